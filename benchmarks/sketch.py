"""Sketched against whole sums: precision on real activations of SmolLM2-135M, memory and seconds at d = 8192.

python benchmarks/sketch.py

The rows at d = 8192 are synthetic (a power-law spectrum); each way runs in a process of its own, so that peaks of memory are
its own, and does what one residual site takes: activations and gradients summed, a proxy fitted, both tests.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tangent_lens as tln
from tangent_lens.measures.report import Report
from tangent_lens.measures.sketched import sketched_energy_test, sketched_isotropy_test
from tangent_lens.measures.sketched_matrix import gradient_directions, gradient_probes
from tangent_lens.measures.sketched_spectrum import sketched_iso_score
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.sketch import SketchedMoments, gaussian_directions
from tangent_lens.subspaces.sketched import fit_directions, fit_sketched_pca, range_directions

RANK, CONTROLS, LAYERS, SEQUENCES = 16, 20, (0, 7, 15, 22, 29), 64
WIDTH, BATCHES, ROWS = 8192, 4, 1024
WIDE = Console(width=130)


def main() -> None:
    """Both tables; with ``--wide`` only that of d = 8192."""
    # First: a new process begins with the peak of memory that the one before it had.
    compare_on_wide_rows()
    if "--wide" not in sys.argv:
        compare_on_real_rows()


def compare_on_real_rows() -> None:
    """The whole measurement in both ways on the same sequences."""
    lens = tln.Lens.from_pretrained("smollm2-135m", progress=False)
    texts, reports, seconds = tln.reference_prose(), {}, {}
    for way in ("exact", "sketch"):
        started = time.perf_counter()
        reports[way] = lens.measure(
            texts,
            tln.resid_post(*LAYERS),
            rank=RANK,
            controls=CONTROLS,
            max_sequences=SEQUENCES,
            pack=True,
            statistics=way,
            progress=False,
        )
        seconds[way] = time.perf_counter() - started
    exact, found = reports["exact"], reports["sketch"]
    WIDE.print(subspace_table(exact, found))
    WIDE.print(gradient_table(exact, found))
    WIDE.print(
        f"seconds for the whole measurement: exact {seconds['exact']:.0f}, sketch {seconds['sketch']:.0f} (one pass more)\n"
    )


def subspace_table(exact: Report, found: Report) -> Table:
    """Overlap with the exact fit, and the shape of the activations."""
    table = Table(title=f"Activations, k = {RANK}: sketch against exact, relative differences")
    for heading in ("site", "overlap", "share in proxy", "|C|² (by IsoScore*)", "its standard error", "effective rank"):
        table.add_column(heading, justify="left" if heading == "site" else "right")
    for space, other in zip(found.spaces, exact.spaces, strict=True):
        overlap = found.subspaces[space.site].overlap(exact.subspaces[space.site])
        table.add_row(
            space.site,
            f"{overlap:.4f}",
            relative(space.variance_share, other.variance_share),
            relative(
                square_of(other.iso_score, found.subspaces[space.site].d),
                square_of(space.iso_score, found.subspaces[space.site].d),
            ),
            f"{(space.standard_error or 0) / space.iso_score:.1e}",
            relative(space.spectrum.effective_rank, other.spectrum.effective_rank),
        )
    return table


def square_of(iso_score: float, d: int) -> float:
    """The inverse of |C|_F^2 / tr(C)^2, from IsoScore*."""
    return 1 + iso_score * (d - 1)


def gradient_table(exact: Report, found: Report) -> Table:
    """Errors of energies and isotropy by kind of gradient, their medians and largest, beside the standard errors."""
    table = Table(
        title="Gradients: relative differences, median and largest over layers, and the median standard error"
    )
    for heading in ("gradient", "n", "energy", "largest", "said ±", "IsoScore*", "largest", "said ±"):
        table.add_column(heading, justify="left" if heading == "gradient" else "right")
    pairs = list(zip(found.measurements, exact.measurements, strict=True))
    for kind in dict.fromkeys((one.gradient, one.kind) for one, _ in pairs):
        own = [(one, other) for one, other in pairs if (one.gradient, one.kind) == kind]
        cells: list[str] = []
        for part, name in (("energy", "energy"), ("isotropy", "score")):
            both = [(getattr(one, part), getattr(other, part)) for one, other in own]
            errors = [abs(getattr(a, name) / getattr(b, name) - 1) for a, b in both]
            said = [a.standard_error / getattr(a, name) for a, _ in both]
            cells += [f"{statistics.median(errors):.1e}", f"{max(errors):.1e}", f"{statistics.median(said):.1e}"]
        table.add_row(" ".join(kind), str(len(own)), *cells)
    return table


def relative(value: float, truth: float) -> str:
    """The relative difference."""
    return f"{value / truth - 1:+.1e}"


def batches(seed: int) -> Iterable[Tensor]:
    """Float32 rows with a mean and a power-law spectrum, flatter of the gradients (1) than of the activations (0)."""
    scales = torch.arange(1, WIDTH + 1).float() ** -(0.3 if seed else 0.6)
    for batch in range(BATCHES):
        generator = torch.Generator().manual_seed(1000 * seed + batch)
        yield torch.randn(ROWS, WIDTH, generator=generator) * scales.roll(8 * seed) + 0.1 * scales


def exactly() -> dict[str, Any]:
    """One residual site by whole sums."""
    activations, gradients = SecondMoments(WIDTH), SecondMoments(WIDTH)
    for rows in batches(0):
        activations.update(rows)
    tangent = tln.fit_pca(activations, RANK)
    for rows in batches(1):
        gradients.update(rows)
    energy = tln.energy_test(gradients, tangent, controls=CONTROLS)
    isotropy = tln.isotropy_test(gradients.covariance(), tangent, controls=CONTROLS)
    return {
        "basis": tangent.basis,
        "energy": energy,
        "isotropy": isotropy,
        "activations": tln.iso_score(activations.covariance()),
        "kept": 8 * (activations.scatter.numel() + gradients.scatter.numel()) / 1e6,
    }


def sketched() -> dict[str, Any]:
    """The same by sketches."""
    first = SketchedMoments(fit_directions(WIDTH, RANK, 0))
    for rows in batches(0):
        first.update(rows)
    activations = SketchedMoments(range_directions(first), gaussian_directions(WIDTH, 64, "probes"))
    del first
    for rows in batches(0):
        activations.update(rows)
    tangent = fit_sketched_pca(activations, RANK)
    score = sketched_iso_score(activations)
    gradients = SketchedMoments(gradient_directions(tangent), gradient_probes(WIDTH, RANK, CONTROLS, 0))
    for rows in batches(1):
        gradients.update(rows)
    energy = sketched_energy_test(gradients, tangent, controls=CONTROLS)
    isotropy = sketched_isotropy_test(gradients, tangent, controls=CONTROLS)
    tensors = (one for sketch in (activations, gradients) for one in sketch.tensors().values())
    kept = sum(one.numel() for one in tensors) * 8 / 1e6
    return {"basis": tangent.basis, "energy": energy, "isotropy": isotropy, "activations": score.value, "kept": kept}


WAYS: dict[str, Callable[[], dict[str, Any]]] = {"exact": exactly, "sketch": sketched}


def timed(way: str, threads: int) -> tuple[float, float, dict[str, Any]]:
    """Seconds, megabytes beyond what importing and one batch took, and the numbers."""
    torch.set_num_threads(threads)
    for _ in batches(0):
        pass
    before = peak_megabytes()
    started = time.perf_counter()
    found = WAYS[way]()
    return time.perf_counter() - started, peak_megabytes() - before, found


def peak_megabytes() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def compare_on_wide_rows() -> None:
    """One site of 8192 dimensions in both ways, one after the other, each in a new process."""
    found = {}
    for way in WAYS:
        with get_context("spawn").Pool(1) as pool:
            found[way] = pool.apply(timed, (way, torch.get_num_threads()))
    title = f"One residual site, d = {WIDTH}, {BATCHES * ROWS} rows a split, k = {RANK}, {CONTROLS} controls"
    table = Table(title=f"{title}, {torch.get_num_threads()} threads")
    for heading in ("way", "seconds", "peak MB", "sums MB", "energy", "IsoScore* of gradients", "of activations"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way, (seconds, memory, numbers) in found.items():
        isotropy = numbers["isotropy"]
        error = f" ± {isotropy.standard_error:.1e}" if isotropy.standard_error else ""
        cells = (f"{numbers['energy'].energy:.6f}", f"{isotropy.score:.5f}{error}", f"{numbers['activations']:.5f}")
        table.add_row(way, f"{seconds:.1f}", f"{memory:.0f}", f"{numbers['kept']:.0f}", *cells)
    WIDE.print(table)
    (slow, much, _), (quick, little, _) = found.values()
    overlap = float((found["exact"][2]["basis"].T @ found["sketch"][2]["basis"]).square().sum()) / RANK
    WIDE.print(
        f"overlap of the fits {overlap:.4f}; {slow / quick:.0f} times quicker, {much / little:.0f} times less memory"
    )


if __name__ == "__main__":
    main()
