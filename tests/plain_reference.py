"""What plain PyTorch says of a plain HuggingFace model: activations, gradients and weight gradients at every site.

Shares no code with tangent_lens: its own table of modules, its own hooks, loss and layouts of fused maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Places:
    """Module paths of one architecture; those of a block are relative to it."""

    blocks: str
    embedding: str
    final_norm: str
    first_norm: str
    second_norm: str
    attention_out: str
    maps: dict[str, str]


_LLAMA = Places(
    "model.layers",
    "model.embed_tokens",
    "model.norm",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.o_proj",
    {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "mlp_in": "mlp.up_proj",
        "mlp_gate": "mlp.gate_proj",
    },
)
PLACES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "gpt_neox": Places(
        "gpt_neox.layers",
        "gpt_neox.embed_in",
        "gpt_neox.final_layer_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "attention.dense",
        dict.fromkeys(("query", "key", "value"), "attention.query_key_value") | {"mlp_in": "mlp.dense_h_to_4h"},
    ),
    "gpt2": Places(
        "transformer.h",
        "transformer.wte",
        "transformer.ln_f",
        "ln_1",
        "ln_2",
        "attn.c_proj",
        dict.fromkeys(("query", "key", "value"), "attn.c_attn") | {"mlp_in": "mlp.c_fc"},
    ),
}


@dataclass(frozen=True)
class Pass:
    """What plain backward passes leave; rows of all batches one under the other.

    Attributes:
        activations: by site name (rows, width).
        gradients: by site name and by map name, of that map's output (rows, width).
        weights: by map name (out, in).
        positions: the place of each row in its sequence.
        loss: summed next-token loss; ``targets``: over how many tokens.
    """

    activations: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    positions: Tensor
    loss: float
    targets: int


def plain_pass(model: Any, batches: Sequence[Tensor]) -> Pass:
    """Forward and backward over unpadded token batches (batch, position), without masks."""
    model.zero_grad()
    activations, gradients, positions = defaultdict(list), defaultdict(list), []
    loss_sum, targets = 0.0, 0
    for tokens in batches:
        captured, logits = _captured_forward(model, tokens)
        loss = summed_loss(logits, tokens)
        loss.backward()
        loss_sum, targets = loss_sum + float(loss.detach()), targets + tokens[:, 1:].numel()
        positions.append(torch.arange(tokens.shape[1]).repeat(len(tokens)))
        for name, tensor in captured.items():
            activations[name].append(tensor.detach().flatten(0, 1))
            gradients[name].append(tensor.grad.flatten(0, 1))
    rows = {name: torch.cat(parts) for name, parts in activations.items()}
    slopes = {name: torch.cat(parts) for name, parts in gradients.items()}
    _add_middle_of_blocks(model, rows, slopes)
    return Pass(rows, slopes, weight_gradients(model), torch.cat(positions), loss_sum, targets)


def singles(sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each sequence as a batch of its own."""
    return [torch.tensor([list(sequence)]) for sequence in sequences]


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Summed next-token negative log-likelihood."""
    return -logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).sum()


def weight_gradients(model: Any) -> dict[str, Tensor]:
    """``weight.grad`` of every map as (out, in)."""
    found = {}
    for layer, block in enumerate(block_list(model)):
        for kind, path in places_of(model).maps.items():
            gradient = at(block, path).weight.grad
            as_outputs_last = gradient if model.config.model_type == "gpt2" else gradient.T
            found[f"{kind}.{layer}"] = own_part(model.config, kind, as_outputs_last).T.clone()
    return found


def own_part(config: Any, kind: str, tensor: Tensor) -> Tensor:
    """The part of a fused map's last dimension that belongs to queries, keys or values."""
    kinds = ("query", "key", "value")
    if kind not in kinds or config.model_type not in ("gpt_neox", "gpt2"):
        return tensor
    if config.model_type == "gpt2":
        return tensor.chunk(3, dim=-1)[kinds.index(kind)]
    by_head = tensor.unflatten(-1, (config.num_attention_heads, 3, -1))
    return by_head[..., kinds.index(kind), :].flatten(-2)


def places_of(model: Any) -> Places:
    return PLACES[model.config.model_type]


def block_list(model: Any) -> Any:
    return at(model, places_of(model).blocks)


