"""Which query rows the random normals are measured on: a share of a corpus that no batching, order or padding changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tangent_lens.models.protocol import Batch
from tangent_lens.recording.row_choice import sequence_number, sequence_numbers

# Within a chosen sequence one row of this many. The keys of a sequence are split for all of its rows, so that fewer
# sequences cost less, and more of them say more.
ROWS_APART = 4


@dataclass(frozen=True)
class ChosenRows:
    """Every so manieth row of some sequences; a sequence is known by its tokens.

    Attributes:
        last: sequences whose number, drawn from their tokens, is at most this are chosen.
        apart: rows from one chosen row to the next.
    """

    last: int = 2**32
    apart: int = 1

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], wanted: int | None) -> ChosenRows:
        """About ``wanted`` rows of a corpus (never fewer than there are, and all for None)."""
        rows = sum(len(sequence) for sequence in sequences)
        if wanted is None or rows <= wanted:
            return cls()
        apart = min(ROWS_APART, rows // wanted)
        drawn = sorted((sequence_number(sequence), len(sequence)) for sequence in sequences)
        enough = int(np.searchsorted(np.cumsum([length for _, length in drawn]), wanted * apart))
        return cls(drawn[min(enough, len(drawn) - 1)][0], apart)

    def __call__(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """The chosen ones among the kept rows of a batch, on the CPU."""
        mask = batch.attention_mask.cpu()
        numbers = sequence_numbers(batch)[:, None]
        places = mask.cumsum(dim=1) - 1 + numbers
        return batch.keep.cpu() & (numbers <= self.last) & (places % self.apart == 0)


def row_numbers(chosen: Bool[Tensor, "batch pos"]) -> tuple[Int[Tensor, "batch n"], Bool[Tensor, "batch n"]]:
    """Positions of the chosen rows of every sequence, in order, and which of these are more than filling."""
    counts = chosen.sum(dim=1)
    longest = int(counts.max())
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    return order, torch.arange(longest) < counts[:, None]
