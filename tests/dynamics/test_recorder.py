"""Watching a training from inside: the numbers are those of a lens, and the training does not feel it."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from conftest import boot_bridge, tiny_model
from model_snapshot import Snapshot, unusual_state
from plain_reference import random_tokens

from tangent_lens.dynamics import recorder as recorder_module
from tangent_lens.dynamics.recorder import TangentRecorder, TrainingPoint
from tangent_lens.dynamics.schedule import LogSpaced
from tangent_lens.lens import Lens
from tangent_lens.recording.moments import NonFiniteRows

PROBE = random_tokens(6, 10, seed=5)
SMALL = {"rank": 3, "controls": 5}


def dropout_model(family="gpt2", dtype=torch.float32):
    model = tiny_model(family, dtype).train()
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts
    for module in dropouts:
        module.p = 0.3
    return model


def train(model, steps, recorder=None, moment="after step", autocast=False, before=lambda: None):
    """A plain loop with dropout, whose every loss, random number and weight comes back."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    mixed = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    if recorder is not None:
        recorder.step(model, 0)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 100, (4, 12))
        with mixed:
            loss = model(input_ids=tokens, labels=tokens).loss
            if recorder is not None and moment == "in autocast":
                recorder.step(model, step)
        optimizer.zero_grad()
        loss.backward()
        if recorder is not None and moment == "before step":
            recorder.step(model, step)
        optimizer.step()
        if recorder is not None and moment == "after step":
            recorder.step(model, step)
        losses.append(loss.item())
    drawn = (torch.rand(3).tolist(), random.random(), float(np.random.rand()))
    return losses, drawn, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("moment", ["after step", "before step", "in autocast"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_with_dropout_is_the_same_to_the_last_bit(moment, autocast, tmp_path):
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, steps=range(9), keep_states=tmp_path)
    losses, drawn, weights = train(dropout_model(), 8, autocast=autocast)
    watched_losses, watched_drawn, watched_weights = train(dropout_model(), 8, recorder, moment, autocast)
    assert [point.step for point in recorder.points] == list(range(9))
    assert len(set(losses)) == 8
    assert watched_losses == losses
    assert watched_drawn == drawn
    assert all(torch.equal(one, other) for one, other in zip(watched_weights, weights, strict=True))


def test_the_comparison_would_see_a_measurement_that_draws_a_random_number():
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, on_point=lambda point: torch.rand(1))
    losses, _, _ = train(dropout_model(), 3)
    assert train(dropout_model(), 3, recorder)[0] != losses


def test_a_model_in_an_unusual_state_comes_back_as_it_was():
    model = tiny_model("gpt2")
    unusual_state(model)
    before = Snapshot.of(model)
    TangentRecorder(PROBE, **SMALL).step(model, 0)
    before.assert_unchanged(model)


@pytest.mark.parametrize("gradients_on", [True, False])
def test_a_point_holds_the_numbers_of_a_lens(gradients_on):
    model = tiny_model("llama")
    with torch.set_grad_enabled(gradients_on):
        point = TangentRecorder(PROBE, **SMALL, seed=4).step(model, 7)
    report = Lens(model).measure(PROBE, **SMALL, seed=4, sequence_length=128, progress=False)
    assert point is not None and point.step == 7
    assert point.loss == report.corpus.loss
    assert point.spaces == report.spaces
    assert point.measurements == report.measurements


