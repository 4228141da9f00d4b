"""A plain HuggingFace model: decoder or encoder, with or without a language-model head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangent_lens.models.families import (
    FAMILIES,
    MIXTURE,
    PARALLEL,
    READS_THE_STREAM,
    SCALED_LATER,
    Family,
    part_at,
    positions_of,
)
from tangent_lens.models.placement import input_device
from tangent_lens.models.protocol import (
    ATTENTION_MAPS,
    MLP_MAPS,
    Batch,
    LinearMap,
    ModelDescription,
    TapPoint,
    UnsupportedModel,
    forward_parameters,
    width_of,
)
from tangent_lens.models.quantisation import parameter_count, precision_of
from tangent_lens.models.rotary_base import check_rotary_base
from tangent_lens.sites import LAYER_KINDS, Site


class HuggingFaceModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``PreTrainedModel``; the model itself is not changed.

    Raises:
        UnsupportedModel: an architecture whose sites are not known here, or a rotary base that was lost in loading.
    """

    misleading_names: Mapping[str, str] = {}
    padding_sides: tuple[str, ...] = ("right", "left")

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        check_rotary_base(model.config)
        self.module: nn.Module = model
        self.tokenizer = tokenizer
        self._model = model
        self.family = family_of(model)
        self._name = name or model.name_or_path or type(model).__name__
        self._revision = revision or getattr(model.config, "_commit_hash", None) or "unknown"
        self._body = base = _body_of(model, self.family)
        self.blocks: list[Any] = list(part_at(base, self.family.blocks))
        self._prefix = ".".join(filter(None, (_name_of(model, base), self.family.blocks)))
        columns = self.family.fused_columns
        self.columns: dict[str, Tensor] = columns(model.config) if columns else {}
        self.objective = objective_of(model)
        self.longest_sequence: int | None = self.family.longest_sequence(model.config)
        self.absent: Mapping[str, str]
        self.absent, self.sites = sites_of(self.family, model, self.blocks)
        self._shape = self.description
        self.maps = tuple(one for layer in range(len(self.blocks)) for one in self._maps_of(layer))
        self._accepted = {part: set(forward_parameters(part)) for part in (model, base)}

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

    @property
    def device(self) -> torch.device:
        """Where its token ids must lie."""
        return input_device(self.module)

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        if site.layer is None:
            return self.gradient_starts()[0]
        family, block, width = self.family, self.blocks[site.layer], width_of(self._shape, site)
        if site.kind == "resid_pre":
            return self._point(site.layer, "", "input", width=width)
        if site.kind == "resid_post":
            return self._point(site.layer, "", "output", width=width)
        if site.kind == "resid_mid":
            return self._point(site.layer, *family.resid_mid, width=width)
        if site.kind == "attention_input":
            return self._point(site.layer, family.query, "input", width=width)
        if site.kind == "mlp_input":
            return self._point(site.layer, family.mixture_of(block) or family.mlp_in, "input", width=width)
        columns = self.columns.get(site.kind)
        return self._point(site.layer, getattr(family, site.kind), "output", columns, width)

    def gradient_starts(self) -> tuple[TapPoint, ...]:
        """The output of the token embedding."""
        embedding = self._model.get_input_embeddings()
        return (TapPoint(embedding, "output", _name_of(self.module, embedding)),)

    def run(self, batch: Batch) -> Any:
        """Run the model and return its output object."""
        return self._model(**self._arguments(batch, self._model))

    def run_without_logits(self, batch: Batch) -> None:
        """Run the body of the model only."""
        self._body(**self._arguments(batch, self._body))

    def _arguments(self, batch: Batch, part: Any) -> dict[str, Any]:
        """What a batch means to the whole model or to its body."""
        arguments: dict[str, Any] = {"input_ids": batch.tokens}
        accepted = self._accepted[part]
        if "use_cache" in accepted:
            arguments["use_cache"] = False
        if batch.padded:
            arguments["attention_mask"] = batch.attention_mask.long()
        # RoBERTa guesses positions from the tokens that are not padding: another guess wherever a text holds that token.
        if "position_ids" in accepted and (batch.padded or self.family.positions_after_padding):
            arguments["position_ids"] = positions_of(self.family, self._model.config, batch)
        return arguments

    def _point(
        self, layer: int, path: str, side: Any, columns: Tensor | None = None, width: int | None = None
    ) -> TapPoint:
        module = part_at(self.blocks[layer], path) if path else self.blocks[layer]
        name = f"{self._prefix}.{layer}" + (f".{path}" if path else "")
        return TapPoint(module, side, name, columns, width=width)

    def _maps_of(self, layer: int) -> list[LinearMap]:
        family, maps = self.family, []
        kinds = ATTENTION_MAPS if family.mixture_of(self.blocks[layer]) else (*ATTENTION_MAPS, *MLP_MAPS)
        for kind in kinds:
            path = getattr(family, kind)
            if path:
                reads = reads_of(family, self.blocks[layer], kind, layer)
                output = self._point(layer, path, "output", self.columns.get(kind))
                maps.append(LinearMap(kind, layer, reads, (self._point(layer, path, "input"),), output))
        return maps


