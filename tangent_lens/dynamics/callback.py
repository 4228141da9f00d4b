"""The recorder inside a HuggingFace Trainer, and its numbers in other people's loggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tangent_lens.dynamics.recorder import TangentRecorder, TrainingPoint

PREFIX = "tangent/"


class TangentCallback:
    """Measures while a HuggingFace ``Trainer`` trains: ``Trainer(..., callbacks=[TangentCallback(recorder)])``.

    The medians of every point also stand in ``trainer.state.log_history``, under names such as ``tangent/weight_lift``, and
    so in the ``trainer_state.json`` of every checkpoint. Where several processes train, the first one measures and the
    others wait; weights that are spread over processes (FSDP, DeepSpeed stage 3) cannot be measured so. Mixed precision of
    the Trainer applies to the gradients, not to the activations that the proxies are fitted on.

    Args:
        recorder: a :class:`TangentRecorder`. Without a ``last_step`` of its own it takes the Trainer's ``max_steps``.
    """

    def __init__(self, recorder: TangentRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the first step."""
        if self.recorder.last_step is None and state.max_steps > 0:
            self.recorder.last_step = state.max_steps
        self._step(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After every optimiser step."""
        self._step(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After the last step, where the training was stopped early."""
        # The Trainer may have loaded the best checkpoint by now, and these are not the weights of this step.
        if not getattr(args, "load_best_model_at_end", False):
            self._step(state, model, last=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other event that this or a later Trainer knows is none of ours."""
        if name.startswith("on_"):
            return _ignore
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _step(self, state: Any, model: Any, last: bool = False) -> None:
        if not state.is_world_process_zero:
            return
        point = self.recorder.step(model, state.global_step, last=last)
        if point is not None:
            state.log_history.append({**named_medians(point), "step": point.step})


def named_medians(point: TrainingPoint) -> dict[str, float]:
    """The medians of a point under the names that they have in logs."""
    return {PREFIX + name: value for name, value in point.medians.items()}


def to_wandb(run: Any) -> Callable[[TrainingPoint], None]:
    """For ``on_point``: log the medians of every point to a Weights & Biases run, with their step as ``tangent/step``.

    W&B's own step counter is left to the training: ``run.define_metric("tangent/*", step_metric="tangent/step")`` draws
    them over their steps.
    """

    def log(point: TrainingPoint) -> None:
        run.log({**named_medians(point), f"{PREFIX}step": point.step})

    return log


def to_tensorboard(writer: Any) -> Callable[[TrainingPoint], None]:
    """For ``on_point``: write the medians of every point to a TensorBoard ``SummaryWriter``."""

    def write(point: TrainingPoint) -> None:
        for name, value in named_medians(point).items():
            writer.add_scalar(name, value, point.step)

    return write


def _ignore(*args: Any, **kwargs: Any) -> None:
    """An event that nothing is measured at."""
