"""The attention of a HookedTransformer or HookedEncoder, read at its own hook points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tangent_lens.models.attention import AttentionCall, AttentionWeights, NormWeights, Receiver
from tangent_lens.models.attention_checks import check_call, check_clip, check_finite, check_inputs
from tangent_lens.models.hooked_transformer import HookedModel
from tangent_lens.models.protocol import Batch, UnsupportedModel

_ARGUMENTS = (
    "query_input",
    "key_input",
    "value_input",
    "past_kv_cache_entry",
    "additive_attention_mask",
    "attention_mask",
)


class HookedAttention:
    """The :class:`~tangent_lens.models.attention.AttentionReader` of a :class:`HookedModel`.

    Raises:
        UnsupportedModel: attention whose scores are not all there is to its pattern.
    """

    def __init__(self, model: HookedModel) -> None:
        self._model = model
        self._module: Any = model.module
        self._config: Any = self._module.cfg
        _check_kind(self._config)

    def weights(self, layer: int) -> AttentionWeights:
        """What a layer does to every row.

        Raises:
            UnsupportedModel: quantised weights.
        """
        attention = self.block(layer).attn
        query_weight, key_weight = attention.W_Q, attention.W_K
        key_bias = attention.b_K
        if self._grouped:
            # W_K and b_K repeat each head for the queries that share it.
            key_weight, key_bias = attention._W_K, attention._b_K
        for kind, weight in (("query", query_weight), ("key", key_weight)):
            if not weight.is_floating_point() or weight.ndim != 3:
                raise UnsupportedModel(
                    f"the {kind} map of layer {layer} is quantised, and its weights cannot be read as a matrix; "
                    "load the model without load_in_4bit"
                )
        return AttentionWeights(
            norm=self._norm(layer),
            query_weight=_as_matrix(query_weight),
            query_bias=attention.b_Q.detach().flatten(),
            key_weight=_as_matrix(key_weight),
            key_bias=key_bias.detach().flatten(),
            query_norm=_own_norm(attention, "q_norm"),
            key_norm=_own_norm(attention, "k_norm"),
            heads=len(query_weight),
            kv_heads=len(key_weight),
            interleaved=_is_rotary(self._config) and bool(self._config.rotary_adjacent_pairs),
        )

    @contextmanager
    def watching(self, layers: Sequence[int], receive: Receiver) -> Iterator[None]:
        """Inside, every forward pass hands each of these layers' calls to ``receive``.

        Raises:
            UnsupportedModel: inside, where the model runs in a mode whose queries cannot be split.
        """
        with ExitStack() as stack:
            for layer in layers:
                _Call(self, layer, receive).attach(stack)
            yield

    def run(self, batch: Batch) -> None:
        """Run the blocks only."""
        self._model.run_without_logits(batch)

    def block(self, layer: int) -> Any:
        """A layer's block."""
        return self._module.blocks[layer]

    @property
    def _grouped(self) -> bool:
        grouped = self._config.n_key_value_heads is not None
        return grouped and not self._config.ungroup_grouped_query_attention

    def _norm(self, layer: int) -> NormWeights | None:
        """The norm before the maps; None where they read the stream itself."""
        norm = getattr(self.block(layer), "ln1", None)
        if not self._model.norm_first or norm is None or isinstance(norm, nn.Identity):
            return None
        return _weights_of(norm)


