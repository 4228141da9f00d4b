"""The attention of a TransformerBridge, read at the bridge's own hook points."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components.joint_qkv_attention import JointQKVAttentionBridge

from tangent_lens.models.attention import AttentionCall, AttentionWeights, NormWeights, Receiver
from tangent_lens.models.attention_checks import by_head, check_call, check_clip, check_finite, check_inputs, rotated
from tangent_lens.models.families import part_at
from tangent_lens.models.huggingface_attention import norm_weights
from tangent_lens.models.protocol import Batch, UnsupportedModel, read_tensor
from tangent_lens.models.transformer_lens import BridgeModel
from tangent_lens.sites import Site


class BridgeAttention:
    """The :class:`~tangent_lens.models.attention.AttentionReader` of a :class:`BridgeModel`."""

    def __init__(self, model: BridgeModel) -> None:
        self._model = model
        self._shape = model.description

    def weights(self, layer: int) -> AttentionWeights:
        """What a layer does to every row.

        Raises:
            UnsupportedModel: quantised or offloaded weights.
        """
        attention = self.attention(layer)
        (query_weight, query_bias), (key_weight, key_bias) = (_map_of(attention, kind, layer) for kind in ("q", "k"))
        return AttentionWeights(
            norm=self.norm(layer),
            query_weight=query_weight,
            query_bias=query_bias,
            key_weight=key_weight,
            key_bias=key_bias,
            query_norm=_norm_of(attention, "q"),
            key_norm=_norm_of(attention, "k"),
            heads=self._shape.n_heads,
            kv_heads=self._shape.n_key_value_heads,
        )

    @contextmanager
    def watching(self, layers: Sequence[int], receive: Receiver) -> Iterator[None]:
        """Inside, every forward pass hands each of these layers' calls to ``receive``.

        Raises:
            UnsupportedModel: inside, where the bridge runs in a mode whose queries cannot be split.
        """
        with ExitStack() as stack:
            for layer in layers:
                _Call(self, layer, receive).attach(stack)
            yield

    def run(self, batch: Batch) -> None:
        """Run the bridge."""
        self._model.run_without_logits(batch)

    def attention(self, layer: int) -> Any:
        """The bridge's attention of a layer."""
        return self._model.bridge.blocks[layer].attn

    def stream(self, layer: int) -> nn.Module:
        """Where a layer's residual stream passes."""
        return self._model.tap_point(Site("resid_pre", layer)).module

    def norm(self, layer: int) -> NormWeights | None:
        """The norm before the maps; None where they read the stream itself."""
        family, block = self._model.family, self._model.blocks[layer]
        if family.reads_the_stream(block):
            return None
        return norm_weights(_wrapped(part_at(block, family.attention_norm)))

    def is_causal(self) -> bool:
        """What a missing mask means."""
        return not self._model.family.encoder or bool(
            getattr(self._model.bridge.original_model.config, "is_decoder", False)
        )