def test_autocast_of_the_training_does_not_reach_the_measurement():
    model = tiny_model("llama", torch.float32)
    plain = TangentRecorder(PROBE, **SMALL).step(model, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = TangentRecorder(PROBE, **SMALL).step(model, 0)
        assert torch.is_autocast_enabled("cpu")
    assert inside is not None and plain is not None
    assert inside.measurements == plain.measurements


def test_medians_are_of_the_layers():
    point = TangentRecorder(PROBE, **SMALL).step(tiny_model("llama"), 0)
    assert point is not None
    residual = [one.energy.lift for one in point.measurements if one.gradient == "residual"]
    pooled = [one.energy.signal_lift for one in point.measurements if one.name.split(".")[0] in ("attention", "mlp")]
    spaces = [space.iso_score for space in point.spaces if space.site.startswith("resid_post")]
    assert (len(residual), len(pooled), len(spaces)) == (3, 6, 3)
    medians = point.medians
    assert medians["residual_lift"] == pytest.approx(np.median(residual))
    assert medians["weight_signal_lift"] == pytest.approx(np.median(pooled))
    assert medians["iso_score"] == pytest.approx(np.median(spaces))
    assert "residual_signal_lift" not in medians
    assert "weight_lift" in repr(point) and "step 0" in repr(point)


@pytest.mark.parametrize("gradients", ["residual", "weight"])
def test_one_kind_of_gradient_alone(gradients):
    point = TangentRecorder(PROBE, **SMALL, gradients=gradients).step(tiny_model("llama"), 0)
    assert point is not None
    assert {one.gradient for one in point.measurements} == {gradients}
    assert 0 < point.medians["iso_score"] < 1
    assert {name.split("_")[0] for name in point.medians} == {"loss", "iso", gradients}


def test_sketches_for_wide_models():
    model = tiny_model("llama")
    exact, sketched = (TangentRecorder(PROBE, **SMALL, statistics=kind).step(model, 0) for kind in ("exact", "sketch"))
    assert exact is not None and sketched is not None
    assert sketched.measurements[0].energy.standard_error is not None
    assert sketched.medians["residual_energy"] == pytest.approx(exact.medians["residual_energy"], rel=1e-2)


def test_points_as_a_table():
    recorder = TangentRecorder(PROBE, **SMALL, budget=None)
    model = tiny_model("llama")
    for step in range(3):
        recorder.step(model, step)
    table = recorder.to_pandas()
    assert sorted(set(table["step"])) == [0, 1, 2]
    assert len(table) == sum(len(point.measurements) for point in recorder.points) > 0
    first = recorder.points[0].measurements[0]
    assert table.iloc[0][["name", "lift", "loss"]].tolist() == [first.name, first.energy.lift, recorder.points[0].loss]


@pytest.fixture
def no_model(monkeypatch):
    """Points that take a known time of a clock of ours."""
    clock = {"now": 100.0, "cost": 1.0}
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: clock["now"])

    def measured(self, model, step, began):
        clock["now"] += clock["cost"]
        point = TrainingPoint(step, clock["now"] - self._began, clock["cost"], 1.0, (), ())
        self.points = (*self.points, point)
        return point

    monkeypatch.setattr(TangentRecorder, "_measured", measured)
    monkeypatch.setattr(TangentRecorder, "_wrapped", lambda self, model: model)
    return clock


def run_clocked(recorder, clock, steps, seconds_a_step=1.0):
    for step in range(steps + 1):
        recorder.step(None, step)
        clock["now"] += seconds_a_step
    return [point.step for point in recorder.points]


def test_log_spaced_steps_are_measured(no_model):
    assert run_clocked(TangentRecorder(PROBE, budget=None), no_model, 20) == [0, 1, 2, 4, 8, 16]
    assert run_clocked(TangentRecorder(PROBE, budget=None, last_step=20), no_model, 20) == [0, 1, 2, 4, 8, 16, 20]
    assert run_clocked(TangentRecorder(PROBE, budget=None, steps=LogSpaced(every=5)), no_model, 20) == [
        *(0, 1, 2, 4, 8, 13, 18)
    ]
    assert run_clocked(TangentRecorder(PROBE, budget=None, steps=[3, 11]), no_model, 20) == [0, 3, 11]


def test_a_loop_that_calls_seldom_makes_up_for_missed_steps(no_model):
    recorder = TangentRecorder(PROBE, budget=None)
    for step in (3, 10, 11, 15, 20, 25, 40, 40):
        recorder.step(None, step)
    assert [point.step for point in recorder.points] == [3, 10, 20, 40]
    assert recorder.step(None, 41) is None
    assert recorder.step(None, 42, last=True) is not None
    assert recorder.step(None, 42, last=True) is None


