"""Reports side by side on paper: the numbers of the reports, each under its name, at every width and for any number."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens import cli
from tangent_lens.measures.comparison import compare
from tangent_lens.reports import tables
from tangent_lens.reports.console import as_text

WIDTHS = (80, 100, 116, 160)
COUNTS = (2, 4, 7)
TITLES = {
    "residual gradient": ("residual", ""),
    "attention weight gradients": ("weight", "attention"),
    "MLP weight gradients": ("weight", "mlp"),
}
SHOWN = {
    "energy": lambda one: tables.percent(one.energy.energy),
    "lift": lambda one: tables.number(one.energy.lift) + ("*" if one.corrected_energy_p <= 0.05 else ""),
    "signal": lambda one: tables.number(one.energy.signal_lift),
    "IsoSc*": lambda one: tables.small(one.isotropy.score),
}
MEDIAN_OF = {
    "energy": (lambda one: one.energy.energy, tables.percent),
    "lift": (lambda one: one.energy.lift, tables.number),
    "signal": (lambda one: one.energy.signal_lift, tables.number),
    "IsoSc*": (lambda one: one.isotropy.score, tables.small),
}


def varied(report, number: int, **changes):
    """The report with other numbers: those of the n-th differ from all others, significant here and there."""
    measurements = []
    for place, one in enumerate(report.measurements):
        energy = dataclasses.replace(
            one.energy,
            energy=one.energy.energy * 0.9**number + 0.001 * place,
            lift=one.energy.lift * 1.07**number,
            signal_lift=None if one.energy.signal_lift is None else one.energy.signal_lift * 1.03**number,
            p_value=1 / 21 if (place + number) % 3 == 0 else 0.5,
        )
        isotropy = dataclasses.replace(one.isotropy, score=one.isotropy.score * 0.8**number)
        measurements.append(dataclasses.replace(one, energy=energy, isotropy=isotropy, energy_q_value=None))
    model = dataclasses.replace(report.model, name=f"model-{number}")
    corpus = dataclasses.replace(report.corpus, loss=report.corpus.loss + number)
    return dataclasses.replace(report, model=model, corpus=corpus, measurements=tuple(measurements), **changes)


def several(report, count: int):
    return compare(*(varied(report, number) for number in range(count)))


@dataclasses.dataclass
class Block:
    """One printed table: its title, the columns of each report in it, and its rows by label."""

    title: str
    columns: list[str]
    rows: dict[str, list[str]]

    @property
    def groups(self) -> list[list[str]]:
        starts = [place for place, name in enumerate(self.columns) if name == "energy"]
        return [self.columns[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def blocks_of(text: str, labels: Iterable[str] = ("0", "1", "2", "3", "11")) -> list[Block]:
    """Read the printed tables back."""
    title, blocks = "", []
    for line in text.splitlines():
        words = line.split()
        label = next((one for one in (*labels, "median") if re.match(rf"\s*{re.escape(one)}\s", line)), None)
        if line.strip() in TITLES:
            title = line.strip()
        elif words and words[0] in ("layer", "site") and "energy" in words:
            blocks.append(Block(title, words[1:], {}))
        elif blocks and label is not None:
            blocks[-1].rows.setdefault(label, line.strip().removeprefix(label).split())
    return blocks


def titles_of(text: str) -> list[str]:
    """What stands above each group of columns, its lines one after the other and without blanks."""
    lines, titles = text.splitlines(), []
    for number, line in enumerate(lines):
        if line.split()[:2] not in (["layer", "energy"], ["site", "energy"]):
            continue
        first = number - 1
        while (
            first > 0 and lines[first - 1].strip() and not re.match(r"\s*(\S.* gradients?$|median\s)", lines[first - 1])
        ):
            first -= 1
        starts = [found.start() - 2 for found in re.finditer("energy", line)]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            titles.append("".join("".join(one[start:stop].split()) for one in lines[first:number]))
    return titles


def run_names_of(text: str) -> str:
    """The first column of the table of runs, one name after the other and without blanks."""
    lines = text.split("residual gradient")[0].splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:2] == ["run", "model"])
    end = lines[first].index("model")
    return "".join("".join(line[:end].split()) for line in lines[first + 2 :])


def labels_of(rows) -> list[str]:
    """A layer's number stands for a site where there is one kind of sites."""
    every = [next(one for one in cells if one is not None) for _, cells in rows]
    alone = len({one.kind for one in every}) == 1
    return [str(one.layer) if alone and one.layer is not None else one.name for one in every]


