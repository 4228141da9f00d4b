"""Cells as JSON, as a table in a terminal, and as a table in Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.cells import LIBRARY_DIFFERS, NOT_OFFERED, OK, REFUSED, WRONG, Cell, Check
from conformance.families import FAMILIES
from rich.console import Group
from rich.table import Table
from rich.text import Text

# A HookedEncoder is what a HookedTransformer is, for BERT: one column holds both.
_TITLES = {
    "huggingface": "HF",
    "nnsight": "nnsight",
    "hooked_transformer": "Hooked",
    "hooked_encoder": "Hooked",
    "hooked_transformer_processed": "folded",
    "bridge": "bridge",
    "bridge_compatibility": "compat.",
}
_ORDER = list(dict.fromkeys(_TITLES.values()))
_KINDS = (
    "wrong",
    "refused",
    "refused in part",
    "without",
    "the library differs from HuggingFace",
    "the library fails in part",
    "not offered",
)
_LEGEND = (
    "HF: transformers. Hooked: HookedTransformer as stored, HookedEncoder for BERT; folded: with processed weights.",
    "bridge: TransformerBridge; compat.: in compatibility mode. Below them the version of the library.",
    "✓ -14: right, every relative error below 1e-14; f32: right, but the library runs in float32 only.",
    "✓·: right, but part of it is refused, absent, or beyond the library: see below. ✗: wrong.",
    "≠: the library's own logits are not HuggingFace's. –: not offered by the library. refused: by tangent_lens.",
)
Column = tuple[str, str]


def write_json(cells: Sequence[Cell], path: Path) -> None:
    """All cells of one environment."""
    path.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def read_json(paths: Iterable[Path]) -> list[Cell]:
    """The cells of several files; of equal ones the last counts."""
    found = {}
    for path in paths:
        for entry in json.loads(path.read_text()):
            cell = Cell(**entry | {"checks": tuple(Check(**check) for check in entry["checks"])})
            found[cell.family, cell.backend, cell.library] = cell
    return list(found.values())


def as_table(cells: Sequence[Cell]) -> Group:
    """The table, its legend, and what is to be said."""
    columns = _columns(cells)
    table = Table(title="conformance", title_justify="left", pad_edge=False, padding=(0, 1))
    table.add_column("family", no_wrap=True)
    for title, version in columns:
        table.add_column(f"{title}\n{version}")
    for family, row in _rows(cells, columns):
        table.add_row(family, *(_coloured(cell) for cell in row))
    lines: list[Any] = [table, *(Text(line, style="dim") for line in _LEGEND)]
    return Group(*lines, *(Text(line) for line in sentences(cells)))


def as_markdown(cells: Sequence[Cell]) -> str:
    """A table for a README: what is right where."""
    columns = _columns(cells)
    lines = [
        "| family | " + " | ".join(f"{title} {version}".replace("*", "\\*") for title, version in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for family, row in _rows(cells, columns):
        lines.append(f"| {family} | " + " | ".join(_short(cell) for cell in row) + " |")
    return "\n".join(lines)


def line_of(cell: Cell) -> str:
    """One line of progress."""
    error = f", worst {cell.error:.0e}" if cell.error is not None else ""
    rest = f": {cell.sentence}" if cell.verdict not in (OK, NOT_OFFERED) else ""
    return f"{cell.family:<20} {cell.backend:<28} {cell.verdict}{error}{rest}"


def sentences(cells: Sequence[Cell]) -> Iterator[str]:
    """Every wrong number, refusal and failure, once each, with where it happens."""
    kinds: dict[str, dict[str, tuple[str, dict[str, list[str]]]]] = {}
    for cell in _shown(cells):
        for kind, sentence in _remarks(cell):
            _, places = kinds.setdefault(kind, {}).setdefault(_without_particulars(sentence), (sentence, {}))
            places.setdefault(" ".join(_column(cell)), []).append(cell.family)
    for kind in sorted(kinds, key=_KINDS.index):
        yield f"\n{kind}"
        for example, places in kinds[kind].values():
            where = "; ".join(f"{column}: {', '.join(dict.fromkeys(own))}" for column, own in places.items())
            yield f"  {example}\n      {where}"


def _remarks(cell: Cell) -> Iterator[tuple[str, str]]:
    if cell.verdict == WRONG:
        wrong = [f"{check}: {detail}" for check, detail in cell.wrong.items()]
        yield from (("wrong", text) for text in wrong or [cell.sentence])
    elif cell.verdict == LIBRARY_DIFFERS:
        yield "the library differs from HuggingFace", cell.sentence
    elif cell.verdict == REFUSED:
        yield "refused", cell.sentence
    elif cell.verdict == NOT_OFFERED:
        yield "not offered", cell.sentence
    for kind, reason in cell.lacks.items():
        yield "without", f"{kind}: {reason}"
    for check, detail in cell.library_fails.items():
        yield "the library fails in part", f"{check.removeprefix('library ')}: {detail}"
    for check, detail in cell.refused.items():
        yield "refused in part", f"{check.removeprefix('gradients').strip() or 'alone'}: {detail}"


def _without_particulars(sentence: str) -> str:
    """Sentences that differ in a number, the name of a site or of a class say the same."""
    sentence = re.sub(r"\b(inputs|activations|gradients) at \w+(\.\d+)?", "rows at", sentence)
    return re.sub(r"\d[\d.,e+-]*", "0", re.sub(r"\b\w+(ForCausalLM|ForMaskedLM|LMHeadModel)\b", "model", sentence))


def _column(cell: Cell) -> Column:
    version = ".".join(cell.library.split()[-1].split(".")[:2])
    return _TITLES[cell.backend], version


def _columns(cells: Sequence[Cell]) -> list[Column]:
    found = {_column(cell) for cell in cells}
    return sorted(found, key=lambda column: (_ORDER.index(column[0]), [int(part) for part in column[1].split(".")]))


def _shown(cells: Sequence[Cell]) -> list[Cell]:
    """One cell a place: what is offered, where a column holds two classes."""
    by_place: dict[tuple[str, Column], Cell] = {}
    for cell in cells:
        place = (cell.family, _column(cell))
        if place not in by_place or cell.verdict != NOT_OFFERED:
            by_place[place] = cell
    order = list(FAMILIES)
    return sorted(by_place.values(), key=lambda cell: order.index(cell.family))


def _rows(cells: Sequence[Cell], columns: Sequence[Column]) -> Iterator[tuple[str, list[Cell | None]]]:
    by_place = {(cell.family, _column(cell)): cell for cell in _shown(cells)}
    for family in dict.fromkeys(family for family, _ in by_place):
        yield family, [by_place.get((family, column)) for column in columns]


def _short(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.verdict == OK:
        partly = "·" if cell.refused or cell.library_fails or cell.lacks else ""
        return f"✓{partly} {_exponent(cell.error)}"
    return {NOT_OFFERED: "–", REFUSED: "refused", LIBRARY_DIFFERS: "≠", WRONG: "✗"}[cell.verdict]


def _exponent(error: float | None) -> str:
    return "f32" if error is None else str(math.ceil(math.log10(max(error, 1e-16))))


def _coloured(cell: Cell | None) -> Text:
    style = {OK: "green", REFUSED: "yellow", NOT_OFFERED: "dim", LIBRARY_DIFFERS: "yellow", WRONG: "bold red"}
    return Text(_short(cell), style=style[cell.verdict] if cell else "")
