"""The tests of energy and isotropy from sketches: the same numbers as from whole matrices, in O(d (k + m)) memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from torch import Tensor

from tangent_lens.measures.energy import (
    FEWEST_DIMENSIONS,
    BackwardSignals,
    EnergyTest,
    haar_skewness,
    haar_variance,
    lift_of,
    monte_carlo_p,
    ratio,
    shuffled_energy,
    upper_tail,
)
from tangent_lens.measures.isotropy import IsotropyTest, check_shrinkage, shrunk
from tangent_lens.measures.probing import Estimate, propagated
from tangent_lens.measures.sketched_matrix import SketchedMatrix, sketched_matrix
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments
from tangent_lens.subspaces.subspace import Subspace

Sketched = SketchedMoments | SketchedGradient | Sequence[SketchedGradient]


def sketched_energy_test(
    gradient: Sketched, tangent: Subspace, *, controls: int = 20, signals: Sequence[BackwardSignals] = ()
) -> EnergyTest:
    """What :func:`~tangent_lens.measures.energy.energy_test` tells, from a sketch.

    Of gradient rows, the energies of the subspace, of its rivals and of every control, and the mean over all normals, are
    exact. Of weight gradients their numerators are, and the total is estimated, with a standard error. The standard
    deviation over all normals, and p from it, come from estimates of tr(B^2) and tr(B^3); ``oracle`` is what the sketch
    sees of the leading directions: a lower bound for rows.

    Args:
        gradient: sketched with the directions of :func:`~tangent_lens.measures.sketched_matrix.gradient_directions`.
        controls: how many of the blocks of probes count as controls.
        signals: for weight gradients, what the shuffled control needs.

    Raises:
        ValueError: 2k > d, a zero gradient, no rows, or a sketch of another subspace.
    """
    matrix = sketched_matrix(gradient, tangent, controls, centred=False)
    along = float(matrix.inside.diagonal().sum())
    energy = propagated(lambda rest: along / (along + rest), matrix.trace)
    total = along + matrix.trace.value
    random = tuple(_shares(matrix.control_insides, total))
    rivals = {name: float(inside.diagonal().sum()) / total for name, (inside, _) in matrix.rivals.items()}
    oracle = max(min(matrix.leading / total, 1.0), energy.value)
    shuffled = shuffled_energy(signals, tangent.basis) if signals else None
    mean, sd, p = _under_random_normals(matrix, tangent.rank, total, energy.value)
    return EnergyTest(
        rank=tangent.rank,
        d=tangent.d,
        energy=energy.value,
        lift=lift_of(energy.value, tangent.rank, tangent.d),
        expected_random=mean,
        expected_random_sd=sd,
        random=random,
        p_value=monte_carlo_p(energy.value, random),
        trailing=rivals.get("trailing"),
        following=rivals.get("next"),
        oracle=oracle,
        alignment=energy.value / oracle,
        shuffled=shuffled,
        signal_lift=None if shuffled is None else ratio(energy.value, shuffled),
        exact_p_value=p,
        standard_error=energy.standard_error,
    )


def _shares(insides: Tensor, total: float) -> list[float]:
    return (insides.diagonal(dim1=1, dim2=2).sum(dim=1) / total).clamp(0, 1).tolist()


def _under_random_normals(
    matrix: SketchedMatrix, k: int, total: float, energy: float
) -> tuple[float, float, float | None]:
    """Mean, standard deviation and p of the energy over all normals, as the exact test has them."""
    n = matrix.d - k
    trace, square = matrix.trace.value / total, matrix.square.value / total**2
    cube = matrix.cube.value / total**3
    sd = math.sqrt(haar_variance(k, n, trace, square))
    spread = square - trace**2 / n
    mean = k * trace / n
    if n < FEWEST_DIMENSIONS or n == k or spread <= 1e-24 or not sd > 0:
        return mean, sd, None
    centred_cube = cube - 3 * square * trace / n + 2 * trace**3 / n**2
    skewness = haar_skewness(k, n, spread, centred_cube)
    return mean, sd, max(upper_tail((energy - mean) / sd, max(skewness, 0.0)), sys.float_info.min)


def sketched_isotropy_test(
    gradient: Sketched,
    tangent: Subspace,
    *,
    controls: int = 20,
    shrinkage: float = 0.0,
    dimension: str = "ambient",
) -> IsotropyTest:
    """What :func:`~tangent_lens.measures.isotropy.isotropy_test` tells of the rows' covariance, from a sketch.

    |C|_F^2 is exact along the subspace and estimated beside it; the result says its standard errors. The controls share
    that estimate, so their order, and p, hardly depend on it.

    Raises:
        ValueError: as :func:`sketched_energy_test`, a shrinkage outside [0, 1], or an unknown ``dimension``.
    """
    if dimension not in ("ambient", "complement"):
        raise ValueError(f"dimension {dimension!r} must be 'ambient' (d) or 'complement' (d - k)")
    check_shrinkage(shrinkage)
    matrix = sketched_matrix(gradient, tangent, controls, centred=True)
    d, k = tangent.d, tangent.rank
    left = d if dimension == "ambient" else d - k
    along, inner = float(matrix.inside.diagonal().sum()), float(matrix.inside.square().sum())
    # No block of this trace has less: an estimate from few probes can.
    floor = matrix.trace.value**2 / (d - k)
    square = Estimate(max(matrix.square.value, floor), matrix.square.influences)
    parts = (matrix.trace, matrix.cross, square)

    def score(rest: float, cross: float, square: float) -> float:
        return _score(along + rest, inner + 2 * cross + square, d, shrinkage)

    def change(rest: float, cross: float, square: float) -> float:
        return _score(rest, square, left, shrinkage) - score(rest, cross, square)

    trace = along + matrix.trace.value
    if matrix.trace.value <= 1e-12 * trace:
        raise ValueError(f"removing {k} directions leaves no variance, so no isotropy; use a smaller rank")
    before, delta = propagated(score, *parts), propagated(change, *parts)
    whole = inner + 2 * matrix.cross.value + square.value

    def after(inside: Tensor, removed: float) -> float:
        trace_left = trace - float(inside.diagonal().sum())
        rest = max(whole - 2 * removed + float(inside.square().sum()), trace_left**2 / left)
        return _score(trace_left, rest, left, shrinkage) - before.value

    random = tuple(
        after(inside, float(square))
        for inside, square in zip(matrix.control_insides, matrix.control_squares, strict=True)
    )
    trailing = matrix.rivals.get("trailing")
    return IsotropyTest(
        score=min(max(before.value, 0.0), 1.0),
        delta=delta.value,
        random=random,
        p_value=monte_carlo_p(delta.value, random),
        trailing=None if trailing is None else after(*trailing),
        shrinkage=shrinkage,
        dimension=dimension,
        standard_error=before.standard_error,
        delta_standard_error=delta.standard_error,
    )


def _score(trace: float, square: float, d: int, shrinkage: float) -> float:
    """IsoScore* without its limits 0 and 1, at which an error would seem to vanish."""
    return (trace**2 / shrunk(square, trace, d, shrinkage) - 1) / (d - 1)
