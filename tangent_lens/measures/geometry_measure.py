"""From a model and a corpus to a report on local geometry: the same occurrences at every site, then their weight gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangent_lens.measures.concept_geometry import DepthGeometry, depth_geometry
from tangent_lens.measures.curvature import bent_dimension, most_bent_dimension
from tangent_lens.measures.curvature_summary import CloudBend, cloud_bends, summarise_curvature
from tangent_lens.measures.dimension import check_installed
from tangent_lens.measures.geometry_report import (
    BucketGeometry,
    GeometryCorpus,
    GeometryReport,
    GeometrySettings,
    MapGeometry,
    OrderPoints,
    SiteGeometry,
    TokenBucket,
)
from tangent_lens.measures.gradient_order import gradient_order
from tangent_lens.measures.gradient_rows import FEWEST_ROWS, TokenGradients
from tangent_lens.measures.local_tangent import (
    check_nearest,
    crossed_parts,
    largest_dimension,
    local_dimension,
    wanted_dimension,
)
from tangent_lens.measures.neighbourhoods import checked_neighbours
from tangent_lens.measures.report import library_versions, now
from tangent_lens.measures.seen_curvature import summarise_seen
from tangent_lens.measures.tangent_order import OrderParts, TangentOrder, order_parts, other_choices
from tangent_lens.measures.uncertainty import MOST_BYTES, kept_bytes
from tangent_lens.models.protocol import Batch, LinearMap, Model, runs_remotely, width_of
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import Loss
from tangent_lens.recording.occurrence_rows import MapRows, record_map_rows, record_site_rows
from tangent_lens.recording.occurrences import Occurrences, choose_occurrences, clouds_of
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.sites import Site
from tangent_lens.subspaces.ranks import check_rank

# More points than these only blacken a plot.
MOST_POINTS = 2000
FEWEST_OCCURRENCES = 20
# Of the square of a token's rows. Rows that differ by less are one row and rounding.
_NO_SPREAD = 1e-9


def measure_geometry(
    model: Model,
    corpus: Corpus,
    sites: Sequence[Site],
    settings: GeometrySettings,
    loss: Loss,
    *,
    pad_id: int = 0,
    progress: Progress | None = None,
) -> GeometryReport:
    """One forward pass for the rows at every site, one forward and backward for those of the maps.

    Memory is that of the chosen occurrences at every site and map, known before the model runs; the report names it.

    Raises:
        ValueError: settings that do not fit, too few tokens, or a site where the rows of a token are all alike.
        SiteNeverFired, GradientNeverCame, NonFiniteRows: what went wrong inside the model.
        ImportError: scikit-dimension is not installed, and ``depth`` was asked for.
    """
    _check(settings)
    passes = _Passes(model, corpus, settings, pad_id, progress or NoProgress())
    maps = chosen_maps(model, sites, settings)
    chosen = choose_occurrences(
        passes.batches(), settings.occurrences, buckets=settings.buckets, tokens=settings.tokens, seed=settings.seed
    )
    _check_rows(settings, len(chosen), model, sites, maps)
    buckets = token_buckets(chosen, model)
    samples = passes.rows(sites, chosen)
    measured = tuple(
        _site_geometry(site, samples[site], buckets, chosen, settings)
        for site in passes.counted(sites, "local geometry", "sites")
    )
    depth = _depth(samples, settings, passes.progress) if settings.depth else None
    kept = sum(sample.rows.numel() for sample in samples.values())
    gradients: tuple[MapGeometry, ...] = ()
    if maps:
        record = passes.gradients(maps, chosen, loss)
        kept += sum(rows.numel() for rows in record.inputs.values())
        kept += sum(rows.numel() for rows in record.signals.values())
        split = [
            _map_geometry(one, record, chosen, settings) for one in passes.counted(maps, "weight gradients", "maps")
        ]
        gradients = tuple(one for one in split if one is not None)
    return GeometryReport(
        model=model.description,
        corpus=GeometryCorpus(
            name=corpus.name,
            sequences=len(corpus.sequences),
            tokens=corpus.tokens,
            eligible=chosen.eligible,
            chosen=len(chosen.chosen),
            rows=len(chosen),
            megabytes=4 * kept / 1e6,
        ),
        settings=settings,
        buckets=buckets,
        sites=measured,
        gradients=gradients,
        depth=depth,
        warnings=(*corpus.left_out, *_warnings(measured), *_left_out(maps, gradients)),
        versions=library_versions(),
        created=now(),
    )


def _check(settings: GeometrySettings) -> None:
    check_rank(settings.m)
    check_nearest(settings.nearest)
    if settings.occurrences < FEWEST_OCCURRENCES:
        raise ValueError(
            f"{settings.occurrences} occurrences of a token show no local geometry; use {FEWEST_OCCURRENCES} or more "
            "(100 is usual), with more text if tokens are too rare"
        )
    if settings.gradient_layers < 0:
        raise ValueError(f"gradient_layers {settings.gradient_layers} must be 0 or more")


def _check_rows(
    settings: GeometrySettings, rows: int, model: Model, sites: Sequence[Site], maps: Sequence[LinearMap]
) -> None:
    """What only the rows would refuse, before the model runs for them."""
    size = kept_bytes(model.description, sites, maps, rows)
    if size > MOST_BYTES:
        raise ValueError(
            f"{rows:,} occurrences at {len(sites)} sites and {len(maps)} maps take about {size / 2**30:.0f} GiB, and "
            f"{MOST_BYTES / 2**30:.0f} are allowed; measure fewer sites, tokens, occurrences or gradient_layers"
        )
    known = [width for site in sites if (width := width_of(model.description, site)) is not None]
    if known:
        largest_dimension(check_rank(settings.m), settings.occurrences, min(known), settings.nearest)
    if settings.depth:
        try:
            check_installed()
        except ImportError as problem:
            raise ImportError(f"{problem}, or depth=False (--no-depth) to go on without") from problem
        checked_neighbours(settings.neighbours, min(rows, settings.rows))


def chosen_maps(model: Model, sites: Sequence[Site], settings: GeometrySettings) -> tuple[LinearMap, ...]:
    """The maps asked for, in a few of the sites' layers, evenly apart.

    Raises:
        ValueError: a kind of map that the model does not have, or a model on a server.
    """
    if not settings.gradient_layers:
        return ()
    if runs_remotely(model):
        raise ValueError(
            "rows of gradients do not travel from a server; use gradient_layers=0, or measure where the model is"
        )
    known = {one.kind for one in model.maps}
    missing = [kind for kind in settings.maps if kind not in known]
    if missing:
        raise ValueError(
            f"this model has no map {missing[0]!r}; it has {', '.join(sorted(known)) or 'none'}, or gradient_layers=0"
        )
    layers = sorted({site.layer for site in sites if site.layer is not None})
    if not layers:
        raise ValueError("none of these sites has a layer, so no map's gradient belongs to them; use gradient_layers=0")
    places = np.unique(np.linspace(0, len(layers) - 1, min(settings.gradient_layers, len(layers))).round().astype(int))
    picked = {layers[place] for place in places}
    return tuple(one for one in model.maps if one.layer in picked and one.kind in settings.maps)


def token_buckets(chosen: Occurrences, model: Model) -> tuple[TokenBucket, ...]:
    """The chosen tokens with their texts."""
    tokenizer = model.tokenizer

    def text(token: int) -> str:
        return str(token) if tokenizer is None else str(tokenizer.decode([token]))

    return tuple(
        TokenBucket(
            name=f"{min(counts)} to {max(counts)}",
            tokens=tokens,
            texts=tuple(text(token) for token in tokens),
            low=min(counts),
            high=max(counts),
        )
        for tokens, counts in zip(chosen.buckets, chosen.counts, strict=True)
    )


@dataclass(frozen=True)
class _Passes:
    """The passes of one run."""

    model: Model
    corpus: Corpus
    settings: GeometrySettings
    pad_id: int
    progress: Progress

    def batches(self) -> Iterator[Batch]:
        settings = self.settings
        return self.corpus.batches(
            settings.batch_size,
            padding_side=settings.padding_side,
            pad_id=self.pad_id,
            skip_first=settings.skip_first,
            skip_special=settings.skip_special,
        )

    def rows(self, sites: Sequence[Site], chosen: Occurrences) -> dict[Site, RowSample]:
        """The chosen occurrences at every site, in one order."""
        shown: dict[str, Any] = {"progress": self.progress, "total": self.corpus.tokens}
        only = chosen.only(self.batches())
        return record_site_rows(self.model, only, sites, len(chosen), seed=chosen.seed, **shown)

    def gradients(self, maps: Sequence[LinearMap], chosen: Occurrences, loss: Loss) -> MapRows:
        """Input rows and backward signals of the chosen occurrences, in the order of ``chosen.tokens``."""
        shown: dict[str, Any] = {"progress": self.progress, "total": self.corpus.tokens}
        return record_map_rows(self.model, chosen.only(self.batches()), maps, loss, **shown)

    def counted(self, items: Sequence[Any], description: str, unit: str) -> Iterator[Any]:
        """The items, their progress shown."""
        self.progress.start(description, len(items), unit)
        try:
            for item in items:
                yield item
                self.progress.advance(1, str(getattr(item, "name", item)))
        finally:
            self.progress.finish()


def _site_geometry(
    site: Site, sample: RowSample, buckets: Sequence[TokenBucket], chosen: Occurrences, settings: GeometrySettings
) -> SiteGeometry:
    clouds = clouds_of(sample.rows, sample.tokens, chosen.chosen)
    if any(_alike(rows) for rows in clouds.values()):
        raise ValueError(
            f"{site}: the rows of a token are all alike, since no context has entered there yet; choose a site "
            "behind an attention"
        )
    try:
        rule = check_rank(settings.m)
        wanted = wanted_dimension(list(clouds.values()), rule, nearest=settings.nearest)
        limit = largest_dimension(rule, settings.occurrences, sample.width, settings.nearest)
        m = max(1, min(wanted, limit))
        parts = order_parts(clouds, m, nearest=settings.nearest, seed=settings.seed)
        others = other_choices(clouds, m, settings.nearest) if settings.sensitivity else ()
        beside = [order_parts(clouds, other, nearest=share, seed=settings.seed) for other, share in others]
        bends = _bends(clouds, m, settings)
        everything = _bucket_geometry("all", chosen.chosen, parts, bends, settings, beside)
        found = tuple(_bucket_geometry(one.name, one.tokens, parts, bends, settings) for one in buckets)
    except ValueError as problem:
        raise ValueError(f"{site}: {problem}") from problem
    return SiteGeometry(site.name, site.layer, wanted, everything, found, order_points(parts, settings.seed))


def _bends(clouds: Mapping[int, Tensor], m: int, settings: GeometrySettings) -> tuple[int, dict[int, CloudBend]] | None:
    """The m of the quadratic, and what each cloud says; None where so few rows determine none."""
    if most_bent_dimension(settings.occurrences, settings.nearest) < 1:
        return None
    bent = bent_dimension(clouds, m, settings.nearest)
    return bent, cloud_bends(clouds, bent, nearest=settings.nearest, seed=settings.seed)


def _bucket_geometry(
    name: str,
    tokens: Sequence[int],
    parts: OrderParts,
    bends: tuple[int, dict[int, CloudBend]] | None,
    settings: GeometrySettings,
    beside: Sequence[OrderParts] = (),
) -> BucketGeometry:
    options = {"level": settings.level, "seed": settings.seed}
    radius, variation = parts.radii(tokens)
    own = np.isin(parts.tokens, tokens)
    order = TangentOrder(
        name=name,
        rule=settings.m,
        tokens=len(tokens),
        rows=int(own.sum()),
        d=parts.d,
        radius=radius,
        radius_variation=variation,
        chosen=parts.numbers(tokens, **options),
        others=tuple(one.numbers(tokens, **options) for one in beside),
    )
    if bends is None:
        return BucketGeometry(name, order, None, None, parts.radius[own])
    m, of_token = bends
    chosen = [of_token[token] for token in tokens]
    curvature = summarise_curvature(chosen, m, level=settings.level, name=name)
    seen = summarise_seen(chosen, m, level=settings.level, seed=settings.seed, name=name)
    return BucketGeometry(name, order, curvature, seen, parts.radius[own])


def order_points(parts: OrderParts, seed: int, most: int = MOST_POINTS) -> OrderPoints:
    """Some rows, each in units of its token's median radius."""
    tokens, inverse = np.unique(parts.tokens, return_inverse=True)
    medians = np.array([np.median(parts.radius[parts.tokens == token]) for token in tokens])[inverse]
    count = len(inverse)
    kept = (
        np.arange(count) if count <= most else np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
    )
    return OrderPoints(*((size / medians)[kept] for size in (parts.radius, parts.tangent, parts.normal)))


