"""Exponents with intervals: slopes of logarithms pooled over tokens, and powers that stand on a floor of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t as student

# A power on a floor is searched among these exponents, and among these shares of the floor at the median x.
EXPONENTS = np.round(np.arange(0.1, 4.001, 0.05), 10)
FLOORS = np.array(
    [
        0,
        0.005,
        0.01,
        0.02,
        0.03,
        0.04,
        *np.round(np.arange(0.05, 0.9, 0.05), 10),
        0.9,
        0.925,
        0.95,
        0.965,
        0.98,
        0.99,
        1,
    ]
)
RESAMPLES = 500
_FEWEST_ROWS = 4
_NO_SPREAD = "all rows of a token lie at one radius, so no exponent can be read off them; use more rows"


@dataclass(frozen=True)
class Slope:
    """An exponent: the slope of log y on log x, every group with an intercept of its own.

    Attributes:
        exponent: the slope; 2 where y grows as the square of x.
        standard_error: robust to rows of one group that go together (one group alone: to unequal variances).
        low, high: interval at ``level`` by Student's t.
        rows, groups: behind it.
    """

    exponent: float
    standard_error: float
    low: float
    high: float
    rows: int
    groups: int
    level: float

    def holds(self, value: float) -> bool:
        """Whether the interval holds a value."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class FlooredPower:
    """An exponent b above a floor: E y^2 = c (f q + (1-f) (x / median x)^(2b)).

    Attributes:
        exponent: b; None where the floor alone fits best, so that no power is seen.
        low, high: interval of b at ``level`` by resampling groups (one group alone: its rows). All of :data:`EXPONENTS` where
            too many resamples show no power.
        floor: f, the share of y^2 at the median x that does not grow with x; floor_low, floor_high: its interval.
        rows, groups: behind it.
    """

    exponent: float | None
    low: float
    high: float
    floor: float
    floor_low: float
    floor_high: float
    rows: int
    groups: int
    level: float

    @property
    def determined(self) -> bool:
        """Whether these rows say anything about the exponent: its interval lies inside :data:`EXPONENTS`."""
        return self.exponent is not None and EXPONENTS[0] < self.low and self.high < EXPONENTS[-1]

    def holds(self, value: float) -> bool:
        """Whether the interval holds a value."""
        return self.low <= value <= self.high


def pooled_slope(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"], *, level: float = 0.95
) -> Slope:
    """The slope of y on x (both logarithms already), with an intercept for every group.

    The standard error sums the scores of each group before squaring them (Liang and Zeger 1986, with the factor G/(G-1)), and
    the interval has G-1 degrees of freedom. One group alone counts its rows as independent (HC3 of MacKinnon and White 1985).

    Args:
        groups: a whole number a row, for example its token. Groups whose x does not vary are left out.

    Raises:
        ValueError: numbers that are not finite, lengths that differ, fewer than 4 rows in groups inside which x varies, one
            group in which it varies by a single row, or a level outside (0, 1).
    """
    check_level(level)
    x, y, inverse = _checked(x, y, groups)
    varying = _varying(x, inverse)
    if int(varying.sum()) < _FEWEST_ROWS:
        raise ValueError(_NO_SPREAD)
    # The others say nothing about the slope, and would count as groups that all agree on it.
    x, y, inverse = x[varying], y[varying], np.unique(inverse[varying], return_inverse=True)[1]
    count = int(inverse.max()) + 1
    x, y = x - _means(x, inverse, count), y - _means(y, inverse, count)
    spread = float((x**2).sum())
    slope = float((x * y).sum()) / spread
    left = y - slope * x
    if count > 1:
        scores = np.bincount(inverse, weights=x * left, minlength=count)
        error = math.sqrt(float((scores**2).sum()) * count / (count - 1)) / spread
        freedom = count - 1
    else:
        kept = 1 - 1 / len(x) - x**2 / spread
        if not kept.min() > 1e-9:
            raise ValueError("all rows but one lie at one radius, so the exponent has no interval; use more rows")
        error = math.sqrt(float(((x * left / kept) ** 2).sum())) / spread
        freedom = len(x) - 2
    half = float(student.ppf((1 + level) / 2, freedom)) * error
    return Slope(slope, error, slope - half, slope + half, len(x), count, level)


