"""Every tutorial runs from its first cell to its last, on the model it is written for."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tangent_lens.models.packaged import PACKAGED, PackagedModelUnavailable, packaged_model_folder

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("[0-9]*.ipynb"))
# It needs a server; tests/integration starts one and runs it there.
HERE = [path for path in TUTORIALS if path.stem != "05_remote"]


@pytest.mark.slow
@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_tutorial_runs_and_every_cell_shows_something(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells)
    for name in PACKAGED:
        if f'"{name}"' in code:
            _fetch_or_skip(name)
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs, f"this cell shows nothing:\n{cell.source}"


def _fetch_or_skip(name: str) -> None:
    try:
        packaged_model_folder(name)
    except PackagedModelUnavailable as problem:
        pytest.skip(str(problem))


def test_committed_tutorials_carry_their_outputs():
    assert TUTORIALS
    for path in TUTORIALS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert all(cell.outputs for cell in cells), f"{path.name} was committed without its outputs"
