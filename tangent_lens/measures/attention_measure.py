"""A whole measurement of attention scores: proxies on the fit sequences, scores on the test sequences, one report."""

from __future__ import annotations

from collections.abc import Sequence

from tangent_lens.measures.analysis import concentration_warnings, summarise_space, whole_moments
from tangent_lens.measures.attention_report import AttentionReport, AttentionSettings
from tangent_lens.measures.attention_rows import ChosenRows
from tangent_lens.measures.attention_run import frequency_buckets, record_attention
from tangent_lens.measures.plan import check_proxies
from tangent_lens.measures.report import CorpusDescription, library_versions, now
from tangent_lens.models.attention import attention_reader
from tangent_lens.models.protocol import Model, width_of
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.passes import record_activations
from tangent_lens.sites import Site, resid_pre, resolve
from tangent_lens.subspaces.controls import check_normal_controls_fit
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.ranks import known_rank


def measure_attention(
    model: Model,
    corpus: Corpus,
    settings: AttentionSettings,
    *,
    layers: Sequence[int] | None = None,
    pad_id: int = 0,
    progress: Progress | None = None,
) -> AttentionReport:
    """Two forward passes: over the fit sequences for the proxies, over the test sequences for the scores.

    Args:
        layers: which; negative ones count from the last; None for all.
        pad_id: what stands at padding.

    Raises:
        ValueError: settings or layers that do not fit the model or the corpus.
        UnsupportedModel: a model whose scores cannot be split.
    """
    _check_settings(settings)
    reader = attention_reader(model)
    sites = resolve(resid_pre(*(layers or ())), model.sites, model.absent)
    rank = known_rank(settings.rank)
    if rank is not None:
        check_normal_controls_fit(rank, width_of(model.description, sites[0]) or 0)
    fit, test = corpus.split(settings.fit_fraction, settings.seed)
    batching = {
        "padding_side": settings.padding_side,
        "pad_id": pad_id,
        "skip_first": settings.skip_first,
        "skip_special": settings.skip_special,
    }
    activations = record_activations(
        model, fit.batches(settings.batch_size, **batching), sites, progress=progress, tokens=fit.tokens
    )
    proxies = {
        site: fit_pca(whole_moments(record), settings.rank, center=settings.center)
        for site, record in activations.items()
    }
    check_proxies(proxies)
    buckets, labels = None, ()
    if settings.frequency_buckets:
        buckets, labels = frequency_buckets(corpus.sequences, model.description.vocabulary, settings.frequency_buckets)
    found, worst = record_attention(
        model,
        reader,
        test.batches(settings.batch_size, **batching),
        {_layer_of(site): proxy for site, proxy in proxies.items()},
        settings,
        chosen=ChosenRows.of(test.sequences, settings.control_rows),
        token_buckets=buckets,
        frequency_labels=labels,
        progress=progress,
        tokens=test.tokens,
    )
    spaces = tuple(summarise_space(site, record, proxies[site]) for site, record in activations.items())
    return AttentionReport(
        model=model.description,
        corpus=CorpusDescription.of(
            corpus,
            fit,
            test,
            fit_rows=next(iter(activations.values())).moments.count,
            test_rows=max(found[0].rows),
            loss=None,
        ),
        settings=settings,
        layers=found,
        spaces=spaces,
        worst_sum=worst,
        warnings=(*corpus.warnings(settings.prepend_bos), *concentration_warnings(spaces)),
        versions=library_versions(),
        created=now(),
        subspaces={site.name: proxy for site, proxy in proxies.items()},
    )


def _layer_of(site: Site) -> int:
    assert site.layer is not None
    return site.layer


def _check_settings(settings: AttentionSettings) -> None:
    for name in ("controls", "seed", "batch_size", "frequency_buckets"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} {value!r} must be a whole number, 0 or more")
    if settings.controls < 1:
        raise ValueError(f"{settings.controls} controls give no comparison; use 1 or more")
    if settings.control_rows is not None and settings.control_rows < 1:
        raise ValueError(f"control_rows {settings.control_rows} leaves nothing to compare with; use 1 or more, or None")
    edges = settings.distance_edges
    if list(edges) != sorted(set(edges)) or any(edge < 1 for edge in edges):
        raise ValueError(
            f"distance_edges {edges} must be growing key distances of 1 or more, for example (1, 4, 16, 64)"
        )