def floored_power(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    groups: Int[np.ndarray, " n"],
    *,
    profile: Float[np.ndarray, " n"] | None = None,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> FlooredPower:
    """The exponent of y on x where noise adds to y^2 a part that does not grow with x.

    The gamma quasi-likelihood of y^2, consistent for its mean whatever its distribution (McCullagh and Nelder 1989, chapter 8),
    at its best over a grid of exponents and floors; every group has a scale c of its own.

    Args:
        x, y: 0 or more; no logarithms. Rows whose x or y is 0 must be left out.
        profile: q, the size of the noise at each row up to a factor; 1 everywhere by default.
        resamples: behind the intervals.

    Raises:
        ValueError: as :func:`pooled_slope`, numbers that are not positive, or no resamples.
    """
    check_level(level)
    check_resamples(resamples)
    curves = PowerCurves.of(x, y, groups, profile)
    if len(curves.rows) > 1:
        return curves.power(level=level, resamples=resamples, seed=seed)
    logs, squares, floor, _ = _prepared(x, y, groups, profile)
    model = _model(logs, floor).reshape(len(logs), -1)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(logs), np.full(len(logs), 1 / len(logs)), size=resamples).astype(float)
    draws = len(logs) * np.log(weights @ (squares[:, None] / model) / len(logs)) + weights @ np.log(model)
    return _power(curves.losses.sum(axis=0), draws.reshape(resamples, len(EXPONENTS), len(FLOORS)), len(logs), 1, level)


