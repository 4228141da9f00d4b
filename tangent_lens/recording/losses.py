"""The summed losses whose gradients are measured. A sum, never a mean: see ``causal_loss_sum``."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from jaxtyping import Bool, Float, Int
from torch import Tensor

_IGNORED = -100


def causal_targets(
    tokens: Int[Tensor, "batch pos"], attention_mask: Bool[Tensor, "batch pos"]
) -> Int[Tensor, "batch pos"]:
    """The next token of every position that has one; -100 at padding and at the end of each sequence."""
    targets = torch.full_like(tokens, _IGNORED)
    has_next = attention_mask[:, :-1] & attention_mask[:, 1:]
    targets[:, :-1] = torch.where(has_next, tokens[:, 1:], _IGNORED)
    return targets


def causal_loss_sum(
    logits: Float[Tensor, "batch pos vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Bool[Tensor, "batch pos"],
) -> tuple[Float[Tensor, ""], int]:
    """Next-token negative log-likelihood in nats, **summed** over all targets, and the number of targets.

    Summed because a mean would make every gradient depend on how the corpus was cut into batches.
    The last position of a sequence has no target, so its gradient at the last layer is exactly zero.

    Raises:
        ValueError: no position has a next token.
    """
    targets = causal_targets(tokens, attention_mask.bool())
    count = int((targets != _IGNORED).sum())
    if count == 0:
        raise ValueError(
            f"no position of this batch ({tokens.shape[0]} sequences of up to {tokens.shape[1]} tokens) has a next token; "
            "a causal loss needs sequences of at least 2 tokens that are not padding"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
    return loss, count
