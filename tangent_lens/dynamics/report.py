"""The result of one run over training checkpoints: early and late, checkpoint by checkpoint, and how it was made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from tangent_lens.dynamics.windows import EARLY, LATE, Windows
from tangent_lens.measures.energy import monte_carlo_p
from tangent_lens.measures.report import CorpusDescription, Measurement, Settings, Space, flat_row
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.showing import Shown
from tangent_lens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas

# What one row of a summary takes together: residual gradients, or the weight gradients of one input of each layer.
KINDS = ("residual", "attention", "mlp")


@dataclass(frozen=True)
class CheckpointPoint:
    """One checkpoint.

    Attributes:
        window: ``early``, ``late``, or "".
        loss: mean loss on the test sequences, in nats.
        measurements: its gradients against the fixed early proxies.
        refitted: the same against proxies fitted on its own activations; () unless asked for.
        overlaps: of its own proxies with the early ones, by site; empty unless asked for.
        spaces: the shape of its activations on the fit sequences.
        dimensions: intrinsic dimension (TwoNN) by site; empty unless asked for.
    """

    step: int
    name: str
    window: str
    loss: float
    measurements: tuple[Measurement, ...]
    refitted: tuple[Measurement, ...] = ()
    overlaps: Mapping[str, float] = field(default_factory=dict)
    spaces: tuple[Space, ...] = ()
    dimensions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateEnergy:
    """Energy of the updates W_E(t+1) - W_E(t) of the embedding rows in the embedding's early proxy, in one window.

    Attributes:
        bucket: of token frequency, the rarest first; None for all tokens together.
        low, high: frequencies of the tokens in it; tokens: how many.
        share: of the squared length of all updates.
        energy, lift: along the proxy; None where nothing moved.
    """

    window: str
    bucket: int | None
    low: float
    high: float
    tokens: int
    share: float
    energy: float | None
    lift: float | None


@dataclass(frozen=True)
class WindowSummary:
    """One row of the paper's Table 1: all layers of a model in one window, for one kind of gradient.

    Attributes:
        energy: mean over the layers of E(Q_T); random: of the exact mean over random normals; trailing: over the layers
            where it is determined, None where it is nowhere.
        lift: energy / random; trailing_ratio: energy / trailing.
        p_value: (1 + #{j: mean over layers of E(Q_N^j) >= energy}) / (m + 1).
        signal_lift: median over the layers; None for residual gradients.
        delta_iso, delta_iso_random: mean over layers of the change of IsoScore* without the tangent, and without a normal.
        delta_iso_p_value: as ``p_value``, of the change.
    """

    window: str
    kind: str
    layers: int
    energy: float
    random: float
    lift: float
    trailing: float | None
    trailing_ratio: float | None
    p_value: float
    signal_lift: float | None
    delta_iso: float
    delta_iso_random: float
    delta_iso_p_value: float


@dataclass(frozen=True, repr=False, eq=False)
class DynamicsReport(Shown):
    """Early and late in training, against proxies fitted once on the pooled early activations.

    Attributes:
        model: of the last checkpoint; corpus, settings: what was measured, on what, and how.
        windows: which checkpoints are early and late.
        points: every checkpoint, in step order.
        early, late: the gradients of all checkpoints of a window together.
        updates: of the embedding; () where the model has none, or one checkpoint only in each window.
        subspaces: the early proxies, by site name.
    """

    model: ModelDescription
    corpus: CorpusDescription
    settings: Settings
    windows: Windows
    points: tuple[CheckpointPoint, ...]
    early: tuple[Measurement, ...]
    late: tuple[Measurement, ...]
    updates: tuple[UpdateEnergy, ...]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    created: str
    subspaces: Mapping[str, Subspace] = field(default_factory=dict)

    def of(self, window: str) -> tuple[Measurement, ...]:
        """The measurements of ``early`` or ``late``.

        Raises:
            KeyError: another name.
        """
        if window not in (EARLY, LATE):
            raise KeyError(f"{window!r} is no window of a training run; it has 'early' and 'late'")
        return self.early if window == EARLY else self.late

    def summary(self) -> tuple[WindowSummary, ...]:
        """All layers together: one entry a window and kind of gradient."""
        found = (summarise(window, kind, self.of(window)) for kind in KINDS for window in (EARLY, LATE))
        return tuple(one for one in found if one is not None)

    def steps(self) -> tuple[int, ...]:
        """Of all checkpoints."""
        return tuple(point.step for point in self.points)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a checkpoint and gradient; ``proxy`` says whether it is the early one or its own."""
        import pandas

        rows = []
        for point in self.points:
            about = {"step": point.step, "window": point.window, "loss": point.loss}
            for proxy, measurements in ((EARLY, point.measurements), ("own", point.refitted)):
                rows += [about | {"proxy": proxy} | flat_row(one) for one in measurements]
        return pandas.DataFrame(rows)

    def plot(self) -> Any:
        """Loss, lift, isotropy and dimension over steps, as a matplotlib figure (needs the ``plot`` extra)."""
        from tangent_lens.reports.dynamics_plot import plot_dynamics

        return plot_dynamics(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder of ``report.json`` and the subspaces."""
        from tangent_lens.reports.dynamics_files import save_dynamics

        save_dynamics(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DynamicsReport:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError, FileProblem: no report is there, or it is damaged or of a newer format.
        """
        from tangent_lens.reports.dynamics_files import load_dynamics

        return load_dynamics(folder)


def of_kind(measurements: Sequence[Measurement], kind: str) -> list[Measurement]:
    """Those of one kind of a summary: residual gradients, or the pooled weight gradients of attention or MLP inputs."""
    if kind == "residual":
        return [one for one in measurements if one.gradient == "residual"]
    return [one for one in measurements if one.pooled and one.kind == kind]


def summarise(window: str, kind: str, measurements: Sequence[Measurement]) -> WindowSummary | None:
    """All layers of one kind together; None where none was measured."""
    found = of_kind(measurements, kind)
    if not found:
        return None
    energies, isotropies = [one.energy for one in found], [one.isotropy for one in found]
    energy = float(np.mean([one.energy for one in energies]))
    expected = float(np.mean([one.expected_random for one in energies]))
    trailing = [one.trailing for one in energies if one.trailing is not None]
    least = float(np.mean(trailing)) if trailing else None
    signals = [one.signal_lift for one in energies if one.signal_lift is not None]
    delta = float(np.mean([one.delta for one in isotropies]))
    random_deltas = np.mean([one.random for one in isotropies], axis=0)
    return WindowSummary(
        window=window,
        kind=kind,
        layers=len(found),
        energy=energy,
        random=expected,
        lift=energy / expected if expected > 0 else float("inf"),
        trailing=least,
        trailing_ratio=energy / least if least else None,
        p_value=monte_carlo_p(energy, np.mean([one.random for one in energies], axis=0).tolist()),
        signal_lift=median(signals) if signals else None,
        delta_iso=delta,
        delta_iso_random=float(random_deltas.mean()),
        delta_iso_p_value=monte_carlo_p(delta, random_deltas.tolist()),
    )
