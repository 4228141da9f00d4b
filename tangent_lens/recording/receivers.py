"""What taps feed: receivers that turn passing tensors into moments, kept rows, or weight gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.models.protocol import LinearMap
from tangent_lens.recording.moments import (
    ROWS_A_PRODUCT,
    Moments,
    NonFiniteRows,
    ProjectedSums,
    SecondMoments,
    device_with_float64,
    full_precision,
)
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.sketch import SketchedMoments
from tangent_lens.recording.taps import GradientNeverCame, GradientReceiver, SiteNeverFired
from tangent_lens.sites import Site

# Massive activations sit at the first positions (attention sinks); these are watched one by one.
WATCHED_POSITIONS = 16


class Selection:
    """The row choice of the batch now passing, shared by all receivers of one recording."""

    def __init__(self) -> None:
        self.current = RowChoice()


class PositionVariance:
    """How much of a site's variance each of the first positions holds."""

    def __init__(self, width: int) -> None:
        self.count = torch.zeros(WATCHED_POSITIONS, dtype=torch.float64)
        self.sum = torch.zeros(WATCHED_POSITIONS, width, dtype=torch.float64)
        self.square_sum = torch.zeros(WATCHED_POSITIONS, dtype=torch.float64)

    def update(self, rows: Float[Tensor, "n width"], positions: Int[Tensor, " n"]) -> None:
        """Add the rows that stand at watched positions."""
        early = (positions < WATCHED_POSITIONS).to(rows.device)
        rows, places = rows[early].double().cpu(), positions[early.to(positions.device)].cpu()
        self.count.index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
        self.sum.index_add_(0, places, rows)
        self.square_sum.index_add_(0, places, rows.square().sum(dim=1))

    def shares(self, moments: SecondMoments | SketchedMoments) -> Float[Tensor, " watched"]:
        """Share of the total squared distance to the mean that each watched position holds."""
        mean = moments.mean.cpu()
        distances = self.square_sum - 2 * self.sum @ mean + self.count * mean.square().sum()
        return distances / (moments.total_variance() * (moments.count - 1))


class MomentsReceiver:
    """Moments of one site: of its activations, its gradients, or both.

    Attributes:
        fired: how many tensors passed.
        answered: how many of them got a gradient.
    """

    def __init__(
        self,
        site: Site,
        selection: Selection,
        *,
        activations: bool = True,
        gradients: bool = False,
        cross: bool = False,
        watch_positions: bool = False,
    ) -> None:
        self.site = site
        self.selection = selection
        self.wants_activations = activations
        self.wants_gradients = gradients
        self.cross = cross
        self.watch_positions = watch_positions
        self.moments: Moments | None = None
        self.positions: PositionVariance | None = None
        self.fired = 0
        self.answered = 0

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> GradientReceiver | None:
        """Take one batch of activations in; its gradient, if wanted, comes later."""
        self.fired += 1
        choice = self.selection.current
        moments = self._moments_for(activation)
        if self.cross:
            return partial(self._take_pair, moments, choice, activation, activation._version)
        if self.wants_activations:
            rows = choice.rows(activation)
            moments.activations.update(rows)
            if self.watch_positions and choice.positions is not None:
                self.positions = self.positions or PositionVariance(rows.shape[1])
                self.positions.update(rows, choice.row_positions())
        return partial(self._take_gradient, moments, choice) if self.wants_gradients else None

    def _take_gradient(self, moments: Moments, choice: RowChoice, gradient: Tensor) -> None:
        self._count_answer()
        moments.gradients.update(choice.rows(gradient))

    def _count_answer(self) -> None:
        check_first_answer(self.name, self.answered, self.fired)
        self.answered += 1

    def _take_pair(
        self, moments: Moments, choice: RowChoice, activation: Tensor, version: int, gradient: Tensor
    ) -> None:
        self._count_answer()
        check_unchanged(activation, version, self.name)
        moments.update(choice.rows(activation), choice.rows(gradient))

    def _moments_for(self, activation: Tensor) -> Moments:
        if self.moments is None:
            device = device_with_float64(activation)
            self.moments = Moments(activation.shape[-1], name=self.site.name, cross=self.cross, device=device)
        return self.moments

    def result(self) -> Moments:
        """What was gathered.

        Raises:
            SiteNeverFired: no tensor passed.
        """
        if self.moments is None:
            raise SiteNeverFired(f"{self.site}: no forward pass has come by; run the model while the tap is attached")
        return self.moments