class _Call:
    """One layer's call in the making: what passes on the way from the residual stream to the scores."""

    def __init__(self, reader: BridgeAttention, layer: int, receive: Receiver) -> None:
        self._reader, self._layer, self._receive = reader, layer, receive
        self._attention: Any = reader.attention(layer)
        self._seen: dict[str, Any] = {}
        self._weights: AttentionWeights | None = None

    def attach(self, stack: ExitStack) -> None:
        """Look on at the hook points of the attention, and hand everything over when it is through."""
        attention = self._attention
        self._keep(stack, self._reader.stream(self._layer), "rows")
        self._keep(stack, attention.hook_in, "normed")
        for part in ("q", "k"):
            self._keep(stack, getattr(attention, part).hook_out, part)
            norm = _norm_of(attention, part)
            if norm is not None:
                module = getattr(attention, f"{part}_norm")
                self._watch(stack, module.register_forward_hook(self._scaler(part, norm)))
        for name in ("hook_cos", "hook_sin", "hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern"):
            if hasattr(attention, name):
                self._keep(stack, getattr(attention, name), name)
        self._watch(stack, attention.register_forward_pre_hook(self._start, with_kwargs=True))
        self._watch(stack, attention.register_forward_hook(self._finish))

    def _watch(self, stack: ExitStack, hook: Any) -> None:
        stack.callback(hook.remove)

    def _keep(self, stack: ExitStack, module: nn.Module, name: str) -> None:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._seen[name] = read_tensor(output).detach()

        self._watch(stack, module.register_forward_hook(keep))

    def _scaler(self, part: str, weights: NormWeights) -> Callable[..., None]:
        """Keeps what a query or key norm gives, and its scales: over d_head numbers, or over all heads side by side."""

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            scale = weights.scale_of(args[0].detach(), output.detach(), f"{part}_norm of layer {self._layer}")
            self._seen[f"{part}_scale"] = scale.unsqueeze(1) if scale.ndim == 3 else scale
            self._seen[f"{part}_normed"] = output.detach()

        return keep

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        check_inputs(self._attention.config)
        check_finite(self._seen["rows"], self._layer)
        names = inspect.signature(self._attention.original_component.forward).parameters
        self._seen["mask"] = (dict(zip(names, args, strict=False)) | kwargs).get("attention_mask")

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        seen, self._seen = self._seen, {}
        first = self._weights is None
        weights = self._weights = self._weights or self._reader.weights(self._layer)
        call = self._made(seen, weights)
        if first:
            check_call(call, weights, seen.get("hook_attn_scores"), seen.get("hook_pattern"))
        self._receive(call)

    def _made(self, seen: dict[str, Any], weights: AttentionWeights) -> AttentionCall:
        limit = getattr(getattr(self._attention.original_component, "config", None), "clip_qkv", None)
        for part in ("q", "k"):
            check_clip(seen.get(f"{part}_normed", seen[part]), limit, self._layer)
        query, key = (_heads(seen, part, weights) for part in ("q", "k"))
        name = f"the norm before the attention of layer {self._layer}"
        return AttentionCall(
            layer=self._layer,
            rows=seen["rows"],
            row_scale=None if weights.norm is None else weights.norm.scale_of(seen["rows"], seen["normed"], name),
            query=query,
            key=key,
            query_scale=seen.get("q_scale"),
            key_scale=seen.get("k_scale"),
            cos=seen.get("hook_cos"),
            sin=seen.get("hook_sin"),
            scaling=_scaling(self._attention, self._layer, query.shape[-1]),
            softcap=getattr(self._attention.original_component, "attn_logit_softcapping", None),
            allowed=_allowed(seen["mask"], query, self._reader.is_causal()),
        )


def _heads(seen: dict[str, Any], part: str, weights: AttentionWeights) -> Tensor:
    """The model's own after norm and rotation; GPT-NeoX has the hook points of the latter and never fires them."""
    if f"hook_rot_{part}" in seen:
        return seen[f"hook_rot_{part}"]
    heads = by_head(seen[part], weights.heads if part == "q" else weights.kv_heads)
    return rotated(heads, seen["hook_cos"], seen["hook_sin"]) if "hook_cos" in seen else heads


def _scaling(attention: Any, layer: int, d_head: int) -> float:
    if isinstance(attention, JointQKVAttentionBridge):
        # It does not ask the module it wraps (GPT-2's scale_attn_weights).
        later = layer + 1 if getattr(attention.config, "scale_attn_by_inverse_layer_idx", False) else 1
        return d_head**-0.5 / later
    wrapped = attention.original_component
    return getattr(getattr(wrapped, "self", wrapped), "scaling", d_head**-0.5)


def _map_of(attention: Any, part: str, layer: int) -> tuple[Tensor, Tensor | None]:
    """Weight (out, d) and bias of the query or key map, processed where the bridge processed them."""
    module = _wrapped(getattr(attention, part))
    weight, bias = module.weight.detach(), getattr(module, "bias", None)
    if not weight.is_floating_point() or weight.is_meta or weight.ndim != 2:
        raise UnsupportedModel(
            f"the {part} map of layer {layer} is quantised or offloaded, and its weights cannot be read as a matrix; "
            "load the model unquantised on one device"
        )
    weight = weight.T if type(module).__name__ == "Conv1D" else weight
    return weight, None if bias is None else bias.detach()


def _allowed(mask: Tensor | None, query: Tensor, causal: bool) -> Tensor:
    """Which pairs count: where the mask adds nothing; without a mask, all or those before."""
    batch, _, length, _ = query.shape
    if mask is None:
        every = torch.ones(batch, 1, length, length, dtype=torch.bool, device=query.device)
        return every.tril() if causal else every
    if mask.ndim != 4:
        raise UnsupportedModel(
            f"this attention gets a mask of {mask.ndim} dimensions, and only one of 4 says which pairs count"
        )
    allowed = mask if mask.dtype == torch.bool else mask == 0
    return allowed[..., :length].expand(batch, 1, length, length)


def _norm_of(attention: Any, part: str) -> NormWeights | None:
    module = getattr(attention, f"{part}_norm", None)
    return None if module is None else norm_weights(_wrapped(module))


def _wrapped(module: Any) -> Any:
    return getattr(module, "original_component", module)