@dataclass(frozen=True, eq=False)
class PowerCurves:
    """How well every exponent and floor fits each group: computed once, added up for any choice of groups.

    Attributes:
        groups: the numbers of the groups, rising.
        rows: of each (G,).
        losses: minus twice the gamma quasi-likelihood, up to a constant (G, exponents, floors).
    """

    groups: np.ndarray
    rows: np.ndarray
    losses: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, groups: np.ndarray, profile: np.ndarray | None = None) -> PowerCurves:
        """Arguments and errors as of :func:`floored_power`. Costs rows x exponents x floors logarithms."""
        logs, squares, floor, inverse = _prepared(x, y, groups, profile)
        count = int(inverse.max()) + 1
        losses = np.empty((count, len(EXPONENTS), len(FLOORS)))
        for group in range(count):
            own = inverse == group
            model = _model(logs[own], floor[own])
            losses[group] = own.sum() * np.log((squares[own][:, None, None] / model).mean(axis=0)) + np.log(model).sum(
                0
            )
        return cls(np.unique(groups), np.bincount(inverse), losses)

    def power(
        self,
        groups: Sequence[int] | np.ndarray | None = None,
        *,
        level: float = 0.95,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> FlooredPower:
        """The best exponent of some groups (all by default) together; the interval resamples them.

        Raises:
            ValueError: fewer than two groups, which cannot be resampled, no resamples, or a level outside (0, 1).
        """
        check_level(level)
        check_resamples(resamples)
        chosen = np.ones(len(self.groups), dtype=bool) if groups is None else np.isin(self.groups, groups)
        count = int(chosen.sum())
        if count < 2:
            raise ValueError(f"{count} token cannot be resampled; use 2 or more, or floored_power on its rows")
        weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        draws = np.einsum("rg,gef->ref", weights.astype(float), self.losses[chosen])
        return _power(self.losses[chosen].sum(axis=0), draws, int(self.rows[chosen].sum()), count, level)


def _power(losses: np.ndarray, draws: np.ndarray, rows: int, groups: int, level: float) -> FlooredPower:
    exponent, floor = _best(losses[None])[0]
    exponents, floors = _best(draws).T
    tails = [(1 - level) / 2, (1 + level) / 2]
    seen = floors < 1
    low, high = (float(EXPONENTS[0]), float(EXPONENTS[-1]))
    if seen.mean() >= level:
        low, high = (float(one) for one in np.quantile(exponents[seen], tails, method="nearest"))
    floor_low, floor_high = (float(one) for one in np.quantile(floors, tails, method="nearest"))
    shown = None if floor == 1 else float(exponent)
    return FlooredPower(shown, low, high, float(floor), floor_low, floor_high, rows, groups, level)


def _best(losses: Float[np.ndarray, "draws exponents floors"]) -> Float[np.ndarray, "draws 2"]:
    places = np.unravel_index(losses.reshape(len(losses), -1).argmin(axis=1), losses.shape[1:])
    return np.stack([EXPONENTS[places[0]], FLOORS[places[1]]], axis=1)


def _model(logs: np.ndarray, floor: np.ndarray) -> Float[np.ndarray, "n exponents floors"]:
    powers = np.exp(2 * np.clip(logs, -40, 40)[:, None] * EXPONENTS)
    # A power of 0 is no model of a positive number; this is far below any floor that is tried.
    return FLOORS * floor[:, None, None] + (1 - FLOORS) * np.maximum(powers, 1e-30)[..., None]


def _prepared(
    x: np.ndarray, y: np.ndarray, groups: np.ndarray, profile: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    floor = np.ones_like(x) if profile is None else np.asarray(profile, dtype=np.float64)
    if floor.shape != x.shape:
        raise ValueError(
            f"a profile of shape {floor.shape} does not fit rows of shape {x.shape}; give one number a row"
        )
    for numbers in (x, y, floor):
        if not (np.isfinite(numbers).all() and (numbers > 0).all()):
            raise ValueError("a power on a floor needs finite positive numbers; leave rows without a part out")
    logs, squares, inverse = _checked(np.log(x), 2 * np.log(y), groups)
    if not _varying(logs, inverse).any():
        raise ValueError(_NO_SPREAD)
    owned = [inverse == group for group in range(int(inverse.max()) + 1)]
    medians = np.array([np.median(logs[own]) for own in owned])
    largest = np.array([squares[own].max() for own in owned])
    return logs - medians[inverse], np.exp(squares - largest[inverse]), floor, inverse


def check_level(level: float) -> None:
    """Refuse what is no level of an interval.

    Raises:
        ValueError: outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level {level} must lie between 0 and 1, for example 0.95")


def check_resamples(resamples: int) -> None:
    """Refuse a number of resamples that gives no interval.

    Raises:
        ValueError: below 1.
    """
    if resamples < 1:
        raise ValueError(f"{resamples} resamples give no interval; use {RESAMPLES}, for example")


def _means(values: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    sums = np.bincount(inverse, weights=values, minlength=count)
    return (sums / np.bincount(inverse, minlength=count))[inverse]


def _varying(x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Which rows belong to a group in which x varies by more than rounding."""
    lows, highs = np.full(int(inverse.max()) + 1, math.inf), np.full(int(inverse.max()) + 1, -math.inf)
    np.minimum.at(lows, inverse, x)
    np.maximum.at(highs, inverse, x)
    return (highs - lows > 1e-12 * max(float(np.abs(x).max()), 1.0))[inverse]


def _checked(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y, groups = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), np.asarray(groups)
    if x.ndim != 1 or x.shape != y.shape or x.shape != groups.shape:
        raise ValueError(f"{x.shape}, {y.shape} and {groups.shape} do not fit together; give one number a row of each")
    if len(x) < _FEWEST_ROWS:
        raise ValueError(f"{len(x)} rows give no slope with an interval; use {_FEWEST_ROWS} or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("some logarithms are NaN or infinite; leave rows without a part out")
    if groups.dtype.kind == "f" and not np.isfinite(groups).all():
        raise ValueError("some groups are NaN or infinite; give a whole number a row")
    return x, y, np.unique(groups, return_inverse=True)[1]