class InputReceiver:
    """Sums of the input rows that linear maps read: full second moments, or only what one subspace needs."""

    def __init__(self, site: Site, selection: Selection, basis: Tensor | None = None) -> None:
        self.site = site
        self.selection = selection
        self.basis = basis
        self.fired = 0
        self.sums: SecondMoments | ProjectedSums | None = None

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> None:
        """Take one batch in."""
        self.fired += 1
        rows = self.selection.current.rows(activation)
        if self.sums is None:
            name = f"inputs at {self.name}"
            if self.basis is None:
                self.sums = SecondMoments(rows.shape[1], name=name, device=device_with_float64(rows))
            else:
                self.sums = ProjectedSums(self.basis, name=name)
        self.sums.update(rows)

    def result(self) -> SecondMoments | ProjectedSums:
        """What was gathered.

        Raises:
            SiteNeverFired: no tensor passed.
        """
        if self.sums is None:
            raise SiteNeverFired(f"{self.site}: no forward pass has come by; run the model while the tap is attached")
        return self.sums


class RowsReceiver:
    """Keeps every tensor that passes one site, and its gradient: for looking at few sequences closely."""

    def __init__(self, site: Site, selection: Selection, *, gradients: bool = False) -> None:
        self.site = site
        self.selection = selection
        self.wants_gradients = gradients
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.choices: list[RowChoice] = []
        self.fired = 0
        self.answered = 0

    def __call__(self, activation: Tensor) -> GradientReceiver | None:
        """Keep a copy: the model may change the tensor in place afterwards."""
        self.fired += 1
        self.activations.append(activation.clone())
        self.gradients.append(None)
        self.choices.append(self.selection.current)
        return partial(self._take_gradient, self.fired - 1) if self.wants_gradients else None

    def _take_gradient(self, place: int, gradient: Tensor) -> None:
        before = self.gradients[place]
        self.answered += before is None
        # A second backward pass through the same graph adds to the first, as torch's own .grad does.
        self.gradients[place] = gradient.clone() if before is None else before + gradient


@dataclass(frozen=True)
class WeightGradient:
    """The loss gradient of one linear map and what the shuffled control needs of its backward signals.

    Attributes:
        gradient: G = sum of delta_i u_i^T (out, in), float64.
        rows: number N of rows summed.
        signal_sum: sum of delta_i (out,).
        signal_square_sum: sum of delta_i squared, entry by entry (out,).
    """

    kind: str
    layer: int
    reads: Site
    gradient: Float[Tensor, "out in"]
    rows: int
    signal_sum: Float[Tensor, " out"]
    signal_square_sum: Float[Tensor, " out"]

    @property
    def name(self) -> str:
        """``query.3``."""
        return f"{self.kind}.{self.layer}"


