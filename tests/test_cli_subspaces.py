"""Commands about subspaces as a person uses them: fits by name, ablations, shapes, overlaps."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens import cli

NUMBERS = " ".join(str(number % 100) for number in range(1, 1200, 7)) * 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("gpt_neox", torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "numbers.txt"
    path.write_text(NUMBERS)
    return path


@pytest.fixture(scope="module")
def run(model_folder, text_file):
    """A command on the tiny model and the text, unless it needs neither."""

    def run(command, *arguments, reads=True):
        model = (model_folder, "--text", text_file, "--sequence-length", 16, "--sequences", 24) if reads else ()
        words = [str(one) for one in (command, *model, *arguments)]
        return CliRunner().invoke(cli.app, words, env={"COLUMNS": "120"})

    return run


def test_measure_fits_as_told_and_gives_intervals(run, tmp_path):
    result = run(
        "measure", "--fit", "kmeans", "--rank", 2, "--bootstrap", 100, "--gradients", "residual", "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    assert "kmeans" in result.output and "95%" in result.output
    settings = tln.Report.load(tmp_path).settings
    assert (settings.fit, settings.bootstrap, settings.rank) == ("kmeans", 100, 2)


@pytest.mark.parametrize("rank", ["participation_ratio", "0.7"])
def test_a_rank_may_be_a_rule_or_a_share(run, tmp_path, rank):
    result = run("measure", "--rank", rank, "--gradients", "residual", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert str(tln.Report.load(tmp_path).settings.rank) == rank


def test_ablate_prints_what_the_model_loses(run):
    result = run("ablate", "--sites", "resid_post.1", "--rank", 2, "--controls", 3)
    assert result.exit_code == 0, result.output
    assert "resid_post.1" in result.output and "3 random normals" in result.output and "kept" in result.output


def test_shape_prints_a_row_a_site(run):
    result = run("shape", "--rows", 60)
    assert result.exit_code == 0, result.output
    assert all(part in result.output for part in ("resid_post.2", "RankMe", "TwoNN"))
    assert "TwoNN" not in run("shape", "--rows", 60, "--no-dimensions").output


def test_overlaps_between_layers_and_between_runs(run, tmp_path):
    runs = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(runs):
        assert run("measure", "--rank", 2, "--gradients", "residual", "--seed", seed, "--out", folder).exit_code == 0
    one = run("overlaps", runs[0], "--plot", tmp_path / "overlaps.png", reads=False)
    assert one.exit_code == 0, one.output
    assert "resid_post.2" in one.output and "1.00" in one.output
    assert (tmp_path / "overlaps.png").stat().st_size > 10_000
    both = run("overlaps", *runs, "--site", "resid_post.1", reads=False)
    assert "first/resid_post.1" in both.output and "second/resid_post.1" in both.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("measure", "--fit", "umap"), "no fit 'umap'; there are pca"),
        (("measure", "--rank", "elbow"), "or a rule (effective_rank"),
        (("ablate", "--sites", "resid_post.1", "--rank", "99"), "rank 99"),
        (("shape", "--sites", "resid_post.7"), "resid_post.7"),
    ],
)
def test_mistakes_are_sentences(run, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split()) and "Traceback" not in result.output


def test_overlaps_of_a_site_that_no_report_holds_is_a_sentence(run, tmp_path):
    assert run("measure", "--rank", 2, "--gradients", "residual", "--out", tmp_path).exit_code == 0
    result = run("overlaps", tmp_path, "--site", "query", reads=False)
    assert result.exit_code == 1 and "no report here holds subspaces of query" in " ".join(result.output.split())
