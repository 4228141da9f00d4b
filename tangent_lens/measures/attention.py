"""How far tangent terms dominate the attention scores of each head. Pure functions of sums, and what they result in.

A pre-softmax score splits exactly into nine: s_ij = sum over a, b in {centre, tangent, normal} of s_ij^{ab}, a for the
query and b for the key (Section 6 of ``MEASUREMENTS``). Parts are centred over the allowed keys of each row first,
because softmax ignores what is constant over keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tangent_lens.measures.energy import monte_carlo_p, sample_mean, sample_sd
from tangent_lens.showing import Shown

Array = np.ndarray
PARTS = ("centre", "tangent", "normal")
# Query part first; the bias (ALiBi, T5) is a part of its own, so that all ten shares sum to 1.
SHARES = (*(f"{query}_{key}" for query in PARTS for key in PARTS), "bias")
# The theory's order of each part in the radius of the rows.
THEORY = {"tangent_tangent": 2, "mixed": 3, "normal_normal": 4}


@dataclass(frozen=True)
class Spread:
    """One number over the heads of a layer."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Heads without a number are left out."""
        found = [value for value in values if not math.isnan(value)]
        return cls(*(float(of(found)) for of in (np.median, min, max))) if found else cls(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class DominanceByBucket:
    """D of the pairs in each bucket of one axis, head by head; D is not a number where a bucket is empty.

    Attributes:
        axis: ``key distance`` (|query position - key position|) or ``query token frequency``.
        labels: of the buckets.
        dominance: D (heads, buckets): squares of the parts, centred over all allowed keys of their row as always, summed
            over the pairs in the bucket.
        pairs: how many these are (heads, buckets).
    """

    axis: str
    labels: tuple[str, ...]
    dominance: tuple[tuple[float, ...], ...]
    pairs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionScaling:
    """Parts of the scores against the radius of the rows, beside the theory's orders: TT t^2, TN and NT t^3, NN t^4.

    These orders hold where query and key row both lie at radius t from the centre; a pair therefore stands at the
    geometric mean of its two radii, sqrt(t_i t_j). The mean squares and exponents are those of the parts themselves,
    **not** centred over keys: centring would mix keys of other radii into every pair. D is of the centred parts.

    Attributes:
        radius: geometric mean of the pairs' radii in each bin (heads, bins).
        pairs: how many pairs a bin holds (heads, bins).
        mean_square: of ``tangent_tangent``, ``mixed`` (|TN|^2 + |NT|^2) and ``normal_normal``, each (heads, bins).
        dominance: D of the bin's pairs (heads, bins).
        exponent: slope of log rms on log radius for the same three, each (heads,), bins weighted by their pairs.
        standard_error: of the slopes; not a number with fewer than three bins.
    """

    radius: tuple[tuple[float, ...], ...]
    pairs: tuple[tuple[int, ...], ...]
    mean_square: Mapping[str, tuple[tuple[float, ...], ...]]
    dominance: tuple[tuple[float, ...], ...]
    exponent: Mapping[str, tuple[float, ...]]
    standard_error: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, repr=False)