def _map_geometry(
    one: LinearMap, record: MapRows, chosen: Occurrences, settings: GeometrySettings
) -> MapGeometry | None:
    """None where the rows of a token are all alike, since no context has entered yet."""
    clouds, signals = (
        clouds_of(rows, chosen.tokens, chosen.chosen) for rows in (record.inputs[one.reads], record.signals[one.name])
    )
    if any(_alike(rows) for rows in clouds.values()):
        return None
    try:
        m = local_dimension(list(clouds.values()), settings.m, nearest=settings.nearest)
        groups = []
        for token, rows in clouds.items():
            split = _split(token, rows, signals[token], m, settings)
            if split is not None:
                groups.append(split)
        order = gradient_order(groups, seed=settings.seed, level=settings.level)
    except ValueError as problem:
        raise ValueError(f"{one.name}: {problem}") from problem
    return MapGeometry(one.name, one.layer, one.reads.name, m, order)


def _split(token: int, rows: Tensor, signals: Tensor, m: int, settings: GeometrySettings) -> TokenGradients | None:
    """The rows of one token, each half split by the tangent space of the other; None where the loss gave no signal."""
    tangent, normal, places = [], [], []
    for space, seen, parts in crossed_parts(rows, m, nearest=settings.nearest, seed=settings.seed):
        # In the coordinates of the whole space, which both halves share.
        tangent.append(parts.tangent @ space.basis.T)
        normal.append(parts.normal)
        places.append(seen)
    signals = signals[torch.cat(places)]
    answered = signals.abs().sum(dim=1) > 0
    if int(answered.sum()) < FEWEST_ROWS:
        return None
    kept = (torch.cat(tangent)[answered], torch.cat(normal)[answered], signals[answered])
    return TokenGradients(token, *kept)


