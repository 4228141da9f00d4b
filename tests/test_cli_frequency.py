"""The command about token frequency, as a person uses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny_model
from typer.testing import CliRunner

from tangent_lens import cli
from tangent_lens.cli_frequency import checkpoints_of

NUMBERS = " ".join(str(number) for number in np.random.default_rng(0).zipf(1.3, size=900) % 90)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """A model, and checkpoints of its training."""
    root = tmp_path_factory.mktemp("run")
    for step in (10, 200, 3000):
        tiny_model("gpt_neox", torch.float32, seed=step).save_pretrained(root / f"checkpoint-{step}")
    tiny_model("gpt_neox", torch.float32).save_pretrained(root / "final")
    tokenizer.save_pretrained(root / "final")
    return root


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    text = tmp_path_factory.mktemp("texts") / "numbers.txt"
    text.write_text(NUMBERS)

    def run(*arguments):
        fixed = ("frequency", folders / "final", "--text", text, "--sequence-length", 16, "--rank", 2, "--min-count", 5)
        words = [str(one) for one in (*fixed, *arguments)]
        return CliRunner().invoke(cli.app, words, env={"COLUMNS": "120"})

    return run


def test_prints_correlations_and_buckets(run, tmp_path):
    result = run("--sites", "resid_post.1", "--buckets", 3, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for part in ("numbers.txt", "rank 2", "tokens of 5 rows or more", "resid_post.1", "Spearman", "lift"):
        assert part in shown
    assert "trajectory" not in shown
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_checkpoints_bring_the_trajectory(run, folders):
    result = run("--sites", "resid_post.1", "--checkpoints", folders, "--at-most", 2)
    assert result.exit_code == 0, result.output
    assert "trajectory" in result.output and "over 2 checkpoints" in " ".join(result.output.split())


def test_checkpoints_are_folders_a_glob_or_revisions(folders, monkeypatch):
    steps = (10, 200, 3000)
    assert checkpoints_of(str(folders), "model", 0, "float32", "cpu").steps == steps
    assert checkpoints_of(f"{folders}/checkpoint-?00*", "model", 0, "float32", "cpu").steps == (200, 3000)
    assert checkpoints_of(str(folders), "model", 2, "float32", "cpu").steps == (10, 3000)
    asked = []
    source = checkpoints_of(str(folders), "model", 0, "float32", "cpu")
    monkeypatch.setattr(
        "tangent_lens.models.checkpoints.hub_checkpoints", lambda *names, **options: asked.append(names) or source
    )
    assert checkpoints_of(r"step(?P<step>\d+)", "some/model", 0, "float32", "cpu") is source
    assert asked == [("some/model", r"step(?P<step>\d+)")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--min-count", 5000), "no token has a count of 5000 or more"),
        (("--sites", "resid_post.9"), "resid_post.9"),
        (("--checkpoints", "nowhere/at/all"), "nowhere/at/all holds no folders"),
        (("--buckets", 0), "0 buckets hold nothing"),
    ],
)
def test_mistakes_are_sentences(run, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split()) and "Traceback" not in result.output
