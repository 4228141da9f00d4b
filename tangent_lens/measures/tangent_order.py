"""How the tangent and the normal part of a token's occurrences grow with their distance from the token's mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.local_tangent import ROUNDING, common_width, crossed_parts, local_dimension
from tangent_lens.measures.slopes import FlooredPower, PowerCurves, Slope, floored_power, pooled_slope
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class OrderNumbers:
    """The exponents at one choice of m and of the share of rows that a tangent space is fitted to.

    Attributes:
        m, nearest: that choice.
        tangent: slope of log |tangent part| on log t. Theory: 1.
        normal: slope of log |normal part| on log t, over the tokens that have a normal part. Theory: 2. Noise alone gives about 1
            where the normal part is most of t, for it then grows as t, and less where it is not. None where there is no normal
            part but rounding.
        above_floor: exponent of the normal part on the tangent radius |tangent part|, above a floor of noise. Theory: 2. None as
            above.
        normal_share: E |normal|^2 / E t^2.
    """

    m: int
    nearest: float
    tangent: Slope
    normal: Slope | None
    above_floor: FlooredPower | None
    normal_share: float


@dataclass(frozen=True, repr=False)
class TangentOrder(Shown):
    """``tangent_order`` of some tokens (section 9 of ``MEASUREMENTS``).

    Attributes:
        name: of the tokens, for example a bucket of frequency.
        rule: how m was asked for.
        tokens, rows, d: behind it.
        radius: mean of t, the distance from the foot of a token's mean; radius_variation: the standard deviation of t over its
            mean, averaged over tokens. Exponents are read off this range.
        chosen: at the m that was asked for.
        others: at other m and nearest, to see what hangs on the choice.
    """

    name: str
    rule: int | float | str
    tokens: int
    rows: int
    d: int
    radius: float
    radius_variation: float
    chosen: OrderNumbers
    others: tuple[OrderNumbers, ...] = ()

    @property
    def m(self) -> int:
        """Dimension of the tangent spaces."""
        return self.chosen.m

    def to_pandas(self) -> pandas.DataFrame:
        """One row a choice of m and nearest, the chosen one first."""
        import pandas

        return pandas.DataFrame(
            [{"name": self.name, "tokens": self.tokens, **flat_order(one)} for one in (self.chosen, *self.others)]
        )


def flat_order(one: OrderNumbers) -> dict[str, float | int | None]:
    """One choice as columns."""
    found: dict[str, float | int | None] = {"m": one.m, "nearest": one.nearest, "normal_share": one.normal_share}
    for name, slope in (("tangent", one.tangent), ("normal", one.normal)):
        for part in ("exponent", "low", "high"):
            found[name if part == "exponent" else f"{name}_{part}"] = None if slope is None else getattr(slope, part)
    for part in ("exponent", "low", "high", "floor", "floor_low", "floor_high"):
        label = "above_floor" if part == "exponent" else (part if part.startswith("floor") else f"above_floor_{part}")
        found[label] = None if one.above_floor is None else getattr(one.above_floor, part)
    return found


@dataclass(frozen=True, eq=False)
class OrderParts:
    """What every row says about the exponents, each row split by a tangent space that other rows of its token gave.

    Attributes:
        tokens: which token each row is an occurrence of (n,).
        radius, tangent, normal: t and the sizes of both parts (n,).
        curves: of the normal part on the tangent one, without tokens that have no normal part but rounding; None where none has.
    """

    m: int
    nearest: float
    d: int
    tokens: np.ndarray
    radius: np.ndarray
    tangent: np.ndarray
    normal: np.ndarray
    profile: np.ndarray
    curves: PowerCurves | None

    def numbers(self, tokens: Sequence[int] | None = None, *, level: float = 0.95, seed: int = 0) -> OrderNumbers:
        """The exponents of some tokens, all by default.

        Raises:
            ValueError: none of them was split, or what :func:`pooled_slope` refuses.
        """
        own = self._rows_of(tokens)
        groups, radius, normal = self.tokens[own], self.radius[own], self.normal[own]
        logs = np.log(radius)
        share = float((normal**2).mean() / (radius**2).mean())
        tangent = pooled_slope(logs, np.log(self.tangent[own]), groups, level=level)
        bent = np.isin(groups, () if self.curves is None else self.curves.groups)
        if not bent.any():
            return OrderNumbers(self.m, self.nearest, tangent, None, None, share)
        slope = pooled_slope(logs[bent], np.log(normal[bent]), groups[bent], level=level)
        above_floor = self._above_floor(np.flatnonzero(own)[bent], level, seed)
        return OrderNumbers(self.m, self.nearest, tangent, slope, above_floor, share)

    def radii(self, tokens: Sequence[int] | None = None) -> tuple[float, float]:
        """Mean of t, and its standard deviation over its mean within a token, averaged over tokens."""
        own = self._rows_of(tokens)
        of_token = [self.radius[own & (self.tokens == token)] for token in np.unique(self.tokens[own])]
        return float(self.radius[own].mean()), float(np.mean([one.std() / one.mean() for one in of_token]))

    def _above_floor(self, own: np.ndarray, level: float, seed: int) -> FlooredPower:
        chosen = np.unique(self.tokens[own])
        if len(chosen) > 1 and self.curves is not None:
            return self.curves.power(chosen, level=level, seed=seed)
        parts = (self.tangent[own], self.normal[own], self.tokens[own])
        return floored_power(*parts, profile=self.profile[own], level=level, seed=seed)

    def _rows_of(self, tokens: Sequence[int] | None) -> np.ndarray:
        own = np.ones(len(self.tokens), dtype=bool) if tokens is None else np.isin(self.tokens, list(tokens))
        if not own.any():
            raise ValueError(f"none of the tokens {tokens} was split; there are {np.unique(self.tokens).tolist()}")
        return own


def order_parts(
    clouds: Mapping[int, Float[Tensor, "n d"]], m: int, *, nearest: float = 1.0, seed: int = 0
) -> OrderParts:
    """Split every row by the tangent space fitted to the other half of its token's rows.

    Raises:
        ValueError: no clouds, widths that differ, or what :func:`fit_local_tangent` refuses.
    """
    width = common_width(list(clouds.values()))
    names, radius, tangent, normal, profile = [], [], [], [], []
    for token, rows in clouds.items():
        # A token's halves depend on the seed and its own number of rows alone, not on the other tokens.
        for _, seen, parts in crossed_parts(rows, m, nearest=nearest, seed=seed):
            names.append(np.full(len(seen), token))
            radius.append(parts.radius)
            tangent.append(parts.tangent.norm(dim=1))
            normal.append(parts.normal.norm(dim=1))
            profile.append(parts.profile)
    found = [torch.cat(one).numpy() for one in (radius, tangent, normal, profile)]
    # A row on the foot, or without a tangent part, has no logarithm.
    kept = (found[0] > 0) & (found[1] > ROUNDING * found[0])
    tokens, (t, along, beside, noise) = np.concatenate(names)[kept], [one[kept] for one in found]
    bent = ~np.isin(tokens, tokens[beside <= ROUNDING * t])
    curves = PowerCurves.of(along[bent], beside[bent], tokens[bent], noise[bent]) if bent.any() else None
    return OrderParts(m, nearest, width, tokens, t, along, beside, noise, curves)


def tangent_order(
    clouds: Mapping[int, Float[Tensor, "n d"]],
    m: int | float | str = "participation_ratio",
    *,
    nearest: float = 1.0,
    sensitivity: bool = True,
    level: float = 0.95,
    seed: int = 0,
    name: str = "tokens",
) -> TangentOrder:
    """How fast the two parts grow: theory says as t and t^2 on a smooth manifold.

    The rows of every token are cut in half by the seed; each half is split by the tangent space fitted to the other, at the foot
    of its mean (:func:`fit_local_tangent`), so that no row is explained by itself. Slopes are pooled over tokens, each token
    with an intercept of its own; intervals take tokens as the independent draws.

    Args:
        clouds: the rows of each token (n, d); at least 4 a token, and 3 m + 2 in each half.
        m: dimension of the tangent spaces: a whole number, a variance share in (0, 1), or a rule, whose median over tokens
            counts.
        nearest: share of a half's rows that its tangent space is fitted to, weighted by nearness.
        sensitivity: also at half and twice of m, at 1, and at half of ``nearest``.

    Raises:
        ValueError: too few rows for m, rows that are not finite or all equal, or rows all at one radius.

    Source: theory, the paper's section on local geometry; exponents and their correction for noise, ours.
    """
    chosen = local_dimension(list(clouds.values()), m, nearest=nearest)
    first = order_parts(clouds, chosen, nearest=nearest, seed=seed)
    others = other_choices(clouds, chosen, nearest) if sensitivity else ()
    radius, variation = first.radii()
    return TangentOrder(
        name=name,
        rule=m,
        tokens=len(clouds),
        rows=len(first.tokens),
        d=first.d,
        radius=radius,
        radius_variation=variation,
        chosen=first.numbers(level=level, seed=seed),
        others=tuple(
            order_parts(clouds, one, nearest=share, seed=seed).numbers(level=level, seed=seed) for one, share in others
        ),
    )


def other_choices(clouds: Mapping[int, Tensor], m: int, nearest: float) -> tuple[tuple[int, float], ...]:
    """m and nearest that a reader should see beside the chosen ones, as far as the rows allow them."""
    found = []
    for one, share in ((1, nearest), (max(m // 2, 1), nearest), (2 * m, nearest), (m, nearest / 2)):
        try:
            local_dimension(list(clouds.values()), one, nearest=share)
        except ValueError:
            continue
        if (one, share) not in ((m, nearest), *found):
            found.append((one, share))
    return tuple(found)
