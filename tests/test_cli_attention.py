"""Attention scores on the command line: one command to measure, and the common one to show."""

from __future__ import annotations

import pytest
from conftest import tiny_model
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens import cli
from tangent_lens.measures.attention_report import AttentionReport
from tangent_lens.reports.console import as_text

NUMBERS = " ".join(str(number % 100) for number in range(1, 1200, 7)) * 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    import torch

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(NUMBERS)
    return path


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def quick(model_folder, text_file):
    return ("attention", model_folder, "--text", text_file, "--rank", 3, "--sequence-length", 16, "--sequences", 20)


@pytest.fixture(scope="module")
def saved(model_folder, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "attention"
    axes = ("--distance", "1, 4", "--frequency", 2, "--scaling", "--controls", 19, "--seed", 3)
    result = run(*quick(model_folder, text_file), "--layers", "0,-1", *axes, "--heads", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_it_prints_the_table_and_every_head_and_saves(saved):
    folder, printed = saved
    report = AttentionReport.load(folder)
    assert as_text(report, width=100) in printed.replace("\r", "")
    assert "2.3" in printed and "D by key distance" in printed
    assert "show it again with: tangent-lens show" in printed


def test_options_reach_the_measurement(saved):
    report = AttentionReport.load(saved[0])
    settings = report.settings
    assert [one.layer for one in report.layers] == [0, 2]
    assert (settings.rank, settings.controls, settings.seed) == (3, 19, 3)
    assert (settings.distance_edges, settings.frequency_buckets, settings.scaling) == ((1, 4), 2, True)
    assert (settings.sequence_length, settings.max_sequences, settings.pack) == (16, 20, True)
    assert report.corpus.name == "numbers.txt"


def test_layers_are_all_by_default_or_a_slice(model_folder, text_file, tmp_path):
    for number, (layers, expected) in enumerate((((), [0, 1, 2]), (("--layers", "0:2"), [0, 1]))):
        result = run(*quick(model_folder, text_file), *layers, "--controls", 2, "--out", tmp_path / str(number))
        assert result.exit_code == 0, result.output
        assert [one.layer for one in AttentionReport.load(tmp_path / str(number)).layers] == expected


def test_a_saved_report_is_shown_again_with_heads_and_plot(saved, tmp_path):
    folder, _ = saved
    report = AttentionReport.load(folder)
    plain = run("show", folder)
    assert plain.exit_code == 0 and plain.output.rstrip() == as_text(report, width=100).rstrip()
    result = run("show", folder, "--heads", "--plot", tmp_path / "heads.png")
    assert as_text(report.by_head(), width=100) in result.output
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_both_kinds_are_shown_and_options_of_the_other_refused(saved, report, tmp_path):
    report.save(tmp_path / "gradients")
    assert "residual gradient" in run("show", tmp_path / "gradients").output
    for folder, option, sentence in (
        (tmp_path / "gradients", "--heads", "--heads is about reports of attention scores"),
        (saved[0], "--maps", "--maps is about reports of gradients"),
    ):
        result = run("show", folder, option)
        assert result.exit_code == 1
        assert sentence in " ".join(result.output.split())


def test_reports_of_two_kinds_are_not_compared(saved, report, tmp_path):
    report.save(tmp_path)
    result = run("compare", tmp_path, saved[0])
    assert result.exit_code == 1
    assert "holds a report of attention scores" in " ".join(result.output.split())


def test_a_folder_of_the_other_kind_is_refused_before_the_model_runs(saved, report, tmp_path):
    result = run("measure", "no/such-model", "--out", saved[0])
    assert result.exit_code == 1
    assert "holds a report of attention scores, which would be lost" in " ".join(result.output.split())
    report.save(tmp_path)
    result = run("attention", "no/such-model", "--out", tmp_path)
    assert "holds a report of gradients, which would be lost" in " ".join(result.output.split())
    assert tln.Report.load(tmp_path).to_dict() == report.to_dict()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("--layers", "7"), "resid_pre.7 is not in this model, which has 3 layers, 0 to 2"),
        (("--layers", "first"), "'first' in 'resid_pre.first' is no layer"),
        (("--layers", ","), "no site selected"),
        (("--distance", "near"), "--distance 'near' must be whole numbers with commas, for example 1,4,16,64"),
        (("--distance", "4,1"), "must be growing key distances"),
        (("--controls", 0), "0 controls give no comparison"),
        (("--frequency", -1), "frequency_buckets -1 must be a whole number"),
        (("--rank", "many"), "rank 'many' must be a whole number"),
        (("--lines", "--dataset", "x"), "--text and --dataset were both given"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_1(model_folder, text_file, changes, sentence):
    result = run(*quick(model_folder, text_file), *changes)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output