def _depth(samples: Mapping[Site, RowSample], settings: GeometrySettings, progress: Progress) -> DepthGeometry:
    progress.start("geometry along depth", None, "sites")
    try:
        named = {site.name: sample for site, sample in samples.items()}
        options = {"neighbours": settings.neighbours, "most": settings.rows, "seed": settings.seed}
        return depth_geometry(named, m=settings.linear_m, **options)
    finally:
        progress.finish()


def _alike(rows: Tensor) -> bool:
    values = rows.double()
    return float((values - values.mean(dim=0)).square().sum()) <= _NO_SPREAD * float(values.square().sum())


def _left_out(maps: Sequence[LinearMap], measured: Sequence[MapGeometry]) -> Iterator[str]:
    missing = sorted({one.name for one in maps} - {one.map for one in measured})
    if missing:
        yield (
            f"{', '.join(missing)}: the rows of a token are all alike there, since no context has entered yet; its gradient was "
            "not split"
        )


def _warnings(sites: Sequence[SiteGeometry]) -> Iterator[str]:
    capped = [one for one in sites if one.wanted_m > one.everything.order.m]
    if capped:
        yield (
            f"m: the rule asks for up to {max(one.wanted_m for one in capped)} directions at {len(capped)} of {len(sites)} "
            f"sites, and the occurrences of a token determine {capped[0].everything.order.m}; ask for "
            "more of them, or for a smaller m"
        )
    narrow = [one.site for one in sites if one.everything.order.radius_variation < 0.1]
    if narrow:
        yield (
            f"at {', '.join(narrow)} the radii of a token differ by less than a tenth (standard deviation over mean), as in "
            "noise of many dimensions: exponents are read off a very short range there"
        )