def at(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """Largest difference, relative to the largest expected entry; refuses an expectation of zeros."""
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} is not {tuple(expected.shape)}"
    scale, worst = float(expected.abs().max()), float((found.double() - expected.double()).abs().max())
    assert scale > 0, f"{name}: an expectation of zeros tests nothing"
    assert worst <= tolerance * scale, f"{name}: off by {worst / scale:.1e} of the largest entry"


def tolerance_of(family: str) -> float:
    """Llama and its relatives compute their norms in float32, whatever their dtype."""
    return 1e-5 if family.split()[0] in ("llama", "mistral", "qwen2") else 1e-10


def random_sequences(lengths: Sequence[int], seed: int = 0, vocabulary: int = 100) -> list[list[int]]:
    """Sequences of these lengths; ids 0 (padding) and 1 (end of text) stand among them like any other."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    for sequence in drawn:
        sequence[len(sequence) // 2] = len(sequence) % 2
    return drawn


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Token ids of the tiny vocabulary."""
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))


def turn_on_checkpointing(model: Any) -> None:
    """Blocks run again during the backward pass; transformers renamed the method on its way to version 6."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def tiny_relative(kind: str) -> Any:
    """A random float64 Mistral with a window of 4 tokens, or a Qwen2 (whose queries, keys and values have biases)."""
    shape = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "mistral":
            model: Any = MistralForCausalLM(MistralConfig(**shape, sliding_window=4))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**shape))
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
    model.config.architectures = [type(model).__name__]
    return model.double().eval()


def _captured_forward(model: Any, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    captured: dict[str, Tensor] = {}
    handles = _capturing_hooks(model, captured)
    try:
        output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    last = len(block_list(model)) - 1
    for layer, hidden in enumerate(output.hidden_states[:-1]):
        _keep(captured, f"resid_pre.{layer}", hidden)
        if layer > 0:
            _keep(captured, f"resid_post.{layer - 1}", hidden)
    assert torch.equal(at(model, places_of(model).final_norm)(captured[f"resid_post.{last}"]), output.hidden_states[-1])
    _split_fused_maps(model, captured)
    return captured, output.logits


def _capturing_hooks(model: Any, captured: dict[str, Tensor]) -> list[Any]:
    places = places_of(model)
    hooks = [at(model, places.embedding).register_forward_hook(_keeper(captured, "embedding"))]
    last = len(block_list(model)) - 1
    hooks.append(
        at(model, places.final_norm).register_forward_pre_hook(
            lambda module, args: _keep(captured, f"resid_post.{last}", args[0])
        )
    )
    for layer, block in enumerate(block_list(model)):
        outputs = {
            "attention_input": places.first_norm,
            "mlp_input": places.second_norm,
            "attention_out": places.attention_out,
        }
        for name, path in (outputs | places.maps).items():
            hooks.append(at(block, path).register_forward_hook(_keeper(captured, f"{name}.{layer}")))
    return hooks


def _keeper(captured: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, args, output: _keep(captured, name, output)


def _keep(captured: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    tensor.retain_grad()
    captured[name] = tensor


class _Part:
    """Reads its own columns of a fused tensor and of its gradient, once that has come."""

    def __init__(self, whole: Tensor, take: Callable[[Tensor], Tensor]) -> None:
        self.whole, self.take = whole, take

    def detach(self) -> Tensor:
        return self.take(self.whole.detach())

    @property
    def grad(self) -> Tensor:
        return self.take(self.whole.grad)


def _split_fused_maps(model: Any, captured: dict[str, Any]) -> None:
    for layer in range(len(block_list(model))):
        for kind in ("query", "key", "value"):
            name = f"{kind}.{layer}"
            captured[name] = _Part(captured[name], lambda whole, kind=kind: own_part(model.config, kind, whole))


def _add_middle_of_blocks(model: Any, rows: dict[str, Tensor], slopes: dict[str, Tensor]) -> None:
    """x_mid = x_pre + attention(x_pre): so its gradient is that of the attention's output."""
    for layer in range(len(block_list(model))):
        rows[f"resid_mid.{layer}"] = rows[f"resid_pre.{layer}"] + rows[f"attention_out.{layer}"]
        slopes[f"resid_mid.{layer}"] = slopes[f"attention_out.{layer}"]