class AttentionDominance(Shown):
    """Tangent dominance of one layer's attention scores, head by head; every tuple has one entry a head.

    Attributes:
        layer: which one; None if it was not said.
        dominance: D = |S^TT|^2 / (|S^TT|^2 + |S^TN|^2 + |S^NT|^2 + |S^NN|^2), in [0, 1]; not a number where no score
            has a part without centre.
        random: D of each random normal subspace in the tangent's place (heads, m).
        shares: <S^ab, S> / |S|^2 for every name in ``SHARES`` (query part, key part; ``bias``); they sum to 1 and may be
            negative.
        random_shares: the same of each random normal, where ``tangent`` is what lies inside it (heads, m).
        kl: KL(softmax(S) || softmax(S without TN, NT, NN)) in nats, mean over rows; S after a soft cap.
        random_kl: the same of each random normal (heads, m).
        variance_baseline: rho^2 with rho the tangent's share of the variance of the normed rows: about what D is if the
            head's own weights have no preference. None if rho was not given.
        rows: query rows that were counted; pairs: their allowed keys.
        left_out_rows: rows with fewer than two allowed keys, in which nothing can be centred.
        random_rows: of ``rows``, those on which the random normals were measured.
        by_distance, by_frequency, scaling: None where they were not asked for.
    """

    layer: int | None
    dominance: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]
    shares: Mapping[str, tuple[float, ...]]
    random_shares: Mapping[str, tuple[tuple[float, ...], ...]]
    kl: tuple[float, ...]
    random_kl: tuple[tuple[float, ...], ...]
    variance_baseline: float | None
    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    left_out_rows: tuple[int, ...]
    random_rows: tuple[int, ...]
    by_distance: DominanceByBucket | None = None
    by_frequency: DominanceByBucket | None = None
    scaling: AttentionScaling | None = None

    @property
    def heads(self) -> int:
        """How many query heads."""
        return len(self.dominance)

    @property
    def random_mean(self) -> tuple[float, ...]:
        """Mean D of the random normals."""
        return tuple(sample_mean(values) for values in self.random)

    @property
    def random_sd(self) -> tuple[float, ...]:
        """Standard deviation of D over the random normals (n - 1)."""
        return tuple(sample_sd(values) for values in self.random)

    @property
    def p_value(self) -> tuple[float, ...]:
        """(1 + #{random >= D}) / (m + 1)."""
        return _p_values(self.dominance, self.random)

    @property
    def random_kl_mean(self) -> tuple[float, ...]:
        """Mean divergence of the random normals, in nats."""
        return tuple(sample_mean(values) for values in self.random_kl)

    @property
    def random_kl_sd(self) -> tuple[float, ...]:
        """Standard deviation of the divergence over the random normals (n - 1)."""
        return tuple(sample_sd(values) for values in self.random_kl)

    @property
    def kl_p_value(self) -> tuple[float, ...]:
        """(1 + #{random divergence <= divergence}) / (m + 1): a smaller divergence keeps more of the pattern."""
        return _p_values([-value for value in self.kl], [[-value for value in values] for values in self.random_kl])

    def random_share_mean(self, name: str) -> tuple[float, ...]:
        """Mean of one share over the random normals."""
        return tuple(sample_mean(values) for values in self.random_shares[name])

    def random_share_sd(self, name: str) -> tuple[float, ...]:
        """Standard deviation of one share over the random normals (n - 1)."""
        return tuple(sample_sd(values) for values in self.random_shares[name])

    def share_p_value(self, name: str) -> tuple[float, ...]:
        """(1 + #{random share >= share}) / (m + 1)."""
        return _p_values(self.shares[name], self.random_shares[name])

    @property
    def summary(self) -> dict[str, Spread]:
        """Median, least and largest over heads: ``dominance``, ``random_mean``, ``p_value``, ``kl``, ``random_kl_mean`` and
        every share."""
        named = {name: getattr(self, name) for name in ("dominance", "random_mean", "p_value", "kl", "random_kl_mean")}
        return {name: Spread.of(values) for name, values in {**named, **self.shares}.items()}

    def flat_rows(self) -> list[dict[str, Any]]:
        """One flat row of named numbers a head."""
        columns: dict[str, Sequence[Any]] = {
            name: getattr(self, name)
            for name in ("dominance", "random_mean", "random_sd", "p_value", "kl", "random_kl_mean", "random_kl_sd")
        }
        columns["kl_p_value"] = self.kl_p_value
        columns |= {f"share_{name}": values for name, values in self.shares.items()}
        columns |= {f"random_share_{name}": self.random_share_mean(name) for name in self.random_shares}
        columns |= {name: getattr(self, name) for name in ("rows", "pairs", "left_out_rows", "random_rows")}
        if self.scaling is not None:
            columns |= {f"exponent_{name}": values for name, values in self.scaling.exponent.items()}
            columns |= {f"exponent_se_{name}": values for name, values in self.scaling.standard_error.items()}
        return [
            {"layer": self.layer, "head": head}
            | {name: values[head] for name, values in columns.items()}
            | {"variance_baseline": self.variance_baseline}
            for head in range(self.heads)
        ]


