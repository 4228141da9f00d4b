"""TransformerLens's own reimplementations, of its versions 2 and 3: ``HookedTransformer`` and ``HookedEncoder``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tangent_lens.models.families import MIXTURE, PARALLEL, READS_THE_STREAM, part_at
from tangent_lens.models.placement import input_device
from tangent_lens.models.protocol import (
    ATTENTION_MAPS,
    MLP_MAPS,
    Batch,
    LinearMap,
    ModelDescription,
    TapPoint,
    UnsupportedModel,
    width_of,
)
from tangent_lens.models.quantisation import parameter_count, precision_of
from tangent_lens.sites import LAYER_KINDS, Site

# Their norms stand behind each branch: attention and MLP read the residual stream itself.
_POST_NORM = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
# Relative to the largest entry: what centring leaves of a mean is rounding.
_CENTRED = 1e-5


@dataclass(frozen=True)
class Place:
    """Where a tensor passes in a block; see :class:`~tangent_lens.models.protocol.TapPoint`."""

    path: str
    side: Literal["input", "output"] = "output"
    arguments: tuple[str, ...] = ()

    @property
    def hookable(self) -> bool:
        """Whether TransformerLens knows the place as a hook point."""
        return self.path.split(".")[-1].startswith("hook_")


@dataclass(frozen=True)
class Layout:
    """Where one class of TransformerLens keeps its tensors.

    Attributes:
        embedding: the hook point after the token embedding.
        mask: the argument that takes the attention mask.
        places: by kind of site, inside a block.
    """

    embedding: str
    mask: str
    places: dict[str, Place]


_MAP_INPUTS = {
    "query": Place("attn", "input", ("query_input",)),
    "key": Place("attn", "input", ("key_input",)),
    "value": Place("attn", "input", ("value_input",)),
    "mlp_in": Place("mlp", "input", ("x",)),
    "mlp_gate": Place("mlp", "input", ("x",)),
}
_MAP_OUTPUTS = {kind: Place(f"attn.hook_{kind[0]}") for kind in ATTENTION_MAPS}
_DECODER = Layout(
    embedding="hook_embed",
    mask="attention_mask",
    places=_MAP_OUTPUTS
    | {
        "resid_pre": Place("hook_resid_pre"),
        # The norm runs once for each of the three; the tensor it makes has no hook point after its weight and bias
        # (ln1.hook_normalized fires three times, and stands before them or after them, by version).
        "attention_input": Place("attn", "input", ("query_input", "key_input", "value_input")),
        "resid_mid": Place("hook_resid_mid"),
        "mlp_input": Place("mlp", "input", ("x",)),
        "resid_post": Place("hook_resid_post"),
    },
)
# hook_resid_mid and hook_resid_post stand before the norms here: not what the next part reads, nor what it is added to.
_ENCODER = Layout(
    embedding="embed.hook_embed",
    mask="one_zero_attention_mask",
    places=_MAP_OUTPUTS
    | {
        "resid_pre": Place("hook_resid_pre"),
        "resid_mid": Place("ln1"),
        "resid_post": Place("hook_normalized_resid_post"),
    },
)
_BEFORE_NORM = (
    "on a HookedEncoder this stands before the LayerNorm, on other models the residual stream is what the next part reads; "
    "write {kind}, the stream after the norm"
)


class HookedModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``HookedTransformer`` or a ``HookedEncoder``.

    Taps are raw torch hooks on hook points and modules; they survive the person's ``reset_hooks()``.

    Raises:
        UnsupportedModel: a model without blocks of the known kind.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        encoder = type(model).__name__ == "HookedEncoder"
        if not hasattr(model, "blocks") or getattr(model.cfg, "positional_embedding_type", "") == "shortformer":
            raise UnsupportedModel(f"the sites of this {type(model).__name__} are not known")
        self.module: nn.Module = model
        self.tokenizer = tokenizer or model.tokenizer
        self.objective = "masked" if encoder else "causal"
        # A HookedEncoder counts positions from the first column, whatever stands there.
        self.padding_sides: tuple[str, ...] = ("right",) if encoder else ("right", "left")
        self.misleading_names: Mapping[str, str] = (
            {f"hook_{kind}": _BEFORE_NORM.format(kind=kind) for kind in ("resid_mid", "resid_post")} if encoder else {}
        )
        self.longest_sequence: int | None = model.cfg.n_ctx
        self._model, self._config = model, model.cfg
        self._layout = _ENCODER if encoder else _DECODER
        self._name, self._revision = name or self._config.model_name, revision or "unknown"
        self._norm_first = not encoder and self._config.original_architecture not in _POST_NORM
        self._shape = self.description
        self.absent: Mapping[str, str] = self._absent()
        layers = range(self._config.n_layers)
        every = (Site(kind, layer) for layer in layers for kind in LAYER_KINDS)
        self.sites = tuple(site for site in (Site("embedding"), *every) if site.kind not in self.absent)
        self.maps = tuple(one for layer in layers for one in self._maps_of(layer))

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes, and how the weights were processed."""
        config = self._config
        return ModelDescription(
            name=self._name,
            revision=self._revision,
            library=f"transformer-lens {version('transformer-lens')} ({type(self.module).__name__})",
            architecture=config.original_architecture or type(self.module).__name__,
            weights=weights_of(self.module),
            dtype=precision_of(self.module),
            parameters=parameter_count(self.module),
            n_layers=config.n_layers,
            d_model=config.d_model,
            n_heads=config.n_heads,
            n_key_value_heads=config.n_key_value_heads or config.n_heads,
            d_head=config.d_head,
            vocabulary=config.d_vocab,
        )

    @property
    def norm_first(self) -> bool:
        """Whether the attention reads the stream through a norm."""
        return self._norm_first

    @property
    def device(self) -> torch.device:
        """Where its token ids must lie."""
        return input_device(self.module)

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        if site.layer is None:
            return self.gradient_starts()[0]
        return self._point(site.layer, self._layout.places[site.kind], width_of(self._shape, site))

    def gradient_starts(self) -> tuple[TapPoint, ...]:
        """The hook point after the token embedding."""
        path = self._layout.embedding
        return (TapPoint(part_at(self.module, path), "output", path),)

    def run(self, batch: Batch) -> Tensor:
        """Run the model and return the logits (batch, position, vocabulary)."""
        return self._model(batch.tokens, **self._mask(batch), return_type="logits")

    def run_without_logits(self, batch: Batch) -> None:
        """Run the blocks only."""
        if self.objective == "masked":
            self._model.encoder_output(batch.tokens, **self._mask(batch))
        else:
            self._model(batch.tokens, **self._mask(batch), return_type=None, stop_at_layer=self._config.n_layers)

    def _mask(self, batch: Batch) -> dict[str, Tensor]:
        if "left" not in self.padding_sides and not bool(batch.attention_mask[:, 0].all()):
            raise ValueError(
                "this batch is padded on the left, and a HookedEncoder counts positions from the first column; "
                "pad it on the right"
            )
        # Always: where there is none, TransformerLens guesses it from the tokens that equal the padding token.
        return {self._layout.mask: batch.attention_mask.long()}

    def _point(self, layer: int, place: Place, width: int | None) -> TapPoint:
        module = part_at(self._model.blocks[layer], place.path)
        name = f"blocks.{layer}.{place.path}"
        return TapPoint(module, place.side, name, arguments=place.arguments, width=width, hookable=place.hookable)

    def _maps_of(self, layer: int) -> list[LinearMap]:
        outputs = dict(_MAP_OUTPUTS)
        mlp = getattr(self._model.blocks[layer], "mlp", None)
        if mlp is not None and not hasattr(mlp, "experts"):
            gated = hasattr(mlp, "hook_pre_linear")
            outputs["mlp_in"] = Place("mlp.hook_pre_linear" if gated else "mlp.hook_pre")
            if gated:
                outputs["mlp_gate"] = Place("mlp.hook_pre")
        maps = []
        for kind, output in outputs.items():
            reads = Site(self._read_by(kind), layer)
            inputs = (self._point(layer, _MAP_INPUTS[kind], self._config.d_model),)
            # Of an attention map, the site of the same name: (batch, position, head, d_head) here, heads side by side there.
            width = width_of(self._shape, Site(kind, layer)) if kind in ATTENTION_MAPS else None
            maps.append(LinearMap(kind, layer, reads, inputs, self._point(layer, output, width)))
        return maps

    def _read_by(self, kind: str) -> str:
        if kind in ATTENTION_MAPS:
            return "attention_input" if self._norm_first else "resid_pre"
        return "mlp_input" if self._norm_first else "resid_mid"

    def _absent(self) -> dict[str, str]:
        config, absent = self._config, {}
        if not self._norm_first:
            absent["attention_input"] = READS_THE_STREAM.format(stream="resid_pre")
            absent["mlp_input"] = READS_THE_STREAM.format(stream="resid_mid")
        if getattr(config, "parallel_attn_mlp", False):
            absent["resid_mid"] = PARALLEL
        if getattr(config, "attn_only", False):
            absent |= dict.fromkeys(("resid_mid", "mlp_input", *MLP_MAPS), "it has attention layers only")
        elif any(hasattr(block.mlp, "experts") for block in self._model.blocks):
            absent |= dict.fromkeys(MLP_MAPS, MIXTURE)
        return absent


def weights_of(model: Any) -> str:
    """``as stored``, or what TransformerLens did to the weights: it puts activations and gradients in another basis."""
    done = []
    if (model.cfg.normalization_type or "").endswith("Pre"):
        done.append("norms folded")
    embedding = model.W_E
    if embedding.mean(dim=-1).abs().max() <= _CENTRED * embedding.abs().max():
        done.append("writing weights centred")
    return f"processed ({', '.join(done)})" if done else "as stored"