def assert_shows_all(comparison, text: str) -> None:
    """Every report's every number stands in its place, once."""
    for title, (gradient, kind) in TITLES.items():
        rows, place = comparison.measurements(gradient, kind), 0
        labels = labels_of(rows)
        own = [block for block in blocks_of(text, labels) if block.title == title]
        assert bool(own) == bool(rows), title
        with_content = [n for n in range(len(comparison.reports)) if any(cells[n] for _, cells in rows)]
        for block in own:
            here = with_content[place : place + len(block.groups)]
            for label, (_, cells) in zip(labels, rows, strict=True):
                expected = [
                    "–" if cells[n] is None else SHOWN[column](cells[n])
                    for n, columns in zip(here, block.groups, strict=True)
                    for column in columns
                ]
                assert block.rows[label] == expected, (title, label)
            medians = [
                medians_of([cells[n] for _, cells in rows if cells[n] is not None], column)
                for n, columns in zip(here, block.groups, strict=True)
                for column in columns
            ]
            assert block.rows["median"] == medians, title
            assert len(block.rows) == len(rows) + 1
            place += len(block.groups)
        assert place == len(with_content), f"{title}: {place} of {len(with_content)} reports are shown"


def medians_of(measurements, column: str) -> str:
    read, show = MEDIAN_OF[column]
    values = sorted(map(read, measurements))
    middle = len(values) // 2
    return show(values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2)


def assert_fits(text: str, width: int) -> None:
    for line in text.splitlines():
        assert len(line.rstrip()) <= width and "…" not in line, line


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
class TestAtEveryWidth:
    def test_nothing_is_wider_than_the_console_nor_cut_and_all_numbers_stand(self, report, count, width):
        comparison = several(report, count)
        text = as_text(comparison, width=width)
        assert_fits(text, width)
        assert_shows_all(comparison, text)

    @pytest.mark.parametrize(
        "name", ["after step {}", "EleutherAI/pythia-160m-deduped, step {}"], ids=["short", "long"]
    )
    def test_every_group_can_be_told_whose_it_is(self, report, count, width, name):
        """By its name, or by a short one that the table of runs explains."""
        names = [name.format(number + 1) for number in range(count)]
        comparison = compare(*(varied(report, number) for number in range(count)), names=names)
        text = as_text(comparison, width=width)
        assert_fits(text, width)
        assert_shows_all(comparison, text)
        whole = [one.replace(" ", "") for one in names]
        short = [f"run{number + 1}" for number in range(count)]
        explained = "".join(f"{one}:{other}" for one, other in zip(short, whole, strict=True))
        assert (titles_of(text), run_names_of(text)) in ((whole * 3, "".join(whole)), (short * 3, explained))

    def test_many_kinds_of_sites_have_their_whole_names_and_all_numbers(self, report, count, width):
        moved = {"attention_input.10": "resid_post.0", "resid_mid.10": "resid_post.1", "embedding": "resid_post.2"}
        extra = tuple(at(varied(report, 9), name, place) for place, name in moved.items())
        reports = [varied(report, number) for number in range(count)]
        reports[-1] = dataclasses.replace(reports[-1], measurements=(*reports[-1].measurements, *extra))
        comparison = compare(*reports)
        text = as_text(comparison, width=width)
        assert_fits(text, width)
        assert_shows_all(comparison, text)

    @pytest.mark.parametrize("label", ["query.10 (residual)", "transformer.encoder.layers.11.linear1.dropout"])
    def test_sites_of_long_names_cost_columns_and_no_digits(self, report, count, width, label):
        one = dataclasses.replace(extreme(report.of("resid_post.0")), name=label, kind="named", layer=None)
        other = dataclasses.replace(one, name="b")
        comparison = compare(*[dataclasses.replace(report, measurements=(one, other))] * count)
        text = as_text(comparison, width=width)
        assert_fits(text, width)
        assert_shows_all(comparison, text)

    def test_large_and_tiny_numbers_are_not_cut(self, report, count, width):
        wide = dataclasses.replace(report, measurements=tuple(extreme(one) for one in report.measurements))
        comparison = compare(*[wide] * count)
        text = as_text(comparison, width=width)
        assert_fits(text, width)
        assert_shows_all(comparison, text)
        assert "1.2e+04*" in text


