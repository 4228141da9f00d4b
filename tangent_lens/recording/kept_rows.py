"""Rows that stay as they are: a bounded sample for fits, or all rows with their sequences for the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.models.protocol import LinearMap
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.recording.taps import GradientReceiver
from tangent_lens.sites import Site


class RowSampler:
    """A bounded sample of the activations of one site: those rows whose random numbers are the smallest.

    A row's number is drawn from the seed, its sequence's tokens and its position, so that no batching, padding or order
    changes which rows are in the sample. Equal sequences give equal numbers, and share their places in the order.
    """

    def __init__(self, site: Site, selection: Selection, count: int, seed: int = 0) -> None:
        """Keep ``count`` rows.

        Raises:
            ValueError: a count below 1.
        """
        if count < 1:
            raise ValueError(f"a sample of {count} rows holds nothing; use 1 or more")
        self.site, self.selection, self.count, self.seed = site, selection, count, seed
        self.seen = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> None:
        """Take one batch in."""
        choice = self.selection.current
        numbers = choice.row_numbers(activation, self.seed)
        self.seen += len(numbers)
        few = numbers.argsort(stable=True)[: self.count]
        rows = choice.rows(activation)[few.to(activation.device)].cpu()
        rows = rows if rows.dtype == torch.float64 else rows.float()
        sequences, tokens = choice.row_sequences(activation)[few], choice.row_tokens(activation)[few]
        self._kept.append((numbers[few], rows.clone(), sequences, tokens))
        if sum(len(part[0]) for part in self._kept) > 2 * self.count:
            self._kept = [self._smallest()]

    def _smallest(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        numbers, rows, sequences, tokens = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        first = numbers.argsort(stable=True)[: self.count]
        return numbers[first], rows[first], sequences[first], tokens[first]

    def result(self) -> RowSample:
        """The sample, in the order of its random numbers.

        Raises:
            ValueError: no row passed, or some that were kept are not finite.
        """
        if not self.seen:
            raise ValueError(f"{self.site}: no row passed that could be kept")
        _, rows, sequences, tokens = self._smallest()
        return RowSample(rows, sequences, tokens, self.seen, f"activations at {self.site}", self.seed)


class KeptRows:
    """All rows of one site with their sequences: its activations, or its gradients."""

    def __init__(self, site: Site, selection: Selection, *, gradients: bool) -> None:
        self.site, self.selection, self.gradients = site, selection, gradients
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, activation: Tensor) -> GradientReceiver | None:
        """Take the activations, or wait for their gradient."""
        choice = self.selection.current
        sequences = choice.row_sequences(activation)
        if self.gradients:
            return partial(self._take, choice, sequences)
        self._take(choice, sequences, activation)
        return None

    def _take(self, choice: RowChoice, sequences: Tensor, tensor: Tensor) -> None:
        self._kept.append((_kept(choice.rows(tensor)), sequences))

    def result(self) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]:
        """Rows, and the number of the sequence of each."""
        rows, sequences = zip(*self._kept, strict=True)
        return torch.cat(rows), torch.cat(sequences)


class KeptSignals:
    """All backward signals at the output of one module, which may hold several maps side by side."""

    def __init__(self, maps: Sequence[LinearMap], selection: Selection) -> None:
        self.maps, self.selection = tuple(maps), selection
        self._kept: list[Tensor] = []

    def __call__(self, activation: Tensor) -> GradientReceiver:
        """The output passes; its gradient comes later."""
        return partial(self._take, self.selection.current)

    def _take(self, choice: RowChoice, signal: Tensor) -> None:
        self._kept.append(_kept(choice.rows(signal)))

    def result(self) -> dict[str, Float[Tensor, "n out"]]:
        """The signals of every map, by its name."""
        signals = torch.cat(self._kept)
        return {
            f"{one.kind}.{one.layer}": signals if one.output.columns is None else signals[:, one.output.columns.cpu()]
            for one in self.maps
        }


def _kept(rows: Tensor) -> Tensor:
    return (rows if rows.dtype == torch.float64 else rows.float()).detach().cpu().clone()