def family_of(model: PreTrainedModel) -> Family:
    """The family of a HuggingFace model.

    Raises:
        UnsupportedModel: an architecture whose sites are not known here.
    """
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"the sites of a HuggingFace {config.model_type!r} model are not known; "
            f"supported: {', '.join(sorted(FAMILIES))}. Any module can be measured at places that you name: "
            "Lens(model, sites={'middle': 'path.of.submodule'})"
        )
    if getattr(config, "add_cross_attention", False) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(model).__name__} attends to a second model, and such blocks are not known here")
    return FAMILIES[config.model_type]


def objective_of(model: PreTrainedModel) -> str:
    """What a model's own head is for: ``causal``, ``masked``, or ``""`` without a language-model head."""
    if model.get_output_embeddings() is None:
        return ""
    decodes = getattr(model.config, "is_decoder", False)
    return "masked" if FAMILIES[model.config.model_type].encoder and not decodes else "causal"


def sites_of(family: Family, model: Any, blocks: Sequence[Any]) -> tuple[dict[str, str], tuple[Site, ...]]:
    """What a model of a family lacks, and why; and every site it has."""
    absent: dict[str, str] = {}
    # transformers 5 scales inside the embedding module, transformers 4 after it.
    if family.scaled_embedding and not hasattr(model.get_input_embeddings(), "embed_scale"):
        absent["embedding"] = SCALED_LATER
    if family.is_parallel(model.config):
        absent["resid_mid"] = PARALLEL
    streaming = [layer for layer, block in enumerate(blocks) if family.reads_the_stream(block)]
    if not family.attention_norm:
        absent |= {"attention_input": READS_THE_STREAM.format(stream="resid_pre")}
        absent |= {"mlp_input": READS_THE_STREAM.format(stream="resid_mid")}
    else:
        stream = READS_THE_STREAM.format(stream="resid_pre")
        absent |= {f"attention_input.{layer}": stream for layer in streaming}
    mixtures = [bool(family.mixture_of(block)) for block in blocks]
    if any(mixtures):
        of = "" if all(mixtures) else f" (layers {', '.join(str(i) for i, mixed in enumerate(mixtures) if mixed)})"
        absent |= dict.fromkeys(MLP_MAPS, MIXTURE + of)
    every = [Site("embedding"), *(Site(kind, layer) for layer in range(len(blocks)) for kind in LAYER_KINDS)]
    return absent, tuple(site for site in every if not {site.kind, site.name} & absent.keys())


def reads_of(family: Family, block: nn.Module, kind: str, layer: int) -> Site:
    """The site whose rows a map reads."""
    if kind in ATTENTION_MAPS:
        return Site("resid_pre" if family.reads_the_stream(block) else "attention_input", layer)
    return Site("mlp_input" if family.attention_norm else "resid_mid", layer)


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
        dtype=precision_of(model),
        parameters=parameter_count(model),
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=heads,
        n_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        d_head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
    )


def _body_of(model: Any, family: Family) -> Any:
    """The model without its head. Some classes (Gemma 3 in transformers 4) name it by a prefix that is not there."""
    first = family.blocks.split(".")[0]
    return next((part for part in (model.base_model, getattr(model, "model", None)) if hasattr(part, first)), model)


def _name_of(root: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in root.named_modules() if module is wanted)
