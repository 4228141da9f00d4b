"""A tiny model put into each library, the way a person would: the library as it is, nothing of tangent_lens."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from conformance.families import FAMILIES, HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH, NotInThisVersion, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

PROCESSED = ("hooked_transformer_processed", "bridge_compatibility")
# HookedTransformer takes only names it knows, but reads the config of a local folder of that name. Its size is ours.
_OFFICIAL_NAMES = {
    "gpt2": "gpt2",
    "gpt_neox": "EleutherAI/pythia-14m",
    "gpt_neox_sequential": "EleutherAI/pythia-14m",
    "llama": "01-ai/Yi-6B",  # for a name with "llama" in it the library reads no config but knows the sizes
    "llama_tied": "01-ai/Yi-6B",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "qwen2": "Qwen/Qwen2-0.5B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "gemma": "google/gemma-2b",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-1b-pt",
    "olmo": "allenai/OLMo-1B-hf",
    "olmo2": "allenai/OLMo-2-0425-1B",
    "bert": "google-bert/bert-base-cased",
}
_SIZES_BY_NAME = ("gemma", "gemma2", "gemma3", "olmo", "olmo2")


class NotOffered(Exception):
    """The library does not take this family; in its own words."""


@dataclass(frozen=True)
class Hosted:
    """A model in a library.

    Attributes:
        model: what a person would hand to ``Lens``.
        logits: how a person runs it, for (tokens, attention mask or None, place of each token in its sequence).
        angles_differ: rotary angles in float64, where transformers computes them in float32.
    """

    model: Any
    logits: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    angles_differ: bool = False


def transformer_lens_version() -> str:
    """The installed version, "" for none."""
    try:
        return version("transformer-lens")
    except PackageNotFoundError:
        return ""


def backends_here() -> tuple[str, ...]:
    """Which ways there are to hold a model in this environment."""
    major = int((transformer_lens_version() or "0").split(".")[0])
    hooked = ("hooked_transformer", "hooked_transformer_processed", "hooked_encoder") if major in (1, 2, 3) else ()
    return ("huggingface", "nnsight", *hooked, *(("bridge", "bridge_compatibility") if major >= 3 else ()))


def library_of(backend: str) -> str:
    """The library and its version, as a column of the table is named."""
    if backend == "huggingface":
        return f"transformers {transformers.__version__}"
    if backend == "nnsight":
        return f"nnsight {version('nnsight')}"
    return f"transformer-lens {transformer_lens_version()}"


def host(name: str, backend: str, dtype: torch.dtype = torch.float64) -> Hosted:
    """The tiny model of a family in a library.

    Raises:
        NotOffered: the library does not take this family.
    """
    try:
        model = tiny_model(name, dtype)
    except NotInThisVersion as reason:
        raise NotOffered(str(reason)) from None
    if backend == "huggingface":
        return Hosted(model, lambda tokens, mask, places: _run_plain(name, model, tokens, mask, places))
    with _quietly():
        try:
            return _HOSTS[backend](name, model, dtype)
        except NotOffered:
            raise
        except (ValueError, NotImplementedError, AttributeError, RuntimeError, AssertionError) as refusal:
            # A library says no in many ways, some of them by falling over; its words go into the table.
            raise NotOffered(_first_sentence(refusal)) from refusal


def _first_sentence(refusal: Exception) -> str:
    text = " ".join(str(refusal).split()).split(". Available ")[0].split(". Valid ")[0]
    shown = text if len(text) < 200 else f"{text[:199]}…"
    return shown if isinstance(refusal, (ValueError, NotImplementedError)) else f"{type(refusal).__name__}: {shown}"


def _run_plain(name: str, model: Any, tokens: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
    arguments: dict[str, Any] = {"input_ids": tokens}
    if mask is not None:
        arguments |= {"attention_mask": mask.long(), "position_ids": _position_ids(name, places)}
    return model(**arguments).logits


def _position_ids(name: str, places: Tensor) -> Tensor:
    """RoBERTa's first position is the one after its padding id."""
    return places + 2 if FAMILIES[name].classes in ("Roberta", "Camembert") else places


def _nnsight(name: str, model: Any, dtype: torch.dtype) -> Hosted:
    import nnsight

    held = nnsight.NNsight(model)

    def run(tokens: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": tokens}
        if mask is not None:
            arguments |= {"attention_mask": mask.long(), "position_ids": _position_ids(name, places)}
        with held.trace(**arguments):
            logits = nnsight.save(held.output.logits)
        return logits

    return Hosted(held, run)


def _bridge(name: str, model: Any, dtype: torch.dtype) -> Hosted:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        "tiny", hf_model=model, tokenizer=tokenizer(), device="cpu", dtype=dtype
    )
    return Hosted(bridge, lambda tokens, mask, places: _run_bridge(name, bridge, tokens, mask, places))


def _compatible_bridge(name: str, model: Any, dtype: torch.dtype) -> Hosted:
    hosted = _bridge(name, model, dtype)
    hosted.model.enable_compatibility_mode()
    hosted.logits(torch.arange(5, 10)[None], None, torch.arange(5)[None])
    return hosted


