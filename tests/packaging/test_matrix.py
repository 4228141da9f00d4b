"""What packaging/matrix.py decides by itself; that its environments work is what `make test-matrix` shows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tangent_lens.models import packaged

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "packaging")
    return importlib.import_module("matrix")


@pytest.fixture
def checkout(matrix, monkeypatch, tmp_path):
    """A small project in the place of this one."""
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "packaging").mkdir()
    (tmp_path / "tangent_lens" / "__pycache__").mkdir(parents=True)
    (tmp_path / "tangent_lens" / "__init__.py").write_text("one = 1\n", encoding="utf-8")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "/else/where"}, {"TANGENT_LENS_CACHE": "~/mine"}])
def test_environments_lie_in_the_librarys_cache_folder(matrix, monkeypatch, variables):
    for name in ("XDG_CACHE_HOME", "TANGENT_LENS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert matrix.cache_folder() == packaged.cache_folder()


def test_a_changed_requirement_is_seen_and_a_changed_linter_rule_is_not(matrix, checkout):
    before = matrix.requirements_mark("2", (3, 11))
    edit(checkout / "pyproject.toml", "line-length = 120", "line-length = 99")
    assert matrix.requirements_mark("2", (3, 11)) == before
    assert matrix.requirements_mark("3", (3, 11)) != before
    assert matrix.requirements_mark("2", (3, 12)) != before
    (checkout / "packaging" / "constraints-2.txt").write_text("pyarrow<24\n", encoding="utf-8")
    constrained = matrix.requirements_mark("2", (3, 11))
    assert constrained != before
    edit(checkout / "pyproject.toml", '"torch>=2.6"', '"torch>=2.7"')
    assert matrix.requirements_mark("2", (3, 11)) not in (before, constrained)


def test_a_changed_module_is_seen_and_a_compiled_one_is_not(matrix, checkout):
    before = matrix.wheel_mark()
    (checkout / "tangent_lens" / "__pycache__" / "__init__.pyc").write_bytes(b"compiled")
    assert matrix.wheel_mark() == before
    edit(checkout / "tangent_lens" / "__init__.py", "1", "2")
    assert matrix.wheel_mark() != before


def test_a_half_made_environment_is_made_anew(matrix, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(matrix, "install_all", lambda venv, *_: (venv.mkdir(), made.append(venv)))
    venv = tmp_path / "2-3.11"
    venv.mkdir()
    (venv / "left by a killed run").touch()
    matrix.make(venv, "2", (3, 11), sys.executable, "requirements", "wheel")
    assert made == [venv]
    assert [path.name for path in venv.iterdir()] == [matrix.environment.STAMP]
    assert matrix.read_stamp(venv) == ("requirements", "wheel")


@pytest.mark.parametrize(
    ("said", "unavailable"),
    [
        ("ERROR: Could not find a version that satisfies the requirement a<3,>=2 (from versions: none)", True),
        ("WARNING: Retrying (Retry(total=0, ...)) after connection broken by 'NewConnectionError(...)'", True),
        ("ERROR: Could not find a version that satisfies the requirement a==9 (from versions: 1.0, 2.0)", False),
        ("WARNING: Retrying (Retry(total=4, ...))\nERROR: ResolutionImpossible: for help visit", False),
    ],
)
def test_an_index_out_of_reach_is_told_from_a_conflict(matrix, said, unavailable):
    failed = subprocess.CompletedProcess([], 1, stdout=said)
    with pytest.raises(matrix.SetupError) as caught:
        matrix.check(failed, "It could not be installed")
    assert isinstance(caught.value, matrix.Unavailable) == unavailable


@pytest.mark.parametrize(
    ("outcomes", "skip", "code"),
    [
        ((0, 0), False, 0),
        ((5, 0), False, 1),
        (("unavailable", 0), False, 1),
        (("unavailable", 0), True, 0),
        (("unavailable", 1), True, 1),
        (("conflict", 0), True, 1),
    ],
)
def test_every_version_is_tried_and_one_failure_is_a_failure(matrix, monkeypatch, capsys, outcomes, skip, code):
    def run_beside(major, command, fresh):
        outcome = outcomes[int(major) - 2]
        if outcome == "unavailable":
            raise matrix.Unavailable("the index does not answer")
        if outcome == "conflict":
            raise matrix.SetupError("two requirements disagree")
        return outcome, f"transformer-lens {major}: said"

    monkeypatch.setattr(matrix, "run_beside", run_beside)
    assert matrix.run_matrix(["2", "3"], ["true"], skip_unavailable=skip) == code
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 and all("transformer-lens" in line for line in lines)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the matrix needs Python 3.11")
def test_the_command_runs_in_the_repository_without_importing_from_it(matrix, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told = tmp_path / "told-{major}.json"
    code = "import json, os, sys; json.dump([os.getcwd(), sys.prefix, sys.path], open(sys.argv[1], 'w'))"
    assert matrix.run_command(Path(sys.prefix), "3", ["python", "-c", code, str(told)]) == 0
    folder, prefix, path = json.loads((tmp_path / "told-3.json").read_text(encoding="utf-8"))
    assert Path(folder) == ROOT and prefix == sys.prefix
    assert "" not in path
