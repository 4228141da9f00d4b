"""The dynamics command as a person uses it: folders, files of settings, and the ten models of the paper in rehearsal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conformance.families import MASK, NotInThisVersion
from conformance.families import tiny_model as tiny_family
from dynamics_examples import STEPS, quick_collections, save_folders
from loopback_hub import LoopbackHub, serve_in_this_process
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens import cli, cli_dynamics
from tangent_lens.cli_dynamics import step_pattern
from tangent_lens.models.checkpoints import step_of

EXAMPLES = Path(__file__).parent.parent / "examples" / "dynamics"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
NUMBERS = " ".join(str(number % 100) for number in range(1, 1200, 7))
SMALL = ("--rank", 2, "--controls", 3, "--sequence-length", 12, "--sequences", 8)
# Branches as those of the real repositories are named, or, of the last four, as they may be.
PYTHIA = ("gpt_neox", ["step0", "step1000", "step120000", "step143000"])
SMOLLM2 = ("llama", ["step-125000", "step-250000", "step-875000", "step-1000000"])
UNKNOWN = ["step-1000", "step-2000", "step-9000", "step-10000"]
SERVED = {
    "pythia-160m": ("EleutherAI/pythia-160m", *PYTHIA),
    "pythia-410m": ("EleutherAI/pythia-410m", *PYTHIA),
    "pythia-1b": ("EleutherAI/pythia-1b", *PYTHIA),
    "olmo-1b": (
        "allenai/OLMo-1B-hf",
        "olmo",
        ["step1000-tokens4B", "step20000-tokens84B", "step600000-tokens2516B", "step738020-tokens3094B"],
    ),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints", *SMOLLM2),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints", *SMOLLM2),
    "eurobert-210m": ("EuroBERT/EuroBERT-210m", "eurobert", UNKNOWN),
    "eurobert-610m": ("EuroBERT/EuroBERT-610m", "eurobert", [f"EuroBERT-610m_{name}" for name in UNKNOWN]),
    "moderncamembert-base": ("almanach/moderncamembert-base", "modernbert", [name.replace("step", "ckpt") for name in UNKNOWN]),
    "gaperon-1.5b": ("almanach/Gaperon-1125-1B", "llama", [name.replace("-", "_") for name in UNKNOWN]),
}  # fmt: skip


def run(*words, width: int = 120):
    return CliRunner().invoke(cli.app, [str(one) for one in words], env={"COLUMNS": str(width)})


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "numbers.txt"
    path.write_text(NUMBERS)
    return path


@pytest.fixture(autouse=True, scope="module")
def quickly():
    with quick_collections():
        yield


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    """Where an unfinished run writes what it has."""
    monkeypatch.setattr("tangent_lens.dynamics.state.cache_folder", lambda: tmp_path / "cache of runs")
    return tmp_path / "cache of runs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    return save_folders(tmp_path_factory.mktemp("run"), tokenizer)


@pytest.fixture
def base(folders, texts):
    """The words of a command on the folders."""
    return ("dynamics", folders, "--text", texts, *SMALL)


def test_folders_to_tables_report_and_plot(base, tmp_path):
    result = run(*base, "--refit", "--dimensions", "--out", tmp_path / "run", "--plot", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    for part in ("early and late in training", "along the run", "updates of the embedding", "TwoNN", "own proxy"):
        assert part in result.output
    assert (tmp_path / "run.png").stat().st_size > 10_000
    report = tln.DynamicsReport.load(tmp_path / "run")
    assert report.steps() == STEPS and report.windows.early == (0, 1, 2, 3)
    assert (report.settings.rank, report.settings.controls, report.settings.pack) == (2, 3, True)
    shown = run("show", tmp_path / "run", "--plot", tmp_path / "again.png")
    assert shown.exit_code == 0, shown.output
    assert "along the run" in shown.output and (tmp_path / "again.png").is_file()
    overlaps = run("overlaps", tmp_path / "run")
    assert overlaps.exit_code == 0 and "overlap" in overlaps.output


def test_which_checkpoints_and_windows(base, tmp_path):
    chosen = (
        "--checkpoints",
        "checkpoint-*",
        "--at-most",
        4,
        "--spacing",
        "linear",
        "--no-everywhere",
        "--by",
        "count",
    )
    result = run(*base, *chosen, "--early", 0.25, "--late", 0.25, "--gradients", "residual", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = tln.DynamicsReport.load(tmp_path)
    assert report.windows.early == (0,) and report.windows.late == (10,)
    assert report.steps() == (0, 10)
    assert {one.gradient for one in report.early} == {"residual"}


@pytest.mark.parametrize(
    ("text", "name", "step"),
    [
        ("step*", "step1000", 1000),
        ("step*", "step1000-tokens4B", None),
        ("step*-tokens*B", "step1000-tokens4B", 1000),
        ("a.b*", "a.b20k", 20_000),
        ("a.b*", "acb20", None),
        (r"x(?P<step>\d+)y", "x7y", 7),
    ],
)
def test_names_of_checkpoints_by_glob_or_expression(text, name, step):
    assert step_of(name, re.compile(step_pattern(text))) == step


def test_refusals_are_sentences(base, folders, report, tmp_path):
    cases = {
        ("--checkpoints", "checkpoint"): "does not say where the step is; write step*",
        ("--delete-downloads",): "is about the hub",
        ("--early", "0.9"): "that do not overlap",
        ("--checkpoints", "step*"): "no folder is named by a training step",
        ("--config", tmp_path / "none.toml"): "No such file",
    }
    for words, sentence in cases.items():
        result = run(*base, *words, width=300)
        assert result.exit_code == 1 and sentence in result.output, words
    report.save(tmp_path / "gradients")
    result = run(*base, "--out", tmp_path / "gradients", width=300)
    assert result.exit_code == 1 and "holds a report of gradients, which would be lost" in result.output
    assert run("dynamics", tmp_path / "nowhere" / "x").exit_code == 1


def test_show_refuses_options_of_other_reports(base, tmp_path):
    assert run(*base, "--at-most", 2, "--gradients", "residual", "--out", tmp_path).exit_code == 0
    maps, heads = (run("show", tmp_path, option, width=300) for option in ("--maps", "--heads"))
    assert maps.exit_code == heads.exit_code == 1
    assert "holds one of training dynamics" in maps.output
    assert "holds none" in heads.output


needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")


class TestConfig:
    def written(self, folder: Path, content: dict) -> Path:
        lines = [f"{name} = {json.dumps(value)}" for name, value in content.items()]
        (folder / "run.toml").write_text("\n".join(lines))
        return folder / "run.toml"

    @needs_toml
    def test_its_values_are_defaults_that_options_override(self, folders, texts, tmp_path):
        values = {"model": str(folders), "rank": 2, "controls": 4, "at-most": 3, "text": [str(texts)], "refit": True}
        values |= {"sequence_length": 12, "sequences": 8, "gradients": "residual"}
        file = self.written(tmp_path, values)
        result = run("dynamics", "--config", file, "--controls", 5, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        report = tln.DynamicsReport.load(tmp_path / "run")
        assert (report.settings.rank, report.settings.controls) == (2, 5)
        assert len(report.points) == 3 and report.points[0].refitted
        assert report.corpus.name == texts.name and report.settings.gradients == ("residual",)

    @needs_toml
    def test_unknown_names_and_other_files_are_refused(self, tmp_path):
        result = run("dynamics", "--config", self.written(tmp_path, {"model": "x", "ranks": 2}), width=400)
        assert result.exit_code == 1 and "ranks is no option of dynamics; it has model, checkpoints" in result.output
        (tmp_path / "bad.toml").write_text("model: x")
        result = run("dynamics", "--config", tmp_path / "bad.toml", width=400)
        assert result.exit_code == 1 and "bad.toml is no TOML file" in result.output

    def test_older_pythons_are_told(self, monkeypatch, tmp_path):
        monkeypatch.setattr(cli_dynamics.sys, "version_info", (3, 10, 14))
        result = run("dynamics", "--config", self.written(tmp_path, {"model": "x"}), width=300)
        assert result.exit_code == 1 and "from 3.11 on; give its values as options" in result.output


@pytest.fixture(scope="module")
def masking_tokenizer():
    """As the other, with the ids of the tiny encoders: 4 is the mask."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    words = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate([*names, *map(str, range(95))])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), names, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    assert made.mask_token_id == MASK
    return made