def dominance_of_squares(squares: Array) -> Array:
    """D = |S^TT|^2 / (|S^TT|^2 + |S^TN|^2 + |S^NT|^2 + |S^NN|^2), of squared norms (..., 4) in this order."""
    squares = np.maximum(np.asarray(squares, dtype=np.float64), 0)
    return _ratio(squares[..., 0], squares.sum(axis=-1))


def control_products(products: Array, inside: Array) -> Array:
    """<S^ab, S> of all nine parts and the bias when a control stands in the tangent's place.

    With M = tangent + normal and R = M - N, every part of the control's split is a difference.

    Args:
        products: those of the tangent's split (heads, 10), in the order of ``SHARES``.
        inside: <S^cN, S>, <S^Nc, S>, <S^NM, S>, <S^MN, S>, <S^NN, S> of each control (heads, m, 5).

    Returns:
        (heads, m, 10).
    """
    nine = products[:, None, :9].reshape(len(products), 1, 3, 3)
    c_all, all_c, all_all = nine[..., 0, 1:].sum(-1), nine[..., 1:, 0].sum(-1), nine[..., 1:, 1:].sum((-2, -1))
    c_n, n_c, n_all, all_n, n_n = np.moveaxis(inside, -1, 0)
    columns = [nine[..., 0, 0], c_n, c_all - c_n, n_c, n_n, n_all - n_n, all_c - n_c, all_n - n_n]
    columns += [all_all - n_all - all_n + n_n, products[:, None, 9]]
    return np.stack([np.broadcast_to(column, c_n.shape) for column in columns], axis=-1)


def fitted_exponent(log_radius: Array, log_size: Array, weights: Array) -> tuple[float, float]:
    """Slope of ``log_size`` on ``log_radius`` by weighted least squares, and its standard error.

    Weights are inverse variances up to a factor, which the residuals tell: se^2 = sum w r^2 / ((n - 2) sum w (x - mean)^2).
    Points without weight or with a size of zero (log -inf) are left out. Not a number with fewer than two different
    radii; the standard error with fewer than three points.
    """
    used = (weights > 0) & np.isfinite(log_size) & np.isfinite(log_radius)
    x, y, w = log_radius[used], log_size[used], weights[used]
    if len(x) < 2:
        return math.nan, math.nan
    x, y = x - np.average(x, weights=w), y - np.average(y, weights=w)
    spread = float(w @ x**2)
    if not spread > 0:
        return math.nan, math.nan
    slope = float(w @ (x * y)) / spread
    left = float(w @ (y - slope * x) ** 2)
    return slope, math.sqrt(left / ((len(x) - 2) * spread)) if len(x) > 2 else math.nan


