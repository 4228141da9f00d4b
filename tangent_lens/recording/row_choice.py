"""Which rows of a passing tensor enter the statistics, and whose they are."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangent_lens.models.protocol import Batch, Inputs


@dataclass(frozen=True)
class RowChoice:
    """Which (sequence, position) entries of one batch enter the statistics; ``keep=None`` takes them all."""

    keep: Bool[Tensor, "batch pos"] | None = None
    positions: Int[Tensor, "batch pos"] | None = None
    batch: Batch | None = None
    first: int = 0

    @classmethod
    def of(cls, batch: Batch | Inputs, first: int = 0) -> RowChoice:
        """What a batch of the corpus says; an all-True mask is dropped, so that rows need no copy.

        Args:
            first: number of its first sequence in the corpus.
        """
        if isinstance(batch, Inputs):
            return cls(first=first)
        return cls(None if bool(batch.keep.all()) else batch.keep, batch.positions, batch, first)

    def rows(self, tensor: Float[Tensor, "batch pos width"]) -> Float[Tensor, "n width"]:
        """The chosen rows, one under the other.

        Raises:
            ValueError: the tensor has no rows, or the mask has another shape.
        """
        if tensor.ndim < 2:
            raise ValueError(f"a site carries rows (..., width); here {tuple(tensor.shape)} passed")
        if tensor.ndim != 3 and self.positions is not None:
            raise ValueError(f"a site carries (batch, position, width); here {tuple(tensor.shape)} passed")
        if self.keep is None:
            return tensor.flatten(0, -2)
        if self.keep.shape != tensor.shape[:2]:
            raise ValueError(f"a mask of shape {tuple(self.keep.shape)} does not fit activations {tuple(tensor.shape)}")
        return tensor[self.keep.to(tensor.device)]

    def row_positions(self) -> Int[Tensor, " n"]:
        """The place of each chosen row in its own sequence."""
        if self.positions is None:
            raise ValueError("positions are only known of batches of a corpus")
        return self.positions.flatten() if self.keep is None else self.positions[self.keep]

    def row_sequences(self, tensor: Float[Tensor, "batch pos width"]) -> Int[Tensor, " n"]:
        """The number, in the corpus, of the sequence that each chosen row of this tensor belongs to."""
        numbers = self.first + torch.arange(len(tensor))
        return self._by_row(numbers.view(-1, *(1,) * (tensor.ndim - 2)).expand(tensor.shape[:-1]))

    def row_tokens(self, tensor: Float[Tensor, "batch pos width"]) -> Int[Tensor, " n"]:
        """The token at each chosen row; 0 where rows stand for no tokens."""
        tokens = torch.zeros(tensor.shape[:-1], dtype=torch.long) if self.batch is None else self.batch.tokens.cpu()
        return self._by_row(tokens)

    def row_numbers(self, tensor: Float[Tensor, "batch pos width"], seed: int = 0) -> Int[Tensor, " n"]:
        """A random number for each chosen row, decided by the seed, its sequence's tokens and its position alone."""
        if self.batch is None:
            # Nothing but the order tells the rows of a batch of somebody's own apart.
            own = torch.arange(tensor[..., 0].numel()).view(tensor.shape[:-1]) + (self.first << 32)
        else:
            own = (sequence_numbers(self.batch)[:, None] << 24) + self.batch.positions.cpu()
        numbers = mixed(self._by_row(own).numpy().astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))
        return torch.from_numpy((numbers >> np.uint64(1)).astype(np.int64))

    def _by_row(self, values: Tensor) -> Tensor:
        return values.flatten() if self.keep is None else values[self.keep.cpu()]


def sequence_number(tokens: np.ndarray) -> int:
    """Between 0 and 2^32, as good as random, and decided by the tokens alone."""
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())


def sequence_numbers(batch: Batch) -> Int[Tensor, " batch"]:
    """The number of every sequence of a batch, whatever its padding."""
    pairs = zip(batch.tokens.cpu().numpy(), batch.attention_mask.cpu().numpy(), strict=True)
    return torch.tensor([sequence_number(tokens[mask]) for tokens, mask in pairs])


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Well-spread 64-bit numbers from any (SplitMix64: Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        found = numbers + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return found ^ (found >> np.uint64(31))
