"""A TransformerLens ``TransformerBridge``, as stored or in compatibility mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from tangent_lens.models.families import Family, part_at, positions_of
from tangent_lens.models.huggingface import describe, family_of, objective_of, reads_of, sites_of
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
from tangent_lens.sites import Site

# Path of the hook point of each kind of site, relative to a block. On a bridge these carry the raw tensors of the
# wrapped model: queries are (batch, position, heads * d_head), as everywhere in this library.
_HOOK_POINTS = {
    "resid_pre": "hook_in",
    "attention_input": "attn.hook_in",
    "query": "attn.q.hook_out",
    "key": "attn.k.hook_out",
    "value": "attn.v.hook_out",
    "mlp_input": "mlp.hook_in",
    "resid_post": "hook_out",
}
_MAP_MODULES = {"query": "attn.q", "key": "attn.k", "value": "attn.v", "mlp_in": "mlp.in", "mlp_gate": "mlp.gate"}
# Before it, backward hooks leaked and teardown removed the person's own hooks.
_OLDEST = (3, 7, 3)
_NOT_THE_MIDDLE = (
    "on this bridge it is an alias of the input of the block's last norm, another tensor than on other models; "
    "write resid_mid, the stream that the MLP reads"
)


class BridgeModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``TransformerBridge``.

    Taps are raw torch hooks on the bridge's own hook points: they see what the person's hooks have changed there, and
    survive the person's ``reset_hooks()``.

    Raises:
        UnsupportedModel: an architecture whose sites are not known here, or a TransformerLens older than 3.7.3.
    """

    padding_sides: tuple[str, ...] = ("right", "left")

    def __init__(
        self, bridge: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        _check_version()
        original = bridge.original_model
        self.bridge = bridge
        self.module: nn.Module = bridge
        self.tokenizer = tokenizer or bridge.tokenizer
        self._config: Any = original.config
        self._family: Family = family_of(original)
        self._name = name or getattr(bridge.cfg, "model_name", None) or type(original).__name__
        self._revision = revision or getattr(self._config, "_commit_hash", None) or "unknown"
        self.objective = objective_of(original)
        self.longest_sequence: int | None = self._family.longest_sequence(self._config)
        # The wrapped blocks answer to the family's own paths; what the bridge calls its parts is the same everywhere.
        blocks = [getattr(block, "original_component", block) for block in bridge.blocks]
        self._blocks: list[Any] = blocks
        self.absent: Mapping[str, str]
        self.absent, self.sites = sites_of(self._family, original, blocks)
        self.misleading_names: Mapping[str, str] = (
            {} if self._family.attention_norm else {"hook_resid_mid": _NOT_THE_MIDDLE}
        )
        self._shape = self.description
        self._maps = tuple(one for layer in range(len(blocks)) for one in self._maps_of(layer))

    @property
    def family(self) -> Family:
        """Where the wrapped model keeps its parts."""
        return self._family

    @property
    def blocks(self) -> list[Any]:
        """The wrapped blocks."""
        return self._blocks

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that reads a site."""
        return self._maps

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes, and whether the weights were processed."""
        return describe(
            self.bridge.original_model,
            name=self._name,
            revision=self._revision,
            library=f"transformer-lens {version('transformer-lens')} (TransformerBridge)",
            weights=self._weights(),
        )

    def _weights(self) -> str:
        """Processed weights put activations and gradients in another basis; a report must say so."""
        mode = " (compatibility mode)" if self.bridge.compatibility_mode else ""
        return f"{'processed' if self._processed() else 'as stored'}{mode}"

    def _processed(self) -> bool:
        # A version without this flag cannot be asked; there compatibility mode is the only way to process weights.
        return getattr(self.bridge, "_weights_processed", self.bridge.compatibility_mode)

    @property
    def device(self) -> torch.device:
        """Where its token ids must lie."""
        return input_device(self.bridge)

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        if site.layer is None:
            return self.gradient_starts()[0]
        width = width_of(self._shape, site)
        if site.kind == "resid_mid":
            # What goes into this hook point is the stream; what comes out is a copy for the norm alone as soon as somebody
            # has a backward hook there, without the gradient of the path around the MLP.
            return self._point(site.layer, self._middle(), width, side="input")
        return self._point(site.layer, _HOOK_POINTS[site.kind], width)

    def gradient_starts(self) -> tuple[TapPoint, ...]:
        """The hook point after the token embedding."""
        return (TapPoint(self.bridge.embed.hook_out, "output", "embed.hook_out"),)

    def run(self, batch: Batch) -> Tensor:
        """Run the bridge and return the logits (batch, position, vocabulary)."""
        arguments: dict[str, Any] = {"return_type": "logits"}
        if self.objective == "causal":
            arguments["use_cache"] = False
        if batch.padded:
            arguments["attention_mask"] = batch.attention_mask.long()
        if batch.padded or self._family.positions_after_padding:
            arguments["position_ids"] = positions_of(self._family, self._config, batch)
        return self.bridge(batch.tokens, **arguments)

    def run_without_logits(self, batch: Batch) -> None:
        """Run the bridge; it offers no way to stop before the unembedding that keeps every hook."""
        self.run(batch)

    def _middle(self) -> str:
        """Where the stream between attention and MLP passes: into the MLP's norm, out of the attention's, or into the MLP."""
        if self._family.attention_norm:
            return "ln2.hook_in"
        # On a BERT bridge of TransformerLens 3, mlp.hook_in never fires.
        return "ln1.hook_out" if self._family.resid_mid[1] == "output" else "mlp.hook_in"

    def _point(self, layer: int, path: str, width: int | None = None, side: Any = "output") -> TapPoint:
        module = part_at(self.bridge.blocks[layer], path)
        return TapPoint(module, side, f"blocks.{layer}.{path}", width=width)

    def _maps_of(self, layer: int) -> list[LinearMap]:
        maps = []
        mixed = self._family.mixture_of(self._blocks[layer])
        for kind in ATTENTION_MAPS if mixed else (*ATTENTION_MAPS, *MLP_MAPS):
            path = _MAP_MODULES[kind]
            if part_at(self.bridge.blocks[layer], path, None) is not None:
                reads = reads_of(self._family, self._blocks[layer], kind, layer)
                # A map's own hook_in knows what a person's hook put there, but it is silent where the bridge multiplies
                # by itself: with processed weights, and with split query, key and value inputs.
                through = self._point(layer, "attn.hook_in" if kind in ATTENTION_MAPS else "mlp.hook_in")
                inputs = (through, self._point(layer, f"{path}.hook_in"))
                width = width_of(self._shape, Site(kind, layer)) if kind in ATTENTION_MAPS else None
                maps.append(LinearMap(kind, layer, reads, inputs, self._point(layer, f"{path}.hook_out", width)))
        return maps


def _check_version() -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version("transformer-lens"))[:3])
    if numbers < _OLDEST:
        raise UnsupportedModel(
            f"transformer-lens {version('transformer-lens')} is too old for a TransformerBridge; 3.7.3 is the first that "
            "leaves hooks alone: pip install -U transformer-lens, or use a HookedTransformer"
        )
