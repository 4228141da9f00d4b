"""The early/late protocol: what each number is, that nothing about the run changes it, and that a kill changes nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from dynamics.toy_run import SETTINGS, STEPS, corpus, source, trained

from tangent_lens.dynamics.protocol import Choices, measure_dynamics
from tangent_lens.lens import Lens
from tangent_lens.measures.energy import energy_test
from tangent_lens.measures.plain import finite
from tangent_lens.measures.plan import plan_measurement
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.sites import Site, resid_post, resolve
from tangent_lens.subspaces.fits import fit_pca


@pytest.fixture(scope="module")
def run():
    return trained()


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    return measure_dynamics(
        source(*run), corpus(), SETTINGS, Choices(refit=True), folder=tmp_path_factory.mktemp("run")
    )


def plain(report):
    """All numbers of a report."""
    parts = ("points", "early", "late", "updates")
    found = {name: [finite(asdict(one)) for one in getattr(report, name)] for name in parts}
    return found | {"subspaces": {site: one.basis.tolist() for site, one in report.subspaces.items()}}


def by_hand(run, window, proxy_of):
    """Pooled second moments of the residual and of the attention gradients of layer 1, checkpoint by checkpoint."""
    model, states = run
    _, test = corpus().split(SETTINGS.fit_fraction, SETTINGS.seed)
    residual, weights = SecondMoments(24), SecondMoments(24)
    for step in window:
        model.load_state_dict(states[step])
        lens = Lens(model)
        plan = plan_measurement(lens.model, resolve(resid_post(), lens.sites), SETTINGS)
        record = record_gradients(lens.model, test.batches(4), plan.residual_sites, plan.maps)
        residual.merge(record.moments[Site("resid_post", 1)].gradients)
        for one in record.weights:
            if one.layer == 1 and one.kind in ("query", "key", "value"):
                weights.merge(SecondMoments.of(one.gradient))
    return residual, weights


def early_proxy(run, site):
    model, states = run
    fit, _ = corpus().split(SETTINGS.fit_fraction, SETTINGS.seed)
    pooled = SecondMoments(24, name=f"activations at {site}")
    for step in (0, 5, 10):
        model.load_state_dict(states[step])
        pooled.merge(record_activations(Lens(model).model, fit.batches(4), [site])[site].moments)
    return fit_pca(pooled, SETTINGS.rank)


class TestNumbers:
    def test_proxies_are_fitted_once_on_the_pooled_early_activations(self, run, report):
        assert report.windows.early == (0, 5, 10) and report.windows.late == (30, 35, 40)
        for site in (Site("resid_post", 1), Site("attention_input", 0), Site("embedding")):
            expected = early_proxy(run, site)
            assert report.subspaces[site.name].overlap(expected) == pytest.approx(1, abs=1e-9)

    @pytest.mark.parametrize("window", ["early", "late"])
    def test_windows_pool_the_gradients_of_their_checkpoints(self, run, report, window):
        residual, weights = by_hand(run, getattr(report.windows, window), None)
        pairs = {"resid_post.1": (residual, "resid_post.1"), "attention.1": (weights, "attention_input.1")}
        for name, (rows, site) in pairs.items():
            (found,) = [one for one in report.of(window) if one.name == name]
            expected = energy_test(rows, report.subspaces[site], controls=2)
            assert found.energy.energy == pytest.approx(expected.energy, rel=1e-9)
            assert found.energy.trailing == pytest.approx(expected.trailing, rel=1e-6)

    def test_a_point_is_a_measurement_of_its_checkpoint_against_the_early_proxies(self, run, report):
        model, states = run
        model.load_state_dict(states[20])
        subspaces = {name: one for name, one in report.subspaces.items() if name != "embedding"}
        expected = Lens(model).measure(corpus(), subspaces=subspaces, rank=3, controls=5, batch_size=4, progress=False)
        (point,) = [one for one in report.points if one.step == 20]
        assert point.window == "" and point.loss == pytest.approx(expected.corpus.loss)
        for one, other in zip(point.measurements, expected.measurements, strict=True):
            assert one.name == other.name and one.energy.energy == pytest.approx(other.energy.energy, rel=1e-9)
            signals = (one.energy.signal_lift, other.energy.signal_lift)
            assert signals[0] == (None if signals[1] is None else pytest.approx(signals[1], rel=1e-6))

    def test_refitted_points_are_plain_measurements(self, run, report):
        model, states = run
        model.load_state_dict(states[35])
        expected = Lens(model).measure(corpus(), rank=3, controls=5, batch_size=4, progress=False)
        (point,) = [one for one in report.points if one.step == 35]
        for one, other in zip(point.refitted, expected.measurements, strict=True):
            assert one.energy.energy == pytest.approx(other.energy.energy, rel=1e-9)
        for site, overlap in point.overlaps.items():
            assert overlap == pytest.approx(expected.subspaces[site].overlap(report.subspaces[site]), abs=1e-9)

    def test_embedding_updates_are_those_of_consecutive_checkpoints_in_a_window(self, run, report):
        _, states = run
        name = "gpt_neox.embed_in.weight"
        seen = np.unique(np.concatenate(corpus().sequences))
        for window in ("early", "late"):
            steps = getattr(report.windows, window)
            moved = [(states[after][name] - states[before][name]).double()[seen] for before, after in pairwise(steps)]
            rows, basis = torch.cat(moved), report.subspaces["embedding"].basis
            (whole,) = [one for one in report.updates if one.window == window and one.bucket is None]
            assert whole.energy == pytest.approx(float((rows @ basis).square().sum() / rows.square().sum()), rel=1e-6)
            parts = [one for one in report.updates if one.window == window and one.bucket is not None]
            assert sum(one.share for one in parts) == pytest.approx(1) and sum(one.tokens for one in parts) == len(seen)

    def test_the_summary_is_a_mean_over_layers(self, report):
        (found,) = [one for one in report.summary() if (one.window, one.kind) == ("late", "residual")]
        layers = [one for one in report.late if one.gradient == "residual"]
        assert found.layers == 2 and found.energy == pytest.approx(np.mean([one.energy.energy for one in layers]))
        controls = np.mean([one.energy.random for one in layers], axis=0)
        assert found.p_value == pytest.approx((1 + (controls >= found.energy - 1e-12).sum()) / 6)
        expected = np.mean([one.energy.expected_random for one in layers])
        assert found.lift == pytest.approx(found.energy / expected)


class TestInvariances:
    @pytest.mark.parametrize("changed", [{"batch_size": 3}, {"padding_side": "left"}])
    def test_batches_and_padding_change_nothing(self, run, report, tmp_path, changed):
        settings = replace(SETTINGS, **changed)
        other = measure_dynamics(source(*run), corpus(), settings, Choices(refit=True), folder=tmp_path)
        for one, same in zip((*report.early, *report.late), (*other.early, *other.late), strict=True):
            assert one.energy.energy == pytest.approx(same.energy.energy, rel=1e-4)

    def test_only_the_windows(self, run, report, tmp_path):
        choices = Choices(refit=True, everywhere=False)
        other = measure_dynamics(source(*run), corpus(), SETTINGS, choices, folder=tmp_path)
        assert [point.step for point in other.points] == [0, 5, 10, 30, 35, 40]
        assert plain(other)["early"] == plain(report)["early"] and plain(other)["late"] == plain(report)["late"]

    def test_the_model_comes_back_as_it_was(self, run, tmp_path):
        model, states = run
        model.load_state_dict(states[40])
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        measure_dynamics(source(*run), corpus(), SETTINGS, folder=tmp_path)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def run_and_killed(folder, passes):
    command = [sys.executable, str(Path(__file__).with_name("toy_run.py")), str(folder), str(passes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


class TestInterruptions:
    @pytest.mark.parametrize("passes", [2, 9, 20])
    def test_a_run_killed_at_any_moment_ends_with_the_same_numbers(self, run, report, tmp_path, passes):
        done = run_and_killed(tmp_path, passes)
        assert done.returncode == -9, done.stderr
        resumed = measure_dynamics(source(*run), corpus(), SETTINGS, Choices(refit=True), folder=tmp_path)
        assert plain(resumed) == plain(report)
        assert not list(tmp_path.iterdir())

    def test_a_finished_checkpoint_is_not_opened_again(self, run, tmp_path):
        opened = []

        class Watched:
            """The source, which says what is opened and breaks at step 30."""

            def __init__(self, inner, breaks):
                self.inner, self.breaks = inner, breaks
                self.name, self.steps = inner.name, inner.steps

            def __iter__(self):
                return iter(self.inner)

            def open(self, checkpoint):
                opened.append(checkpoint.step)
                if checkpoint.step == self.breaks:
                    raise OSError("the network went away")
                return self.inner.open(checkpoint)

        with pytest.raises(OSError, match="went away"):
            measure_dynamics(Watched(source(*run), 30), corpus(), SETTINGS, folder=tmp_path)
        assert opened == [0, 5, 10, 0, 5, 10, 15, 20, 25, 30]
        opened.clear()
        measure_dynamics(Watched(source(*run), None), corpus(), SETTINGS, folder=tmp_path)
        assert opened == [30, 35, 40]

    def test_another_run_does_not_go_on_with_these_sums(self, run, report, tmp_path):
        run_and_killed(tmp_path, 9)
        assert len(list(tmp_path.iterdir())) == 1
        other = replace(SETTINGS, seed=1)
        found = measure_dynamics(source(*run), corpus(), other, Choices(refit=True), folder=tmp_path)
        fresh = measure_dynamics(source(*run), corpus(), other, Choices(refit=True), folder=tmp_path / "fresh")
        assert plain(found) == plain(fresh) != plain(report)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "words"),
        [({"fit": "kmeans"}, "rows"), ({"bootstrap": 200}, "bootstrap=0"), ({"statistics": "sketch"}, "exact")],
    )
    def test_what_needs_more_than_pooled_sums(self, run, tmp_path, changed, words):
        with pytest.raises(ValueError, match=words):
            measure_dynamics(source(*run), corpus(), replace(SETTINGS, **changed), folder=tmp_path)

    def test_checkpoints_of_two_precisions(self, run, tmp_path):
        model, states = run
        folder = tmp_path / "state"
        assert run_and_killed(folder, 9).returncode == -9
        wide = copy.deepcopy(model).double()
        with pytest.raises(
            ValueError, match=r"in float64, and the checkpoints before it were .*float32; load all alike"
        ):
            measure_dynamics(source(wide, states), corpus(), SETTINGS, Choices(refit=True), folder=folder)

    def test_dimensions_come_along(self, run, tmp_path):
        pytest.importorskip("skdim")
        choices = Choices(dimensions=True, everywhere=False)
        found = measure_dynamics(source(*run), corpus(), SETTINGS, choices, sites="resid_post.1", folder=tmp_path)
        assert all(1 < point.dimensions["resid_post.1"] < 24 for point in found.points)
        assert set(STEPS) > {point.step for point in found.points}
