"""The rows that a token's weight gradient is a sum of: sums of delta_i u_i^T by their norms, and random signs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64

# Of fewer rows, too few patterns of signs exist for a p-value well below 0.05.
FEWEST_ROWS = 8
# A part shorter than this many radii is rounding of a part that is zero.
_ROUNDING = 1e-12
# Numbers in one batch of flipped signs.
_BATCH = 4_000_000


@dataclass(frozen=True, eq=False, repr=False)
class TokenGradients:
    """The rows of one token: displacements from its mean, and the signals that the map's output got back.

    mu and T are taken as given. The unbiased squares are unbiased where both were fitted on other rows; about the rows' own
    mean, what a constant signal adds cancels, and squares come out low by about |mean delta|^2 E|u|^2 / n.

    Attributes:
        token: id, 0 or more.
        tangent: coordinates of x - mu in an orthonormal basis of T (n, m), in units of x.
        normal: the rest of x - mu, in any orthonormal coordinates or in the ambient ones (n, p).
        signals: delta_i = dL/d(W x_i) (n, out).
    """

    token: int
    tangent: Float[Tensor, "n m"]
    normal: Float[Tensor, "n p"]
    signals: Float[Tensor, "n out"]

    def __post_init__(self) -> None:
        """Keep the rows in float64.

        Raises:
            ValueError: a negative id, shapes that do not fit together, fewer than 8 rows, values that are not finite, or
                signals or displacements that are all zero.
        """
        if self.token < 0:
            raise ValueError(f"token {self.token} is no id; use one of 0 or more")
        parts = {name: as_float64(getattr(self, name)) for name in ("tangent", "normal", "signals")}
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
        if any(part.ndim != 2 or not part.shape[1] for part in parts.values()):
            raise ValueError(f"token {self.token}: {shapes} must each be of shape (rows, 1 or more)")
        if len({len(part) for part in parts.values()}) > 1:
            raise ValueError(f"token {self.token}: {shapes} do not have the same rows; give one of each a row")
        if len(self) < FEWEST_ROWS:
            raise ValueError(
                f"token {self.token} has {len(self)} rows, too few to tell a mean gradient from 0; leave out tokens with "
                f"fewer than {FEWEST_ROWS}"
            )
        for name, part in parts.items():
            if not bool(torch.isfinite(part).all()):
                raise ValueError(f"token {self.token}: the {name} rows hold NaN or infinity; leave such rows out")
            object.__setattr__(self, name, part)
        if not bool(parts["signals"].any()):
            raise ValueError(f"token {self.token}: every signal is zero, so there is no gradient; leave the token out")
        if not bool(parts["tangent"].any() or parts["normal"].any()):
            raise ValueError(f"token {self.token}: no row lies away from the mean; leave the token out")

    def __len__(self) -> int:
        return len(self.signals)

    def __repr__(self) -> str:
        return f"TokenGradients(token {self.token}: {len(self)} rows)"


def parabola_gradients(
    n: int,
    seed: int = 0,
    *,
    target: float = -1.0,
    tilt: float = 0.0,
    step: float = 0.0,
    radius: float = 1.0,
    token: int = 0,
) -> TokenGradients:
    """Rows x = (u, u^2) about 0 with u uniform in [-radius, radius], W = 0, loss (Wx - y)^2 / 2.

    With y = ``target`` alone the mean tangent gradient is 0 and the normal one -target radius^2 / 3. With y = target + tilt u +
    step sign(u), it is tilt radius^2 / 3 + step radius / 2 in size: a tilt keeps normal / tangent = |target / tilt| however
    small the radius, a step makes it 2/3 |target / step| radius.
    """
    u = (2 * torch.from_numpy(np.random.default_rng(seed).random((n, 1))) - 1) * radius
    return TokenGradients(token, u, u**2, -(target + tilt * u + step * u.sign()))


@dataclass(frozen=True)
class OrderedRows:
    """Rows of a token in order of t; signals and displacements in units of their largest."""

    signals: Tensor
    tangent: Tensor
    normal: Tensor
    radius: np.ndarray
    parts: tuple[np.ndarray, np.ndarray]
    signal_unit: float
    length_unit: float


@dataclass(frozen=True)
class OuterSums:
    """Sums of delta_i u_i^T under weights, known only by their squared norms."""

    squares: Callable[[Tensor], Tensor]
    own: Tensor

    def unbiased(self, chosen: Float[Tensor, "sets n"]) -> Float[Tensor, " sets"]:
        """Mean over pairs of different rows of each set (of zeros and ones)."""
        count = chosen.sum(dim=1)
        return (self.squares(chosen) - chosen @ self.own) / (count * (count - 1))


def ordered_rows(group: TokenGradients, most: int, generator: np.random.Generator) -> OrderedRows:
    """Rows by rising t, at most ``most`` of them, and parts that are rounding set to zero."""
    signal_unit = float(group.signals.abs().max())
    length_unit = max(float(group.tangent.abs().max()), float(group.normal.abs().max()))
    signals, tangent, normal = group.signals / signal_unit, group.tangent / length_unit, group.normal / length_unit
    radius = torch.hypot(tangent.norm(dim=1), normal.norm(dim=1))
    # In order of t before rows are drawn, so that nothing depends on the order in which they came.
    order = torch.argsort(radius, stable=True)
    if len(order) > most:
        order = order[np.sort(generator.choice(len(order), most, replace=False))]
    signals, tangent, normal, radius = signals[order], tangent[order], normal[order], radius[order]
    tangent, normal = (torch.where(part.norm(dim=1) > _ROUNDING * radius, part.T, 0.0).T for part in (tangent, normal))
    sizes = signals.norm(dim=1)
    parts = ((sizes * tangent.norm(dim=1)).numpy(), (sizes * normal.norm(dim=1)).numpy())
    return OrderedRows(signals, tangent, normal, radius.numpy(), parts, signal_unit, length_unit)


def outer_sums(signals: Float[Tensor, "n out"], part: Float[Tensor, "n width"]) -> OuterSums:
    """Sums of the outer products of a signal and a part; holds n min(n, out width) numbers."""
    count = len(signals)
    own = signals.square().sum(dim=1) * part.square().sum(dim=1)
    if signals.shape[1] * part.shape[1] <= count:
        products = (signals[:, :, None] * part[:, None, :]).reshape(count, -1)
        return OuterSums(lambda weights: (weights @ products).square().sum(dim=1), own)
    # |sum s_i delta_i u_i^T|^2 = sum_ij s_i s_j (delta_i . delta_j)(u_i . u_j): never an out x width matrix.
    gram = (signals @ signals.T).mul_(part @ part.T)
    return OuterSums(lambda weights: (weights @ gram).mul_(weights).sum(dim=1), own)


def sign_flip_p_value(sums: OuterSums, flips: int, generator: np.random.Generator) -> float:
    """Share of sign patterns, the one found among them, that make the sum at least as long."""
    count, reached = len(sums.own), 1
    # Patterns that equal the one found up to rounding reach it.
    found = float(sums.squares(torch.ones(1, count, dtype=torch.float64))) * (1 - 1e-9)
    for size in _batches(flips, max(1, _BATCH // count)):
        signs = torch.from_numpy(2.0 * generator.integers(0, 2, size=(size, count), dtype=np.int8) - 1)
        reached += int((sums.squares(signs) >= found).sum())
    return reached / (flips + 1)


def _batches(total: int, largest: int) -> Iterator[int]:
    for begin in range(0, total, largest):
        yield min(largest, total - begin)
