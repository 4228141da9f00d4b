"""A plain HuggingFace causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangent_lens.models.protocol import (
    ATTENTION_MAPS,
    MLP_MAPS,
    Batch,
    LinearMap,
    ModelDescription,
    TapPoint,
    UnsupportedModel,
)
from tangent_lens.sites import LAYER_KINDS, Site


@dataclass(frozen=True)
class Family:
    """Where a family of architectures keeps its parts; paths are relative to a block.

    Attributes:
        blocks: path of the list of blocks in the model.
        query, key, value: the maps; all three the same path where they are fused.
        mlp_in, mlp_gate: the MLP's first maps; ``mlp_gate`` is "" where there is none.
        resid_mid: the module whose input is the residual stream between attention and MLP.
        parallel: config attribute that, when true, runs attention and MLP side by side (no resid_mid).
        learned_positions: whether a sequence longer than the position table cannot run.
        fused_columns: for fused maps, which output columns are queries, keys, values.
    """

    blocks: str
    query: str
    key: str
    value: str
    mlp_in: str
    mlp_gate: str
    resid_mid: str
    parallel: str = ""
    learned_positions: bool = False
    fused_columns: Callable[[Any], dict[str, Tensor]] | None = None


def _interleaved_by_head(config: Any) -> dict[str, Tensor]:
    """GPT-NeoX: for each head its query, key and value follow one another."""
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    columns = torch.arange(3 * config.hidden_size).view(heads, 3, width)
    return {kind: columns[:, place].flatten() for place, kind in enumerate(("query", "key", "value"))}


def _one_after_another(config: Any) -> dict[str, Tensor]:
    """GPT-2: all queries, then all keys, then all values."""
    columns = torch.arange(3 * config.hidden_size).view(3, config.hidden_size)
    return {kind: columns[place] for place, kind in enumerate(("query", "key", "value"))}


_LLAMA = Family(
    blocks="model.layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    mlp_in="mlp.up_proj",
    mlp_gate="mlp.gate_proj",
    resid_mid="post_attention_layernorm",
)
_GPT_NEOX = Family(
    blocks="gpt_neox.layers",
    query="attention.query_key_value",
    key="attention.query_key_value",
    value="attention.query_key_value",
    mlp_in="mlp.dense_h_to_4h",
    mlp_gate="",
    resid_mid="post_attention_layernorm",
    parallel="use_parallel_residual",
    fused_columns=_interleaved_by_head,
)
_GPT2 = Family(
    blocks="transformer.h",
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    mlp_in="mlp.c_fc",
    mlp_gate="",
    resid_mid="ln_2",
    learned_positions=True,
    fused_columns=_one_after_another,
)
FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "gpt_neox": _GPT_NEOX, "gpt2": _GPT2}


class HuggingFaceModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``PreTrainedModel``; the model itself is not changed.

    Raises:
        UnsupportedModel: an architecture whose sites are not known here.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        config: Any = model.config
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(
                f"the sites of a HuggingFace {config.model_type!r} model are not known; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )
        if model.get_output_embeddings() is None:
            raise UnsupportedModel(
                f"{type(model).__name__} has no language-model head, so it has no loss; load it with AutoModelForCausalLM"
            )
        self.module: nn.Module = model
        self._model = model
        self.tokenizer = tokenizer
        self._family = FAMILIES[config.model_type]
        self._name = name or model.name_or_path or type(model).__name__
        self._revision = revision or getattr(config, "_commit_hash", None) or "unknown"
        self._blocks: list[Any] = list(_at(model, self._family.blocks))
        columns = self._family.fused_columns
        self._columns: dict[str, Tensor] = columns(config) if columns else {}
        self.absent = self._absent()
        self.longest_sequence: int | None = longest_sequence(config)
        kinds = [kind for kind in LAYER_KINDS if kind not in self.absent]
        layers = range(len(self._blocks))
        self.sites = (Site("embedding"), *(Site(kind, layer) for layer in layers for kind in kinds))
        self.maps = tuple(linear_map for layer in layers for linear_map in self._maps_of(layer))
        self._forward_arguments = set(inspect.signature(model.forward).parameters)

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes."""
        return describe(
            self.module,
            name=self._name,
            revision=self._revision,
            library=f"transformers {transformers.__version__}",
            weights="as stored",
        )

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        if site.layer is None:
            return self.embedding_point()
        family = self._family
        if site.kind == "resid_pre":
            return self._point(site.layer, "", "input")
        if site.kind == "resid_post":
            return self._point(site.layer, "", "output")
        if site.kind == "resid_mid":
            return self._point(site.layer, family.resid_mid, "input")
        if site.kind == "attention_input":
            return self._point(site.layer, family.query, "input")
        if site.kind == "mlp_input":
            return self._point(site.layer, family.mlp_in, "input")
        return self._point(site.layer, getattr(family, site.kind), "output", self._columns.get(site.kind))

    def embedding_point(self) -> TapPoint:
        """The output of the token embedding."""
        embedding = self._model.get_input_embeddings()
        return TapPoint(embedding, "output", _name_of(self.module, embedding))

    def logits(self, batch: Batch) -> Tensor:
        """Run the model and return the logits (batch, position, vocabulary)."""
        return self._model(**self._arguments(batch)).logits

    def run_without_logits(self, batch: Batch) -> None:
        """Run the body of the model only."""
        self._model.base_model(**self._arguments(batch))

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": False}
        if batch.padded:
            arguments["attention_mask"] = batch.attention_mask.long()
            if "position_ids" in self._forward_arguments:
                arguments["position_ids"] = batch.positions
        return arguments

    def _point(self, layer: int, path: str, side: Any, columns: Tensor | None = None) -> TapPoint:
        module = _at(self._blocks[layer], path) if path else self._blocks[layer]
        name = f"{self._family.blocks}.{layer}" + (f".{path}" if path else "")
        return TapPoint(module, side, name, columns)

    def _maps_of(self, layer: int) -> list[LinearMap]:
        family, maps = self._family, []
        for kind in (*ATTENTION_MAPS, *MLP_MAPS):
            path = getattr(family, kind)
            if path:
                reads = Site("attention_input" if kind in ATTENTION_MAPS else "mlp_input", layer)
                output = self._point(layer, path, "output", self._columns.get(kind))
                maps.append(LinearMap(kind, layer, reads, (self._point(layer, path, "input"),), output))
        return maps

    def _absent(self) -> dict[str, str]:
        family = self._family
        if family.parallel and getattr(self._model.config, family.parallel):
            return {"resid_mid": "its attention and MLP read the same residual stream side by side"}
        return {}


def longest_sequence(config: Any) -> int | None:
    """Where the learned positions of a known architecture end; None for rotary ones."""
    return config.max_position_embeddings if FAMILIES[config.model_type].learned_positions else None


def describe(model: nn.Module, *, name: str, revision: str, library: str, weights: str) -> ModelDescription:
    """The shapes of a HuggingFace model, from its config."""
    config: Any = model.config
    heads = config.num_attention_heads
    return ModelDescription(
        name=name,
        revision=revision,
        library=library,
        architecture=type(model).__name__,
        weights=weights,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=heads,
        n_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        d_head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
    )


def _at(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _name_of(root: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in root.named_modules() if module is wanted)
