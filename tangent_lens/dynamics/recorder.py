"""Measurements from inside a training run: at a few steps, in a share of its time, without changing a bit of it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tangent_lens.dynamics.schedule import Schedule, check_share, schedule_of, seconds_allowed
from tangent_lens.measures.measure import measure_model
from tangent_lens.measures.plan import plan_measurement
from tangent_lens.measures.report import Measurement, Report, Settings, Space, flat_row
from tangent_lens.models.checkpoints import CheckpointSource, state_checkpoints
from tangent_lens.models.loading import with_weights, wrap
from tangent_lens.models.protocol import Model, pad_id_of
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import Loss, choose_loss
from tangent_lens.recording.moments import NonFiniteRows
from tangent_lens.recording.reading import Texts, read_corpus
from tangent_lens.sites import SiteSelection, resolve
from tangent_lens.storage import load_tensors, save_tensors

if TYPE_CHECKING:
    import pandas

STATE = "training state"


@dataclass(frozen=True, repr=False)
class TrainingPoint:
    """What was measured at one step; every tangent proxy was fitted on the activations of that very step.

    Attributes:
        step: optimiser steps done.
        elapsed: seconds since the recorder was first called.
        seconds: that this point took.
        loss: mean loss on the test half of the probe corpus, in nats.
        spaces: the activations, one entry a site at which a proxy was fitted.
        measurements: the gradients, one entry a gradient and place.
    """

    step: int
    elapsed: float
    seconds: float
    loss: float
    spaces: tuple[Space, ...]
    measurements: tuple[Measurement, ...]

    @property
    def medians(self) -> dict[str, float]:
        """Medians over the layers, by short names: ``loss``, ``iso_score`` of the activations, and ``residual_lift``,
        ``residual_energy``, ``weight_lift``, ``weight_energy``, ``weight_signal_lift`` of what was measured.
        """
        found = {"loss": self.loss, "iso_score": _median(space.iso_score for space in self._residual_spaces())}
        for gradient in ("residual", "weight"):
            # Of the weights, all maps of an input together: one number a layer's attention, one its MLP.
            tests = [
                one.energy
                for one in self.measurements
                if one.gradient == gradient and one.pooled == (gradient == "weight")
            ]
            for name in ("lift", "energy", "signal_lift"):
                values = [value for test in tests if (value := getattr(test, name)) is not None]
                if values:
                    found[f"{gradient}_{name}"] = _median(values)
        return found

    def _residual_spaces(self) -> Sequence[Space]:
        sites = {one.site for one in self.measurements if one.gradient == "residual"}
        return [space for space in self.spaces if space.site in sites] or self.spaces

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.3g}" for name, value in self.medians.items())
        return f"TrainingPoint(step {self.step}: {shown})"


@dataclass(frozen=True)
class SkippedStep:
    """A step that was due and was not measured, and why."""

    step: int
    reason: str


class TangentRecorder:
    """Measures a model while it trains; call :meth:`step` after every optimiser step (and before the first).

    The training is not changed in any bit: ``grad``, ``requires_grad``, the mode of every submodule, random states and
    the optimiser are as they were. Half of the probe corpus fits the proxies, the other half brings the gradients.

    Args:
        texts: the probe corpus, the same at every step: texts, token ids, or a :class:`Corpus`. Best what is not trained on.
        tokenizer: needed for texts if the model does not bring its own.
        sites, rank, controls, gradients, loss, statistics, seed: as of :meth:`tangent_lens.lens.Lens.measure`; wide models
            want ``statistics="sketch"`` (``auto`` may choose differently from step to step).
        max_sequences, sequence_length, pack, batch_size: how large the probe corpus is, and how it is read.
        steps: which steps are due: a :class:`LogSpaced`, steps one by one, or None for 0, 1, 2, 4, 8, ... A due step at which
            :meth:`step` is not called is made up for at the next call. The first call always measures.
        last_step: the number of steps of the whole training, where it is known: it is then always measured, and time
            can be spent ahead on the early steps.
        budget: the largest share of the training time that measuring may take; a due step that would exceed it is skipped,
            and kept in ``skipped``. The first two points and the last step are measured whatever they take. None: no limit.
        keep_states: a folder for the weights of every due step, so that :meth:`source` can hand them to the early/late
            protocol afterwards. Writing them counts as measuring, but they are kept where there is no time to measure, too.
        on_point: called with every new :class:`TrainingPoint`; one function, or several.

    Attributes:
        points: what was measured, in the order of the steps.
        skipped: due steps that were not measured.
    """

    def __init__(
        self,
        texts: Texts,
        tokenizer: Any = None,
        *,
        sites: SiteSelection = "resid_post.*",
        rank: int | float | str = 8,
        controls: int = 20,
        gradients: Sequence[str] = ("residual", "weight"),
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        max_sequences: int | None = 16,
        sequence_length: int | None = 128,
        pack: bool = False,
        batch_size: int = 8,
        statistics: str = "exact",
        seed: int = 0,
        steps: Schedule | Iterable[int] | None = None,
        last_step: int | None = None,
        budget: float | None = 0.05,
        keep_states: str | os.PathLike[str] | None = None,
        on_point: Callable[[TrainingPoint], Any] | Sequence[Callable[[TrainingPoint], Any]] = (),
    ) -> None:
        check_share(budget)
        self.points: tuple[TrainingPoint, ...] = ()
        self.skipped: tuple[SkippedStep, ...] = ()
        self.last_step = last_step
        self._budget = budget
        self._schedule = schedule_of(steps)
        self._next: int | None = -1
        self._listeners = (on_point,) if callable(on_point) else tuple(on_point)
        self._folder = None if keep_states is None else Path(keep_states)
        self._states: dict[int, Path] = {}
        self._texts, self._tokenizer, self._sites, self._loss = texts, tokenizer, sites, loss
        self._settings = Settings(
            rank=rank,
            controls=controls,
            seed=seed,
            gradients=(gradients,) if isinstance(gradients, str) else tuple(gradients),
            max_sequences=max_sequences,
            sequence_length=sequence_length,
            pack=pack,
            batch_size=batch_size,
            statistics=statistics,
        )
        self._model: tuple[Any, Model] | None = None
        self._corpus: Corpus | None = None
        self._began: float | None = None
        self._seen = -1
        self._first_step = 0
        self._spent = 0.0

    def step(self, model: Any, step: int, *, last: bool = False) -> TrainingPoint | None:
        """Measure if this step is due; costs next to nothing where it is not.

        Args:
            model: what :func:`tangent_lens.models.loading.wrap` takes, at any moment between two passes.
            step: optimiser steps done so far.
            last: that this is the end, whatever ``last_step`` says.

        Returns:
            The new point; None where nothing was measured.

        Raises:
            ValueError: steps that go backwards; settings that do not fit the model or the corpus, at the first point. What
                goes wrong later (a loss that became NaN) is no reason to end a training: it is a warning, and in ``skipped``.
            UnsupportedModel: the model is not known.
        """
        if step < self._seen:
            raise ValueError(f"step {step} comes after step {self._seen}; a new training needs a new TangentRecorder")
        last = last or step == self.last_step
        due = last or (self._next is not None and step >= self._next)
        self._seen = step
        if not due or (self.points and self.points[-1].step == step):
            return None
        self._next = self._schedule.after(step)
        return self._due(model, step, last)

    @property
    def seconds(self) -> float:
        """Spent in measuring so far."""
        return self._spent

    @property
    def share(self) -> float:
        """Of the training time so far, what was spent in measuring."""
        trained = self._trained()
        return self._spent / trained if trained > 0 else 0.0

    def source(self, model: Any, *, name: str | None = None) -> CheckpointSource:
        """The kept states as checkpoints; each is loaded into this model in turn, which has its own weights afterwards.

        Args:
            model: the one that was trained.
            name: what a report calls it.

        Raises:
            ValueError: no state was kept.
        """
        if not self._states:
            raise ValueError("no state was kept; give TangentRecorder(keep_states=folder) a folder, and train")
        states = [(step, partial(_read_state, path)) for step, path in self._states.items()]
        return state_checkpoints(model, states, tokenizer=self._tokenizer, name=name)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a step and measurement, one column a number."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "step": point.step,
                    "elapsed": point.elapsed,
                    "seconds": point.seconds,
                    "loss": point.loss,
                    **flat_row(one),
                }
                for point in self.points
                for one in point.measurements
            ]
        )

    def __repr__(self) -> str:
        steps = ", ".join(str(point.step) for point in self.points) or "none yet"
        return f"TangentRecorder: steps {steps}; {len(self.skipped)} skipped; {self._spent:.1f} s, {self.share:.1%} of training"

    def _due(self, model: Any, step: int, last: bool) -> TrainingPoint | None:
        now = time.perf_counter()
        if self._began is None:
            self._began, self._first_step = now, step
        reason = None if last else self._too_slow(step)
        point = None
        try:
            wrapped = self._wrapped(model)
            if reason is None:
                point = self._measured(wrapped, step, now)
            if self._folder is not None:
                self._states[step] = _write_state(wrapped.module, self._folder, step)
        except ValueError as problem:
            # That the settings fit was shown by the first point; NaN is the training's own trouble.
            if not self.points and not isinstance(problem, NonFiniteRows):
                raise
            reason = str(problem)
            warnings.warn(f"step {step} was not measured: {reason}", stacklevel=3)
        finally:
            self._spent += time.perf_counter() - now
        if reason is not None:
            self.skipped = (*self.skipped, SkippedStep(step, reason))
        if point is not None:
            for listen in self._listeners:
                listen(point)
        return point

    def _too_slow(self, step: int) -> str | None:
        """Why there is no time for this step, in a sentence; None where there is."""
        if self._budget is None or len(self.points) < 2:
            return None
        trained, cost = self._trained(), self.points[-1].seconds
        whole = None
        if self.last_step is not None and step > self._first_step:
            whole = trained * (self.last_step - self._first_step) / (step - self._first_step)
        # The last step will be measured in any case.
        needed = self._spent + cost * (1 if whole is None else 2)
        if needed <= seconds_allowed(self._budget, trained, whole):
            return None
        return (
            f"measuring took {self._spent:.2f} s so far and would take {cost:.2f} s more, above {self._budget:.1%} of the "
            "training time; raise budget, measure fewer sequences (max_sequences) or fewer sites"
        )

    def _trained(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began - self._spent

    def _measured(self, model: Model, step: int, began: float) -> TrainingPoint:
        # Under autocast the gradients would be those of rounded weights; the surrounding block comes back by itself.
        with torch.autocast(model.device.type, enabled=False):
            report = self._report(model)
        now = time.perf_counter()
        assert self._began is not None and report.corpus.loss is not None
        point = TrainingPoint(
            step, now - self._began, now - began, report.corpus.loss, report.spaces, report.measurements
        )
        self.points = (*self.points, point)
        return point

    def _report(self, model: Model) -> Report:
        settings = self._settings
        sites = resolve(self._sites, model.sites, model.absent, model.misleading_names)
        if self._corpus is None:
            options = ("sequence_length", "max_sequences", "pack")
            reading = {option: getattr(settings, option) for option in options}
            self._corpus = read_corpus(self._texts, model.tokenizer, **reading, name="probe")
        plan = plan_measurement(model, sites, settings)
        objective = choose_loss(self._loss, model, settings.seed)
        return measure_model(model, self._corpus, settings, plan, objective, pad_id=pad_id_of(model))

    def _wrapped(self, model: Any) -> Model:
        if self._model is None or self._model[0] is not model:
            tokenizer = None if hasattr(model, "tap_point") else self._tokenizer
            self._model = model, with_weights(wrap(model, tokenizer))
        return self._model[1]


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _write_state(module: torch.nn.Module, folder: Path, step: int) -> Path:
    """The weights, no narrower than float32; tied ones once."""
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        own.setdefault(id(tensor), (name, tensor.detach()))
    tensors = {name: tensor.to(_kept_dtype(tensor), copy=True) for name, tensor in own.values()}
    path = folder / f"step-{step:06d}.safetensors"
    save_tensors(path, STATE, tensors, {"step": step})
    return path


def _kept_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _read_state(path: Path) -> dict[str, Tensor]:
    return load_tensors(path, STATE)[0]
