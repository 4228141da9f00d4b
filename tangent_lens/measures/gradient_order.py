"""How the tangent and the normal part of a weight gradient grow with the distance from a token's mean.

For a linear map W that reads rows x, dL/dW = sum_i delta_i x_i^T. About a token's mean mu with tangent space T, x - mu has a
tangent part u of size O(t), t = |x - mu|, and on a smooth manifold a normal part n of size O(t^2). The paper (Bernas,
Jourdan, Poché, Hudelot 2026, section 2.4) bounds the gradient's two parts by these powers and speaks of normal / tangent =
O(t). Both are upper bounds, and a mean tangent gradient can vanish: then the ratio says nothing, and the result names it
``tangent gradient degenerate`` instead (``MEASUREMENTS``, section 9).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import t as student

from tangent_lens.measures.bootstrap import FEWEST_SEQUENCES, resampled_weights
from tangent_lens.measures.gradient_rows import (
    FEWEST_ROWS,
    OrderedRows,
    OuterSums,
    TokenGradients,
    ordered_rows,
    outer_sums,
    sign_flip_p_value,
)
from tangent_lens.measures.slopes import Slope, pooled_slope
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas

DEGENERATE = "tangent gradient degenerate"
SIGNIFICANCE = 0.05
# Powers of t that an exponent is sought among.
POWERS = np.linspace(0, 8, 81)
_REPLICATES = 999


@dataclass(frozen=True)
class TokenOrder:
    """The mean gradient of one token, in its two parts, each in units of signal times x.

    Attributes:
        rows, given: rows used, and rows there were.
        radius: median of t.
        tangent_rows, normal_rows: means over rows of |delta||u| and of |delta||n|.
        tangent, normal: |mean of delta u^T| and |mean of delta n^T|, Frobenius.
        tangent_square, normal_square: their squares without bias: the mean over pairs of different rows (a U-statistic), so
            that it may be negative.
        p_value: of a tangent mean of 0, by flipping the rows' signs. Exact where delta u^T is symmetric about 0, and right for
            many rows anywhere (of exponential ones, 5 % are 10 with 10 rows, 7 with 30 and 6 with 100).
        coherence: root of ``tangent_square`` (0 if negative) over ``tangent_rows``, in [0, 1]: 0 where rows cancel.
        why: what makes the tangent gradient degenerate; None if nothing does.
        ratio: normal over tangent, from the unbiased squares, a negative normal one as 0 (to leave those out would raise a
            median); None where the tangent gradient is degenerate.
    """

    token: int
    rows: int
    given: int
    radius: float
    tangent_rows: float
    normal_rows: float
    tangent: float
    normal: float
    tangent_square: float
    normal_square: float
    p_value: float
    coherence: float
    why: str | None
    ratio: float | None

    @property
    def degenerate(self) -> bool:
        """Whether the tangent gradient is too near to 0 to divide by."""
        return self.why is not None


@dataclass(frozen=True)
class RowOrder:
    """How the norms of single rows grow with t; this is what the paper's bounds are about.

    Attributes:
        slope: of log |delta||part| on log t, every token with an intercept of its own; None with a ``reason``.
        left_out: rows whose part is zero and has no logarithm.
    """

    slope: Slope | None
    left_out: int
    reason: str | None = None


@dataclass(frozen=True)
class MeanOrder:
    """How the mean gradient inside a ball grows with the ball.

    Attributes:
        exponent: a, where the mean grows as the mean of t^a; None with a ``reason``.
        low, high: interval by Student's t and the standard deviation over resampled tokens; None with fewer than 8 tokens.
        radii: mean t in each ball, in median radii of the token, over tokens.
        squares: unbiased squares of the mean gradient in each ball, in squares of the token's mean row norm, over tokens.
        tokens, left_out: behind it, and without rows enough for the balls.
    """

    exponent: float | None
    low: float | None
    high: float | None
    radii: tuple[float, ...]
    squares: tuple[float, ...]
    tokens: int
    left_out: int
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class GradientOrder(Shown):
    """The orders in t of a weight gradient's tangent and normal part.

    Attributes:
        tokens: one each, in the order given.
        tangent_rows, normal_rows: exponents of single rows; 1 and 2 on a smooth manifold where signals do not depend on t.
        tangent_mean, normal_mean: exponents of mean gradients.
        level: of the intervals; balls, flips, seed, floor, most: see :func:`gradient_order`.
    """

    tokens: tuple[TokenOrder, ...]
    tangent_rows: RowOrder
    normal_rows: RowOrder
    tangent_mean: MeanOrder
    normal_mean: MeanOrder
    balls: int
    flips: int
    seed: int
    level: float
    floor: float
    most: int

    @property
    def degenerate(self) -> int:
        """Number of tokens whose tangent gradient is degenerate."""
        return sum(one.degenerate for one in self.tokens)

    @property
    def median_ratio(self) -> float | None:
        """Median of normal / tangent over the tokens that have one; None if none has.

        Of tokens whose tangent gradient is truly 0, five in a hundred pass the test; where the verdict is ``tangent gradient
        degenerate``, this may be the median of those alone.
        """
        ratios = [one.ratio for one in self.tokens if one.ratio is not None]
        return statistics.median(ratios) if ratios else None

    @property
    def verdict(self) -> str:
        """``tangent gradient degenerate`` if it is for more than half of the tokens; else normal / tangent in words."""
        if _mostly_degenerate(self.tokens):
            return DEGENERATE
        count = len(self.tokens)
        over = "" if count == 1 else f" (median over {count - self.degenerate} of {count} tokens)"
        return f"normal / tangent {self.median_ratio:#.3g}{over}"

    def to_pandas(self) -> pandas.DataFrame:
        """One row a token."""
        import pandas

        return pandas.DataFrame([vars(one) | {"degenerate": one.degenerate} for one in self.tokens])


def gradient_order(
    groups: Sequence[TokenGradients],
    *,
    balls: int = 8,
    flips: int = 999,
    seed: int = 0,
    level: float = 0.95,
    floor: float = 0.02,
    most: int = 2048,
) -> GradientOrder:
    """Orders of the tangent and normal gradient in the distance from a token's mean.

    A tangent gradient is degenerate, and its token has no ratio, where rows with random signs give one as long (p > 0.05),
    its unbiased square is not positive, or its coherence is below ``floor``. The exponents of the mean gradient come from balls
    that hold the nearest 1/balls, 2/balls, ... of each token's rows: the slope of the log square on log mean t, read as the
    power a whose own means of t^a over the same balls have that slope. Read as a itself, it would be wrong by how the radii
    are spread (2.06 for 2 where u is normal in two dimensions). Tokens count equally, in units of their own mean row norm.

    Memory: 2 n min(n, out width) numbers for each token in turn, n at most ``most``; width is that of either part.

    Args:
        groups: one a token.
        balls: 3 or more. Tokens with fewer than twice as many rows have no exponent.
        flips: random signs behind each p-value.
        floor: no ratio is more than 1/floor times the ratio of the rows' own norms. By chance n rows cohere by about
            1/sqrt(n), so 0.02 says: what only more than 2500 rows could tell from 0 is called 0.
        most: rows of a token; of more, so many are drawn by ``seed``.

    Raises:
        ValueError: no tokens, one twice, or an option out of range.
    """
    _check(groups, balls, flips, level, floor, most)
    rows: list[tuple[np.ndarray, ...]] = []
    orders: list[TokenOrder] = []
    curves: list[_Curve] = []
    for group in groups:
        generator = np.random.default_rng([seed, group.token])
        own = ordered_rows(group, most, generator)
        sums = (outer_sums(own.signals, own.tangent), outer_sums(own.signals, own.normal))
        orders.append(_token_order(group, own, *sums, sign_flip_p_value(sums[0], flips, generator), floor))
        curves.extend(_curves(own, sums, balls))
        rows.append((own.radius, *own.parts))
    why = DEGENERATE if _mostly_degenerate(orders) else None
    return GradientOrder(
        tokens=tuple(orders),
        tangent_rows=_row_order(rows, 1, level),
        normal_rows=_row_order(rows, 2, level),
        tangent_mean=_mean_order(curves, 0, len(groups), level, seed, why),
        normal_mean=_mean_order(curves, 1, len(groups), level, seed),
        balls=balls,
        flips=flips,
        seed=seed,
        level=level,
        floor=floor,
        most=most,
    )


@dataclass(frozen=True)
class _Curve:
    """One token over its balls: mean t, squares of both parts, and the squares of a mean of t^a for every power a."""

    radii: np.ndarray
    squares: np.ndarray
    expected: np.ndarray


def _check(groups: Sequence[TokenGradients], balls: int, flips: int, level: float, floor: float, most: int) -> None:
    if not groups:
        raise ValueError("no token was given; pass the TokenGradients of one or more")
    tokens = [group.token for group in groups]
    if len(set(tokens)) < len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise ValueError(f"token {twice} is there {tokens.count(twice)} times; put all its rows into one group")
    if balls < 3:
        raise ValueError(f"{balls} balls show no exponent; use 3 or more (8 is usual)")
    if flips < 99:
        raise ValueError(f"{flips} flips give no p-value near {SIGNIFICANCE}; use 99 or more (999 is usual)")
    if not 0 < level < 1:
        raise ValueError(f"level {level} must lie between 0 and 1, for example 0.95")
    if not 0 <= floor < 1:
        raise ValueError(f"floor {floor} must lie in [0, 1); it is a share of the rows' own norms, 0.02 as a rule")
    if most < FEWEST_ROWS:
        raise ValueError(f"most={most} rows a token are too few; use {FEWEST_ROWS} or more")


def _token_order(
    group: TokenGradients, own: OrderedRows, tangent: OuterSums, normal: OuterSums, p_value: float, floor: float
) -> TokenOrder:
    every = torch.ones(1, len(own.radius), dtype=torch.float64)
    unit = own.signal_unit * own.length_unit
    means = [float(sums.squares(every).clamp(min=0).sqrt()) / every.shape[1] for sums in (tangent, normal)]
    squares = [float(sums.unbiased(every)) for sums in (tangent, normal)]
    row_norms = [float(part.mean()) for part in own.parts]
    coherence = min(max(squares[0], 0) ** 0.5 / row_norms[0], 1.0) if row_norms[0] > 0 else 0.0
    why = _why_degenerate(p_value, squares[0], coherence, floor)
    return TokenOrder(
        token=group.token,
        rows=every.shape[1],
        given=len(group),
        radius=float(np.median(own.radius)) * own.length_unit,
        tangent_rows=row_norms[0] * unit,
        normal_rows=row_norms[1] * unit,
        tangent=means[0] * unit,
        normal=means[1] * unit,
        tangent_square=squares[0] * unit**2,
        normal_square=squares[1] * unit**2,
        p_value=p_value,
        coherence=coherence,
        why=why,
        ratio=None if why else (max(squares[1], 0) / squares[0]) ** 0.5,
    )


def _why_degenerate(p_value: float, square: float, coherence: float, floor: float) -> str | None:
    if p_value > SIGNIFICANCE:
        return f"not told from 0 (p = {p_value:.3g})"
    if not square > 0:
        return "its unbiased square is not positive"
    if coherence < floor:
        return f"its rows cancel: coherence {coherence:.2g} below {floor:g}"
    return None


def _mostly_degenerate(tokens: Sequence[TokenOrder]) -> bool:
    return 2 * sum(one.degenerate for one in tokens) > len(tokens)


def _row_order(rows: Sequence[tuple[np.ndarray, ...]], part: int, level: float) -> RowOrder:
    """Of tokens' t and the norms of their rows' tangent (1) and normal (2) part."""
    kept = [own[part] > 0 for own in rows]
    # Units of a token are part of its intercept.
    t, norms = (
        np.concatenate([np.log(own[place][keep]) for own, keep in zip(rows, kept, strict=True)]) for place in (0, part)
    )
    tokens = np.repeat(np.arange(len(rows)), [int(keep.sum()) for keep in kept])
    left_out = sum(len(keep) for keep in kept) - len(t)
    try:
        return RowOrder(pooled_slope(t, norms, tokens, level=level), left_out)
    except ValueError as problem:
        return RowOrder(None, left_out, str(problem))


def _curves(own: OrderedRows, sums: tuple[OuterSums, OuterSums], balls: int) -> Iterator[_Curve]:
    count = len(own.radius)
    ends = np.ceil(np.arange(1, balls + 1) * count / balls).astype(int)
    inside = np.arange(count) < ends[:, None]
    if count < 2 * balls or not own.radius[ends[0] - 2] > 0:
        return
    relative = own.radius / np.median(own.radius)
    powers = relative[:, None] ** POWERS
    # Over pairs of different rows, as the squares are, and summed so that nothing cancels.
    pairs = np.cumsum(powers[1:] * np.cumsum(powers, axis=0)[:-1], axis=0)[ends - 2]
    expected = 2 * pairs / (ends * (ends - 1))[:, None] / powers.mean(axis=0) ** 2
    chosen = torch.from_numpy(inside.astype(np.float64))
    scales = [float(part.mean()) or 1.0 for part in own.parts]
    squares = [one.unbiased(chosen).numpy() / scale**2 for one, scale in zip(sums, scales, strict=True)]
    radii = np.cumsum(relative)[ends - 1] / ends
    yield _Curve(radii, np.array(squares), expected)


def _mean_order(
    curves: Sequence[_Curve], part: int, given: int, level: float, seed: int, why: str | None = None
) -> MeanOrder:
    left_out = given - len(curves)
    if not curves:
        return MeanOrder(None, None, None, (), (), 0, left_out, why or "no token has rows enough for the balls")
    radii = np.stack([one.radii for one in curves])
    squares = np.stack([one.squares[part] for one in curves])
    expected = np.stack([one.expected for one in curves])
    exponent, low, high, reason = _exponent(radii, squares, expected, level, seed)
    if why:
        exponent, low, high, reason = None, None, None, why
    means = (tuple(radii.mean(axis=0).tolist()), tuple(squares.mean(axis=0).tolist()))
    return MeanOrder(exponent, low, high, *means, len(curves), left_out, reason)


def _exponent(
    radii: np.ndarray, squares: np.ndarray, expected: np.ndarray, level: float, seed: int
) -> tuple[float | None, float | None, float | None, str | None]:
    count = len(radii)
    if not (squares.mean(axis=0) > 0).all():
        return None, None, None, "the unbiased squares of some balls are not positive"
    if np.ptp(np.log(radii.mean(axis=0))) < 1e-6:
        return None, None, None, "the rows of every ball lie at one distance"
    (found,) = _powers(np.full((1, count), 1 / count), radii, squares, expected)
    if not POWERS[0] < found < POWERS[-1]:
        return None, None, None, f"no power of t between {POWERS[0]:g} and {POWERS[-1]:g} grows like this"
    if count < FEWEST_SEQUENCES:
        return float(found), None, None, None
    draws = _powers(resampled_weights(count, _REPLICATES, seed) / count, radii, squares, expected)
    seen = draws[np.isfinite(draws)]
    if len(seen) < level * len(draws):
        share = 1 - len(seen) / len(draws)
        return None, None, None, f"some ball has no positive square in {share:.0%} of the resampled sets of tokens"
    # Percentiles of so few tokens as 8 held the truth 87 times in 100: resampling shrinks variances by (count - 1) / count.
    error = float(seen.std(ddof=1)) * (count / (count - 1)) ** 0.5
    half = float(student.ppf((1 + level) / 2, count - 1)) * error
    return float(found), float(found) - half, float(found) + half, None


def _powers(
    weights: Float[np.ndarray, "draws tokens"], radii: np.ndarray, squares: np.ndarray, expected: np.ndarray
) -> Float[np.ndarray, " draws"]:
    """The power whose means over the balls have the slope of the squares, of each draw; NaN where a square is not positive."""
    x = np.log(weights @ radii)
    x = x - x.mean(axis=1, keepdims=True)
    x = x / (x**2).sum(axis=1, keepdims=True)
    mean = weights @ squares
    positive = (mean > 0).all(axis=1)
    slopes = (x * np.log(np.where(mean > 0, mean, 1))).sum(axis=1)
    logs = np.log(np.tensordot(weights, expected, axes=1))
    references = np.maximum.accumulate((x[:, :, None] * logs).sum(axis=1), axis=1)
    found = [np.interp(slope, reference, POWERS) for slope, reference in zip(slopes, references, strict=True)]
    return np.where(positive, found, np.nan)
