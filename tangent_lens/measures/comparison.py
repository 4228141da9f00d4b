"""Several reports side by side: one model in several libraries, several states of one model, several models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tangent_lens.measures.report import Measurement, Report, flat_row
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas

# Settings that change numbers; batch_size and padding_side do not.
_DECISIVE = (
    "rank",
    "fit",
    "controls",
    "seed",
    "maps",
    "loss",
    "fit_site",
    "center",
    "shrinkage",
    "fit_fraction",
    "sequence_length",
    "pack",
    "prepend_bos",
    "skip_first",
    "skip_special",
)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Shown):
    """Reports side by side.

    Attributes:
        names: what the table calls each report.
        warnings: sentences on what else differs between the runs than what the reader may think.
    """

    reports: tuple[Report, ...]
    names: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of every report one under the other, with a column ``run`` of their names."""
        import pandas

        rows = [
            {"run": name, **flat_row(one)}
            for name, report in zip(self.names, self.reports, strict=True)
            for one in report.measurements
        ]
        return pandas.DataFrame(rows)

    def measurements(self, gradient: str, kind: str) -> list[tuple[str, tuple[Measurement | None, ...]]]:
        """Measurement by measurement, what each report has of it: (name, one entry a report), in the order of layers.

        Args:
            gradient: ``residual`` or ``weight``.
            kind: of a weight gradient, ``attention`` or ``mlp`` (maps together); of a residual one, "" for all kinds.
        """
        found: dict[tuple[int, str], list[Measurement | None]] = {}
        for place, report in enumerate(self.reports):
            for one in report.measurements:
                if (
                    one.gradient == gradient
                    and (one.pooled if gradient == "weight" else True)
                    and kind in ("", one.kind)
                ):
                    key = (-1 if one.layer is None else one.layer, one.name)
                    found.setdefault(key, [None] * len(self.reports))[place] = one
        return [(name, tuple(cells)) for (_, name), cells in sorted(found.items(), key=lambda item: item[0][0])]


def compare(*reports: Report, names: Sequence[str] | None = None) -> Comparison:
    """Put reports side by side, with warnings where they are not of one kind.

    Args:
        reports: two or more.
        names: what to call them; by default whatever tells them apart: library, model, revision, or a number.

    Raises:
        ValueError: fewer than two reports, or another number of names.
    """
    if len(reports) < 2:
        raise ValueError(f"{len(reports)} report cannot be compared; pass two or more")
    if names is not None and (len(names) != len(reports) or len(set(names)) != len(names)):
        raise ValueError(f"{len(reports)} reports need as many names, each another; got {list(names)}")
    chosen = tuple(names) if names is not None else _names(reports)
    return Comparison(reports, chosen, tuple(_warnings(reports, chosen)))


def _names(reports: Sequence[Report]) -> tuple[str, ...]:
    candidates = (
        [_library(report) for report in reports],
        [report.model.name for report in reports],
        [report.model.revision for report in reports],
        [f"{report.model.name}, {_library(report)}" for report in reports],
    )
    numbered = [f"run {place}" for place in range(1, len(reports) + 1)]
    return tuple(next((found for found in candidates if len(set(found)) == len(found)), numbered))


def _library(report: Report) -> str:
    """``transformers``, or the class inside transformer-lens."""
    return report.model.library.rpartition("(")[2].rstrip(")").split(" ")[0]


def _warnings(reports: Sequence[Report], names: Sequence[str]) -> Iterable[str]:
    weights = [report.model.weights for report in reports]
    if len(set(weights)) > 1:
        yield (
            f"the weights are of different kinds ({_each(names, weights)}): processed weights put activations and gradients "
            "in another basis, so energies, lifts and IsoScore* do not compare number by number"
        )
    losses = [report.settings.loss for report in reports]
    if len(set(losses)) > 1:
        yield f"the losses differ ({_each(names, losses)}): their gradients answer different questions"
    for what, values in (
        ("models", [report.model.name for report in reports]),
        ("revisions", [report.model.revision for report in reports]),
        ("precisions", [report.model.dtype for report in reports]),
        ("texts", [_text_of(report) for report in reports]),
        ("beginnings of sequences", [_beginning(report) for report in reports]),
    ):
        if len(set(values)) > 1:
            yield f"the {what} differ: {_each(names, values)}"
    for setting in _DECISIVE:
        values = [getattr(report.settings, setting) for report in reports]
        if setting != "loss" and len(set(values)) > 1:
            yield f"{setting} differs: {_each(names, values)}"


def _text_of(report: Report) -> str:
    corpus = report.corpus
    return f"{corpus.name}, {corpus.fit_tokens + corpus.test_tokens:,} tokens"


def _beginning(report: Report) -> str:
    special = [sentence for sentence in report.warnings if sentence.startswith("every sequence begins with")]
    return "with a special token of the tokenizer's own" if special else "with the text or as asked"


def _each(names: Sequence[str], values: Sequence[Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