@pytest.mark.parametrize("known_end", [True, False])
@pytest.mark.parametrize("steps", [100, 400, 3000])
def test_measuring_stays_within_its_share(no_model, known_end, steps):
    recorder = TangentRecorder(
        PROBE, budget=0.05, steps=LogSpaced(1.2, every=10), last_step=steps if known_end else None
    )
    measured = run_clocked(recorder, no_model, steps)
    least = 2 + known_end
    assert len(measured) <= max(least, 0.05 * steps)
    assert recorder.share <= 0.05 or len(measured) == least
    # Close to all of what it may take: the limit decides, not timidity.
    assert len(measured) >= 0.9 * 0.05 * steps - 1
    assert recorder.seconds == len(measured)
    assert recorder.skipped and "above 5.0% of the training time" in recorder.skipped[0].reason
    assert not {one.step for one in recorder.skipped} & set(measured)
    assert (measured[-1] == steps) or not known_end


def test_a_known_end_lets_the_early_steps_be_measured(no_model):
    blind = run_clocked(TangentRecorder(PROBE), no_model, 500)
    seeing = run_clocked(TangentRecorder(PROBE, last_step=500), no_model, 500)
    assert blind[:3] == [0, 1, 64]
    assert seeing == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 500]


def test_a_step_that_is_not_due_costs_nothing(no_model):
    recorder = TangentRecorder(PROBE, last_step=10**9)
    recorder.step(None, 2**29)
    began = time.process_time()
    for step in range(2**29 + 1, 2**29 + 20_001):
        recorder.step(None, step)
    assert time.process_time() - began < 1
    assert len(recorder.points) == 1


def test_states_open_as_checkpoints(tmp_path):
    model = dropout_model("gpt2")
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, keep_states=tmp_path / "states", steps=[0, 2])
    train(model, 3, recorder)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == [
        "step-000000.safetensors",
        "step-000002.safetensors",
    ]
    source = recorder.source(model, name="mine")
    assert source.steps == (0, 2)
    for point in recorder.points:
        with source.open(point.step) as opened:
            report = Lens(opened).measure(PROBE, **SMALL, sequence_length=128, progress=False)
        assert report.measurements == point.measurements
    assert all(torch.equal(one, kept) for one, kept in zip(model.parameters(), trained, strict=True))


def test_states_are_kept_where_there_is_no_time_to_measure(tmp_path):
    model = dropout_model("gpt2")
    recorder = TangentRecorder(PROBE, **SMALL, budget=1e-6, keep_states=tmp_path, steps=range(4))
    train(model, 3, recorder)
    assert [point.step for point in recorder.points] == [0, 1]
    assert [one.step for one in recorder.skipped] == [2, 3]
    assert recorder.source(model).steps == (0, 1, 2, 3)
    assert recorder.seconds > sum(point.seconds for point in recorder.points)