def served_revisions(family, names, tokenizer, where) -> dict[str, Path]:
    """A saved model of the family for every branch; ``main`` is one of them, and no checkpoint."""
    found = {}
    for seed, name in enumerate(["main", *names]):
        try:
            model = tiny_family(family, torch.float32, seed=seed)
        except NotInThisVersion as missing:
            pytest.skip(str(missing))
        found[name] = where / name
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def test_every_model_of_the_paper_has_a_file():
    assert [path.stem for path in CONFIGS] == sorted(SERVED)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"--config examples/dynamics/{name}.toml --out runs/{name}\n" in readme for name in SERVED)


@needs_toml
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_rehearsal_of_a_model_of_the_paper(config, texts, masking_tokenizer, monkeypatch, tmp_path):
    repository, family, names = SERVED[config.stem]
    revisions = served_revisions(family, names, masking_tokenizer, tmp_path / "served")
    with LoopbackHub({repository: revisions}) as hub:
        serve_in_this_process(monkeypatch, hub, tmp_path / "hub cache")
        result = run("dynamics", "--config", config, "--text", texts, *SMALL, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        opened = {path.split("/resolve/")[1].split("/")[0] for path in hub.downloads("model.safetensors")}
        assert opened & {*names, *revisions} <= set(names)
        assert all({name, hub.commit(repository, name)} & opened for name in names)
        assert not {"main", hub.commit(repository, "main")} & opened
    kept = list((tmp_path / "hub cache").rglob("*.safetensors"))
    assert len(kept) == (0 if "delete_downloads = true" in config.read_text() else len(names))
    report = tln.DynamicsReport.load(tmp_path / "run")
    assert report.model.name == repository and len(report.steps()) == len(names) >= 4
    summary = {(one.window, one.kind): one for one in report.summary()}
    for window in ("early", "late"):
        assert len(getattr(report.windows, window)) >= 2
        for kind in ("residual", "attention", "mlp"):
            one = summary[window, kind]
            assert one.layers >= 2 and 0 < one.energy < 1 and one.lift > 0
    assert summary["early", "residual"].energy != summary["late", "residual"].energy
    assert report.points[0].refitted and report.points[-1].overlaps
    masked = family in ("eurobert", "modernbert")
    assert (report.corpus.loss_unit, report.settings.loss == "next-token") == (
        ("masked token", False) if masked else ("token", True)
    )


def test_table_1_of_saved_runs(base, tmp_path):
    for name in ("first", "second"):
        assert run(*base, "--at-most", 3, "--gradients", "residual", "--out", tmp_path / name).exit_code == 0
    script = [sys.executable, str(EXAMPLES / "table_1.py"), str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "%" in line]
    report = tln.DynamicsReport.load(tmp_path / "first")
    assert [row[1] for row in rows] == ["(1)", "(2)"]
    assert rows[0][2] == f"{report.summary()[0].energy:.1%}"
