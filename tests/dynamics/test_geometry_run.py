"""Local geometry along training: every checkpoint as if it had been measured alone, and the same rows in all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy_run

import tangent_lens as tln
from tangent_lens.dynamics.geometry_run import geometry_checkpoints
from tangent_lens.measures.neighbourhoods import neighbourhood_overlap
from tangent_lens.models.checkpoints import state_checkpoints

DRAW = np.random.default_rng(3)
SEQUENCES = [(DRAW.zipf(1.3, size=12) % 97).tolist() for _ in range(80)]
OPTIONS = {"occurrences": 24, "buckets": 2, "tokens": 3, "m": 2, "neighbours": 5, "linear_m": 3, "sensitivity": False}
STEPS = (0, 10, 40)


@pytest.fixture(scope="module")
def trained():
    model, states = toy_run.trained()
    return model, [(step, states[step]) for step in STEPS]


@pytest.fixture(scope="module")
def run(trained):
    return geometry_checkpoints(state_checkpoints(*trained, name="toy"), SEQUENCES, progress=False, **OPTIONS)


def test_every_checkpoint_as_if_alone(run, trained):
    model, states = trained
    assert [point.step for point in run.points] == list(STEPS)
    for point, (_, state) in zip(run.points, states, strict=True):
        model.load_state_dict(state)
        alone = tln.Lens(model).geometry(SEQUENCES, gradient_layers=0, progress=False, **OPTIONS)
        numbers = alone.to_pandas().select_dtypes("number").columns
        np.testing.assert_allclose(point.report.to_pandas()[numbers], alone.to_pandas()[numbers], rtol=1e-6)


def test_the_same_tokens_everywhere(run):
    assert len({point.report.buckets for point in run.points}) == 1
    assert run.sites == ("resid_post.0", "resid_post.1")


def test_overlaps_are_of_the_same_rows_at_two_checkpoints(run, trained):
    model, states = trained
    rows = []
    for _, state in states:
        model.load_state_dict(state)
        depth = tln.Lens(model).geometry(SEQUENCES, "resid_post.1", gradient_layers=0, progress=False, **OPTIONS).depth
        rows.append(depth.neighbours[0])
    pairs = run.overlaps("resid_post.1")
    assert pairs[0][0] is None and pairs[-1][1].overlap == 1
    for place in range(1, len(rows)):
        shared = [
            len(set(one.tolist()) & set(other.tolist())) / 5
            for one, other in zip(rows[place - 1], rows[place], strict=True)
        ]
        assert pairs[place][0].overlap == pytest.approx(np.mean(shared))
    # Training moves neighbourhoods: more is shared than by chance, and less than all.
    assert pairs[0][1].expected < pairs[0][1].overlap < 1


def test_depth_neighbours_are_what_an_overlap_counts(run):
    depth = run.points[0].report.depth
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    assert neighbourhood_overlap(rows, 2 * rows, 5).overlap == 1
    assert depth.neighbours[0].shape == (len(depth.neighbours[0]), 5)


def test_frame_has_one_row_a_step_and_a_site(run):
    found = run.to_pandas()
    assert list(zip(found["step"], found["site"], strict=True)) == [
        (step, site) for step in STEPS for site in run.sites
    ]
    last = found[found["step"] == STEPS[-1]]
    assert (last["overlap_last_step"] == 1).all()
    assert found[found["step"] == STEPS[0]]["overlap_before_step"].isna().all()
    assert {"two_nn", "linearity", "above_floor", "explained"} <= set(found.columns)


def test_without_depth_there_are_no_overlaps(trained):
    run = geometry_checkpoints(
        state_checkpoints(*trained, name="toy"), SEQUENCES, "resid_post.1", depth=False, progress=False, **OPTIONS
    )
    assert "two_nn" not in run.to_pandas().columns
    with pytest.raises(ValueError, match="depth=True"):
        run.overlaps("resid_post.1")


def test_sites_that_are_not_there(run):
    with pytest.raises(KeyError, match="was not measured"):
        run.overlaps("resid_post.7")
