"""What taps feed where sums are sketched: receivers that turn passing tensors into products with fixed directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from tangent_lens.models.protocol import LinearMap
from tangent_lens.recording.moments import device_with_float64
from tangent_lens.recording.receivers import MapReceiver, PositionVariance, Selection, check_first_answer
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments, gaussian_number, left_directions, left_seed
from tangent_lens.recording.taps import GradientReceiver, SiteNeverFired
from tangent_lens.sites import Site


@dataclass(frozen=True, eq=False)
class SketchDirections:
    """The test matrix [own | probes] of a site's rows, as :class:`~tangent_lens.recording.sketch.SketchedMoments` has it."""

    own: Float[Tensor, "d w"]
    probes: Float[Tensor, "d n"] | None = None


# From a site and the width of its rows, which may be known only when the first of them pass.
ActivationSketch = Callable[[Site, int], SketchDirections]


@dataclass(frozen=True, eq=False)
class GradientSketch:
    """The test matrices of a gradient pass.

    Attributes:
        at_sites: for the rows of each site; at_inputs: for the input side of the maps that read each site.
        left_rows: how many Gaussian rows the output side of those maps is seen through.
        seed: of these.
    """

    at_sites: Mapping[Site, SketchDirections]
    at_inputs: Mapping[Site, SketchDirections]
    left_rows: Mapping[Site, int]
    seed: int = 0

    def left(self, one: LinearMap, out: int) -> Float[Tensor, "s out"]:
        """Psi of one map: another for each, so that several maps can be taken together."""
        return left_directions(out, self.left_rows[one.reads], self._left_seed(one))

    def left_recipe(self, one: LinearMap, out: int) -> dict[str, int]:
        """How a server draws the same numbers, which would be too many to send."""
        rows = self.left_rows[one.reads]
        return {"out": out, "rows": rows, "number": gaussian_number(out, rows, left_seed(self._left_seed(one)))}

    def _left_seed(self, one: LinearMap) -> str:
        return f"{self.seed}/{one.name}"


@dataclass(frozen=True, eq=False)
class SketchedWeight:
    """The sketched loss gradient of one linear map, under the name it has in a report."""

    kind: str
    layer: int
    reads: Site
    gradient: SketchedGradient

    @property
    def name(self) -> str:
        """``query.3``."""
        return f"{self.kind}.{self.layer}"

    @property
    def rows(self) -> int:
        """Number of rows summed."""
        return self.gradient.rows


class SketchReceiver:
    """The sketch of one site's rows: of its activations, or of its gradients.

    Attributes:
        fired: how many tensors passed; answered: how many of them got a gradient.
    """

    def __init__(
        self, site: Site, selection: Selection, matrices: ActivationSketch, *, gradients: bool = False
    ) -> None:
        self.site = site
        self.selection = selection
        self.matrices = matrices
        self.gradients = gradients
        self.sketch: SketchedMoments | None = None
        self.positions: PositionVariance | None = None
        self.fired = 0
        self.answered = 0

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site.name

    def __call__(self, activation: Float[Tensor, "batch pos width"]) -> GradientReceiver | None:
        """Take one batch of activations in, or wait for its gradient."""
        self.fired += 1
        choice = self.selection.current
        if self.gradients:
            return partial(self._take_gradient, choice)
        rows = choice.rows(activation)
        self._sketch_for(rows).update(rows)
        if choice.positions is not None:
            self.positions = self.positions or PositionVariance(rows.shape[1])
            self.positions.update(rows, choice.row_positions())
        return None

    def _take_gradient(self, choice: RowChoice, gradient: Tensor) -> None:
        check_first_answer(self.name, self.answered, self.fired)
        self.answered += 1
        rows = choice.rows(gradient)
        self._sketch_for(rows).update(rows)

    def _sketch_for(self, rows: Tensor) -> SketchedMoments:
        if self.sketch is None:
            name = f"{'gradients' if self.gradients else 'activations'} at {self.name}"
            matrix, device = self.matrices(self.site, rows.shape[1]), device_with_float64(rows)
            self.sketch = SketchedMoments(matrix.own, matrix.probes, name=name, device=device)
        return self.sketch

    def result(self) -> SketchedMoments:
        """What was gathered.

        Raises:
            SiteNeverFired: no tensor passed, or no gradient came.
        """
        if self.sketch is None:
            raise SiteNeverFired(f"{self.site}: no forward pass has come by; run the model while the tap is attached")
        return self.sketch


class SketchedWeightReceiver(MapReceiver):
    """Sketched weight gradients of the maps that share one module."""

    def __init__(self, maps: Iterable[LinearMap], selection: Selection, sketch: GradientSketch) -> None:
        super().__init__(maps, selection)
        self.sketch = sketch
        self._sums: list[SketchedGradient] = []

    def _take_pair(self, inputs: Tensor, signals: Tensor) -> None:
        if not self._sums:
            self._sums = [self._sum_of(one, signals) for one in self.maps]
        for one, total in zip(self.maps, self._sums, strict=True):
            columns = one.output.columns
            total.update(signals if columns is None else signals[:, columns.to(signals.device)], inputs)

    def _sum_of(self, one: LinearMap, delta: Tensor) -> SketchedGradient:
        matrix, columns = self.sketch.at_inputs[one.reads], one.output.columns
        return SketchedGradient(
            matrix.own,
            self.sketch.left(one, delta.shape[1] if columns is None else len(columns)),
            matrix.probes,
            name=f"weight gradient {one.name}",
            device=device_with_float64(delta),
        )

    def results(self) -> list[SketchedWeight]:
        """One sketch a map.

        Raises:
            SiteNeverFired: nothing was gathered.
        """
        if not self._sums:
            raise SiteNeverFired(f"{self.name}: no backward pass has come by")
        return [
            SketchedWeight(one.kind, one.layer, one.reads, total)
            for one, total in zip(self.maps, self._sums, strict=True)
        ]
