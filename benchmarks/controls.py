"""Energies of 1,000 random normals at d = 2048, k = 32: ours against loops that build each projection matrix.

python benchmarks/controls.py

The loops run a few times only and are extrapolated to 1,000; the table says so.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangent_lens import Subspace, energy_test, random_normals
from tangent_lens.measures.energy import random_normal_moments
from tangent_lens.recording.moments import SecondMoments

WIDTH, RANK, CONTROLS, LOOPED = 2048, 32, 1000, 3


def main() -> None:
    """Time the library first, so that the peak of memory is its own, then the loops on the same frames."""
    moments, tangent = make_case()
    moment = moments.second_moment()
    before = peak_megabytes()
    started = time.perf_counter()
    result = energy_test(moments, tangent, controls=CONTROLS)
    own = time.perf_counter() - started
    memory = peak_megabytes() - before
    frames = random_normals(tangent, LOOPED)
    table = Table(
        title=f"Energies of {CONTROLS} random normals; d = {WIDTH}, k = {RANK}, {torch.get_num_threads()} threads"
    )
    for heading in ("way", "seconds", "times ours", "largest difference"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    table.add_row("energy_test, whole (with moments, oracle, exact p)", f"{own:.1f}", "1", "")
    for name, share in LOOPS.items():
        seconds, found = timed(share, moment, frames)
        seconds *= CONTROLS / LOOPED
        difference = max(abs(one - other) for one, other in zip(found, result.random[:LOOPED], strict=True))
        table.add_row(
            f"{name}, {LOOPED} timed, extrapolated", f"{seconds:.0f}", f"{seconds / own:.0f}", f"{difference:.0e}"
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"peak memory over what the moments took: {memory:.0f} MB; all frames at once would be "
        f"{CONTROLS * WIDTH * RANK * 8 / 1e6:.0f} MB"
    )
    mean, sd = random_normal_moments(moment, tangent.basis)
    console.print(f"exact mean {mean:.6f}, sd {sd:.2e}; sampled {result.random_mean:.6f}, {result.random_sd:.2e}")


def make_case() -> tuple[SecondMoments, Subspace]:
    """Gradient moments with a power-law spectrum, and a tangent that nothing was fitted to."""
    # Not the seed of the controls: the tangent would be one of their Gaussians, and that control rounding.
    torch.manual_seed(2026)
    rows = torch.randn(2 * WIDTH, WIDTH, dtype=torch.float64) * torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -0.4
    return SecondMoments.of(rows), Subspace.spanned_by(torch.randn(WIDTH, RANK, dtype=torch.float64))


def projected_trace(moment: Tensor, frame: Tensor) -> float:
    """tr(P M P) as written, with P = Q Q^T."""
    projection = frame @ frame.T
    return float((projection @ moment @ projection).trace() / moment.trace())


def projection_once(moment: Tensor, frame: Tensor) -> float:
    """tr(P M): the same number by one product."""
    return float((frame @ frame.T @ moment).trace() / moment.trace())


def projection_entries(moment: Tensor, frame: Tensor) -> float:
    """sum of P * M: still the projection matrix, but no product with it."""
    return float(((frame @ frame.T) * moment).sum() / moment.trace())


LOOPS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "loop of tr(P M P)": projected_trace,
    "loop of tr(P M)": projection_once,
    "loop of sum(P * M)": projection_entries,
}


def timed(share: Callable[[Tensor, Tensor], float], moment: Tensor, frames: Tensor) -> tuple[float, list[float]]:
    """Seconds for all frames, drawing them not counted, and their energies."""
    started = time.perf_counter()
    found = [share(moment, frame) for frame in frames]
    return time.perf_counter() - started, found


def peak_megabytes() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
