"""A training run in one call: texts once for all checkpoints, settings as asked, and on from where it stopped."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conformance.families import NotInThisVersion
from conformance.families import tiny_model as tiny_family
from dynamics_examples import STEPS, quick_collections, run_report, save_folders, train

import tangent_lens as tln
from tangent_lens.dynamics.protocol import Choices, measure_dynamics
from tangent_lens.measures.report import Settings
from tangent_lens.models.checkpoint_opening import CheckpointProblem
from tangent_lens.recording.corpus import Corpus

TEXT = " ".join(str(number % 100) for number in range(1, 1500, 7))
SMALL = {"rank": 3, "controls": 5, "progress": False}


@pytest.fixture(autouse=True, scope="module")
def quickly():
    with quick_collections():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    return save_folders(tmp_path_factory.mktemp("run"), tokenizer)


def test_it_is_the_protocol_with_these_settings(tmp_path):
    model, states, tokens = train()
    source = tln.state_checkpoints(model, states, name="mine")
    asked = {"gradients": "weight", "maps": ("query", "mlp_in"), "fit_site": "residual", "skip_first": True, "seed": 2}
    chosen = {"early": 0.2, "late": 0.4, "refit": True, "everywhere": False, "buckets": 3}
    report = tln.measure_checkpoints(
        source, tokens, "resid_post.1", **SMALL, **asked, **chosen, folder=tmp_path, name="n"
    )
    settings = Settings(rank=3, controls=5, **asked | {"gradients": ("weight",)})
    plain = measure_dynamics(
        source, Corpus.from_tokens(tokens, name="n"), settings, Choices(**chosen), sites="resid_post.1", folder=tmp_path
    )
    for one in dataclasses.fields(plain):
        if one.name not in ("created", "subspaces"):
            assert getattr(report, one.name) == getattr(plain, one.name), one.name
    assert report.settings.loss == "next-token"
    assert report.windows.early == (0, 1, 2) and report.steps() == (0, 1, 2, 8, 9, 10)
    assert {one.name for one in report.late} == {"attention.1", "mlp.1"}
    assert {one.name for one in report.points[0].measurements} == {"attention.1", "query.1", "mlp.1", "mlp_in.1"}


def test_texts_are_read_with_the_tokenizer_of_the_first_checkpoint(folders, tmp_path):
    source = tln.folder_checkpoints(folders)
    report = tln.measure_checkpoints(
        source, TEXT, **SMALL, sequence_length=12, max_sequences=10, pack=True, name="counting", folder=tmp_path
    )
    assert report.steps() == STEPS
    assert report.corpus.name == "counting"
    assert report.corpus.fit_sequences + report.corpus.test_sequences == 10
    assert (report.settings.sequence_length, report.settings.max_sequences, report.settings.pack) == (12, 10, True)
    assert not list(tmp_path.iterdir()), "a complete run leaves no state behind"
    assert report.late[0].energy.energy != report.early[0].energy.energy


def test_texts_without_a_tokenizer_are_refused():
    model, states, _ = train()
    with pytest.raises(ValueError, match="without a tokenizer"):
        tln.measure_checkpoints(tln.state_checkpoints(model, states), TEXT, **SMALL)


def test_a_run_that_was_stopped_goes_on(tmp_path):
    model, states, tokens = train()
    opened = []

    def loader(step, state, broken):
        def load():
            opened.append(step)
            if step == broken:
                raise CheckpointProblem("the network is down")
            return state

        return load

    def source(broken=None):
        return tln.state_checkpoints(
            model, [(step, loader(step, state, broken)) for step, state in states], name="tiny/[run]"
        )

    asked = {
        "rank": 3,
        "controls": 19,
        "seed": 4,
        "refit": True,
        "dimensions": True,
        "name": "numbers",
        "progress": False,
    }
    with pytest.raises(CheckpointProblem, match="network"):
        tln.measure_checkpoints(source(broken=9), tokens, folder=tmp_path, **asked)
    assert len(list(tmp_path.iterdir())) == 1
    opened.clear()
    report = tln.measure_checkpoints(source(), tokens, folder=tmp_path, **asked)
    # The first is opened for its tokenizer only.
    assert opened == [0, 9, 10]
    expected = run_report()
    assert (report.points, report.early, report.late, report.updates) == (
        expected.points, expected.early, expected.late, expected.updates,
    )  # fmt: skip


def test_a_masked_model_needs_to_know_its_mask(tmp_path):
    try:
        model = tiny_family("bert", torch.float32)
    except NotInThisVersion as missing:
        pytest.skip(str(missing))
    states = [(step, {name: (1 + 0.01 * step) * one for name, one in model.state_dict().items()}) for step in (0, 10)]
    source = tln.state_checkpoints(model, states, name="masked")
    tokens = torch.randint(5, 100, (12, 12), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="mask"):
        tln.measure_checkpoints(source, tokens, **SMALL, folder=tmp_path)
