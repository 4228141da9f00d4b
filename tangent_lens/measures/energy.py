"""How much gradient energy lies along a subspace, against normal controls. Pure functions of matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.matrices import CANCELLATION, checked_symmetric, times_frames, without
from tangent_lens.recording.moments import Moments, ProjectedSums, SecondMoments
from tangent_lens.showing import Shown
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.controls import check_normal_controls_fit, normal_frame_batches
from tangent_lens.subspaces.subspace import Subspace, check_orthonormal

# In fewer, the bounds of the energy shape its law more than its first three moments do.
FEWEST_DIMENSIONS = 6


@dataclass(frozen=True, repr=False)
class EnergyTest(Shown):
    """Gradient energy along the tangent proxy and along its controls. Energies are shares of the total, in [0, 1].

    Attributes:
        energy: E(Q_T).
        lift: R = E (d-k) / (k (1-E)): energy a direction in the tangent over energy a direction outside.
        expected_random, expected_random_sd: exact mean and standard deviation of E over Haar-random normals.
        random: E of each sampled random normal.
        p_value: (1 + #{random >= energy}) / (m + 1).
        exact_p_value: P(E of a random normal >= energy) from the exact moments, see :func:`random_normal_p_value`;
            None where they give none, and in reports of before it was measured.
        trailing, following: E of the least-variance and of the next principal directions; None if the fit
            could not determine them.
        oracle: E of the k leading eigenvectors of the gradient's own second moment: no subspace of rank k has more.
        alignment: energy / oracle.
        shuffled: expected E when backward signals are permuted over rows (``weight`` gradients only).
        signal_lift: energy / shuffled: above 1, the signals prefer the tangent beyond what the inputs force.
        standard_error: of ``energy`` where a sketch estimated it (0 where the sketch gives it exactly); None of whole sums.
    """

    rank: int
    d: int
    energy: float
    lift: float
    expected_random: float
    expected_random_sd: float
    random: tuple[float, ...]
    p_value: float
    trailing: float | None
    following: float | None
    oracle: float
    alignment: float
    shuffled: float | None = None
    signal_lift: float | None = None
    exact_p_value: float | None = None
    standard_error: float | None = None

    @property
    def random_mean(self) -> float:
        """Mean of the sampled controls."""
        return sample_mean(self.random)

    @property
    def random_sd(self) -> float:
        """Standard deviation of the sampled controls (n - 1)."""
        return sample_sd(self.random)

    @property
    def trailing_ratio(self) -> float | None:
        """energy / trailing: the ratio that the paper's deterministic control gives."""
        return None if self.trailing is None else ratio(self.energy, self.trailing)

    @property
    def following_ratio(self) -> float | None:
        """energy / following: against the hardest rival."""
        return None if self.following is None else ratio(self.energy, self.following)


@dataclass(frozen=True)
class BackwardSignals:
    """What the ``shuffled`` control needs of the rows that formed one or several weight gradients.

    Attributes:
        mean_square: a = (1/N) sum |delta_i|^2.
        cross: b = (|sum delta_i|^2 - sum |delta_i|^2) / (N (N-1)).
        inputs: sums of the input rows u_i.
    """

    mean_square: float
    cross: float
    inputs: SecondMoments | ProjectedSums

    @classmethod
    def of(
        cls, signal_sum: Tensor, signal_square_sum: Tensor, inputs: SecondMoments | ProjectedSums
    ) -> BackwardSignals:
        """From sums of delta and of its squares, entry by entry; several maps of one input are concatenated.

        Raises:
            ValueError: fewer than two rows.
        """
        n = inputs.count
        if n < 2:
            raise ValueError(f"{n} row cannot be shuffled; at least 2 are needed")
        squares = float(signal_square_sum.sum())
        return cls(squares / n, (float(signal_sum.square().sum()) - squares) / (n * (n - 1)), inputs)


def energy_fraction(second_moment: Float[Tensor, "d d"], basis: Float[Tensor, "d k"]) -> float:
    """E(Q) = tr(Q^T M Q) / tr(M).

    Raises:
        ValueError: M is zero, not finite, or of another width; or Q is not orthonormal.
    """
    basis = as_float64(basis)
    check_orthonormal(basis)
    return float(_energies(_checked(second_moment, basis.shape[0]), basis[None])[0])


def lift_of(energy: float, rank: int, d: int) -> float:
    """R = E (d-k) / (k (1-E)); infinite when all energy is in the subspace (Section 4 of ``MEASUREMENTS``)."""
    return math.inf if energy >= 1 else energy * (d - rank) / (rank * (1 - energy))


def random_normal_moments(second_moment: Float[Tensor, "d d"], basis: Float[Tensor, "d k"]) -> tuple[float, float]:
    """Exact mean and standard deviation of E(Q_N) over Haar-random k-frames Q_N of the complement of Q.

    With B the complement's part of M / tr(M) and n = d - k: mean = k tr(B) / n and
    variance = 2 k (n-k) / (n^2 (n+2) (n-1)) * (n tr(B^2) - tr(B)^2).
    """
    matrix = _checked(second_moment, basis.shape[0])
    d, k = basis.shape
    check_normal_controls_fit(k, d)
    n = d - k
    matrix = matrix / matrix.diagonal().sum()
    through = matrix @ basis
    inside = basis.T @ through
    trace = float(1 - inside.diagonal().sum())
    square = float(matrix.square().sum() - 2 * through.square().sum() + inside.square().sum())
    if trace < CANCELLATION:
        rest = without(matrix, basis)
        trace, square = max(float(rest.diagonal().sum()), 0.0), float(rest.square().sum())
    return k * trace / n, math.sqrt(haar_variance(k, n, trace, square))


def haar_variance(k: int, n: int, trace: float, square: float) -> float:
    """Variance of tr(N^T B N) over Haar-random k-frames N in n dimensions, from tr(B) and tr(B^2)."""
    if n == 1:
        return 0.0
    return max(2 * k * (n - k) / (n**2 * (n + 2) * (n - 1)) * (n * square - trace**2), 0.0)


def random_normal_skewness(second_moment: Float[Tensor, "d d"], basis: Float[Tensor, "d k"]) -> float | None:
    """Exact skewness of E(Q_N) over Haar-random k-frames Q_N of the complement of Q; costs one d x d product.

    With n = d - k and B_0 the complement's part of M / tr(M) without its mean, the third central moment is
    8 k (n-k) (n-2k) tr(B_0^3) / (n (n-1) (n-2) (n+2) (n+4)), and the variance 2 k (n-k) tr(B_0^2) / (n (n-1) (n+2)).

    Returns:
        The skewness; None where every normal has the same energy up to rounding.

    Source: zonal polynomials of degree 3 (James 1964, "Distributions of matrix variates and latent roots").
    """
    matrix = _checked(second_moment, basis.shape[0])
    (d, k), n = basis.shape, basis.shape[0] - basis.shape[1]
    check_normal_controls_fit(k, d)
    rest = without(matrix / matrix.diagonal().sum(), basis)
    outside = torch.eye(d, dtype=torch.float64) - basis @ basis.T
    spread = rest - rest.diagonal().sum() / n * outside
    squares = spread.square().sum()
    if float(squares.sqrt()) <= 1e-12 or n == k:
        return None
    # One scale, so that no power of a small spread underflows.
    spread = spread / squares.sqrt()
    return haar_skewness(k, n, 1.0, float(((spread @ spread) * spread).sum()))


def haar_skewness(k: int, n: int, square: float, cube: float) -> float:
    """Skewness of tr(N^T B N) over Haar-random k-frames N in n dimensions, from tr(B_0^2) and tr(B_0^3)."""
    if n == 2 * k:
        return 0.0
    variance = 2 * k * (n - k) * square / (n * (n - 1) * (n + 2))
    return 8 * k * (n - k) * (n - 2 * k) * cube / (n * (n - 1) * (n - 2) * (n + 2) * (n + 4)) / variance**1.5


def random_normal_p_value(
    energy: float, second_moment: Float[Tensor, "d d"], basis: Float[Tensor, "d k"]
) -> float | None:
    """One-sided p of an energy under the Haar-random normals: P(E(Q_N) >= energy), without sampling.

    The moments are exact; the law between them is Pearson's type III (a shifted gamma) of the exact mean, variance and
    skewness, and the normal law where the skewness is negative. Against 20,000 samples of 10 kinds of spectra in 6 to 200
    dimensions, ranks 1 to 25: the share of normals at p <= .05 is at most 1.3 times that, at p <= .01 at most 1.2 times,
    at p <= .002 at most 1.5 times; where the spectrum is skewed to the left, p is too large (conservative). (A
    Beta law of the same mean and variance is wrong by up to 4.6 times at .002.) Below about 1e-3, p is extrapolated.

    Returns:
        p, never below 2.2e-308, where float64 ends; None where the complement has fewer than 6 dimensions (there the law
        does not fit), or where every normal has the same energy up to rounding.
    """
    d, k = basis.shape
    skewness = random_normal_skewness(second_moment, basis)
    if skewness is None or d - k < FEWEST_DIMENSIONS:
        return None
    mean, sd = random_normal_moments(second_moment, basis)
    return max(upper_tail((energy - mean) / sd, max(skewness, 0.0)), sys.float_info.min)


def upper_tail(z: float, skewness: float) -> float:
    """P(Z >= z) of the Pearson type III (shifted gamma) law of mean 0, variance 1 and this skewness >= 0."""
    from scipy.special import gammaincc, ndtr

    # Nearer to none, the gamma law's own shape is too large for float64 and the two laws are one.
    if skewness < 1e-6:
        return float(ndtr(-z))
    shape = 4 / skewness**2
    return float(gammaincc(shape, max(shape + 2 * z / skewness, 0.0)))


def shuffled_energy(signals: BackwardSignals | Sequence[BackwardSignals], basis: Float[Tensor, "d k"]) -> float:
    """Expected energy along Q when the backward signals are permuted uniformly over the rows (closed form).

    E_shuf(Q) = [(a-b) tr(Q^T M_u Q) + b |Q^T s_u|^2] / [(a-b) tr(M_u) + b |s_u|^2], a ratio of expectations.
    Several maps add above and below the line.

    Raises:
        ValueError: no signal at all.
    """
    above = below = 0.0
    for one in [signals] if isinstance(signals, BackwardSignals) else signals:
        total, spread = as_float64(one.inputs.sum()), one.mean_square - one.cross
        above += spread * one.inputs.square_along(basis) + one.cross * float((basis.T @ total).square().sum())
        below += spread * one.inputs.square_total() + one.cross * float(total.square().sum())
    if not below > 0:
        raise ValueError("the backward signals are all zero, so there is nothing to shuffle")
    return above / below


def energy_test(
    gradient: Moments | SecondMoments,
    tangent: Subspace,
    *,
    controls: int | Float[Tensor, "m d k"] = 20,
    seed: int = 0,
    signals: Sequence[BackwardSignals] = (),
) -> EnergyTest:
    """Test whether a gradient prefers a subspace over normal ones of the same rank.

    Args:
        gradient: moments of gradient rows (of a :class:`Moments`, its gradients are taken), or of the rows of a
            weight gradient.
        tangent: the subspace; its rivals, where it knows them, become controls too.
        controls: how many random normals to draw (a batch at a time, in bounded memory), or frames already drawn by
            :func:`random_normals`.
        seed: of the random normals.
        signals: for weight gradients, what the shuffled control needs.

    Raises:
        ValueError: 2k > d, a zero gradient, no gradient rows, or widths that differ.
    """
    stream = gradient.gradients if isinstance(gradient, Moments) else gradient
    if stream.count == 0:
        raise ValueError(f"{stream.name}: no gradient was gathered; attach with gradients=True and run a backward pass")
    matrix = _checked(stream.second_moment(), tangent.d, stream.name)
    batches = normal_frame_batches(tangent, controls, seed)
    energy = float(_energies(matrix, tangent.basis[None])[0])
    random = tuple(torch.cat([_energies(matrix, frames) for frames in batches]).tolist())
    mean, sd = random_normal_moments(matrix, tangent.basis)
    rivals = {name: float(_energies(matrix, directions[None])[0]) for name, directions in tangent.rivals.items()}
    oracle = _leading_share(matrix, tangent.rank)
    shuffled = shuffled_energy(signals, tangent.basis) if signals else None
    return EnergyTest(
        rank=tangent.rank,
        d=tangent.d,
        energy=energy,
        lift=lift_of(energy, tangent.rank, tangent.d),
        expected_random=mean,
        expected_random_sd=sd,
        random=random,
        p_value=monte_carlo_p(energy, random),
        trailing=rivals.get("trailing"),
        following=rivals.get("next"),
        oracle=oracle,
        alignment=energy / oracle,
        shuffled=shuffled,
        signal_lift=None if shuffled is None else ratio(energy, shuffled),
        exact_p_value=random_normal_p_value(energy, matrix, tangent.basis),
    )


def sample_mean(values: Sequence[float]) -> float:
    """Not a number of none."""
    return float(np.mean(values)) if len(values) else math.nan


def sample_sd(values: Sequence[float]) -> float:
    """With n - 1; not a number of fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def monte_carlo_p(observed: float, controls: Sequence[float], tie: float = 1e-12) -> float:
    """(1 + #{controls >= observed}) / (m + 1); values within ``tie`` of each other are equal, whatever rounding says."""
    return (1 + sum(control >= observed - tie for control in controls)) / (len(controls) + 1)


def _energies(matrix: Tensor, frames: Float[Tensor, "m d k"]) -> Float[Tensor, " m"]:
    inside = (frames * times_frames(matrix, frames)).sum(dim=(1, 2))
    return (inside / matrix.diagonal().sum()).clamp(0, 1)


def _leading_share(matrix: Tensor, k: int) -> float:
    # Lanczos is worth it only where the full decomposition takes seconds.
    if len(matrix) <= 1024:
        leading = torch.linalg.eigvalsh(matrix)[-k:]
    else:
        from scipy.sparse.linalg import eigsh

        start = np.random.default_rng(0).standard_normal(len(matrix))
        leading = torch.from_numpy(eigsh(matrix.numpy(), k=k, v0=start, return_eigenvectors=False))
    return float((leading.sum() / matrix.diagonal().sum()).clamp(0, 1))


def _checked(matrix: Tensor, d: int, name: str = "the gradient") -> Tensor:
    zero = "is zero everywhere, so it has no direction; the loss does not depend on this place"
    matrix = checked_symmetric(matrix, name, zero)
    if len(matrix) != d:
        raise ValueError(f"{name} lives in {len(matrix)} dimensions, the subspace in {d}; fit it at the same site")
    return matrix


def ratio(above: float, below: float) -> float | None:
    """above / below; None where both are zero: nothing against nothing is no preference."""
    if below > 0:
        return above / below
    return math.inf if above > 0 else None