def dominance_of_sums(
    sums: Mapping[str, Array],
    controls: Mapping[str, Array] | None = None,
    *,
    layer: int | None = None,
    tangent_share: float | None = None,
    distance_labels: Sequence[str] = (),
    frequency_labels: Sequence[str] = (),
) -> AttentionDominance:
    """The result that follows from the sums of :class:`~tangent_lens.measures.attention_sums.AttentionSums`.

    Args:
        sums: float64 arrays by name, heads first.
        controls: the same of the rows on which the controls were measured; by default ``sums``.
        tangent_share: rho = tr(Q^T C Q) / tr(C) of the rows after the norm with frozen scale, for ``variance_baseline``.

    Raises:
        ValueError: a tangent share outside [0, 1].
    """
    if tangent_share is not None and not 0 <= tangent_share <= 1:
        raise ValueError(f"tangent_share {tangent_share} is a share of variance and must lie between 0 and 1")
    heads, rows = len(sums["rows"]), sums["rows"]
    empty = np.zeros((heads, 0))
    shares = _ratio(sums["products"], sums["score_square"][:, None])
    random, random_kl, random_shares = empty, empty, np.zeros((heads, 0, len(SHARES)))
    beside = sums if controls is None else controls
    compared = "control_squares" in beside
    if compared:
        random = dominance_of_squares(beside["control_squares"])
        random_kl = np.maximum(_ratio(beside["control_kl"], beside["rows"][:, None]), 0)
        found = control_products(beside["products"], beside["control_products"])
        random_shares = _ratio(found, beside["score_square"][:, None, None])
    return AttentionDominance(
        layer=layer,
        dominance=_tuples(dominance_of_squares(sums["squares"])),
        random=_tuples(random),
        shares={name: _tuples(shares[:, place]) for place, name in enumerate(SHARES)},
        random_shares={name: _tuples(random_shares[..., place]) for place, name in enumerate(SHARES)},
        kl=_tuples(np.maximum(_ratio(sums["kl"], rows), 0)),
        random_kl=_tuples(random_kl),
        variance_baseline=None if tangent_share is None else tangent_share**2,
        **{name: _tuples(sums[name].astype(int)) for name in ("rows", "pairs", "left_out_rows")},
        random_rows=_tuples((beside["rows"] if compared else np.zeros(heads)).astype(int)),
        by_distance=_by_bucket(sums, "distance", "key distance", distance_labels),
        by_frequency=_by_bucket(sums, "frequency", "query token frequency", frequency_labels),
        scaling=_scaling(sums) if "radius_squares" in sums else None,
    )


def _by_bucket(sums: Mapping[str, Array], key: str, axis: str, labels: Sequence[str]) -> DominanceByBucket | None:
    if f"{key}_squares" not in sums:
        return None
    dominance = _tuples(dominance_of_squares(sums[f"{key}_squares"]))
    return DominanceByBucket(axis, tuple(labels), dominance, _tuples(sums[f"{key}_pairs"].astype(int)))


def _scaling(sums: Mapping[str, Array]) -> AttentionScaling:
    seen = np.flatnonzero(sums["radius_pairs"].sum(axis=0))
    pairs, logs, squares = (sums[f"radius_{name}"][:, seen] for name in ("pairs", "logs", "squares"))
    log_radius = _ratio(logs, pairs)
    raw = squares[..., :4]
    three = {"tangent_tangent": raw[..., 0], "mixed": raw[..., 1] + raw[..., 2], "normal_normal": raw[..., 3]}
    mean_square = {name: _ratio(square, pairs) for name, square in three.items()}
    with np.errstate(divide="ignore"):
        log_size = {name: 0.5 * np.log(square) for name, square in mean_square.items()}
    fits = {
        name: [fitted_exponent(*one) for one in zip(log_radius, sizes, pairs, strict=True)]
        for name, sizes in log_size.items()
    }
    return AttentionScaling(
        radius=_tuples(np.exp(log_radius)),
        pairs=_tuples(pairs.astype(int)),
        mean_square={name: _tuples(square) for name, square in mean_square.items()},
        dominance=_tuples(dominance_of_squares(squares[..., 4:])),
        exponent={name: tuple(slope for slope, _ in found) for name, found in fits.items()},
        standard_error={name: tuple(error for _, error in found) for name, found in fits.items()},
    )


def _ratio(above: Array, below: Array) -> Array:
    """Not a number where nothing is below the line."""
    above, below = np.broadcast_arrays(above, below)
    return np.divide(above, below, out=np.full(above.shape, math.nan), where=below > 0)


def _tuples(values: Array) -> Any:
    """Plain numbers in nested tuples."""
    listed = values.tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in listed)


def _p_values(observed: Sequence[float], controls: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Not a number where nothing was observed, or nothing to compare it with."""
    return tuple(
        monte_carlo_p(value, others) if others and not math.isnan(value) else math.nan
        for value, others in zip(observed, controls, strict=True)
    )
