"""Local geometry along training: the same occurrences of the same tokens at every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tangent_lens.measures.geometry_measure import measure_geometry
from tangent_lens.measures.geometry_report import GeometryReport, GeometrySettings
from tangent_lens.measures.neighbourhoods import NeighbourhoodOverlap, overlap_of_neighbours
from tangent_lens.models.checkpoints import CheckpointSource
from tangent_lens.models.protocol import Model, pad_id_of
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import choose_loss
from tangent_lens.recording.reading import Texts, read_corpus
from tangent_lens.showing import Shown
from tangent_lens.sites import Site, SiteSelection, resid_post, resolve

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class GeometryPoint:
    """One checkpoint.

    Attributes:
        step: of training; name: of the checkpoint.
    """

    step: int
    name: str
    report: GeometryReport


@dataclass(frozen=True, repr=False, eq=False)
class GeometryRun(Shown):
    """Reports of one training run, the first step first.

    Attributes:
        source: what the checkpoints are called.
        points: one a checkpoint; the tokens and their occurrences are the same in all.
    """

    source: str
    points: tuple[GeometryPoint, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the measured sites."""
        return tuple(one.site for one in self.points[0].report.sites)

    def overlaps(self, site: str) -> tuple[tuple[NeighbourhoodOverlap | None, NeighbourhoodOverlap], ...]:
        """Of every checkpoint, how many neighbours a row keeps from the one before (None at the first), and how many it shares
        with the last.

        Raises:
            KeyError: a site that was not measured.
            ValueError: the run was measured with ``depth=False``.
        """
        found = []
        for one in self.points:
            depth = one.report.depth
            if depth is None:
                raise ValueError("neighbours were not looked for; measure with depth=True")
            if site not in depth.sites:
                raise KeyError(f"{site!r} was not measured; measured: {', '.join(depth.sites)}")
            found.append(depth.neighbours[depth.sites.index(site)])
        before = [None, *(overlap_of_neighbours(one, other) for one, other in pairwise(found))]
        return tuple(zip(before, (overlap_of_neighbours(one, found[-1]) for one in found), strict=True))

    def to_pandas(self) -> pandas.DataFrame:
        """One row a step and a site: exponents, curvature and, with ``depth``, dimensions and overlaps."""
        import pandas

        frames = []
        for one in self.points:
            frame = one.report.to_pandas()
            frame = frame[frame["bucket"] == "all"].drop(columns="bucket")
            if one.report.depth is not None:
                columns = ["site", "two_nn", "mle", "effective_rank", "linearity", "agreement"]
                frame = frame.merge(one.report.depth.to_pandas()[columns], on="site")
            frames.append(frame.assign(step=one.step))
        found = pandas.concat(frames, ignore_index=True)
        if self.points[0].report.depth is None:
            return found
        of_site = {site: self.overlaps(site) for site in self.sites}
        steps = [one.step for one in self.points]
        pairs = [of_site[site][steps.index(step)] for site, step in zip(found["site"], found["step"], strict=True)]
        kept = [None if before is None else before.overlap for before, _ in pairs]
        return found.assign(overlap_before_step=kept, overlap_last_step=[last.overlap for _, last in pairs])

    def plot(self) -> Any:
        """Exponents, dimensions and overlaps along the steps, as a matplotlib figure (needs the ``plot`` extra)."""
        from tangent_lens.reports.geometry_run_plot import plot_geometry_run

        return plot_geometry_run(self)


def geometry_checkpoints(
    source: CheckpointSource,
    texts: Texts,
    sites: SiteSelection | None = None,
    *,
    max_sequences: int | None = None,
    sequence_length: int | None = None,
    pack: bool = False,
    prepend_bos: bool | None = None,
    name: str = "texts",
    gradient_layers: int = 0,
    progress: bool | Progress = True,
    **settings: Any,
) -> GeometryRun:
    """:meth:`Lens.geometry` at every checkpoint of a training run; one checkpoint is in memory at a time.

    Args:
        source: of :func:`hub_checkpoints`, :func:`folder_checkpoints` or :func:`state_checkpoints`; ``source.choose`` thins it.
        texts: read with the tokenizer of the first checkpoint.
        sites: resid_post of every layer by default.
        max_sequences, sequence_length, pack, prepend_bos, name: as of :meth:`Lens.corpus`.
        gradient_layers: as of :meth:`Lens.geometry`; none by default.
        settings: any other field of :class:`GeometrySettings`.

    Raises:
        ValueError: settings or texts that do not fit.
        CheckpointProblem: a checkpoint that cannot be opened.
    """
    reading = {
        "sequence_length": sequence_length,
        "pack": pack,
        "max_sequences": max_sequences,
        "prepend_bos": prepend_bos,
    }
    with source.open(source.steps[0]) as model:
        corpus = read_corpus(texts, model.tokenizer, name=name, **reading)
    chosen = GeometrySettings(gradient_layers=gradient_layers, **settings)
    shown = chosen_progress(progress)
    return GeometryRun(source.name, tuple(_points(source, corpus, sites, chosen, shown)))


def _points(
    source: CheckpointSource,
    corpus: Corpus,
    sites: SiteSelection | None,
    settings: GeometrySettings,
    progress: Progress | None,
) -> Iterator[GeometryPoint]:
    for checkpoint in source:
        with source.open(checkpoint) as model:
            loss = choose_loss(None, model, settings.seed)
            options = {"pad_id": pad_id_of(model), "progress": progress}
            report = measure_geometry(model, corpus, _sites_of(model, sites), settings, loss, **options)
        yield GeometryPoint(checkpoint.step, checkpoint.name, report)


def _sites_of(model: Model, sites: SiteSelection | None) -> tuple[Site, ...]:
    return resolve(resid_post() if sites is None else sites, model.sites, model.absent, model.misleading_names)
