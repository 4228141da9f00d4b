"""Semi-NMF of rows: ours in float64 against PyPI overcomplete 0.3.0 in float32 (its default), in one run.

python benchmarks/semi_nmf.py
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangent_lens.subspaces.semi_nmf import semi_nmf

SHAPES = ((4096, 256, 16), (4096, 768, 16), (1500, 576, 64))


def main() -> None:
    """Time both on the same rows, and compare the errors they leave."""
    console = Console(width=110)
    try:
        from overcomplete.optimization import SemiNMF
    except ImportError as missing:
        console.print(f"skipped: {missing}; pip install overcomplete==0.3.0 in an environment of its own to compare")
        return
    table = Table(title="Semi-NMF: time, and relative error |X - AD| / |X| with default settings")
    for heading in (
        "rows x d, rank",
        "overcomplete, s",
        "ours to its error, s",
        "times faster",
        "ours, s",
        "its error",
        "our error",
    ):
        table.add_column(heading, justify="right")
    for count, d, rank in SHAPES:
        rows = make_rows(count, d)
        torch.manual_seed(0)
        (codes, directions), their_seconds = timed(lambda r=rows, k=rank: SemiNMF(k).fit(r.float()))
        own, own_seconds = timed(lambda r=rows, k=rank: semi_nmf(r, k))
        their_error = float((rows - codes.double() @ directions.double()).norm() / rows.norm())
        own_error = float((rows - own.codes @ own.directions).norm() / rows.norm())
        # As many iterations as it takes to be as good, then timed on their own.
        enough = next(
            (i for i, error in enumerate(own.relative_errors) if error <= their_error), len(own.relative_errors)
        )
        _, seconds = timed(lambda r=rows, k=rank, i=enough: semi_nmf(r, k, iterations=max(i, 1)))
        times = (f"{their_seconds:.2f}", f"{seconds:.2f}", f"{their_seconds / seconds:.1f}", f"{own_seconds:.2f}")
        table.add_row(f"{count} x {d}, {rank}", *times, f"{their_error:.6f}", f"{own_error:.6f}")
    console.print(table)


def make_rows(count: int, d: int) -> Tensor:
    """Sums of 24 directions with codes that are not negative, and noise."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.rand(count, 24, generator=generator, dtype=torch.float64).square()
    directions = torch.randn(24, d, generator=generator, dtype=torch.float64)
    return codes @ directions + 0.3 * torch.randn(count, d, generator=generator, dtype=torch.float64)


def timed(job) -> tuple:
    """The result and the seconds of one run."""
    started = time.perf_counter()
    return job(), time.perf_counter() - started


if __name__ == "__main__":
    main()
