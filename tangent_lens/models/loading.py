"""From what a person has, an object or a name, to a model this library can measure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tangent_lens.models.protocol import Model, UnsupportedModel
from tangent_lens.progress import Progress

BACKENDS = ("huggingface", "transformer_lens")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def wrap(model: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None) -> Model:
    """The :class:`Model` of an object that a person already holds.

    Raises:
        UnsupportedModel: an object of another kind, or an architecture that is not known.
    """
    if _is_wrapped(model):
        if tokenizer is not None or name is not None or revision is not None:
            raise ValueError("this model is wrapped already; give tokenizer, name and revision where it was wrapped")
        return model
    if _is_a(model, "transformer_lens.model_bridge", "TransformerBridge"):
        from tangent_lens.models.transformer_lens import BridgeModel

        return BridgeModel(model, tokenizer, name=name, revision=revision)
    if _is_a(model, "transformers", "PreTrainedModel"):
        from tangent_lens.models.huggingface import HuggingFaceModel

        return HuggingFaceModel(model, tokenizer or _own_tokenizer(model), name=name, revision=revision)
    if isinstance(model, str):
        raise UnsupportedModel(f"{model!r} is a name, not a model; load it with Lens.from_pretrained({model!r})")
    raise UnsupportedModel(
        f"a {type(model).__module__}.{type(model).__name__} cannot be measured; pass a HuggingFace causal language model, "
        "a TransformerLens TransformerBridge, or a name to Lens.from_pretrained"
    )


def load(
    name: str,
    *,
    backend: str = "huggingface",
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Model:
    """Load a model by name.

    Args:
        name: a hub id, a local folder, or ``smollm2-135m`` (real weights that come as a Python package).
        backend: ``huggingface`` or ``transformer_lens``.
        revision: of a hub id: a branch, tag or commit.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: where to put it.

    Raises:
        ValueError: an unknown backend or dtype, or a folder without a model.
        PackagedModelUnavailable: the packaged model cannot be fetched.
        OSError: the hub has no such model, or cannot be reached.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    wide = getattr(torch, dtype)
    _check_device(device)
    source, shown, packaged_revision = _source(name, progress)
    model: Any = AutoModelForCausalLM.from_pretrained(source, revision=revision, dtype=wide)
    model.to(device).eval()
    tokenizer = _saved_tokenizer(source, revision)
    named = {"name": shown, "revision": revision or packaged_revision}
    if backend == "huggingface":
        return wrap(model, tokenizer, **named)
    from transformer_lens.model_bridge import TransformerBridge

    model.config.architectures = [type(model).__name__]
    bridge = TransformerBridge.boot_transformers(source, hf_model=model, tokenizer=tokenizer, device=device, dtype=wide)
    return wrap(bridge, tokenizer, **named)


def _check_device(device: str) -> None:
    import torch

    kind = device.split(":")[0]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(kind, False):
        here = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"device {device!r} is not available to this torch; here: {here}")


def _source(name: str, progress: Progress | None) -> tuple[str, str, str | None]:
    """Where to load from, what a report calls it, and the revision if the name alone says it."""
    from tangent_lens.models.packaged import MODEL_NAME, PACKAGED_NAME, REQUIREMENT, packaged_model_folder

    if name.lower() == PACKAGED_NAME:
        return str(packaged_model_folder(progress)), f"{MODEL_NAME} (4-bit weights, widened)", REQUIREMENT
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder {name} holds no config.json, so it is no saved HuggingFace model")
    return name, name, None


def _own_tokenizer(model: Any) -> Any:
    return _saved_tokenizer(model.name_or_path) if model.name_or_path else None


def _saved_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer saved beside the weights, or None: texts need it, token ids do not."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError):
        return None


def _is_wrapped(model: Any) -> bool:
    parts = ("module", "sites", "maps", "tap_point")
    return not isinstance(model, type) and all(hasattr(model, part) for part in parts)


def _is_a(model: Any, library: str, class_name: str) -> bool:
    """Without importing a library that the person has not: an object of it can exist only if it is loaded."""
    loaded = sys.modules.get(library)
    kind = getattr(loaded, class_name, None) if loaded else None
    return kind is not None and isinstance(model, kind)
