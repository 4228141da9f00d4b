"""How far embedding rows travel over checkpoints: the spread of the matrices, one checkpoint in memory at a time."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import tiny_model

from tangent_lens.dynamics.trajectory import trajectory_for, trajectory_of
from tangent_lens.measures.frequency import TokenFrequencies
from tangent_lens.models.checkpoints import Checkpoint, CheckpointSource, state_checkpoints
from tangent_lens.models.huggingface import HuggingFaceModel
from tangent_lens.recording.corpus import Corpus

STEPS = (0, 5, 20)


class Opening:
    """Opens tiny models and counts how many are open, and how often one was opened."""

    def __init__(self):
        self.opened, self.now, self.most = [], 0, 0

    @contextmanager
    def __call__(self, checkpoint):
        self.opened.append(checkpoint.step)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield HuggingFaceModel(tiny_model("llama", seed=checkpoint.step))
        finally:
            self.now -= 1


@pytest.fixture
def opening():
    return Opening()


def source_of(opening, steps=STEPS):
    return CheckpointSource("a run", tuple(Checkpoint(step, f"step {step}") for step in steps), opening)


def embeddings(steps=STEPS):
    found = [tiny_model("llama", seed=step).get_input_embeddings().weight.detach().numpy() for step in steps]
    return np.stack(found)


def distances():
    """Of every row of every checkpoint to the mean row of the token (checkpoint, token)."""
    rows = embeddings()
    return np.linalg.norm(rows - rows.mean(axis=0), axis=2)


def test_is_the_distance_of_each_row_to_its_own_mean(opening):
    spread = trajectory_of(source_of(opening), mean_distance=True)
    assert spread.tokens.tolist() == list(range(100)) and set(spread.occurrences) == {3}
    assert np.allclose(spread.mean_distance, distances().mean(axis=0), rtol=1e-12)
    assert np.allclose(spread.mean_square, (distances() ** 2).mean(axis=0), rtol=1e-12)
    assert "3 checkpoints of a run" in spread.name


def test_one_checkpoint_at_a_time_and_a_second_opening_only_for_mean_distances(opening):
    once = trajectory_of(source_of(opening))
    assert opening.opened == list(STEPS) and opening.most == 1 and opening.now == 0
    assert once.mean_distance is None
    assert np.allclose(once.mean_square, (distances() ** 2).mean(axis=0), rtol=1e-12)
    trajectory_of(source_of(opening), mean_distance=True)
    assert opening.opened == list(STEPS) * 3 and opening.most == 1 and opening.now == 0


def test_of_some_tokens(opening):
    spread = trajectory_of(source_of(opening), torch.tensor([40, 7]), mean_distance=True)
    assert spread.tokens.tolist() == [7, 40]
    assert np.allclose(spread.mean_distance, distances().mean(axis=0)[[7, 40]])


def test_states_of_one_model_come_in_turn_and_leave_no_trace():
    model = tiny_model("llama", seed=9)
    before = model.get_input_embeddings().weight.detach().clone()
    states = [(step, tiny_model("llama", seed=step).state_dict()) for step in STEPS]
    spread = trajectory_of(state_checkpoints(model, states), mean_distance=True)
    assert np.allclose(spread.mean_distance, distances().mean(axis=0), rtol=1e-12)
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_which_tokens_a_report_asks_for(opening):
    corpus = Corpus.from_tokens([[1, 2, 2], [5, 2, 1, 0]])
    assert trajectory_for(source_of(opening), corpus, None, 2).tokens.tolist() == [1, 2]
    counts = np.zeros(100)
    counts[[3, 99]] = 0.5
    found = trajectory_for(source_of(opening), corpus, TokenFrequencies(counts), 2)
    assert found.tokens.tolist() == [3, 99] and found.mean_distance is not None


def test_progress_counts_the_checkpoints(opening):
    calls = []

    class Shown:
        def start(self, description, total=None, unit=""):
            calls.append((description, total, unit))

        def advance(self, amount=1.0, note=""):
            calls.append(note)

        def finish(self):
            calls.append("finished")

    trajectory_of(source_of(opening), progress=Shown())
    assert calls == [("embeddings of checkpoints", 3, "checkpoints"), "step 0", "step 5", "step 20", "finished"]


def test_what_cannot_travel_is_refused(opening, monkeypatch):
    with pytest.raises(ValueError, match="a run: a trajectory needs 2 checkpoints or more, and there is 1"):
        trajectory_of(source_of(opening, (4,)))
    assert opening.opened == []
    with pytest.raises(ValueError, match="step 0: token 100 has no row in an embedding of 100 tokens"):
        trajectory_of(source_of(opening), [3, 100])
    assert opening.now == 0
    monkeypatch.setattr("tangent_lens.dynamics.trajectory.embedding_of", lambda model: None)
    with pytest.raises(ValueError, match="no token embedding matrix"):
        trajectory_of(source_of(opening))