class _Call:
    """One layer's call in the making: what passes on the way from the residual stream to the scores."""

    def __init__(self, reader: HookedAttention, layer: int, receive: Receiver) -> None:
        self._reader, self._layer, self._receive = reader, layer, receive
        self._block: Any = reader.block(layer)
        self._attention: Any = self._block.attn
        self._weights: AttentionWeights | None = None
        self._seen: dict[str, Any] = {}

    def attach(self, stack: ExitStack) -> None:
        """Look on at the hook points of the attention, and hand everything over when it is through."""
        attention = self._attention
        self._keep(stack, self._block.hook_resid_pre, "rows")
        for part in ("q", "k"):
            self._keep(stack, getattr(attention, f"hook_{part}"), part)
            norm = getattr(attention, f"{part}_norm", None)
            if norm is not None:
                self._watch(stack, norm.register_forward_hook(self._scaler(part, _weights_of(norm))))
            if _is_rotary(attention.cfg):
                self._keep(stack, getattr(attention, f"hook_rot_{part}"), f"rotated_{part}")
        self._keep(stack, attention.hook_attn_scores, "scores")
        self._watch(stack, attention.register_forward_pre_hook(self._start, with_kwargs=True))
        self._watch(stack, attention.register_forward_hook(self._finish))

    def _watch(self, stack: ExitStack, hook: Any) -> None:
        stack.callback(hook.remove)

    def _keep(self, stack: ExitStack, module: nn.Module, name: str) -> None:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self._seen[name] = output.detach()

        self._watch(stack, module.register_forward_hook(keep))

    def _scaler(self, part: str, weights: NormWeights) -> Callable[..., None]:
        """Keeps what a query or key norm gives, and its scales: one a head, or one for all heads side by side."""

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            before = self._seen[part]
            scale = weights.scale_of(args[0].detach(), output.detach(), f"{part}_norm of layer {self._layer}")
            # Norms over d_head numbers get every head of every position as a row.
            self._seen[f"{part}_scale"] = scale.view(*before.shape[:2], -1, 1).transpose(1, 2)
            self._seen[f"{part}_normed"] = output.detach().view(before.shape)

        return keep

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        check_inputs(self._attention.cfg)
        check_finite(self._seen["rows"], self._layer)
        self._seen["inputs"] = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        seen, self._seen = self._seen, {}
        first = self._weights is None
        weights = self._weights = self._weights or self._reader.weights(self._layer)
        call = self._made(seen, weights)
        if first:
            check_call(call, weights, seen["scores"], None)
        self._receive(call)

    def _made(self, seen: dict[str, Any], weights: AttentionWeights) -> AttentionCall:
        attention, config, inputs = self._attention, self._attention.cfg, seen["inputs"]
        for part in ("q", "k"):
            check_clip(seen.get(f"{part}_normed", seen[part]), getattr(config, "clip_qkv", None), self._layer)
        query, key = (_heads(seen, part) for part in ("q", "k"))
        cos, sin = _tables(attention, query, inputs.get("attention_mask"))
        normed = inputs["query_input"].detach()
        name = f"the norm before the attention of layer {self._layer}"
        return AttentionCall(
            layer=self._layer,
            rows=seen["rows"],
            row_scale=None if weights.norm is None else weights.norm.scale_of(seen["rows"], normed, name),
            query=query,
            key=key,
            query_scale=seen.get("q_scale"),
            key_scale=seen.get("k_scale"),
            cos=cos,
            sin=sin,
            scaling=1 / attention.attn_scale,
            # TransformerLens writes -1 for none.
            softcap=config.attn_scores_soft_cap if (config.attn_scores_soft_cap or 0) > 0 else None,
            allowed=_allowed(attention, query, inputs),
            bias=_alibi(attention, query),
        )


def _heads(seen: dict[str, Any], part: str) -> Tensor:
    """The model's own after norm and rotation, heads before positions."""
    found = seen.get(f"rotated_{part}", seen.get(f"{part}_normed", seen[part]))
    return found.transpose(1, 2)


def _tables(attention: Any, query: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines of every position: it counts from the first token that is not padding."""
    if not _is_rotary(attention.cfg):
        return None, None
    batch, _, length, _ = query.shape
    counted = torch.ones(batch, length, dtype=torch.long, device=query.device) if mask is None else mask
    places = (counted.cumsum(dim=1) - 1).clamp(min=0).to(attention.rotary_cos.device)
    return attention.rotary_cos[places], attention.rotary_sin[places]


def _allowed(attention: Any, query: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Which pairs count: those before, within the window; never padding."""
    batch, _, length, _ = query.shape
    allowed = torch.ones(batch, 1, length, length, dtype=torch.bool, device=query.device)
    if attention.cfg.attention_dir == "causal":
        allowed = allowed.tril()
        if attention.attn_type == "local":
            allowed = allowed.triu(1 - attention.cfg.window_size)
        mask = inputs.get("attention_mask")
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None, :]
    added = inputs.get("additive_attention_mask")
    return allowed if added is None else allowed & (added == 0)


def _alibi(attention: Any, query: Tensor) -> Tensor | None:
    if attention.cfg.positional_embedding_type != "alibi":
        return None
    length = query.shape[-2]
    return attention.alibi[:, -length:, :length].detach()


def _is_rotary(config: Any) -> bool:
    return config.positional_embedding_type == "rotary"


def _as_matrix(weight: Tensor) -> Tensor:
    """(head, d_model, d_head) as (head * d_head, d_model)."""
    return weight.detach().transpose(1, 2).flatten(0, 1)


def _own_norm(attention: Any, name: str) -> NormWeights | None:
    norm = getattr(attention, name, None)
    return None if norm is None else _weights_of(norm)


def _weights_of(norm: Any) -> NormWeights:
    """Weight and bias of a norm of TransformerLens; those whose weights were folded have none."""
    weight, bias = getattr(norm, "w", None), getattr(norm, "b", None)
    return NormWeights(
        weight=None if weight is None else weight.detach(),
        bias=None if bias is None else bias.detach(),
        subtract_mean="LayerNorm" in type(norm).__name__,
    )


def _check_kind(config: Any) -> None:
    if getattr(config, "use_attention_sinks", False):
        raise UnsupportedModel(
            "with attention sinks a softmax also runs over numbers that are no scores of pairs, and these patterns cannot be "
            "split; measure a model without them"
        )
    if config.positional_embedding_type == "relative_positional_bias":
        raise UnsupportedModel(
            "relative_positional_bias adds learned numbers to the scores that TransformerLens shows nowhere; measure a model "
            "with another position embedding"
        )
