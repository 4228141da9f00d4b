"""IsoScore* before and after removing a subspace and 20 controls: ours against PyPI IsoScore 2.0.1 on the same covariance.

python benchmarks/isotropy.py
"""

from __future__ import annotations

import time

import torch
from IsoScore.IsoScore import IsoScore_star
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangent_lens import Subspace, iso_score, iso_score_without, random_normals

RANK, CONTROLS = 16, 20


def main() -> None:
    """Time both on each width in one run, and compare their numbers."""
    table = Table(title=f"IsoScore* of C, of C without the tangent, and without {CONTROLS} normals; rank {RANK}")
    for heading in ("d", "PyPI IsoScore, s", "ours, s", "times faster", "largest difference"):
        table.add_column(heading, justify="right")
    for d in (768, 2048):
        covariance, frames = make_case(d)
        published, published_seconds = timed(lambda c=covariance, f=frames: with_published(c, f), repeats=1)
        own, own_seconds = timed(lambda c=covariance, f=frames: with_ours(c, f), repeats=5)
        difference = float((published - own).abs().max())
        ratio = published_seconds / own_seconds
        table.add_row(str(d), f"{published_seconds:.2f}", f"{own_seconds:.4f}", f"{ratio:.0f}", f"{difference:.1e}")
    Console(width=110).print(table)


def make_case(d: int) -> tuple[Tensor, Tensor]:
    """A covariance with a power-law spectrum, its leading directions, and frames: the tangent first, then controls."""
    torch.manual_seed(d)
    directions, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    variances = torch.arange(1, d + 1, dtype=torch.float64) ** -0.8
    covariance = (directions * variances) @ directions.T
    tangent = Subspace(directions[:, :RANK].contiguous(), torch.zeros(d, dtype=torch.float64))
    return covariance, torch.cat([tangent.basis[None], random_normals(tangent, CONTROLS)])


def with_published(covariance: Tensor, frames: Tensor) -> Tensor:
    """The published function (zeta = 1 makes it take our covariance as it is), projections formed as one would."""
    identity = torch.eye(len(covariance), dtype=torch.float64)
    unused = torch.zeros(2, len(covariance), dtype=torch.float64).numpy()
    scores = [IsoScore_star(unused, covariance, 1.0)]
    for frame in frames:
        projection = identity - frame @ frame.T
        scores.append(IsoScore_star(unused, projection @ covariance @ projection, 1.0))
    return torch.stack(scores).double()


def with_ours(covariance: Tensor, frames: Tensor) -> Tensor:
    """The same numbers by the participation-ratio identity."""
    return torch.cat(
        [torch.tensor([iso_score(covariance)], dtype=torch.float64), iso_score_without(covariance, frames)]
    )


def timed(job, repeats: int) -> tuple[Tensor, float]:
    """The result and the fastest of some runs."""
    fastest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        result = job()
        fastest = min(fastest, time.perf_counter() - started)
    return result, fastest


if __name__ == "__main__":
    main()
