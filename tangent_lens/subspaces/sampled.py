"""What the fits on rows share: reading a sample, checking it, and making a subspace of the directions that were found."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.ranks import check_whole_rank
from tangent_lens.subspaces.subspace import Subspace, check_directions

# Directions or rows this far below the largest are what rounding leaves of nothing.
_ROUNDING = 1e-10


def as_sample(rows: RowSample | Float[Tensor, "n d"]) -> RowSample:
    """The sample, or one made of plain rows.

    Raises:
        ValueError: rows that are not (n, d) or not finite.
    """
    if isinstance(rows, RowSample):
        return rows
    if not hasattr(rows, "ndim") or rows.ndim != 2:
        raise ValueError(f"rows must be a RowSample or a tensor (n, d), not {type(rows).__name__}")
    return RowSample.of(torch.as_tensor(rows))


def checked_rows(sample: RowSample, rank: int, *, center: bool) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
    """The rows in float64 about their centre, and the centre: their mean, or zeros.

    Raises:
        ValueError: a rank that is no whole number, or that the width, the number of rows or their variation forbids.
    """
    check_whole_rank(rank)
    rows = as_float64(sample.rows)
    centre = rows.mean(dim=0) if center else torch.zeros(sample.width, dtype=torch.float64)
    if rank > sample.width:
        raise ValueError(f"{sample.name}: rank {rank} does not fit in {sample.width} dimensions; use <= {sample.width}")
    most = len(rows) - 1 if center else len(rows)
    if rank > most:
        raise ValueError(
            f"{sample.name}: {len(rows)} rows determine at most {most} directions, rank {rank} was asked; "
            "use more rows or a smaller rank"
        )
    offsets = rows - centre
    if not float(offsets.abs().max()) > _ROUNDING * float(rows.abs().max()):
        what = "equal" if center else "zero"
        raise ValueError(f"{sample.name}: all {len(rows)} rows are {what}, so they have no direction")
    return offsets, centre


def sample_origin(sample: RowSample, method: str, **facts: Any) -> dict[str, Any]:
    """How a fit on a sample was made."""
    origin = {"method": method, "fitted_on": sample.name, "rows": len(sample), "rows_seen": sample.seen}
    return origin | {"sample_seed": sample.seed} | facts


def span_of(
    directions: Float[Tensor, "d m"],
    rank: int | None,
    centre: Float[Tensor, " d"],
    origin: dict[str, Any],
    noise: float = 0.0,
) -> Subspace:
    """The subspace of m directions, which may be dependent or more than asked for.

    Args:
        directions: as columns, whose lengths count where fewer are asked for than they span.
        rank: how many leading left singular directions to take; None for all that they span.
        centre: the point they are measured from.
        origin: how they were made; the rank is added.
        noise: lengths below this are rounding.

    Returns:
        A subspace that keeps the directions where it is their whole span.

    Raises:
        ValueError: directions that span fewer dimensions than asked for.
    """
    directions = check_directions(directions)
    left, values, _ = torch.linalg.svd(directions, full_matrices=False)
    spanned = int((values > max(_ROUNDING * float(values.max()), noise)).sum())
    subject = f"{origin.get('fitted_on', 'directions')}: {origin['method']}"
    if not spanned:
        raise ValueError(f"{subject}: all {directions.shape[1]} directions are zero, so they span nothing")
    wanted = spanned if rank is None else check_whole_rank(rank)
    if wanted > spanned:
        raise ValueError(
            f"{subject}: {directions.shape[1]} directions span only {spanned} dimensions, rank {wanted} was asked; "
            f"use rank <= {spanned}"
        )
    kept = directions if wanted == spanned else None
    return Subspace(left[:, :wanted].contiguous(), centre, origin | {"rank": wanted}, directions=kept)
