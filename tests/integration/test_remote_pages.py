"""What a person reads and copies, on a real NDIF server: tutorial 05, the example, the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import tiny_model
from nbclient import NotebookClient
from ndif_server import NdifServer

from tangent_lens.models.packaged import PackagedModelUnavailable, packaged_model_folder

pytestmark = [pytest.mark.ndif, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server():
    with NdifServer() as running:
        yield running


@pytest.fixture
def environment(server, tmp_path, monkeypatch):
    """Of a person whose jobs go to this server."""
    for name, value in {
        "NDIF_HOST": server.url,
        "NDIF_API_KEY": "somebody",
        "TANGENT_LENS_CACHE": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    return os.environ


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", torch.float32, hidden_size=64, intermediate_size=96).save_pretrained(folder)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, folder)
    return folder


def ran(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_runs_and_every_cell_shows_something(server, environment, monkeypatch, tmp_path):
    cache = os.environ.pop("TANGENT_LENS_CACHE")
    try:
        monkeypatch.setenv("TUTORIAL_MODEL", str(packaged_model_folder("smollm2-135m")))
    except PackagedModelUnavailable as problem:
        pytest.skip(str(problem))
    monkeypatch.setenv("TANGENT_LENS_CACHE", cache)
    notebook = nbformat.read(ROOT / "tutorials" / "05_remote.ipynb", as_version=4)
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells)
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "same energies: True" in said and "from an interrupted run" in said


def test_the_example_runs(environment, folder):
    said = ran(sys.executable, str(ROOT / "examples" / "remote_on_ndif.py"), str(folder))
    assert "remote" in said and "MB received" in said


def test_the_command_runs(environment, folder):
    options = ["--remote", "--sequences", "8", "--sequence-length", "32", "--rank", "4", "--controls", "3"]
    said = ran(sys.executable, "-m", "tangent_lens", "measure", str(folder), *options)
    assert "remote" in said and "energy" in said
    said = ran(
        sys.executable, "-m", "tangent_lens", "shape", str(folder), "--remote", "--sequences", "8", "--no-dimensions"
    )
    assert "IsoSc" in said
