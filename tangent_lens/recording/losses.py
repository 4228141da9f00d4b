"""The losses whose gradients are measured. Always sums over targets, never means: see :func:`causal_loss_sum`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangent_lens.models.protocol import Batch, Model, logits_of
from tangent_lens.recording.masking import MaskedLoss

IGNORED = -100


class Loss(Protocol):
    """What is differentiated.

    Attributes:
        name: what a report calls it.
        unit: what its mean is a mean over: ``token``, ``masked token``, ``sequence``.
    """

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    def prepare(self, batch: Any) -> Any:
        """The batch as the model shall see it (a masked-token loss masks some of its tokens)."""
        ...

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        """The loss summed over the targets of a batch, and how many these are.

        Args:
            output: what the model returned.
            batch: what :meth:`prepare` made.
        """
        ...


class CausalLoss:
    """The summed next-token negative log-likelihood."""

    name = "next-token"
    unit = "token"

    def prepare(self, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch

    def __call__(self, output: Any, batch: Batch) -> tuple[Float[Tensor, ""], int]:
        """As :func:`causal_loss_sum`."""
        return causal_loss_sum(logits_of(output), batch.tokens, batch.attention_mask)


class UserLoss:
    """A function of the person's own: ``function(output, batch)`` returns a scalar that can be differentiated.

    It must be a **sum** over whatever it looks at: with a mean, every gradient depends on how the corpus was batched.
    """

    unit = "sequence"

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self._function = function
        self.name = f"{getattr(function, '__name__', type(function).__name__)} (your own)"

    def prepare(self, batch: Any) -> Any:
        """The batch as it is."""
        return batch

    def __call__(self, output: Any, batch: Any) -> tuple[Float[Tensor, ""], int]:
        """The function's value, and the number of sequences.

        Raises:
            TypeError, ValueError: it returned no finite scalar that can be differentiated.
        """
        value = self._function(output, batch.value if hasattr(batch, "value") else batch)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss {self.name} returned a {type(value).__name__}; it must return a scalar tensor")
        if value.numel() != 1:
            raise ValueError(f"loss {self.name} returned a tensor of shape {tuple(value.shape)}; sum it to a scalar")
        if not bool(torch.isfinite(value)):
            raise ValueError(f"loss {self.name} returned {float(value.detach())}; nothing can be differentiated there")
        if not value.requires_grad:
            raise ValueError(f"loss {self.name} depends on none of the measured places, so it has no gradient")
        return value.reshape(()), len(batch.tokens) if isinstance(batch, Batch) else batch.size


def choose_loss(loss: str | Loss | Callable[[Any, Any], Tensor] | None, model: Model, seed: int = 0) -> Loss:
    """The loss that a person asked for; None asks for the one the model was trained with.

    Args:
        loss: None, ``causal``, ``masked``, a :class:`MaskedLoss`, or a function ``(output, batch) -> summed scalar``.
        seed: of the masks, where ``masked`` names no seed of its own.

    Raises:
        ValueError: an unknown name, a loss the model has no head for, or no mask token to mask with.
    """
    if loss is None:
        loss = model.objective or _no_loss(model)
    if isinstance(loss, MaskedLoss) or loss == "masked":
        _check_objective(model, "masked")
        masked = loss if isinstance(loss, MaskedLoss) else MaskedLoss(seed=seed)
        return masked.for_model(model.tokenizer, model.description.vocabulary)
    if loss == "causal":
        _check_objective(model, "causal")
        return CausalLoss()
    if isinstance(loss, str):
        raise ValueError(f"loss {loss!r} is not known; use 'causal', 'masked', or a function of (output, batch)")
    if isinstance(loss, type) or not callable(loss):
        raise TypeError(
            f"loss {loss!r} is no loss; pass 'causal', 'masked', MaskedLoss(), or a function of (output, batch)"
        )
    if all(hasattr(loss, part) for part in ("name", "unit", "prepare")):
        return loss  # pyright: ignore[reportReturnType]
    return UserLoss(loss)  # pyright: ignore[reportArgumentType]


def _no_loss(model: Model) -> str:
    if not model.description.n_layers:
        raise ValueError(
            f"what {model.description.architecture} is trained for is not known here: pass loss=, a function of (output, batch) "
            "that returns a summed scalar. Activations alone need no loss: lens.record(batches, gradients=False)"
        )
    raise ValueError(
        f"{model.description.architecture} has no language-model head, so no loss of its own: pass loss=, a function of "
        "(output, batch) that returns a summed scalar, for example loss=lambda output, batch: "
        "output.last_hidden_state.square().sum(), or load it with AutoModelForMaskedLM or AutoModelForCausalLM. "
        "Activations alone need no loss: lens.record(texts, gradients=False)"
    )


def _check_objective(model: Model, asked: str) -> None:
    if not model.objective:
        _no_loss(model)
    if model.objective != asked:
        raise ValueError(
            f"a {asked} loss was asked for, and {model.description.architecture} is a {model.objective} language model; "
            f"leave loss out, or pass loss='{model.objective}'"
        )


def causal_targets(
    tokens: Int[Tensor, "batch pos"], attention_mask: Bool[Tensor, "batch pos"]
) -> Int[Tensor, "batch pos"]:
    """The next token of every position that has one; -100 at padding and at the end of each sequence."""
    targets = torch.full_like(tokens, IGNORED)
    has_next = attention_mask[:, :-1] & attention_mask[:, 1:]
    targets[:, :-1] = torch.where(has_next, tokens[:, 1:], IGNORED)
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
    count = int((targets != IGNORED).sum())
    if count == 0:
        raise ValueError(
            f"no position of this batch ({tokens.shape[0]} sequences of up to {tokens.shape[1]} tokens) has a next token; "
            "a causal loss needs sequences of at least 2 tokens that are not padding"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat = targets.flatten().to(logits.device)
    return functional.cross_entropy(wide.flatten(0, 1), flat, ignore_index=IGNORED, reduction="sum"), count
