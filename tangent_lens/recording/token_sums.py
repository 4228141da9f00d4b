"""Sums by token: how far the rows of one token lie apart, and where the gradients of rare and frequent tokens point.

Memory is O(tokens x width) a site for the tokens chosen beforehand, and O(buckets) for gradient energy, whatever the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.recording.moments import ROWS_A_PRODUCT, NonFiniteRows, device_with_float64


class TokenSums:
    """Count, mean and summed squared distance to the mean of the rows of each chosen token.

    Means and squares are joined pairwise (Chan, Golub, LeVeque 1983), so that rows far from the origin lose no digits.

    Attributes:
        tokens: the chosen tokens, in order (w,).
        count: rows of each (w,); mean: of each (w, d), float64; square: sum of |x - mean|^2 of each (w,), float64.
    """

    def __init__(self, tokens: Int[Tensor, " w"] | Sequence[int], width: int, *, name: str = "rows") -> None:
        self.tokens = checked_tokens(tokens)
        self.width, self.name = width, name
        self.count = torch.zeros(len(self.tokens), dtype=torch.long)
        self.mean = torch.zeros(len(self.tokens), width, dtype=torch.float64)
        self.square = torch.zeros(len(self.tokens), dtype=torch.float64)

    def update(self, rows: Float[Tensor, "n d"], tokens: Int[Tensor, " n"]) -> None:
        """Add rows; those of tokens that were not chosen are passed over.

        Raises:
            ValueError: rows of another width, or not one token a row.
            NonFiniteRows: NaN or infinity in a row of a chosen token; nothing is added then.
        """
        for part, places in _parts(rows, tokens, self.tokens, self.width, self.name):
            found, inverse = places.unique(return_inverse=True)
            count, here = torch.bincount(inverse, minlength=len(found)), inverse.to(part.device)
            mean = part.new_zeros(len(found), self.width).index_add_(0, here, part) / count.to(part.device)[:, None]
            square = part.new_zeros(len(found)).index_add_(0, here, (part - mean[here]).square().sum(dim=1))
            self._join(found, count, mean.cpu(), square.cpu())

    def _join(self, places: Tensor, count: Tensor, mean: Tensor, square: Tensor) -> None:
        before = self.count[places]
        total = before + count
        step, share = mean - self.mean[places], count.double() / total
        self.square[places] += square + before * share * step.square().sum(dim=1)
        self.mean[places] += share[:, None] * step
        self.count[places] = total

    def merge(self, other: TokenSums) -> None:
        """Add all that another recording of the same tokens saw; exact up to rounding, in any order.

        Raises:
            ValueError: other tokens or another width.
        """
        if other.width != self.width or not torch.equal(other.tokens, self.tokens):
            raise ValueError(
                f"{self.name}: sums of other tokens or another width cannot be merged; choose the same tokens"
            )
        places = other.count.nonzero().flatten()
        self._join(places, other.count[places], other.mean[places], other.square[places])

    def __repr__(self) -> str:
        return f"TokenSums({self.name}: {int(self.count.sum())} rows of {len(self.tokens)} tokens, width {self.width})"


class TokenDistances:
    """Summed distance of the rows of each token to a mean that is known already: a second pass over the same rows.

    Attributes:
        sums: what the first pass left.
        count: rows of each token (w,); distance: sum of |x - mean| of each (w,), float64.
    """

    def __init__(self, sums: TokenSums) -> None:
        self.sums = sums
        self.count = torch.zeros_like(sums.count)
        self.distance = torch.zeros_like(sums.square)

    def update(self, rows: Float[Tensor, "n d"], tokens: Int[Tensor, " n"]) -> None:
        """Add rows, as :meth:`TokenSums.update` takes them."""
        for part, places in _parts(rows, tokens, self.sums.tokens, self.sums.width, self.sums.name):
            distance = torch.linalg.vector_norm(part - self.sums.mean[places].to(part.device), dim=1).cpu()
            self.distance.index_add_(0, places, distance)
            self.count += torch.bincount(places, minlength=len(self.count))

    def merge(self, other: TokenDistances) -> None:
        """Add all that another second pass about the same means saw.

        Raises:
            ValueError: distances to other means.
        """
        same = torch.equal(other.sums.tokens, self.sums.tokens) and torch.equal(other.sums.mean, self.sums.mean)
        if not same:
            raise ValueError(
                f"{self.sums.name}: distances to other means cannot be merged; merge the first passes first"
            )
        self.distance, self.count = self.distance + other.distance, self.count + other.count

    def __repr__(self) -> str:
        return f"TokenDistances({self.sums.name}: {int(self.count.sum())} rows of {len(self.count)} tokens)"


class BucketSums:
    """Gradient energy, in all and along one subspace, of the rows of each bucket of tokens.

    Attributes:
        basis: orthonormal columns Q (d, k), float64.
        bucket_of: the bucket of every token of the vocabulary, -1 for none.
        count: rows of each bucket (b,); total: sum of |g|^2 (b,); along: sum of |Q^T g|^2 (b,), float64.
        left_out: rows of tokens in no bucket.
    """

    def __init__(
        self, basis: Float[Tensor, "d k"], bucket_of: Int[Tensor, " vocabulary"], *, name: str = "rows"
    ) -> None:
        self.basis, self.bucket_of, self.name = basis.detach().cpu().double(), torch.as_tensor(bucket_of).long(), name
        buckets = int(self.bucket_of.max()) + 1 if self.bucket_of.numel() else 0
        if buckets < 1:
            raise ValueError(f"{name}: no token is in any bucket; give every token its bucket, -1 for those in none")
        self.count = torch.zeros(buckets, dtype=torch.long)
        self.total = torch.zeros(buckets, dtype=torch.float64)
        self.along = torch.zeros(buckets, dtype=torch.float64)
        self.left_out = 0

    @property
    def width(self) -> int:
        """Dimensions of a row."""
        return len(self.basis)

    def update(self, rows: Float[Tensor, "n d"], tokens: Int[Tensor, " n"]) -> None:
        """Add gradient rows and the token at each.

        Raises:
            ValueError: rows of another width, not one token a row, or a token outside the vocabulary.
            NonFiniteRows: NaN or infinity; nothing is added then.
        """
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(self.bucket_of):
            raise ValueError(
                f"{self.name}: tokens {int(tokens.min())} to {int(tokens.max())} do not fit buckets of a vocabulary of "
                f"{len(self.bucket_of)}; make the buckets for the model's own vocabulary"
            )
        buckets = self.bucket_of[tokens]
        every = torch.arange(len(self.count))
        for part, places in _parts(rows, buckets, every, self.width, self.name):
            basis = self.basis.to(part.device)
            self.total.index_add_(0, places, part.square().sum(dim=1).cpu())
            self.along.index_add_(0, places, (part @ basis).square().sum(dim=1).cpu())
            self.count += torch.bincount(places, minlength=len(self.count))
        self.left_out += int((buckets < 0).sum())

    def merge(self, other: BucketSums) -> None:
        """Add all that another recording along the same subspace and by the same buckets saw.

        Raises:
            ValueError: another subspace or other buckets.
        """
        if not (torch.equal(other.basis, self.basis) and torch.equal(other.bucket_of, self.bucket_of)):
            raise ValueError(f"{self.name}: sums along another subspace or by other buckets cannot be merged")
        self.count, self.left_out = self.count + other.count, self.left_out + other.left_out
        self.total, self.along = self.total + other.total, self.along + other.along

    def __repr__(self) -> str:
        return f"BucketSums({self.name}: {int(self.count.sum())} rows in {len(self.count)} buckets)"


def checked_tokens(tokens: Int[Tensor, " w"] | Sequence[int]) -> Int[Tensor, " w"]:
    """Token ids in order.

    Raises:
        ValueError: none, repeated ones, negative ones, or what is no list of integers.
    """
    found = torch.as_tensor(tokens)
    if found.ndim != 1 or not found.numel() or found.is_floating_point():
        raise ValueError(
            f"tokens must be a list of 1 or more integer ids, not {found.dtype} of shape {tuple(found.shape)}"
        )
    ordered = found.long().cpu().unique()
    if len(ordered) != len(found) or int(ordered[0]) < 0:
        raise ValueError(
            f"{len(found)} token ids, {len(ordered)} different ones from {int(ordered[0])} on: give each once"
        )
    return ordered


def _parts(
    rows: Tensor, tokens: Tensor, chosen: Int[Tensor, " w"], width: int, name: str
) -> list[tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]]:
    """The rows of chosen tokens in float64, some at a time, and the place of each one's token among the chosen."""
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"{name}: rows of shape {tuple(rows.shape)} cannot join rows (n, {width})")
    if tokens.shape != rows.shape[:1]:
        raise ValueError(f"{name}: {len(rows)} rows and {tuple(tokens.shape)} tokens; each row has one token")
    tokens = tokens.cpu().long()
    places = torch.searchsorted(chosen, tokens).clamp(max=len(chosen) - 1)
    wanted = (chosen[places] == tokens).nonzero().flatten()
    kept = rows.detach()[wanted.to(rows.device)].to(device_with_float64(rows))
    if not bool(torch.isfinite(kept).all()):
        raise NonFiniteRows(
            f"{name}: some rows are NaN or infinite; find out where the model overflows before measuring"
        )
    return [
        (part.double(), own)
        for part, own in zip(kept.split(ROWS_A_PRODUCT), places[wanted].split(ROWS_A_PRODUCT), strict=True)
        if len(part)
    ]
