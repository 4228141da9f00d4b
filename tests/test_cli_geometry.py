"""The command about local geometry, as a person uses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny_model
from typer.testing import CliRunner

from tangent_lens import cli

NUMBERS = " ".join(str(number) for number in np.random.default_rng(0).zipf(1.3, size=2500) % 90)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """A model, and checkpoints of its training."""
    root = tmp_path_factory.mktemp("run")
    for step in (10, 200, 3000):
        tiny_model("gpt_neox", torch.float32, seed=step).save_pretrained(root / f"checkpoint-{step}")
        tokenizer.save_pretrained(root / f"checkpoint-{step}")
    tiny_model("gpt_neox", torch.float32).save_pretrained(root / "final")
    tokenizer.save_pretrained(root / "final")
    return root


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    text = tmp_path_factory.mktemp("texts") / "numbers.txt"
    text.write_text(NUMBERS)

    def run(*arguments):
        fixed = ("geometry", folders / "final", "--text", text, "--sequence-length", 16, "--occurrences", 30)
        words = [str(one) for one in (*fixed, "--buckets", 2, "--tokens", 3, "--m", 2, "--sequences", 0, *arguments)]
        return CliRunner().invoke(cli.app, words, env={"COLUMNS": "120"})

    return run


def test_prints_exponents_gradients_and_depth(run, tmp_path):
    result = run("--sites", "resid_post.1,2", "--gradient-layers", 1, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for part in ("numbers.txt", "resid_post.1", "resid_post.2", "tangent", "normal", "mlp_in.1", "TwoNN"):
        assert part in shown
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_gradients_and_depth_can_be_left_out(run):
    result = run("--sites", "resid_post.1", "--gradient-layers", 0, "--no-depth")
    assert result.exit_code == 0, result.output
    assert "mlp_in" not in result.output and "TwoNN" not in result.output


def test_checkpoints_one_after_another(run, folders, tmp_path):
    plot = tmp_path / "run.png"
    result = run("--sites", "resid_post.1", "--checkpoints", folders, "--at-most", 2, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "3,000" in result.output or "3000" in result.output
    assert "200" not in result.output.split("step")[-1] and plot.stat().st_size > 10_000


def test_first_positions_are_kept_on_request(run):
    without, kept = (
        run("--sites", "resid_post.1", "--gradient-layers", 0, "--no-depth", *more) for more in ((), ("--keep-first",))
    )
    assert without.exit_code == kept.exit_code == 0
    assert without.output != kept.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--occurrences", 5), "20 or more"),
        (("--occurrences", 100000), "most frequent"),
        (("--maps", "gate"), "no map 'gate'"),
        (("--m", "1.5"), "whole number"),
        (("--sites", "resid_past.1"), "resid_post"),
        (("--checkpoints", "/nowhere/at/all"), "nowhere"),
    ],
)
def test_errors_teach_and_show_no_traceback(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code != 0 and said in " ".join(result.output.split()) and "Traceback" not in result.output
