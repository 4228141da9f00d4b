"""Which rows a server shall send as they are. They are chosen here, by tokens and seed alone, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangent_lens.models.protocol import Batch
from tangent_lens.recording.kept_rows import RowSampler
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.sites import Site


@dataclass(frozen=True, eq=False)
class ChosenSample:
    """The rows that the sample of every site will hold.

    Attributes:
        masks: of the kept rows of each batch, which are in the sample.
        order: where each row of the sample is found among those that come back, which are in the order of the batches.
        template: sequences, tokens and numbers of the sample.
    """

    masks: tuple[Bool[Tensor, " n"], ...]
    order: Int[Tensor, " sample"]
    template: RowSample

    def of(self, rows: Float[Tensor, "sample d"], site: Site) -> RowSample:
        """The sample of a site from the rows that came back."""
        known = self.template
        name = f"activations at {site}"
        return RowSample(rows[self.order], known.sequences, known.tokens, known.seen, name, known.seed)


def chosen_sample(batches: Sequence[Batch], count: int, seed: int) -> ChosenSample:
    """The rows that a :class:`~tangent_lens.recording.kept_rows.RowSampler` would keep, without their numbers.

    Raises:
        ValueError: a count below 1, or no row.
    """
    selection = Selection()
    sampler = RowSampler(Site("embedding"), selection, count, seed)
    sequences, starts = 0, [0]
    for batch in batches:
        selection.current = RowChoice.of(batch, sequences)
        # What passes is the place of each row among all rows that are kept.
        places = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        kept = int(batch.keep.sum())
        places[batch.keep.cpu()] = torch.arange(starts[-1], starts[-1] + kept, dtype=torch.float64)
        sampler(places[..., None])
        sequences, starts = sequences + len(batch.tokens), [*starts, starts[-1] + kept]
    template = sampler.result()
    found = template.rows[:, 0].long()
    chosen = torch.zeros(starts[-1], dtype=torch.bool)
    chosen[found] = True
    masks = tuple(chosen[start:end] for start, end in pairwise(starts))
    return ChosenSample(masks, found.argsort().argsort(), template)
