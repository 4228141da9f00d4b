"""The attention of a HuggingFace model, read where transformers hands queries and keys to whatever computes attention.

That place is one for all families and implementations: the model's own choice (sdpa, flash attention) is replaced for the
pass by eager attention that looks on, and comes back afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tangent_lens.models.attention import AttentionCall, AttentionWeights, NormWeights, Receiver
from tangent_lens.models.attention_checks import check_call, check_clip, check_finite
from tangent_lens.models.families import part_at
from tangent_lens.models.huggingface import HuggingFaceModel
from tangent_lens.models.protocol import Batch, UnsupportedModel

_OURS = "tangent_lens_looking_on"
# Where the norms between the maps and the scores stand, beside the query map.
_QUERY_NORMS, _KEY_NORMS = ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")


class HuggingFaceAttention:
    """The :class:`~tangent_lens.models.attention.AttentionReader` of a :class:`HuggingFaceModel`.

    Raises:
        UnsupportedModel: attention that no function can be handed to.
    """

    def __init__(self, model: HuggingFaceModel) -> None:
        self._model = model
        self._config: Any = model.module.config
        self._shape = model.description
        _check_interface(self._attention(0))

    def weights(self, layer: int) -> AttentionWeights:
        """What a layer does to every row.

        Raises:
            UnsupportedModel: quantised or offloaded weights.
        """
        family, block = self._model.family, self._model.blocks[layer]
        shape = self._shape
        attention = self._attention(layer)
        streams = family.reads_the_stream(block)
        query_weight, query_bias = self._map(layer, "query")
        key_weight, key_bias = self._map(layer, "key")
        return AttentionWeights(
            norm=None if streams else norm_weights(part_at(block, family.attention_norm)),
            query_weight=query_weight,
            query_bias=query_bias,
            key_weight=key_weight,
            key_bias=key_bias,
            query_norm=_weights_of(_norm_in(attention, _QUERY_NORMS)),
            key_norm=_weights_of(_norm_in(attention, _KEY_NORMS)),
            heads=shape.n_heads,
            kv_heads=shape.n_key_value_heads,
        )

    @contextmanager
    def watching(self, layers: Sequence[int], receive: Receiver) -> Iterator[None]:
        """Inside, every forward pass hands each of these layers' calls to ``receive``.

        Raises:
            UnsupportedModel: inside, where a call cannot be read, or never comes.
        """
        calls = {id(self._attention(layer)): _Call(self, layer, receive) for layer in layers}

        def look_on(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            if mask is not None and mask.dtype == torch.float64:
                # Eager attention takes the softmax in float32, where the least of float64 is -inf, and a row of padding
                # that may look at nothing is NaN for all that follows.
                mask = mask.clamp(min=torch.finfo(torch.float32).min)
            output, pattern = _eager_of(module)(module, query, key, value, mask, **options)
            if id(module) in calls:
                calls[id(module)].take(module, query, key, mask, pattern, options)
            return output, pattern

        with ExitStack() as stack:
            for call in calls.values():
                call.attach(stack)
            stack.enter_context(_implementation(self._config, look_on))
            yield

    def run(self, batch: Batch) -> None:
        """Run the body of the model."""
        self._model.run_without_logits(batch)

    def block(self, layer: int) -> nn.Module:
        """A layer's block."""
        return self._model.blocks[layer]

    def norm(self, layer: int) -> tuple[nn.Module, NormWeights] | None:
        """The norm before the maps; None where they read the stream itself."""
        block, family = self._model.blocks[layer], self._model.family
        if family.reads_the_stream(block):
            return None
        module = part_at(block, family.attention_norm)
        return module, norm_weights(module)

    def attention(self, layer: int) -> nn.Module:
        """The module that holds the query and key maps."""
        return self._attention(layer)

    @property
    def clip(self) -> float | None:
        """What the model clips queries and keys to; None where it does not."""
        return getattr(self._config, "clip_qkv", None)

    def before_clipping(self, layer: int) -> list[nn.Module]:
        """The norms or maps of queries and keys whose outputs are clipped, where anything is."""
        attention, block, family = self._attention(layer), self._model.blocks[layer], self._model.family
        pairs = ((_QUERY_NORMS, family.query), (_KEY_NORMS, family.key))
        return [_norm_in(attention, names) or part_at(block, path) for names, path in pairs]

    def _attention(self, layer: int) -> nn.Module:
        return part_at(self._model.blocks[layer], self._model.family.query.rpartition(".")[0])

    def _map(self, layer: int, kind: str) -> tuple[Tensor, Tensor | None]:
        """Weight (out, d) and bias of the query or key map; of a fused one, its own columns."""
        module: Any = part_at(self._model.blocks[layer], getattr(self._model.family, kind))
        weight, bias = module.weight.detach(), getattr(module, "bias", None)
        if not weight.is_floating_point() or weight.is_meta or weight.ndim != 2:
            raise UnsupportedModel(
                f"the {kind} map of layer {layer} is quantised or offloaded, and its weights cannot be read as a matrix; "
                "load the model unquantised on one device"
            )
        # GPT-2's Conv1D keeps its weight transposed.
        weight = weight.T if type(module).__name__ == "Conv1D" else weight
        own = self._model.columns.get(kind)
        if own is not None:
            weight, bias = weight[own.to(weight.device)], None if bias is None else bias[own.to(weight.device)]
        return weight, None if bias is None else bias.detach()


