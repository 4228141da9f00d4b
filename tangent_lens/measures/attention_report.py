"""The result of one run over attention scores: what was measured, on what, and how."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.report import CorpusDescription, Space, hold_plain_numbers
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.showing import Shown
from tangent_lens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class AttentionSettings:
    """How a run was made; every choice that can change a number.

    Attributes:
        control_rows: about how many query rows, evenly spread over the corpus, the random normals are measured on; None for
            all rows. The tangent is measured on all rows always.
        distance_edges: where buckets of the key distance begin, beside 0; () without that axis.
        frequency_buckets: buckets of the query token's frequency, each of about as many tokens; 0 without that axis.
        scaling: whether pairs were binned by the radius of their rows.
    """

    rank: int | float | str = 16
    controls: int = 20
    control_rows: int | None = 256
    seed: int = 0
    center: bool = True
    fit_fraction: float = 0.5
    distance_edges: tuple[int, ...] = ()
    frequency_buckets: int = 0
    scaling: bool = False
    sequence_length: int | None = None
    pack: bool = False
    max_sequences: int | None = None
    prepend_bos: bool | None = None
    skip_first: bool = False
    skip_special: bool = False
    batch_size: int = 8
    padding_side: str = "right"

    def __post_init__(self) -> None:
        """Numbers of NumPy become Python's own, which files can hold."""
        hold_plain_numbers(self)


@dataclass(frozen=True, repr=False, eq=False)
class AttentionReport(Shown):
    """How far tangent terms dominate the attention scores of every layer and head of one model.

    Attributes:
        model, corpus, settings: what was measured, on what, and how. ``corpus.loss`` is not a number: none was computed.
        layers: one entry a layer.
        spaces: the residual stream that each layer's attention reads, where its tangent proxy was fitted.
        worst_sum: largest relative difference, over all layers, between the sum of the parts and the model's own queries and
            keys, on the first batch.
        warnings: sentences a reader must know before believing the numbers.
        versions: of the libraries that ran.
        created: when, UTC.
        subspaces: the tangent proxies by site name.
    """

    model: ModelDescription
    corpus: CorpusDescription
    settings: AttentionSettings
    layers: tuple[AttentionDominance, ...]
    spaces: tuple[Space, ...]
    worst_sum: float
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    created: str
    subspaces: Mapping[str, Subspace] = field(default_factory=dict)

    def layer(self, number: int) -> AttentionDominance:
        """One layer.

        Raises:
            KeyError: not measured.
        """
        for one in self.layers:
            if one.layer == number:
                return one
        raise KeyError(f"layer {number} was not measured; measured: {', '.join(str(one.layer) for one in self.layers)}")

    def by_head(self) -> AttentionHeads:
        """The table of every single head."""
        return AttentionHeads(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON; the subspaces are left out."""
        content: dict[str, Any] = {
            name: getattr(self, name) for name in ("worst_sum", "warnings", "versions", "created")
        }
        content |= {name: asdict(getattr(self, name)) for name in ("model", "corpus", "settings")}
        return content | {name: [asdict(one) for one in getattr(self, name)] for name in ("layers", "spaces")}

    def to_pandas(self) -> pandas.DataFrame:
        """One row a layer and head, one column a number."""
        import pandas

        return pandas.DataFrame([row for one in self.layers for row in one.flat_rows()])

    def plot(self) -> Any:
        """D of every layer and head as a heat map, beside its control, as a matplotlib figure (the ``plot`` extra)."""
        from tangent_lens.reports.attention_plots import plot_attention

        return plot_attention(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder of ``report.json`` and the subspaces, so that a crash leaves the old or the new."""
        from tangent_lens.reports.files import save_report

        save_report(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> AttentionReport:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: no report is there.
            FileProblem: it is damaged, of another kind, or of a newer format.
        """
        from tangent_lens.reports.attention_files import load_attention_report

        return load_attention_report(folder)


@dataclass(frozen=True, repr=False)
class AttentionHeads(Shown):
    """A report seen head by head; it shows itself as a table."""

    report: AttentionReport
