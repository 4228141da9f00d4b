"""Passes of a corpus that leave sums by token: forward for spreads, forward and backward for energies by frequency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.models.protocol import Model
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.progress import Progress
from tangent_lens.recording.losses import CausalLoss, Loss
from tangent_lens.recording.passes import attached, check_answered, check_fired, padding_explained, passing
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.taps import GradientNeverCame, GradientReceiver, SiteNeverFired
from tangent_lens.recording.token_sums import BucketSums, TokenDistances, TokenSums, checked_tokens
from tangent_lens.sites import Site


def record_token_sums(
    model: Model,
    batches: Iterable[Any],
    sites: Sequence[Site],
    tokens: Int[Tensor, " w"] | Sequence[int],
    *,
    progress: Progress | None = None,
    total: int = 0,
) -> dict[Site, TokenSums]:
    """Stream activations into sums by token: means and mean squared distances in one forward pass, exactly.

    Args:
        batches: of a corpus, read once.
        tokens: whose rows are summed; they take tokens x d float64 numbers a site.
        total: how many tokens the batches hold, for the progress display.

    Raises:
        SiteNeverFired: a site through which no tensor passed, or several in one run.
        NonFiniteRows: NaN or infinity at a site.
        ValueError: rows that stand for no tokens, or none of the chosen tokens among them.
    """
    chosen = checked_tokens(tokens)
    selection = Selection()
    receivers = [TokenReceiver(site, selection, partial(_sums, chosen, site)) for site in sites]
    return _forward(model, batches, selection, receivers, progress, total)


def record_token_distances(
    model: Model,
    batches: Iterable[Any],
    sums: Mapping[Site, TokenSums],
    *,
    progress: Progress | None = None,
    total: int = 0,
) -> dict[Site, TokenDistances]:
    """The second pass, over the batches of the first: distances of rows to their tokens' means.

    Raises:
        SiteNeverFired, NonFiniteRows, ValueError: as :func:`record_token_sums`.
    """
    selection = Selection()
    receivers = [TokenReceiver(site, selection, partial(_distances, one)) for site, one in sums.items()]
    return _forward(model, batches, selection, receivers, progress, total)


def record_bucket_energy(
    model: Model,
    batches: Iterable[Any],
    bases: Mapping[Site, Float[Tensor, "d k"]],
    bucket_of: Int[Tensor, " vocabulary"],
    *,
    loss: Loss | None = None,
    progress: Progress | None = None,
    total: int = 0,
) -> dict[Site, BucketSums]:
    """Stream gradients of a summed loss into energies by bucket of the token that stands at each row.

    Args:
        bases: orthonormal columns of a subspace, by site.
        bucket_of: the bucket of every token, -1 for none. Where a masked-token loss hides a token, the hidden one counts.
        loss: what is differentiated; the next-token loss by default.

    Raises:
        GradientNeverCame: the loss does not reach a site.
        SiteNeverFired, NonFiniteRows, ValueError: as :func:`record_token_sums`.
    """
    loss, selection = loss or CausalLoss(), Selection()
    receivers = [
        BucketReceiver(site, selection, BucketSums(basis, bucket_of, name=f"gradients at {site}"))
        for site, basis in bases.items()
    ]
    targets = passes = 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(frozen_parameters(model))
        for receiver in receivers:
            stack.enter_context(attached(model.tap_point(receiver.site), receiver))
        for batch in passing(batches, selection, model, "gradients by token", total, progress, loss.prepare):
            with padding_explained(batch):
                output, passes = model.run(batch), passes + 1
                check_fired(receivers, passes)
                value, count = loss(output, batch)
                value.backward()
            targets += count
            del output, value
            check_answered(receivers)
    if not targets:
        raise ValueError(f"the {loss.name} loss found nothing to predict in the whole corpus")
    return {receiver.site: receiver.sums for receiver in receivers}


class _Accumulator(Protocol):
    count: Tensor

    def update(self, rows: Tensor, tokens: Tensor) -> None: ...


_Sums = TypeVar("_Sums", bound=_Accumulator)


class TokenReceiver(Generic[_Sums]):
    """Feeds the rows of one site, each with its token, to an accumulator made when their width is known."""

    def __init__(self, site: Site, selection: Selection, make: Callable[[int], _Sums]) -> None:
        self.site, self.selection, self.fired = site, selection, 0
        self._make = make
        self.sums: _Sums | None = None

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> None:
        """Take one batch of activations in."""
        self.fired += 1
        self.sums = self.sums or self._make(activation.shape[-1])
        choice = self.selection.current
        self.sums.update(choice.rows(activation), text_tokens(choice, activation, self.name))


class BucketReceiver:
    """Feeds the gradient rows of one site, each with its token, to sums by bucket."""

    def __init__(self, site: Site, selection: Selection, sums: BucketSums) -> None:
        self.site, self.selection, self.sums = site, selection, sums
        self.fired = self.answered = 0

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> GradientReceiver:
        """One batch passes; its gradient comes later."""
        self.fired += 1
        choice = self.selection.current
        return partial(self._take, choice, text_tokens(choice, activation, self.name))

    def _take(self, choice: RowChoice, tokens: Tensor, gradient: Tensor) -> None:
        if self.answered == self.fired:
            raise GradientNeverCame(f"{self.name}: a second backward pass went through one forward pass; run it again")
        self.answered += 1
        self.sums.update(choice.rows(gradient), tokens)


def text_tokens(choice: RowChoice, tensor: Float[Tensor, "batch pos width"], name: str) -> Int[Tensor, " n"]:
    """The token of the text at each chosen row, also where a masked-token loss has put another one in its place.

    Raises:
        ValueError: the rows stand for no tokens.
    """
    if choice.batch is None:
        raise ValueError(f"{name}: these rows stand for no tokens; sums by token need the batches of a corpus")
    batch = choice.batch
    if batch.targets is not None:
        hidden = batch.targets >= 0
        batch = replace(batch, tokens=torch.where(hidden, batch.targets, batch.tokens))
    return replace(choice, batch=batch).row_tokens(tensor)


def _sums(tokens: Tensor, site: Site, width: int) -> TokenSums:
    return TokenSums(tokens, width, name=f"activations at {site}")


def _distances(sums: TokenSums, width: int) -> TokenDistances:
    return TokenDistances(sums)


def _forward(
    model: Model,
    batches: Iterable[Any],
    selection: Selection,
    receivers: Sequence[TokenReceiver[_Sums]],
    progress: Progress | None,
    total: int,
) -> dict[Site, _Sums]:
    passes = 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.no_grad())
        for receiver in receivers:
            stack.enter_context(attached(model.tap_point(receiver.site), receiver))
        for batch in passing(batches, selection, model, "activations by token", total, progress):
            with padding_explained(batch):
                model.run_without_logits(batch)
            passes += 1
            check_fired(receivers, passes)
    return {receiver.site: _any_row(receiver) for receiver in receivers}


def _any_row(receiver: TokenReceiver[_Sums]) -> _Sums:
    if receiver.sums is None:
        raise SiteNeverFired(f"{receiver.name}: no forward pass has come by")
    if not int(receiver.sums.count.sum()):
        raise ValueError(f"{receiver.name}: none of the chosen tokens stands at a row that was kept; choose others")
    return receiver.sums
