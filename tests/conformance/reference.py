"""What plain PyTorch says of a plain HuggingFace model: activations, gradients and weight gradients at every site.

Shares no code with tangent_lens, and takes another way to the same tensors wherever there is one: block boundaries come
from ``output_hidden_states``, what a map reads from the norm before it, the middle of a block from what attention adds to
the stream, weight gradients from the parameters' own ``.grad``. Each sequence runs alone, without padding or mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from conformance.families import FAMILIES, LAYERS, Example, examples_of, tiny_model
from torch import Tensor

ATTENTION_KINDS = ("query", "key", "value")
SITE_KINDS = ("resid_pre", "attention_input", *ATTENTION_KINDS, "resid_mid", "mlp_input", "resid_post")
MAP_KINDS = (*ATTENTION_KINDS, "mlp_in", "mlp_gate")


@dataclass(frozen=True)
class Places:
    """Module paths of one architecture, those of a block relative to it.

    Attributes:
        stream_end: the module that reads the last block's output; the last hidden state itself if "".
        attention_norm: its output is what the query, key and value maps read; "" where they read the stream itself.
        mlp_norm: its output is what the MLP reads; "" where it reads the stream itself.
        attention_adds: its output is added to the stream; "" in parallel blocks.
        middle: its output is the stream in the middle of a block, where a norm stands on the stream itself.
        maps: module of each map.
        split: the own part of a fused map's last dimension, by kind of map.
    """

    blocks: str
    embedding: str
    stream_end: str
    attention_norm: str
    mlp_norm: str
    maps: dict[str, str]
    attention_adds: str = ""
    middle: str = ""
    split: Callable[[Any, str, Tensor], Tensor] | None = field(default=None, hash=False)


def _interleaved_by_head(config: Any, kind: str, tensor: Tensor) -> Tensor:
    by_head = tensor.unflatten(-1, (config.num_attention_heads, 3, -1))
    return by_head[..., ATTENTION_KINDS.index(kind), :].flatten(-2) if kind in ATTENTION_KINDS else tensor


def _thirds(config: Any, kind: str, tensor: Tensor) -> Tensor:
    return tensor.chunk(3, dim=-1)[ATTENTION_KINDS.index(kind)] if kind in ATTENTION_KINDS else tensor


def _gate_comes_first(kind: str, tensor: Tensor) -> Tensor:
    gate, up = tensor.chunk(2, dim=-1)
    return gate if kind == "mlp_gate" else up


def _modernbert(config: Any, kind: str, tensor: Tensor) -> Tensor:
    return _thirds(config, kind, tensor) if kind in ATTENTION_KINDS else _gate_comes_first(kind, tensor)


def _phi3(config: Any, kind: str, tensor: Tensor) -> Tensor:
    if kind not in ATTENTION_KINDS:
        return _gate_comes_first(kind, tensor)
    head = config.hidden_size // config.num_attention_heads
    widths = [head * config.num_attention_heads, *[head * config.num_key_value_heads] * 2]
    return tensor.split(widths, dim=-1)[ATTENTION_KINDS.index(kind)]


_SEPARATE = {kind: f"self_attn.{kind[0]}_proj" for kind in ATTENTION_KINDS}
_GATED = {"mlp_in": "mlp.up_proj", "mlp_gate": "mlp.gate_proj"}


def _llama_like(
    maps: dict[str, str],
    *,
    blocks: str = "model.layers",
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    attention_adds: str = "self_attn.o_proj",
    split: Callable[[Any, str, Tensor], Tensor] | None = None,
) -> Places:
    body = blocks.rpartition(".")[0]
    return Places(
        blocks, f"{body}.embed_tokens", f"{body}.norm", *norms, maps, attention_adds=attention_adds, split=split
    )


def _bert_like(body: str) -> Places:
    maps = {kind: f"attention.self.{kind}" for kind in ATTENTION_KINDS} | {"mlp_in": "intermediate.dense"}
    layers, words = f"{body}.encoder.layer", f"{body}.embeddings.word_embeddings"
    return Places(layers, words, "", "", "", maps, middle="attention")


def _neox(attention_adds: str) -> Places:
    return Places(
        "gpt_neox.layers",
        "gpt_neox.embed_in",
        "gpt_neox.final_layer_norm",
        "input_layernorm",
        "post_attention_layernorm",
        dict.fromkeys(ATTENTION_KINDS, "attention.query_key_value") | {"mlp_in": "mlp.dense_h_to_4h"},
        attention_adds=attention_adds,
        split=_interleaved_by_head,
    )


_LLAMA = _llama_like(_SEPARATE | _GATED)
_GEMMA_2 = _llama_like(
    _SEPARATE | _GATED,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    attention_adds="post_attention_layernorm",
)
_MIXTURE = _llama_like(_SEPARATE)
PLACES = {
    "gpt2": Places(
        "transformer.h",
        "transformer.wte",
        "transformer.ln_f",
        "ln_1",
        "ln_2",
        dict.fromkeys(ATTENTION_KINDS, "attn.c_attn") | {"mlp_in": "mlp.c_fc"},
        attention_adds="attn.c_proj",
        split=_thirds,
    ),
    "gpt_neox": _neox(""),
    "gpt_neox_sequential": _neox("attention.dense"),
    **dict.fromkeys(("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma", "olmo", "eurobert"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA_2),
    "olmo2": _llama_like(_SEPARATE | _GATED, norms=("", ""), attention_adds="post_attention_layernorm"),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), _MIXTURE),
    "phi3": _llama_like(
        dict.fromkeys(ATTENTION_KINDS, "self_attn.qkv_proj")
        | dict.fromkeys(("mlp_in", "mlp_gate"), "mlp.gate_up_proj"),
        split=_phi3,
    ),
    "bert": _bert_like("bert"),
    **dict.fromkeys(("roberta", "camembert"), _bert_like("roberta")),
    "modernbert": Places(
        "model.layers",
        "model.embeddings.tok_embeddings",
        "model.final_norm",
        "attn_norm",
        "mlp_norm",
        dict.fromkeys(ATTENTION_KINDS, "attn.Wqkv") | dict.fromkeys(("mlp_in", "mlp_gate"), "mlp.Wi"),
        attention_adds="attn.Wo",
        split=_modernbert,
    ),
}
# Gemma multiplies its embedding by sqrt(d_model): transformers 5 inside the embedding, transformers 4 after it. Here it is
# the same tensor in all versions.
_SCALED_EMBEDDING = ("gemma", "gemma2")
# ModernBERT's first block has no norm before its attention.
_WITHOUT = {"modernbert": {"attention_input.0"}}


@dataclass(frozen=True)
class Reference:
    """What plain backward passes leave.

    Attributes:
        examples: the sequences, one backward pass each.
        activations, gradients: by site name, one (position, width) tensor a sequence.
        weights: by map name (out, in), summed over the sequences.
        signals: by map name, the gradient of its bias (out,), of maps that have one.
        norms: by ``attention_input`` or ``mlp_input`` site, the scale and shift of the norm before it.
        logits: (position, vocabulary) of each sequence.
        loss: the summed loss of all.
    """

    examples: tuple[Example, ...]
    activations: dict[str, list[Tensor]]
    gradients: dict[str, list[Tensor]]
    weights: dict[str, Tensor]
    signals: dict[str, Tensor]
    norms: dict[str, tuple[Tensor, Tensor]]
    logits: list[Tensor]
    loss: float


def site_names(name: str) -> set[str]:
    """Every site that the contract gives a family."""
    places = PLACES[name]
    missing = {
        "attention_input": not places.attention_norm,
        "mlp_input": not places.mlp_norm,
        "resid_mid": not (places.attention_adds or places.middle),
    }
    kinds = [kind for kind in SITE_KINDS if not missing.get(kind)]
    names = {f"{kind}.{layer}" for kind in kinds for layer in range(LAYERS)}
    return {"embedding", *names} - _WITHOUT.get(name, set())


def map_names(name: str) -> set[str]:
    """Every linear map that the contract gives a family."""
    return {f"{kind}.{layer}" for kind in PLACES[name].maps for layer in range(LAYERS)}


@lru_cache(maxsize=4)
def reference_of(name: str, dtype: torch.dtype = torch.float64) -> Reference:
    """The reference of a family, computed once."""
    return plain_reference(name, tiny_model(name, dtype), examples_of(name))


def plain_reference(name: str, model: Any, examples: list[Example]) -> Reference:
    """Forward and backward over each sequence alone."""
    passes = [_one_pass(name, model, example) for example in examples]
    wanted = site_names(name)
    activations = {site: [one.values[site] for one in passes] for site in wanted}
    gradients = {site: [one.slopes[site] for one in passes] for site in wanted}
    logits, loss = [one.logits for one in passes], sum(one.loss for one in passes)
    weights, signals = _parameter_gradients(name, model)
    return Reference(tuple(examples), activations, gradients, weights, signals, _norms(name, model), logits, loss)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood of the targets that are not -100."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    chosen = targets != -100
    return -wide.log_softmax(-1)[chosen].gather(-1, targets[chosen][:, None]).sum()


@dataclass
class _Pass:
    values: dict[str, Tensor]
    slopes: dict[str, Tensor]
    logits: Tensor
    loss: float


class _Capture:
    """Values and gradients of tensors, by name. A hook on a tensor stays with it where an in-place change follows
    (OLMo clips its queries so); ``retain_grad`` would move on to the changed one.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.slopes: dict[str, Tensor] = {}

    def keep(self, name: str, tensor: Tensor) -> None:
        self.values[name] = tensor.detach().clone()[0]
        tensor.register_hook(lambda gradient: self.slopes.__setitem__(name, gradient.detach().clone()[0]))

    def output_of(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.keep(name, output[0] if isinstance(output, tuple) else output)

    def input_of(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.keep(name, args[0])


def _one_pass(name: str, model: Any, example: Example) -> _Pass:
    places, capture = PLACES[name], _Capture()
    handles = _hooks(places, model, capture)
    try:
        output = model(input_ids=example.tokens[None], output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    stream = output.hidden_states
    assert len(stream) == LAYERS + 1
    for layer in range(LAYERS):
        capture.keep(f"resid_pre.{layer}", stream[layer])
    for layer in range(LAYERS if not places.stream_end else LAYERS - 1):
        capture.keep(f"resid_post.{layer}", stream[layer + 1])
    loss = summed_loss(output.logits[0], example.targets)
    loss.backward()
    for layer in range(LAYERS):
        _finish_block(places, model.config, capture, layer)
    if name in _SCALED_EMBEDDING:
        for tensors in (capture.values, capture.slopes):
            tensors["embedding"] = tensors["resid_pre.0"]
    return _Pass(capture.values, capture.slopes, output.logits.detach()[0], float(loss.detach()))


def _hooks(places: Places, model: Any, capture: _Capture) -> list[Any]:
    handles = [part_at(model, places.embedding).register_forward_hook(capture.output_of("embedding"))]
    if places.stream_end:
        end = part_at(model, places.stream_end)
        handles.append(end.register_forward_pre_hook(capture.input_of(f"resid_post.{LAYERS - 1}")))
    outputs = {
        "attention_input": places.attention_norm,
        "mlp_input": places.mlp_norm,
        "attention_adds": places.attention_adds,
        "resid_mid": places.middle,
        **{kind: places.maps[kind] for kind in ATTENTION_KINDS},
    }
    for layer, block in enumerate(part_at(model, places.blocks)):
        for kind, path in outputs.items():
            if path:
                handles.append(part_at(block, path).register_forward_hook(capture.output_of(f"{kind}.{layer}")))
    return handles


def _finish_block(places: Places, config: Any, capture: _Capture, layer: int) -> None:
    for tensors in (capture.values, capture.slopes):
        for kind in ATTENTION_KINDS:
            if places.split:
                tensors[f"{kind}.{layer}"] = places.split(config, kind, tensors[f"{kind}.{layer}"])
    if places.attention_adds:
        # mid = pre + added, so that mid and added have the same gradient.
        added = f"attention_adds.{layer}"
        capture.values[f"resid_mid.{layer}"] = capture.values[f"resid_pre.{layer}"] + capture.values[added]
        capture.slopes[f"resid_mid.{layer}"] = capture.slopes[added]


def _parameter_gradients(name: str, model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the weights (out, in) and of the biases (out,) of every map."""
    places, weights, signals = PLACES[name], {}, {}

    def own(kind: str, outputs_last: Tensor) -> Tensor:
        return places.split(model.config, kind, outputs_last) if places.split else outputs_last

    for layer, block in enumerate(part_at(model, places.blocks)):
        for kind, path in places.maps.items():
            module = part_at(block, path)
            gradient = module.weight.grad
            outputs_last = gradient if FAMILIES[name].classes == "GPT2" else gradient.T
            weights[f"{kind}.{layer}"] = own(kind, outputs_last).T.clone()
            if module.bias is not None:
                signals[f"{kind}.{layer}"] = own(kind, module.bias.grad).clone()
    return weights, signals


def _norms(name: str, model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    places, found = PLACES[name], {}
    for layer, block in enumerate(part_at(model, places.blocks)):
        for kind, path in (("attention_input", places.attention_norm), ("mlp_input", places.mlp_norm)):
            if path and f"{kind}.{layer}" in site_names(name):
                found[f"{kind}.{layer}"] = _scale_and_shift(part_at(block, path), model.config.hidden_size)
    return found


def _scale_and_shift(norm: Any, width: int) -> tuple[Tensor, Tensor]:
    """Gemma's norms store what they add to 1; OLMo's have no parameters."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    scale = torch.ones(width, dtype=torch.float64) if weight is None else weight.detach().double()
    shift = torch.zeros(width, dtype=torch.float64) if bias is None else bias.detach().double()
    return scale + 1 if type(norm).__name__.startswith("Gemma") else scale, shift


def part_at(module: Any, path: str) -> Any:
    """The submodule at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module
