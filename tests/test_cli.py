"""The command line as a person uses it: commands, tables, exit codes, sentences."""

import subprocess
import sys

import pytest
from conftest import tiny_model
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens import cli

NUMBERS = " ".join(str(number % 100) for number in range(1, 1200, 7)) * 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    import torch

    folder = tmp_path_factory.mktemp("model")
    tiny_model("gpt_neox", torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text(NUMBERS)
    return path


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def quick(model_folder, text_file):
    return ("measure", model_folder, "--text", text_file, "--rank", 3, "--sequence-length", 16, "--sequences", 20)


def test_measure_prints_the_table_and_saves(model_folder, text_file, tmp_path):
    out = tmp_path / "run"
    result = run(*quick(model_folder, text_file), "--out", out, "--maps")
    assert result.exit_code == 0, result.output
    for part in ("attention weights", "median", "numbers.txt", "query.2", "saved in"):
        assert part in result.output
    report = tln.Report.load(out)
    assert report.corpus.fit_sequences == report.corpus.test_sequences == 10
    shown = run("show", out, "--plot", tmp_path / "plot.png")
    assert shown.exit_code == 0
    assert "numbers.txt" in shown.output
    assert (tmp_path / "plot.png").is_file()


def test_measure_takes_every_choice(model_folder, text_file, tmp_path):
    choices = (
        "--sites",
        "resid_post.1,embedding",
        "--gradients",
        "residual",
        "--controls",
        5,
        "--seed",
        3,
        "--skip-first",
    )
    more = ("--no-pack", "--shrinkage", 0.1, "--batch-size", 3, "--dtype", "float64", "--backend", "transformer_lens")
    result = run(*quick(model_folder, text_file), *choices, *more, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    report = tln.Report.load(tmp_path / "run")
    assert [one.name for one in report.measurements] == ["embedding", "resid_post.1"]
    assert (report.settings.controls, report.settings.seed, report.settings.skip_first) == (5, 3, True)
    assert (report.settings.shrinkage, report.settings.batch_size, report.settings.pack) == (0.1, 3, False)
    assert "TransformerBridge" in report.model.library and report.model.dtype == "float64"


def test_a_variance_share_is_a_rank(model_folder, text_file, tmp_path):
    result = run(*quick(model_folder, text_file), "--rank", "0.3", "--gradients", "residual", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert all(space.variance_share >= 0.3 for space in tln.Report.load(tmp_path / "run").spaces)


def test_a_local_dataset_is_read(model_folder, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.csv").write_text("body\n" + "\n".join(NUMBERS for _ in range(3)))
    rest = ("--rank", 3, "--sequence-length", 16, "--sequences", 10, "--sites", "resid_post.0")
    good = run("measure", model_folder, "--dataset", folder, "--column", "body", *rest)
    assert good.exit_code == 0, good.output
    bad = run("measure", model_folder, "--dataset", folder, *rest)
    assert bad.exit_code == 1
    assert "no column 'text'; it has body" in " ".join(bad.output.split())


def test_sites_lists_them_and_says_what_is_missing(model_folder):
    result = run("sites", model_folder)
    assert result.exit_code == 0, result.output
    assert "resid_post" in result.output and "no resid_mid" in result.output


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("--rank", 17), "rank 17 needs 2*rank <= d = 32"),
        (("--rank", 0), "rank 0 spans nothing"),
        (("--rank", "many"), "rank 'many' must be a whole number"),
        (("--sites", "resid_post.9"), "resid_post.9 is not in this model, which has 3 layers, 0 to 2"),
        (("--sites", "resid_mid.*"), "this model has no resid_mid"),
        (("--gradients", "hessian"), "must name 'residual', 'weight' or both"),
        (("--fit-site", "logits"), "fit_site 'logits'"),
        (("--sequence-length", 1), "sequence_length 1"),
        (("--controls", 0), "0 controls give no comparison"),
        (("--dataset", "x"), "--text and --dataset were both given"),
        (("--dtype", "int3"), "dtype 'int3' is not known"),
        (("--backend", "jax"), "backend 'jax' is not known"),
        (("--sequences", 1), "1 sequence cannot be split"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_1(model_folder, text_file, changes, sentence):
    result = run(*quick(model_folder, text_file), *changes)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_an_unknown_option_is_a_usage_error():
    assert run("measure", "x", "--nonsense").exit_code == 2


def test_missing_things_are_said(tmp_path):
    assert "no report at" in run("show", tmp_path).output
    assert "holds no config.json" in " ".join(run("sites", tmp_path).output.split())
    assert run("measure", tmp_path, "--text", tmp_path / "none.txt").exit_code == 1


def test_help_and_version_do_not_load_torch():
    code = "import sys; sys.argv = ['tangent-lens', '--help']; from tangent_lens.cli import main\n"
    code += "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "measure" in done.stdout and done.stdout.strip().endswith("False")
    version = subprocess.run([sys.executable, "-m", "tangent_lens", "--version"], capture_output=True, text=True)
    assert version.stdout.strip() == f"tangent-lens {tln.__version__}"


def test_the_demo_falls_back_to_a_small_model_with_a_sentence(monkeypatch, model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tangent_lens.models import loading, packaged, small

    def unavailable(*_, **__):
        raise packaged.PackagedModelUnavailable("pip could not fetch it; going without")

    def trained(texts, progress=None):
        return AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)

    monkeypatch.setattr(loading, "load", unavailable)
    monkeypatch.setattr("tangent_lens.lens.load", unavailable)
    monkeypatch.setattr(small, "train_small_model", trained)
    monkeypatch.setattr(cli, "DEMO_RANK", 4)
    result = run("demo", "--sequences", 12)
    assert result.exit_code == 0, result.output
    assert "pip could not fetch it" in result.output
    assert "attention weights" in result.output


def test_names_with_brackets_are_no_markup(tmp_path):
    result = run("show", tmp_path / "x[/b]")
    assert result.exit_code == 1
    assert "x[/b]" in "".join(result.output.split("\n"))


def test_text_that_is_not_utf8_is_named(model_folder, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9".encode("latin-1"))
    result = run("measure", model_folder, "--text", path)
    assert result.exit_code == 1
    assert "latin.txt is not UTF-8 text" in " ".join(result.output.split())


def test_an_unusable_out_is_refused_before_the_model_runs(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("measure", "no/such-model", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "is a file; name a folder" in " ".join(result.output.split())


def test_a_report_is_saved_even_where_it_cannot_be_printed(model_folder, text_file, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("no space left on the screen")

    monkeypatch.setattr(cli, "print_report", broken)
    assert run(*quick(model_folder, text_file), "--out", tmp_path / "run").exit_code == 1
    assert tln.Report.load(tmp_path / "run").corpus.name == "numbers.txt"


def test_an_output_without_unicode_loses_signs_but_not_the_result(model_folder, text_file):
    arguments = [str(one) for one in quick(model_folder, text_file)]
    done = subprocess.run(
        [sys.executable, "-m", "tangent_lens", *arguments], capture_output=True, env={"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert b"attention weights" in done.stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("--device", "abacus"), "device 'abacus' is not available"),
        (("--rank", "1.0"), "rank '1.0' must be a whole number"),
    ],
)
def test_more_mistakes_get_a_sentence(model_folder, text_file, change, sentence):
    result = run(*quick(model_folder, text_file), *change)
    assert result.exit_code == 1
    assert sentence in " ".join(result.output.split())


@pytest.fixture(scope="module")
def masked_folder(tmp_path_factory):
    from conformance.backends import tokenizer as masking_tokenizer
    from conformance.families import tiny_model as tiny_of_any_family

    folder = tmp_path_factory.mktemp("masked")
    tiny_of_any_family("bert").float().save_pretrained(folder)
    masking_tokenizer().save_pretrained(folder)
    return folder


def test_a_masked_model_is_loaded_as_one_and_its_masks_are_a_choice(masked_folder, text_file, tmp_path):
    report_of = {}
    for name, options in (("default", ()), ("plain", ("--mask-style", "plain", "--mask-share", 0.3, "--seed", 2))):
        result = run(*quick(masked_folder, text_file), *options, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        report_of[name] = tln.Report.load(tmp_path / name)
        assert "a masked token" in " ".join(result.output.split())
    assert report_of["default"].settings.loss == "masked-token (0.15 of the tokens, 80/10/10, seed 0)"
    assert report_of["plain"].settings.loss == "masked-token (0.3 of the tokens, plain, seed 2)"
    assert report_of["plain"].model.architecture == "BertForMaskedLM"
    side_by_side = run("compare", tmp_path / "default", tmp_path / "plain", "--name", "mixed", "--name", "plain")
    assert side_by_side.exit_code == 0, side_by_side.output
    assert "the losses differ" in " ".join(side_by_side.output.split())


def test_masks_are_for_masked_models(model_folder, text_file):
    result = run(*quick(model_folder, text_file), "--mask-share", 0.2)
    assert result.exit_code == 1
    assert "a masked loss was asked for, and GPTNeoXForCausalLM is a causal language model" in " ".join(
        result.output.split()
    )


def test_every_line_can_be_a_text_of_its_own(model_folder, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("5 6 7 8\n\n9 10 11\n12 13 14 15 16\n" * 4)
    choices = ("--text", path, "--rank", 3, "--no-pack", "--out", tmp_path / "run")
    result = run("measure", model_folder, "--lines", *choices)
    assert result.exit_code == 0, result.output
    corpus = tln.Report.load(tmp_path / "run").corpus
    assert corpus.fit_sequences + corpus.test_sequences == 12
    refused = run("measure", model_folder, "--lines")
    assert refused.exit_code == 1
    assert "--lines is about --text files" in refused.output