class _Call:
    """One layer's call in the making: what passes on the way from the residual stream to the scores."""

    def __init__(self, reader: HuggingFaceAttention, layer: int, receive: Receiver) -> None:
        self._reader, self._layer, self._receive = reader, layer, receive
        self._seen: dict[str, Any] = {}
        self._checked = False

    def attach(self, stack: ExitStack) -> None:
        """Look on at the block, the attention and its norms."""
        reader, layer = self._reader, self._layer
        attention = reader.attention(layer)
        self._before(stack, reader.block(layer), self._rows)
        self._before(stack, attention, lambda args, kwargs: {"positions": kwargs.get("position_embeddings")})
        norm = reader.norm(layer)
        if norm is not None:
            self._scale(stack, *norm, "row_scale")
        for key, names in (("query_scale", _QUERY_NORMS), ("key_scale", _KEY_NORMS)):
            module = _norm_in(attention, names)
            if module is not None:
                self._scale(stack, module, norm_weights(module), key)
        self._check_clipping(stack)
        stack.callback(reader.block(layer).register_forward_hook(self._must_have_come).remove)

    def _rows(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        rows = _first(args, kwargs)
        check_finite(rows, self._layer)
        return {"rows": rows}

    def _must_have_come(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._seen:
            raise UnsupportedModel(
                f"layer {self._layer} ran without handing its queries and keys to the attention function of its config, so "
                "its scores cannot be read; was it changed after it was loaded?"
            )

    def _check_clipping(self, stack: ExitStack) -> None:
        """Queries and keys are clipped in place (OLMo): look before that."""
        limit = self._reader.clip
        if limit is None:
            return

        def look(part: nn.Module, args: Any, output: Any) -> None:
            check_clip(output, limit, self._layer)

        for module in self._reader.before_clipping(self._layer):
            stack.callback(module.register_forward_hook(look).remove)

    def _before(self, stack: ExitStack, module: nn.Module, read: Callable[[Any, Any], dict[str, Any]]) -> None:
        hook = module.register_forward_pre_hook(
            lambda module, args, kwargs: self._seen.update(read(args, kwargs)), with_kwargs=True
        )
        stack.callback(hook.remove)

    def _scale(self, stack: ExitStack, module: nn.Module, weights: NormWeights, key: str) -> None:
        def read(part: nn.Module, args: Any, output: Tensor) -> None:
            scale = weights.scale_of(args[0].detach(), output.detach(), f"{key} of layer {self._layer}")
            self._seen[key] = scale if key == "row_scale" else _by_head(scale, args[0])

        stack.callback(module.register_forward_hook(read).remove)

    def take(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        pattern: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Queries and keys have come to the scores: hand everything over."""
        seen, self._seen = self._seen, {}
        positions = seen.get("positions")
        cos, sin = positions if positions is not None else (None, None)
        call = AttentionCall(
            layer=self._layer,
            rows=seen["rows"].detach(),
            row_scale=seen.get("row_scale"),
            query=query.detach(),
            key=key.detach(),
            query_scale=seen.get("query_scale"),
            key_scale=seen.get("key_scale"),
            cos=cos,
            sin=sin,
            scaling=_scaling(module, options.get("scaling"), query.shape[-1]),
            softcap=options.get("softcap"),
            allowed=_allowed(module, query, key, mask),
        )
        if not self._checked:
            check_call(call, self._reader.weights(self._layer), None, pattern)
            self._checked = True
        self._receive(call)


def norm_weights(module: Any) -> NormWeights:
    """Weight and bias of a norm, as they multiply and add."""
    kind = type(module).__name__
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is not None and kind.startswith("Gemma"):
        weight = 1 + weight
    return NormWeights(
        weight=None if weight is None else weight.detach(),
        bias=None if bias is None else bias.detach(),
        subtract_mean="LayerNorm" in kind,
    )


def _by_head(scale: Tensor, normed: Tensor) -> Tensor:
    """(batch, heads or 1, pos, 1), whether a norm saw all heads side by side, or each before or after positions."""
    if scale.ndim == 3:
        return scale.unsqueeze(1)
    # Heads lie next to one another in memory, also in a transposed view.
    return scale if normed.stride(1) < normed.stride(2) else scale.transpose(1, 2)


def _weights_of(module: nn.Module | None) -> NormWeights | None:
    return None if module is None else norm_weights(module)


def _norm_in(attention: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(attention, name, None) for name in names)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def _check_interface(attention: nn.Module) -> None:
    """Before transformers 5 some families chose their attention once and for all, by class."""
    modeling = inspect.getmodule(type(attention))
    if not (hasattr(modeling, "ALL_ATTENTION_FUNCTIONS") and hasattr(modeling, "eager_attention_forward")):
        raise UnsupportedModel(
            f"in transformers {transformers.__version__} {type(attention).__name__} computes its scores by itself, where they "
            "cannot be read; transformers 5 can be asked: pip install -U transformers"
        )


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    return getattr(inspect.getmodule(type(module)), "eager_attention_forward")  # noqa: B009


def _scaling(module: Any, given: float | None, d_head: int) -> float:
    """What multiplies query times key; transformers 4 leaves GPT-2's options to its own eager attention."""
    if given is not None:
        return given
    scaling = d_head**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    return scaling / (module.layer_idx + 1) if getattr(module, "scale_attn_by_inverse_layer_idx", False) else scaling


def _allowed(module: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Which pairs count: where the mask adds nothing; without a mask, all or those before."""
    if mask is not None:
        return mask.bool() if mask.dtype == torch.bool else mask[..., : key.shape[-2]] == 0
    shape = (len(query), 1, query.shape[-2], key.shape[-2])
    every = torch.ones(shape, dtype=torch.bool, device=query.device)
    return every.tril() if getattr(module, "is_causal", False) else every


@contextmanager
def _implementation(config: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The model computes attention with ``function``, under the mask that eager attention gets; restored after."""
    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_OURS] = function
    # For all, not for this instance alone: transformers makes no mask for an implementation it finds only there, and
    # the model would run without causality, padding and windows.
    masks = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    masks[_OURS] = eager_mask
    config._attn_implementation = _OURS
    try:
        yield
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[_OURS]
        del masks[_OURS]