def at(report, name: str, place: str):
    """A measurement of the report, moved to another place."""
    kind, _, layer = place.partition(".")
    moved = {"name": place, "site": place, "kind": kind, "layer": int(layer) if layer else None}
    return dataclasses.replace(report.of(name), **moved)


def extreme(one):
    signal = None if one.energy.signal_lift is None else 34567.0
    energy = dataclasses.replace(one.energy, energy=1.0, lift=12345.0, signal_lift=signal, p_value=1 / 21)
    return dataclasses.replace(
        one, energy=energy, energy_q_value=None, isotropy=dataclasses.replace(one.isotropy, score=6e-12)
    )


@pytest.mark.parametrize("width", WIDTHS)
class TestWhatIsMissing:
    def test_a_report_without_weight_gradients(self, report, width):
        residual = tuple(one for one in report.measurements if one.gradient == "residual")
        for order in (1, -1):
            reports = [varied(report, 0), dataclasses.replace(varied(report, 1), measurements=residual)][::order]
            comparison = compare(*reports)
            text = as_text(comparison, width=width)
            assert_shows_all(comparison, text)
            assert_fits(text, width)

    @pytest.mark.parametrize("having", [1, 5])
    def test_no_table_without_a_report_in_it(self, report, width, having):
        """Where the tables are split, a part may have nothing to show."""
        residual = tuple(one for one in report.measurements if one.gradient == "residual")
        reports = [varied(report, number) for number in range(9)]
        reports[having:] = [dataclasses.replace(one, measurements=residual) for one in reports[having:]]
        text = as_text(compare(*reports), width=width)
        assert_shows_all(compare(*reports), text)
        assert not [line for line in text.splitlines() if line.split() in (["layer"], ["site"], ["median"])]

    def test_a_gradient_that_no_report_has_has_no_title(self, report, width):
        residual = tuple(one for one in report.measurements if one.gradient == "residual")
        text = as_text(compare(*[dataclasses.replace(report, measurements=residual)] * 2), width=width)
        assert "residual gradient" in text and "weight gradients" not in text
        weights = tuple(one for one in report.measurements if one.gradient == "weight")
        text = as_text(compare(*[dataclasses.replace(report, measurements=weights)] * 2), width=width)
        assert "attention weight gradients" in text and "residual gradient" not in text

    def test_other_layers(self, report, width):
        fewer = dataclasses.replace(
            varied(report, 1), measurements=tuple(one for one in varied(report, 1).measurements if one.layer != 1)
        )
        other = tuple(at(varied(report, 2), "resid_post.0", f"resid_post.{layer}") for layer in (2, 3, 11))
        comparison = compare(varied(report, 0), fewer, dataclasses.replace(varied(report, 2), measurements=other))
        text = as_text(comparison, width=width)
        assert_shows_all(comparison, text)
        first = blocks_of(text)[0]
        assert list(first.rows) == ["0", "1", "2", "3", "11", "median"]


