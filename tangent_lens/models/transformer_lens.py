"""A TransformerLens ``TransformerBridge``, as stored or in compatibility mode."""

from __future__ import annotations

from typing import Any

import transformer_lens
from torch import Tensor, nn

from tangent_lens.models.huggingface import describe, longest_sequence
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

# Path of the hook point of each kind of site, relative to a block. On a bridge these carry the raw tensors of the
# wrapped model: queries are (batch, position, heads * d_head), as everywhere in this library.
_HOOK_POINTS = {
    "resid_pre": "hook_in",
    "attention_input": "attn.hook_in",
    "query": "attn.q.hook_out",
    "key": "attn.k.hook_out",
    "value": "attn.v.hook_out",
    "resid_mid": "ln2.hook_in",
    "mlp_input": "mlp.hook_in",
    "resid_post": "hook_out",
}
_MAP_MODULES = {"query": "attn.q", "key": "attn.k", "value": "attn.v", "mlp_in": "mlp.in", "mlp_gate": "mlp.gate"}
# Families whose second norm reads the residual stream itself; elsewhere (OLMo-2, Gemma) it stands after the attention.
_ARCHITECTURES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "GPTNeoXForCausalLM",
    "GPT2LMHeadModel",
}


class BridgeModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``TransformerBridge``.

    Taps are raw torch hooks on the bridge's own hook points: they see what the person's hooks have changed there, and
    survive the person's ``reset_hooks()``.

    Raises:
        UnsupportedModel: an architecture whose sites are not known here.
    """

    def __init__(
        self, bridge: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        architecture = type(bridge.original_model).__name__
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"the sites of a TransformerBridge of {architecture} are not known; "
                f"supported: {', '.join(sorted(_ARCHITECTURES))}"
            )
        self.bridge = bridge
        self.module: nn.Module = bridge
        self.tokenizer = tokenizer or bridge.tokenizer
        self._name = name or getattr(bridge.cfg, "model_name", None) or architecture
        self._revision = revision or getattr(bridge.original_model.config, "_commit_hash", None) or "unknown"
        parallel = getattr(bridge.original_model.config, "use_parallel_residual", False)
        self.longest_sequence: int | None = longest_sequence(bridge.original_model.config)
        reason = "its attention and MLP read the same residual stream side by side"
        self.absent = {"resid_mid": reason} if parallel else {}
        kinds = [kind for kind in LAYER_KINDS if kind not in self.absent]
        layers = range(len(bridge.blocks))
        self.sites = (Site("embedding"), *(Site(kind, layer) for layer in layers for kind in kinds))
        self._maps = tuple(one for layer in layers for one in self._maps_of(layer))

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
            library=f"transformer-lens {_version()} (TransformerBridge)",
            weights=self._weights(),
        )

    def _weights(self) -> str:
        """Processed weights put activations and gradients in another basis; a report must say so."""
        mode = " (compatibility mode)" if self.bridge.compatibility_mode else ""
        return f"{'processed' if self._processed() else 'as stored'}{mode}"

    def _processed(self) -> bool:
        # A version without this flag cannot be asked; there compatibility mode is the only way to process weights.
        return getattr(self.bridge, "_weights_processed", self.bridge.compatibility_mode)

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        if site.layer is None:
            return self.embedding_point()
        return self._point(site.layer, _HOOK_POINTS[site.kind])

    def embedding_point(self) -> TapPoint:
        """The hook point after the token embedding."""
        return TapPoint(self.bridge.embed.hook_out, "output", "embed.hook_out")

    def logits(self, batch: Batch) -> Tensor:
        """Run the bridge and return the logits (batch, position, vocabulary)."""
        arguments: dict[str, Any] = {"return_type": "logits", "use_cache": False}
        if batch.padded:
            arguments |= {"attention_mask": batch.attention_mask.long(), "position_ids": batch.positions}
        return self.bridge(batch.tokens, **arguments)

    def run_without_logits(self, batch: Batch) -> None:
        """Run the bridge; it offers no way to stop before the unembedding that keeps every hook."""
        self.logits(batch)

    def _point(self, layer: int, path: str) -> TapPoint:
        module: Any = self.bridge.blocks[layer]
        for part in path.split("."):
            module = getattr(module, part)
        return TapPoint(module, "output", f"blocks.{layer}.{path}")

    def _maps_of(self, layer: int) -> list[LinearMap]:
        maps = []
        for kind in (*ATTENTION_MAPS, *MLP_MAPS):
            path = _MAP_MODULES[kind]
            if _has(self.bridge.blocks[layer], path):
                reads = Site("attention_input" if kind in ATTENTION_MAPS else "mlp_input", layer)
                # A map's own hook_in knows what a person's hook put there, but it is silent where the bridge multiplies
                # by itself: with processed weights, and with split query, key and value inputs.
                inputs = (self.tap_point(reads), self._point(layer, f"{path}.hook_in"))
                maps.append(LinearMap(kind, layer, reads, inputs, self._point(layer, f"{path}.hook_out")))
        return maps


def _has(module: Any, path: str) -> bool:
    for part in path.split("."):
        module = getattr(module, part, None)
        if module is None:
            return False
    return True


def _version() -> str:
    return getattr(transformer_lens, "__version__", None) or _installed_version()


def _installed_version() -> str:
    from importlib.metadata import version

    return version("transformer-lens")
