"""Inside a real HuggingFace Trainer, and the exports of its points."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_model
from plain_reference import random_tokens
from transformers import Trainer, TrainerCallback, TrainingArguments

from tangent_lens.dynamics.callback import TangentCallback, named_medians, to_tensorboard, to_wandb
from tangent_lens.dynamics.recorder import TangentRecorder

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

PROBE = random_tokens(6, 10, seed=5)
ROWS = [{"input_ids": row, "labels": row} for row in random_tokens(40, 12, seed=6)]
SMALL = {"rank": 3, "controls": 5}


def trained(folder, callbacks=(), **options):
    """A short real training with dropout, clipping, accumulation, a schedule and a log at every step."""
    model = tiny_model("gpt2", torch.float32).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    arguments = {
        "output_dir": str(folder),
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    trainer = Trainer(
        model=model, args=TrainingArguments(**arguments | options), train_dataset=ROWS, callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


def losses(trainer):
    return [(one["step"], one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_a_trainer_run_is_the_same_to_the_last_bit(tmp_path, options):
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, keep_states=tmp_path / "states")
    plain = trained(tmp_path / "plain", **options)
    watched = trained(tmp_path / "watched", [TangentCallback(recorder)], **options)
    assert [point.step for point in recorder.points] == [0, 1, 2, 4, 8, 10]
    assert len(losses(plain)) == 10
    assert len({loss for _, loss, _ in losses(plain)}) == 10
    assert losses(watched) == losses(plain)
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], weight), name
    assert recorder.source(watched.model).steps == (0, 1, 2, 4, 8, 10)


def test_medians_stand_in_the_log_history(tmp_path):
    recorder = TangentRecorder(PROBE, **SMALL, budget=None)
    trainer = trained(tmp_path, [TangentCallback(recorder)], max_steps=4, save_strategy="steps", save_steps=4)
    found = [one for one in trainer.state.log_history if "tangent/weight_lift" in one]
    assert found == [{**named_medians(point), "step": point.step} for point in recorder.points]
    assert [one["step"] for one in found] == [0, 1, 2, 4]
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert [one for one in saved["log_history"] if "tangent/weight_lift" in one] == found


def test_measuring_begins_where_a_run_is_resumed(tmp_path):
    trained(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    recorder = TangentRecorder(PROBE, **SMALL, budget=None)
    trainer = trained(tmp_path, [TangentCallback(recorder)], max_steps=4, save_strategy="steps", save_steps=4)
    assert recorder.points[0].step == 0
    resumed = TangentRecorder(PROBE, **SMALL, budget=None)
    trainer.args.max_steps = 9
    trainer.callback_handler.pop_callback(TangentCallback)
    trainer.add_callback(TangentCallback(resumed))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [point.step for point in resumed.points] == [4, 8, 9]


class StopsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step
        return control


def test_a_training_stopped_early_has_its_end_measured(tmp_path):
    recorder = TangentRecorder(PROBE, **SMALL, budget=None)
    trained(tmp_path, [TangentCallback(recorder), StopsAt(7)])
    assert [point.step for point in recorder.points] == [0, 1, 2, 4, 7]


def test_every_event_of_the_trainer_is_answered():
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    assert "on_step_end" in events and len(events) > 10
    callback = TangentCallback(TangentRecorder(PROBE))
    for event in events:
        assert callable(getattr(callback, event))
    assert callback.on_some_event_of_the_future(1, 2, model=3) is None
    with pytest.raises(AttributeError, match="no attribute 'state'"):
        callback.state  # noqa: B018


class Run:
    def __init__(self):
        self.logged = []

    def log(self, values):
        self.logged.append(values)


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def test_exports():
    run, writer = Run(), Writer()
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, on_point=(to_wandb(run), to_tensorboard(writer)))
    model = tiny_model("llama")
    for step in (0, 4):
        recorder.step(model, step)
    first, second = recorder.points
    assert run.logged == [{**named_medians(first), "tangent/step": 0}, {**named_medians(second), "tangent/step": 4}]
    assert [name for name, _, step in writer.scalars if step == 4] == list(named_medians(second))
    assert ("tangent/loss", second.loss, 4) in writer.scalars


def test_a_real_wandb_run_takes_the_points(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="disabled", dir=tmp_path) as run:
        recorder = TangentRecorder(PROBE, **SMALL, on_point=to_wandb(run))
        assert recorder.step(tiny_model("llama"), 0) is not None


def test_a_real_tensorboard_writer_takes_the_points(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        TangentRecorder(PROBE, **SMALL, on_point=to_tensorboard(writer)).step(tiny_model("llama"), 0)
    assert list(tmp_path.iterdir())
