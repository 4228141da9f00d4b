"""From what a person has, an object or a name, to a model this library can measure."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tangent_lens.models.protocol import Model, UnsupportedModel
from tangent_lens.progress import Progress

BACKENDS = ("huggingface", "transformer_lens", "nnsight")
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
    for class_name in ("HookedTransformer", "HookedEncoder"):
        if _is_a(model, f"transformer_lens.{class_name}", class_name):
            from tangent_lens.models.hooked_transformer import HookedModel

            return HookedModel(model, tokenizer, name=name, revision=revision)
    if _is_a(model, "transformers", "PreTrainedModel"):
        from tangent_lens.models.huggingface import HuggingFaceModel

        return HuggingFaceModel(model, tokenizer or _own_tokenizer(model), name=name, revision=revision)
    if _is_envoy(model):
        from tangent_lens.models.nnsight import NNsightModel

        own = tokenizer or getattr(model, "tokenizer", None) or _own_tokenizer(plain_module(model))
        return NNsightModel(model, own, name=name, revision=revision)
    if isinstance(model, str):
        raise UnsupportedModel(f"{model!r} is a name, not a model; load it with Lens.from_pretrained({model!r})")
    raise UnsupportedModel(
        f"a {type(model).__module__}.{type(model).__name__} is no model known here; pass a HuggingFace model, a TransformerLens "
        "HookedTransformer, HookedEncoder or TransformerBridge, an nnsight model, or a name to Lens.from_pretrained; any torch "
        "module can be measured at places that you name: Lens(module, sites={'middle': 'path.of.submodule'})"
    )


def plain_module(model: Any) -> Any:
    """The torch module, where nnsight holds one."""
    return model._module if _is_envoy(model) else model


def with_weights(model: Model) -> Model:
    """The same model, ready to run here: nnsight may hold a structure whose weights are still to be loaded."""
    loaded = getattr(model, "loaded", None)
    return model if loaded is None else loaded()


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
        name: a hub id, a local folder, or a packaged model (real weights that come as a Python package): ``smollm2-135m``,
            ``rxnfp-pretrained``, ``rxnfp-finetuned``, ``rxnfp-finetuned-10k``. What was trained on masked tokens is
            loaded with its masked-language-model head, all else as a causal model.
        backend: ``huggingface``, ``transformer_lens``, or ``nnsight``, which loads no weights until they are needed here:
            never, where everything runs on NDIF.
        revision: of a hub id: a branch, tag or commit.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: where to put it.

    Raises:
        ValueError: an unknown backend or dtype, a folder without a model, or a checkpoint without a head.
        PackagedModelUnavailable: the packaged model cannot be fetched.
        OSError: the hub has no such model, or cannot be reached.
    """
    import torch

    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    wide = getattr(torch, dtype)
    _check_device(device)
    bridge_class = _bridge_class() if backend == "transformer_lens" else None
    source, shown, packaged_revision = _source(name, progress)
    if backend == "nnsight":
        return wrap(_nnsight(source, revision, wide, device), name=shown, revision=revision or packaged_revision)
    model = _pretrained(source, shown, revision, wide)
    model.to(device).eval()
    tokenizer = _saved_tokenizer(source, revision)
    named = {"name": shown, "revision": revision or packaged_revision}
    if bridge_class is None:
        return wrap(model, tokenizer, **named)
    model.config.architectures = [type(model).__name__]
    bridge = bridge_class.boot_transformers(source, hf_model=model, tokenizer=tokenizer, device=device, dtype=wide)
    return wrap(bridge, tokenizer, **named)


def _bridge_class() -> Any:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as missing:
        raise ImportError(
            f"transformer-lens {version('transformer-lens')} has no TransformerBridge, which loading by name needs: load the "
            "model yourself, for example with HookedTransformer.from_pretrained_no_processing(name), and pass it to Lens(...)"
        ) from missing
    return TransformerBridge


def _check_device(device: str) -> None:
    import torch

    kind = device.split(":")[0]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(kind, False):
        here = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"device {device!r} is not available to this torch; here: {here}")


def _pretrained(source: str, shown: str, revision: str | None, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(source, revision=revision)
    kind: Any = AutoModelForMaskedLM if _is_masked(config) else AutoModelForCausalLM
    model, found = kind.from_pretrained(source, revision=revision, dtype=dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"the checkpoint {shown} holds no {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which "
            f"{type(model).__name__} needs and which transformers would fill with random numbers; name a checkpoint with "
            "its language-model head, or load this one as what it is and pass Lens(model, tokenizer)"
        )
    return model


def _nnsight(source: str, revision: str | None, dtype: Any, device: str) -> Any:
    import nnsight
    from transformers import AutoConfig

    if not hasattr(nnsight, "TransformersModel"):
        raise ImportError(
            f"loading by name with nnsight needs version 0.8 or newer, here is {version('nnsight')}; upgrade it, or load the "
            "model yourself and pass it to Lens(...)"
        )
    task = "fill-mask" if _is_masked(AutoConfig.from_pretrained(source, revision=revision)) else "text-generation"
    # nnsight cannot guess the tokenizer of a model without weights beside transformers 5.23 and newer.
    options = {"task": task, "tokenizer": _saved_tokenizer(source, revision), "revision": revision}
    return nnsight.TransformersModel(source, **options, dtype=dtype, device=device)


def _is_masked(config: Any) -> bool:
    """Whether a config is that of a masked language model; where it names no language-model head, its family decides."""
    from tangent_lens.models.families import FAMILIES

    named = (config.architectures or [""])[0]
    if named.endswith(("ForMaskedLM", "ForCausalLM", "LMHeadModel")):
        return named.endswith("ForMaskedLM")
    family = FAMILIES.get(config.model_type)
    return family is not None and family.encoder and not getattr(config, "is_decoder", False)


def _source(name: str, progress: Progress | None) -> tuple[str, str, str | None]:
    """Where to load from, what a report calls it, and the revision if the name alone says it."""
    from tangent_lens.models.packaged import PACKAGED, packaged_model_folder

    if packaged := PACKAGED.get(name.lower()):
        return str(packaged_model_folder(packaged.name, progress)), packaged.title, packaged.revision
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder {name} holds no config.json, so it is no saved HuggingFace model")
    return name, name, None


def _own_tokenizer(model: Any) -> Any:
    place = getattr(model, "name_or_path", "")
    return _saved_tokenizer(place) if place else None


def _saved_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer saved beside the weights, or None: texts need it, token ids do not."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Where none was saved, transformers 5 makes one up that knows nothing but special tokens.
    return None if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens) else tokenizer


def _is_wrapped(model: Any) -> bool:
    parts = ("module", "sites", "maps", "tap_point")
    return not isinstance(model, type) and all(hasattr(model, part) for part in parts)


def _is_envoy(model: Any) -> bool:
    return _is_a(model, "nnsight.intervention.envoy", "Envoy")


def _is_a(model: Any, library: str, class_name: str) -> bool:
    """Without importing a library that the person has not: an object of it can exist only if it is loaded."""
    loaded = sys.modules.get(library)
    kind = getattr(loaded, class_name, None) if loaded else None
    return kind is not None and isinstance(model, kind)
