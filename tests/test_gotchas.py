"""Every gotcha page shows its trap: the code under "Wrong" goes wrong as told, the code under "Right" does not.

Runs in every environment of the matrix: a page that needs a class this TransformerLens does not have is skipped.
"""

from __future__ import annotations

import importlib
import linecache
import re
from importlib.metadata import version
from pathlib import Path

import pytest

PAGES_FOLDER = Path(__file__).parent.parent / "tutorials" / "gotchas"
PAGES = sorted(path for path in PAGES_FOLDER.glob("*.md") if path.name != "README.md")
HEADINGS = ["Symptom", "Cause", "Wrong", "Right"]
NOT_RUN = "the code of this page is not run by the tests"
HOMES = {
    "transformers": "transformers",
    "NNsight": "nnsight",
    "TransformerBridge": "transformer_lens.model_bridge",
    "HookedTransformer": "transformer_lens",
    "HookedEncoder": "transformer_lens",
}


def needs(path: Path) -> str:
    """What stands below the title: ``Needs: `HookedTransformer` (TransformerLens 2 or 3)``."""
    title, blank, line, *_ = path.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and not blank and line.startswith("Needs: "), path.name
    return line.removeprefix("Needs: ")


def missing(needed: str) -> str:
    """Why a page cannot run here; "" where it can."""
    if NOT_RUN in needed:
        return NOT_RUN
    name, _, versions = re.fullmatch(r"`(\w+)`( \((?:TransformerLens|version) ([^)]+)\))?", needed).groups()
    library = "transformers" if name == "transformers" else "transformer-lens"
    if versions and version(library).split(".")[0] not in re.findall(r"\d+", versions):
        return f"needs {library} {versions}"
    if name != "transformers":
        # TransformerLens 4 still knows the names of the classes it dropped, and refuses to hand them out.
        try:
            getattr(importlib.import_module(HOMES[name]), name)
        except (ImportError, AttributeError):
            return f"this TransformerLens has no {name}"
    return ""


def section(path: Path, heading: str) -> str:
    """The text below one heading."""
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]


def blocks(path: Path, heading: str) -> list[str]:
    """The Python below one heading."""
    return re.findall(r"^```python\n(.*?)^```$", section(path, heading), re.DOTALL | re.MULTILINE)


@pytest.fixture
def pages_on_path(monkeypatch):
    """The pages import ``tiny``, the module beside them."""
    monkeypatch.syspath_prepend(str(PAGES_FOLDER))


@pytest.mark.parametrize("heading", ["Wrong", "Right"])
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_shows_what_the_page_says(path, heading, pages_on_path):
    if reason := missing(needs(path)):
        pytest.skip(reason)
    for code in blocks(path, heading):
        name = f"{path.name}, {heading}"
        # nnsight reads the source of a block where Python keeps it.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), {"__name__": path.stem})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_its_four_parts_and_asserts_what_it_claims(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert all(section(path, heading).strip() for heading in HEADINGS)
    for heading in ("Wrong", "Right"):
        (code,) = blocks(path, heading)
        assert NOT_RUN in needs(path) or code.strip().splitlines()[-1].startswith("assert "), heading
    assert not blocks(path, "Symptom") and not blocks(path, "Cause")
    assert max(len(line) for line in text.splitlines()) <= 120


def test_what_a_page_needs_is_said_in_words_that_this_test_reads():
    assert {needs(path) for path in PAGES if NOT_RUN not in needs(path)} <= {
        "`transformers`",
        "`transformers` (version 4)",
        "`NNsight`",
        "`TransformerBridge` (TransformerLens 3 or 4)",
        "`TransformerBridge` (TransformerLens 3)",
        "`TransformerBridge` (TransformerLens 4)",
        "`HookedTransformer` (TransformerLens 2 or 3)",
        "`HookedEncoder` (TransformerLens 2 or 3)",
    }


def test_the_index_has_one_line_for_every_page():
    index = (PAGES_FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^[-|*].*?\]\((\w+\.md)\)", index, re.MULTILINE)
    assert sorted(listed) == [path.name for path in PAGES]
