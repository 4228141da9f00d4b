"""Heat maps in a console: a cell a head, coloured by its number, readable without colour."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from tangent_lens.reports.console import as_html, as_text
from tangent_lens.reports.heat_map import HeatMap, colour_of


def shown(shares, width=80, labels=None, **console):
    target = Console(file=io.StringIO(), width=width, **console)
    target.print(HeatMap("title", labels or [str(row) for row in range(len(shares))], shares))
    return target.file.getvalue()


def cells(text, label):
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [label]]


def test_a_cell_holds_its_share_in_percent_at_its_place():
    text = shown([[0.0, 0.123, 0.999], [1.0, math.nan, 0.505]])
    assert cells(text, "layer") == [["0", "1", "2"]]
    assert cells(text, "0") == [["0", "12", "100"]]
    assert cells(text, "1") == [["100", "–", "50"]]
    header, row = (next(line for line in text.splitlines() if line.split()[:1] == [key]) for key in ("layer", "0"))
    assert header.index("1") == row.index("2"), "heads and cells are not in one column"


@pytest.mark.parametrize(
    ("share", "colour"),
    [(0, (68, 1, 84)), (0.5, (33, 145, 140)), (1, (253, 231, 37)), (-1, (68, 1, 84)), (2, (253, 231, 37))],
)
def test_colours_go_from_dark_to_bright(share, colour):
    assert colour_of(share) == colour


def styles(shares):
    """Text, colour and background of every cell, as (red, green, blue) or None."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    parts = [part for part in console.render(HeatMap("title", ["0"], [shares])) if part.style]
    triplets = [(part.text, part.style.color, part.style.bgcolor) for part in parts]
    cells = [(text, *(colour and tuple(colour.triplet) for colour in both)) for text, *both in triplets]
    return [cell for cell in cells if cell[0].strip() in ("–", *map(str, range(101)))]


def test_the_background_is_the_colour_of_the_share_and_the_text_stands_out():
    assert styles([0.0, 1.0, math.nan]) == [
        ("  0 ", (255, 255, 255), (68, 1, 84)),
        ("100 ", (0, 0, 0), (253, 231, 37)),
        ("  – ", None, None),
    ]
    assert "background-color: #440154" in as_html(HeatMap("title", ["0"], [[0.0]]))


@pytest.mark.parametrize("share", [step / 50 for step in range(51)])
def test_text_is_readable_on_every_colour(share):
    """Contrast of at least 4.4 to 1 (WCAG's threshold for text is 4.5)."""

    def luminance(colour):
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ((_, ink, paper),) = styles([share])
    light, dark = sorted((luminance(ink), luminance(paper)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.4


@pytest.mark.parametrize("width", [20, 80, 100, 116, 160])
@pytest.mark.parametrize("heads", [1, 9, 32, 64, 71])
def test_many_heads_stand_in_blocks_of_about_equal_width(width, heads):
    text = shown([[head / 100 for head in range(heads)]], width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    blocks = cells(text, "layer")
    assert [head for block in blocks for head in block] == [str(head) for head in range(heads)]
    assert [cell for block in cells(text, "0") for cell in block] == [str(head) for head in range(heads)]
    assert max(map(len, blocks)) - min(map(len, blocks)) < len(blocks)


def test_layers_may_differ_in_heads():
    text = shown([[0.1, 0.2], [0.3]])
    assert cells(text, "0") == [["10", "20"]] and cells(text, "1") == [["30"]]


def test_without_layers_there_is_nothing_to_draw():
    assert as_text(HeatMap("title", [], [])).strip() == "title"