def _run_bridge(name: str, bridge: Any, tokens: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
    arguments: dict[str, Any] = {"return_type": "logits"}
    if mask is not None:
        arguments |= {"attention_mask": mask.long(), "position_ids": _position_ids(name, places)}
    return bridge(tokens, **arguments)


def _hooked_transformer(name: str, model: Any, dtype: torch.dtype, processed: bool = False) -> Hosted:
    from transformer_lens import HookedTransformer

    if name not in _OFFICIAL_NAMES or name == "bert":
        _let_it_refuse(model)
        raise NotOffered(f"HookedTransformer lists no model of {FAMILIES[name].model_class}")
    load = HookedTransformer.from_pretrained if processed else HookedTransformer.from_pretrained_no_processing
    with _folder_with_config(name, model), _our_sizes(name, model.config):
        hooked = load(_OFFICIAL_NAMES[name], hf_model=model, tokenizer=tokenizer(), device="cpu", dtype=dtype)
    hooked.to(dtype)  # the experts of a mixture come in float32 whatever was asked

    def run(tokens: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
        return hooked(tokens, return_type="logits", **({} if mask is None else {"attention_mask": mask.long()}))

    return Hosted(hooked, run, angles_differ=FAMILIES[name].rotary)


def _let_it_refuse(model: Any) -> None:
    """No name of its list has this architecture; what it says of one in a local folder."""
    from transformer_lens import loading_from_pretrained as loading

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        loading.get_pretrained_model_config(folder)


def _hooked_encoder(name: str, model: Any, dtype: torch.dtype) -> Hosted:
    from transformer_lens import HookedEncoder

    if name != "bert":
        raise NotOffered(f"HookedEncoder lists no model of {FAMILIES[name].model_class}")
    whole = transformers.BertForPreTraining(model.config).to(dtype).eval()
    whole.load_state_dict(model.state_dict(), strict=False)
    with _folder_with_config(name, model):
        encoder = HookedEncoder.from_pretrained(
            _OFFICIAL_NAMES[name], hf_model=whole, tokenizer=tokenizer(), device="cpu", dtype=dtype
        )

    def run(tokens: Tensor, mask: Tensor | None, places: Tensor) -> Tensor:
        return encoder(
            tokens, return_type="logits", **({} if mask is None else {"one_zero_attention_mask": mask.long()})
        )

    return Hosted(encoder, run)


_HOSTS: dict[str, Callable[[str, Any, torch.dtype], Hosted]] = {
    "nnsight": _nnsight,
    "bridge": _bridge,
    "bridge_compatibility": _compatible_bridge,
    "hooked_transformer": _hooked_transformer,
    "hooked_transformer_processed": lambda name, model, dtype: _hooked_transformer(name, model, dtype, processed=True),
    "hooked_encoder": _hooked_encoder,
}


@contextlib.contextmanager
def _folder_with_config(name: str, model: Any) -> Iterator[None]:
    """A working folder in which the official name is a local model of our size."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / _OFFICIAL_NAMES[name]
        place.mkdir(parents=True)
        if name == "gpt2":
            model.config.n_ctx = POSITIONS  # the hub's config.json of GPT-2 says so; this transformers no longer does
        model.config.save_pretrained(place)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _our_sizes(name: str, config: Any) -> Iterator[None]:
    """Gemma and OLMo have their sizes written into the library by name: those are replaced, the rest stays its own."""
    if name not in _SIZES_BY_NAME:
        yield
        return
    from transformer_lens import loading_from_pretrained as loading

    original = loading.get_pretrained_model_config

    def resized(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        known = {one.name for one in fields(type(found))}
        ours = {key: value for key, value in _sizes(name, config).items() if key in known}
        return type(found).from_dict(found.to_dict() | ours)

    with mock.patch.object(loading, "get_pretrained_model_config", resized):
        yield


def _sizes(name: str, config: Any) -> dict[str, Any]:
    head = getattr(config, "head_dim", None) or WIDTH // HEADS
    sizes = {
        "n_layers": LAYERS,
        "d_model": WIDTH,
        "n_heads": HEADS,
        "d_head": head,
        "rotary_dim": head,
        "n_key_value_heads": config.num_key_value_heads if config.num_key_value_heads != HEADS else None,
        "d_mlp": config.intermediate_size,
        "d_vocab": VOCABULARY,
        "d_vocab_out": VOCABULARY,
        "n_ctx": POSITIONS,
        "eps": getattr(config, "rms_norm_eps", 1e-5),
        "act_fn": getattr(config, "hidden_activation", None) or config.hidden_act,
        "attn_scale": (getattr(config, "query_pre_attn_scalar", None) or head) ** 0.5,
        "attn_types": ["global"] * LAYERS,
        "clip_qkv": getattr(config, "clip_qkv", None),
    }
    if name in ("gemma2", "gemma3"):
        sizes["attn_types"] = ["local" if kind.startswith("sliding") else "global" for kind in config.layer_types]
        sizes["window_size"] = config.sliding_window
    if name == "gemma2":
        sizes["attn_scores_soft_cap"] = config.attn_logit_softcapping
        sizes["output_logits_soft_cap"] = config.final_logit_softcapping
    if name == "olmo2":
        sizes["rotary_base"] = 10000  # transformers' default; OLMo-2 itself has 500,000
    return sizes


@lru_cache(maxsize=1)
def _tokenizer_folder() -> Any:
    folder = tempfile.TemporaryDirectory()
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2", pad_token="0", mask_token="4"
    ).save_pretrained(folder.name)
    return folder


def tokenizer() -> Any:
    """The numbers 0 to 99 as words; a fresh one each time, since libraries change it."""
    return transformers.AutoTokenizer.from_pretrained(_tokenizer_folder().name)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Libraries announce deprecations and every weight they fold."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
