"""Sequences of unequal length side by side, and what of a result belongs to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from conformance.families import Example
from conformance.reference import summed_loss
from torch import Tensor

from tangent_lens.models.protocol import Batch, logits_of

# What stands at padding. Neither a padding id nor a special one: the mask alone must hide it.
FILLER = 7


@dataclass(frozen=True)
class Layout:
    """How the sequences go through the model: ``alone`` one after another, or in one batch, padded ``right`` or ``left``.

    Attributes:
        batches: what the model sees, targets included.
        spans: for each sequence its batch, its row there, and its columns.
    """

    side: str
    batches: tuple[Batch, ...]
    spans: tuple[tuple[int, int, slice], ...]

    def own_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The (position, width) part of each sequence, from one (batch, position, width) tensor a batch."""
        return [tensors[batch][row, columns] for batch, row, columns in self.spans]


def lay_out(examples: Sequence[Example], side: str) -> Layout:
    """All sequences, ``alone`` or padded on a side."""
    if side == "alone":
        lone = [lay_out([example], "right") for example in examples]
        return Layout(
            side,
            tuple(one.batches[0] for one in lone),
            tuple((index, 0, one.spans[0][2]) for index, one in enumerate(lone)),
        )
    lengths = [len(example.tokens) for example in examples]
    longest = max(lengths)
    columns = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in lengths]
    tokens = torch.full((len(examples), longest), FILLER)
    mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    positions, targets = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for row, (example, place) in enumerate(zip(examples, columns, strict=True)):
        tokens[row, place], targets[row, place] = example.tokens, example.targets
        mask[row, place], positions[row, place] = True, torch.arange(len(example.tokens))
    batch = Batch(tokens, mask, positions, mask.clone(), targets)
    return Layout(side, (batch,), tuple((0, row, place) for row, place in enumerate(columns)))


class GivenTargets:
    """The summed loss of targets that stand in the batch: a loss as tangent_lens takes it."""

    name = "given targets"
    unit = "token"

    def prepare(self, batch: Batch) -> Batch:
        """The tokens are corrupted already."""
        return batch

    def __call__(self, output: Any, batch: Batch) -> tuple[Tensor, int]:
        """The loss, and over how many targets it is summed."""
        assert batch.targets is not None
        return summed_loss(logits_of(output), batch.targets), int((batch.targets != -100).sum())


def without_targets(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches for a loss that finds its targets itself."""
    return [replace(batch, targets=None) for batch in batches]