class MapReceiver:
    """Pairs the input rows of maps that share one module with the gradients of its output; what is summed is its heirs' matter.

    Attributes:
        fired: how many outputs passed; answered: how many of them got a gradient.
    """

    def __init__(self, maps: Iterable[LinearMap], selection: Selection) -> None:
        self.maps = tuple(maps)
        self.selection = selection
        self.fired = 0
        self.answered = 0
        self._inputs: Tensor | None = None

    @property
    def name(self) -> str:
        """The first map's name."""
        return self.maps[0].name

    def take_input(self, activation: Tensor) -> None:
        """The map's input rows, kept until the gradient of its output has come."""
        self._inputs = activation

    def take_output(self, activation: Tensor) -> GradientReceiver:
        """The map's output passes: pair its coming gradient with the input."""
        self.fired += 1
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            raise SiteNeverFired(f"{self.name}: its output passed without its input; this module is called oddly")
        return partial(self._take_signal, inputs, inputs._version, self.selection.current)

    def _take_signal(self, inputs: Tensor, version: int, choice: RowChoice, signal: Tensor) -> None:
        check_unchanged(inputs, version, self.name)
        self.answered += 1
        # A model spread over devices moves a map's input inside the map, after the tap has seen it.
        self._take_pair(choice.rows(inputs.to(signal.device)), choice.rows(signal))

    def _take_pair(self, inputs: Float[Tensor, "n in"], signals: Float[Tensor, "n out"]) -> None:
        raise NotImplementedError


class WeightReceiver(MapReceiver):
    """Weight gradients of the maps that share one module (fused queries, keys and values are one product).

    The parameters themselves need no gradient: G is formed from the map's input rows and the gradient of its output.
    """

    def __init__(self, maps: Iterable[LinearMap], selection: Selection) -> None:
        super().__init__(maps, selection)
        self.rows = 0
        self._sums: tuple[Tensor, ...] | None = None

    def _take_pair(self, inputs: Tensor, signals: Tensor) -> None:
        for u, delta in zip(inputs.split(ROWS_A_PRODUCT), signals.split(ROWS_A_PRODUCT), strict=True):
            self._add(
                u if u.dtype == torch.float64 else u.float(), delta if delta.dtype == torch.float64 else delta.float()
            )

    def _add(self, u: Tensor, delta: Tensor) -> None:
        # Sums over one chunk are as precise as its product; summing in float64 here would cost a tenth of the pass.
        signal_sum = delta.sum(dim=0)
        self._check_finite(signal_sum)
        with full_precision(u):
            parts = (delta.T @ u, signal_sum, delta.square().sum(dim=0))
        if self._sums is None:
            device = device_with_float64(u)
            self._sums = tuple(torch.zeros(part.shape, dtype=torch.float64, device=device) for part in parts)
        for total, part in zip(self._sums, parts, strict=True):
            total.add_(part.to(total.device))
        self.rows += len(u)

    def _check_finite(self, sums: Tensor) -> None:
        if not bool(torch.isfinite(sums).all()):
            raise NonFiniteRows(
                f"{self.name}: its weight gradient holds NaN or infinity; find out where the model overflows "
                "before measuring (float32 is the safest dtype)"
            )

    def results(self) -> list[WeightGradient]:
        """One weight gradient a map.

        Raises:
            SiteNeverFired: nothing was gathered.
        """
        if self._sums is None:
            raise SiteNeverFired(f"{self.name}: no backward pass has come by")
        gradient, signal_sum, square_sum = self._sums
        self._check_finite(gradient)
        results = []
        for one in self.maps:
            own = slice(None) if one.output.columns is None else one.output.columns.to(gradient.device)
            sums = (gradient[own], self.rows, signal_sum[own], square_sum[own])
            results.append(WeightGradient(one.kind, one.layer, one.reads, *sums))
        return results


def check_first_answer(name: str, answered: int, fired: int) -> None:
    """Sums cannot take a gradient back.

    Raises:
        GradientNeverCame: every tensor that passed has had its gradient already.
    """
    if answered == fired:
        raise GradientNeverCame(
            f"{name}: a second backward pass went through one forward pass, and sums cannot be corrected "
            "afterwards; run the forward pass again, or keep='rows'"
        )


def check_unchanged(tensor: Tensor, version: int, name: str) -> None:
    """Refuse a tensor that was changed in place. Views share the version counter of the tensor that passed."""
    if tensor._version != version:
        raise RuntimeError(
            f"{name}: the tensor that passed here was changed in place before its gradient came; "
            "let the hook or the model make a new tensor instead"
        )
