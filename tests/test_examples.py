"""Every example runs as a person would run it, on a small model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_model

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# It needs a server; tests/integration starts one and runs it there.
HERE = [path for path in EXAMPLES if path.stem != "remote_on_ndif"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32, hidden_size=64, intermediate_size=96).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("example", HERE, ids=lambda path: path.stem)
def test_example_runs(example, model_folder):
    done = subprocess.run(
        [sys.executable, str(example), str(model_folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 5


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
