"""Where each family of HuggingFace architectures keeps its parts. A new family is one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tangent_lens.models.protocol import ATTENTION_MAPS, Batch

READS_THE_STREAM = (
    "its maps read the residual stream itself, with no norm between; write {stream} for the stream, whose gradient also "
    "holds the path around the maps"
)
PARALLEL = "its attention and MLP read the same residual stream side by side"
SCALED_LATER = (
    "its embedding is multiplied by sqrt(d_model) after this module; write resid_pre.0 for what the model reads"
)
MIXTURE = "its MLP is a mixture of experts, whose maps each read only the rows routed to them"


@dataclass(frozen=True)
class Family:
    """Where a family of architectures keeps its parts; paths are relative to a block.

    Attributes:
        blocks: path of the list of blocks in the base model (without its head).
        query, key, value: the maps; all three the same path where they are fused.
        mlp_in, mlp_gate: the MLP's first maps: ``mlp_gate`` goes through the activation function and multiplies ``mlp_in``;
            it is "" where there is none.
        resid_mid: the module at which the residual stream between attention and MLP passes, and on which side.
        attention_norm: the norm before the maps of the attention; "" where they read the residual stream itself
            (then so does the MLP: norms stand after the parts, or behind each branch).
        mixture: modules that hold experts, where there are any; their input is the MLP input.
        scaled_embedding: whether tokens enter the stream multiplied by sqrt(d_model).
        encoder: whether it is trained on masked tokens, unless its config says that it decodes.
        parallel: config attribute that, when true, runs attention and MLP side by side (no resid_mid).
        learned_positions: whether a sequence longer than the position table cannot run.
        positions_after_padding: whether positions count from the padding id's place on (RoBERTa).
        fused_columns: for fused maps, which output columns belong to which map.
    """

    blocks: str
    query: str
    key: str
    value: str
    mlp_in: str
    mlp_gate: str
    resid_mid: tuple[str, Literal["input", "output"]]
    attention_norm: str
    mixture: tuple[str, ...] = ()
    scaled_embedding: bool = False
    encoder: bool = False
    parallel: str = ""
    learned_positions: bool = False
    positions_after_padding: bool = False
    fused_columns: Callable[[Any], dict[str, Tensor]] | None = None

    def is_parallel(self, config: Any) -> bool:
        """Whether attention and MLP run side by side."""
        return bool(self.parallel and getattr(config, self.parallel))

    def reads_the_stream(self, block: nn.Module) -> bool:
        """Whether the attention maps of this block read the residual stream itself (ModernBERT's first norm is none)."""
        return not self.attention_norm or isinstance(part_at(block, self.attention_norm), nn.Identity)

    def mixture_of(self, block: nn.Module) -> str:
        """Path of the mixture of experts that is this block's MLP; "" where the MLP is a plain one."""
        found = (path for path in self.mixture if hasattr(part_at(block, path, None), "experts"))
        return next(found, "")

    def longest_sequence(self, config: Any) -> int | None:
        """Where learned positions end; None for rotary ones."""
        if not self.learned_positions:
            return None
        taken = config.pad_token_id + 1 if self.positions_after_padding else 0
        return config.max_position_embeddings - taken


def part_at(module: Any, path: str, *default: Any) -> Any:
    """The submodule at a dotted path.

    Raises:
        AttributeError: it is not there and no default is given.
    """
    for part in path.split("."):
        module = getattr(module, part, *default)
    return module


def positions_of(family: Family, config: Any, batch: Batch) -> Tensor:
    """The position ids (batch, position) that a model of this family counts with."""
    if not family.positions_after_padding:
        return batch.positions
    padding = config.pad_token_id
    return torch.where(batch.attention_mask, batch.positions + padding + 1, padding)


def _one_after_another(kinds: Iterable[str], widths: Iterable[int]) -> dict[str, Tensor]:
    columns, start = {}, 0
    for kind, width in zip(kinds, widths, strict=True):
        columns[kind] = torch.arange(start, start + width)
        start += width
    return columns


def _interleaved_by_head(config: Any) -> dict[str, Tensor]:
    """GPT-NeoX: for each head its query, key and value follow one another."""
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    columns = torch.arange(3 * config.hidden_size).view(heads, 3, width)
    return {kind: columns[:, place].flatten() for place, kind in enumerate(ATTENTION_MAPS)}


def _thirds(config: Any) -> dict[str, Tensor]:
    """GPT-2: all queries, then all keys, then all values."""
    return _one_after_another(ATTENTION_MAPS, [config.hidden_size] * 3)


def _modernbert(config: Any) -> dict[str, Tensor]:
    """Thirds; of the MLP's map the first half goes through the activation function."""
    return _thirds(config) | _one_after_another(("mlp_gate", "mlp_in"), [config.intermediate_size] * 2)


def _phi3(config: Any) -> dict[str, Tensor]:
    """Queries of all heads, keys and values of the fewer key-value heads; then gate and in."""
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    attention = _one_after_another(ATTENTION_MAPS, [count * d_head for count in heads])
    return attention | _one_after_another(("mlp_gate", "mlp_in"), [config.intermediate_size] * 2)


_LLAMA = Family(
    blocks="layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    mlp_in="mlp.up_proj",
    mlp_gate="mlp.gate_proj",
    resid_mid=("post_attention_layernorm", "input"),
    attention_norm="input_layernorm",
)
_MIXTURE = replace(_LLAMA, mixture=("mlp", "block_sparse_moe"))
_GEMMA = replace(_LLAMA, scaled_embedding=True)
_GEMMA2 = replace(_GEMMA, resid_mid=("pre_feedforward_layernorm", "input"))
_OLMO2 = replace(_LLAMA, resid_mid=("mlp", "input"), attention_norm="")
_PHI3 = replace(
    _LLAMA,
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
    mlp_in="mlp.gate_up_proj",
    mlp_gate="mlp.gate_up_proj",
    fused_columns=_phi3,
)
_GPT_NEOX = Family(
    blocks="layers",
    query="attention.query_key_value",
    key="attention.query_key_value",
    value="attention.query_key_value",
    mlp_in="mlp.dense_h_to_4h",
    mlp_gate="",
    resid_mid=("post_attention_layernorm", "input"),
    attention_norm="input_layernorm",
    parallel="use_parallel_residual",
    fused_columns=_interleaved_by_head,
)
_GPT2 = Family(
    blocks="h",
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    mlp_in="mlp.c_fc",
    mlp_gate="",
    resid_mid=("ln_2", "input"),
    attention_norm="ln_1",
    learned_positions=True,
    fused_columns=_thirds,
)
_BERT = Family(
    blocks="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    mlp_in="intermediate.dense",
    mlp_gate="",
    resid_mid=("attention.output.LayerNorm", "output"),
    attention_norm="",
    encoder=True,
    learned_positions=True,
)
_ROBERTA = replace(_BERT, positions_after_padding=True)
_MODERNBERT = Family(
    blocks="layers",
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    mlp_in="mlp.Wi",
    mlp_gate="mlp.Wi",
    resid_mid=("mlp_norm", "input"),
    attention_norm="attn_norm",
    encoder=True,
    fused_columns=_modernbert,
)
# By config.model_type.
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "olmo": _LLAMA,
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "mixtral": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "olmoe": _MIXTURE,
    "gpt_neox": _GPT_NEOX,
    "gpt2": _GPT2,
    "bert": _BERT,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": _MODERNBERT,
    "eurobert": replace(_LLAMA, encoder=True),
}