class TestWhatItSays:
    def test_the_runs_stand_above_with_model_library_weights_and_loss(self, report):
        first = dataclasses.replace(report, model=dataclasses.replace(report.model, library="transformers 5.24"))
        bridge = dataclasses.replace(
            report.model, library="transformer-lens 4.3.0 (TransformerBridge)", weights="folded"
        )
        corpus = dataclasses.replace(report.corpus, loss=1.25, loss_unit="masked token")
        second = dataclasses.replace(report, model=bridge, corpus=corpus)
        text = as_text(compare(first, second), width=160)
        above = text.split("residual gradient")[0]
        assert re.search(
            r"transformers .*\[tiny\] model \(LlamaForCausalLM\).*transformers 5\.24, float64.*as stored", above
        )
        assert re.search(r"TransformerBridge .*TransformerBridge\), float64 .*folded .*1\.2500 a masked token", above)
        assert f"{report.corpus.loss:.4f} a token" in above

    @pytest.mark.parametrize("width", WIDTHS)
    def test_warnings_close_it(self, report, width):
        other = dataclasses.replace(report, settings=dataclasses.replace(report.settings, seed=9, rank=5))
        text = " ".join(as_text(compare(report, other, names=["x", "y"]), width=width).split())
        assert text.endswith("warning rank differs: x: 3; y: 5 warning seed differs: x: 4; y: 9")
        assert "warning" not in as_text(compare(report, report), width=width)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_names_are_no_markup(self, report, width):
        names = ["[red]old[/red]", "[/b] new"]
        text = as_text(compare(report, report, names=names), width=width)
        above, below = text.split("residual gradient")
        for part in (above, below):
            assert all("".join(name.split()) in "".join(part.split()) for name in names)
        warned = dataclasses.replace(report, settings=dataclasses.replace(report.settings, seed=9))
        assert "[red]old[/red]: 4; [/b] new: 9" in " ".join(
            as_text(compare(report, warned, names=names), width=160).split()
        )

    def test_a_star_where_p_is_small(self, report):
        comparison = several(report, 2)
        text = as_text(comparison, width=160)
        stars = sum(
            one.corrected_energy_p <= 0.05
            for gradient, kind in TITLES.values()
            for _, cells in comparison.measurements(gradient, kind)
            for one in cells
        )
        tables_alone = text.split("energy: share of")[0].split("residual gradient")[1]
        assert 0 < stars == len(re.findall(r"\d\*", tables_alone)) < 18

    def test_a_significant_lift_is_green(self, report):
        console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
        strong = tuple(extreme(one) for one in report.measurements)
        console.print(compare(*[dataclasses.replace(report, measurements=strong)] * 2))
        assert re.search(r"\x1b\[1;32m\s*1\.2e\+04\*", console.file.getvalue())

    def test_it_shows_itself_everywhere(self, report, capsys):
        comparison = several(report, 2)
        comparison.show(width=100)
        assert capsys.readouterr().out.rstrip() == as_text(comparison, width=100).rstrip()
        assert "MLP weight gradients" in repr(comparison)
        assert comparison._repr_html_().startswith("<pre")

    def test_columns_go_before_reports_do(self, report):
        """Four reports side by side at 100 characters, though without all columns; seven do not fit and are split."""
        four, seven = (blocks_of(as_text(several(report, count), width=100)) for count in (4, 7))
        assert [len(block.groups) for block in four] == [4, 4, 4]
        assert sum(len(block.groups) for block in seven) == 21 and len(seven) > 3


def run(*arguments):
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


class TestOnTheCommandLine:
    @pytest.fixture
    def folders(self, report, tmp_path):
        paths = [tmp_path / "first", tmp_path / "second"]
        for number, path in enumerate(paths):
            varied(report, number).save(path)
        return paths

    def test_saved_reports_side_by_side(self, report, folders):
        result = run(*folders)
        assert result.exit_code == 0, result.output
        assert_shows_all(several(report, 2), result.output)
        assert "warning  the models differ: model-0: model-0; model-1: model-1" in result.output

    def test_names_in_their_order(self, report, folders):
        result = run(*folders, "--name", "before", "--name", "after [x]")
        assert result.exit_code == 0, result.output
        assert "the models differ: before: model-0; after [x]: model-1" in " ".join(result.output.split())
        titles = next(line for line in result.output.splitlines() if line.split() == ["before", "after", "[x]"])
        assert titles.index("before") < titles.index("after")

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["first"], "1 report cannot be compared; pass two or more"),
            (["first", "second", "--name", "a"], "2 reports need as many names, each another; got ['a']"),
            (["first", "second", "--name", "a", "--name", "a"], "2 reports need as many names"),
            (["first", "none"], "no report at"),
        ],
    )
    def test_mistakes_get_a_sentence(self, folders, arguments, sentence):
        places = [folders[0].parent / one if one in ("first", "second", "none") else one for one in arguments]
        result = run(*places)
        assert result.exit_code == 1
        assert sentence in " ".join(result.output.split()) and "Traceback" not in result.output

    def test_a_damaged_report_is_told(self, folders):
        (folders[1] / "report.json").write_text("{")
        result = run(*folders)
        assert result.exit_code == 1 and "is damaged or was cut short" in " ".join(result.output.split())

    def test_it_is_the_comparison_of_python(self, folders):
        shown = as_text(compare(*(tln.Report.load(folder) for folder in folders)), width=100)
        assert run(*folders).output.strip() == shown.strip()
