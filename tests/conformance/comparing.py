"""Found against expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Error:
    """The largest difference, relative to the largest entry of the expectation, and where it is."""

    size: float
    where: str

    @property
    def finite(self) -> bool:
        """Whether nothing was NaN or infinite."""
        return self.size == self.size and self.size != float("inf")


def largest(errors: Iterable[Error]) -> Error:
    """NaN, which compares with nothing, and having nothing to compare count as infinite."""
    order = sorted(errors, key=lambda error: error.size if error.finite else float("inf"))
    return order[-1] if order else Error(float("inf"), "nothing was found")


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Error:
    """Over all names that were found; a wrong shape, or a name that nobody expects, is an infinite error."""
    errors = (difference(found[name], expected[name]) if name in expected else float("inf") for name in found)
    return largest(Error(size, name) for size, name in zip(errors, found, strict=True))


def worst_rows(found: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]]) -> Error:
    """Over all sites that were found, of one (position, width) tensor a sequence."""
    return worst({name: torch.cat(list(found[name])) for name in found}, joined(expected, found))


def joined(parts: Mapping[str, Sequence[Tensor]], names: Iterable[str]) -> dict[str, Tensor]:
    """The rows of all sequences, one under the other, of those names that are there."""
    return {name: torch.cat(list(parts[name])) for name in names if name in parts}


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest expected entry."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
