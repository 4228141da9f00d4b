"""Some rows of a site, kept as they are: what fits that need more than moments work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowSample:
    """A bounded sample of the rows that passed a site.

    Attributes:
        rows: (n, d).
        sequences: which sequence of the corpus each row came from.
        tokens: the token at each row's position.
        seen: how many rows the sample was drawn from; n where all were kept.
        name: of the site.
        seed: of the draw.
    """

    rows: Float[Tensor, "n d"]
    sequences: Int[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    seen: int
    name: str = "rows"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ValueError: rows that are not (n, d) or not finite, or lengths that differ.
        """
        if self.rows.ndim != 2 or not len(self.rows):
            raise ValueError(f"{self.name}: rows must be (n, d) with n of 1 or more, not {tuple(self.rows.shape)}")
        if not bool(torch.isfinite(self.rows).all()):
            raise ValueError(f"{self.name}: some rows are NaN or infinite; find out where the model overflows")
        if self.sequences.shape != self.rows.shape[:1] or self.tokens.shape != self.rows.shape[:1]:
            raise ValueError(
                f"{self.name}: {len(self.rows)} rows, {len(self.sequences)} sequences and {len(self.tokens)} tokens; "
                "each row has one of each"
            )

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], name: str = "rows") -> RowSample:
        """Rows without a corpus: each is a sequence of its own, of token 0."""
        count = len(rows)
        return cls(rows, torch.arange(count), torch.zeros(count, dtype=torch.long), count, name)

    @property
    def width(self) -> int:
        """Dimensions of a row."""
        return self.rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"RowSample({self.name}: {len(self)} of {self.seen} rows in {self.width} dimensions)"