def test_half_precision_is_kept_as_float32_and_loads_again(tmp_path):
    model = tiny_model("llama", torch.bfloat16)
    recorder = TangentRecorder(PROBE, **SMALL, keep_states=tmp_path)
    recorder.step(model, 0)
    weight = model.lm_head.weight
    kept = recorder_module._read_state(tmp_path / "step-000000.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    with torch.no_grad():
        before = weight.clone()
        weight.zero_()
        with recorder.source(model).open(0):
            assert torch.equal(weight, before)
    assert not weight.any()


def test_without_a_folder_there_is_no_source():
    model = tiny_model("llama")
    recorder = TangentRecorder(PROBE, **SMALL)
    recorder.step(model, 0)
    with pytest.raises(ValueError, match="keep_states=folder"):
        recorder.source(model)


def test_steps_do_not_go_backwards(no_model):
    recorder = TangentRecorder(PROBE)
    recorder.step(None, 5)
    with pytest.raises(ValueError, match="step 4 comes after step 5; a new training needs a new TangentRecorder"):
        recorder.step(None, 4)


def test_settings_that_do_not_fit_are_told_at_once():
    with pytest.raises(ValueError, match="use rank <= 16"):
        TangentRecorder(PROBE, rank=17).step(tiny_model("llama"), 0)
    with pytest.raises(ValueError, match="budget 5 must be a share"):
        TangentRecorder(PROBE, budget=5)


def test_a_training_that_broke_goes_on_with_a_warning():
    model = tiny_model("llama", torch.float32)
    recorder = TangentRecorder(PROBE, **SMALL, budget=None)
    recorder.step(model, 0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    before = Snapshot.of(model)
    with pytest.warns(UserWarning, match="step 1 was not measured"):
        assert recorder.step(model, 1) is None
    assert [one.step for one in recorder.skipped] == [1]
    assert [now.requires_grad for now in model.parameters()] == list(before.wants_gradient)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(0.1)
    assert recorder.step(model, 2) is not None


def test_nan_before_the_first_point_does_not_end_a_training_either():
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    recorder = TangentRecorder(PROBE, **SMALL)
    with pytest.warns(UserWarning, match="step 0 was not measured"):
        recorder.step(model, 0)
    assert not recorder.points and len(recorder.skipped) == 1
    with pytest.raises(NonFiniteRows):
        Lens(model).measure(PROBE, **SMALL, progress=False)


def test_texts_need_a_tokenizer_and_get_it(tokenizer):
    texts = [" ".join(str(number % 97) for number in range(place, place + 40)) for place in range(6)]
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="without a tokenizer"):
        TangentRecorder(texts, **SMALL).step(model, 0)
    point = TangentRecorder(texts, tokenizer, **SMALL, sequence_length=16, max_sequences=8).step(model, 0)
    assert point is not None and point.medians["weight_lift"] > 0


def test_every_listener_hears_of_every_point(no_model):
    heard = []
    recorder = TangentRecorder(PROBE, budget=None, on_point=(heard.append, lambda point: heard.append(point.step)))
    run_clocked(recorder, no_model, 2)
    assert heard == [one for point in recorder.points for one in (point, point.step)]
    assert "steps 0, 1, 2; 0 skipped" in repr(recorder)


def train_other(kind, model, tokenizer, recorder=None):
    """Four steps of a model that another library holds."""
    if kind == "bridge":
        held = boot_bridge(model, tokenizer)
        loss_of = partial(held, return_type="loss")
        parameters = list(held.parameters())
    else:
        import nnsight

        held, parameters = nnsight.NNsight(model), list(model.parameters())

        def loss_of(tokens):
            return model(input_ids=tokens, labels=tokens).loss

    torch.manual_seed(3)
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for step in range(1, 5):
        loss = loss_of(torch.randint(0, 100, (4, 12)))
        optimizer.zero_grad()
        loss.backward()
        if recorder is not None:
            recorder.step(held, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, held


@pytest.mark.parametrize("kind", ["bridge", "nnsight"])
def test_models_of_other_libraries(kind, tokenizer, tmp_path):
    losses, _ = train_other(kind, tiny_model("gpt_neox", torch.float32).train(), tokenizer)
    recorder = TangentRecorder(PROBE, **SMALL, budget=None, keep_states=tmp_path)
    model = tiny_model("gpt_neox", torch.float32).train()
    watched, held = train_other(kind, model, tokenizer, recorder)
    assert len(set(losses)) == 4
    assert watched == losses
    assert [point.step for point in recorder.points] == [1, 2, 4]
    with recorder.source(held).open(2) as opened:
        report = Lens(opened).measure(PROBE, **SMALL, sequence_length=128, progress=False)
    energies = [one.energy.energy for one in report.measurements]
    assert energies == pytest.approx([one.energy.energy for one in recorder.points[1].measurements], rel=1e-5)
