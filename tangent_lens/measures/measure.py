"""A whole measurement of gradients: subspaces on the fit sequences, gradients on the test sequences, one report."""

from __future__ import annotations

from collections.abc import Mapping

from tangent_lens.measures.analysis import (
    concentration_warnings,
    fit_proxies,
    given_proxies,
    measure_gradients,
    summarise_space,
)
from tangent_lens.measures.plan import Plan, check_proxies
from tangent_lens.measures.report import CorpusDescription, Report, Settings, library_versions, now
from tangent_lens.measures.uncertainty import check_kept_rows, with_adjusted_p_values, with_uncertainty
from tangent_lens.models.protocol import Model
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.losses import Loss
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.subspaces.methods import needs_rows
from tangent_lens.subspaces.subspace import Subspace


def measure_model(
    model: Model,
    corpus: Corpus | InputCorpus,
    settings: Settings,
    plan: Plan,
    loss: Loss,
    *,
    subspaces: Mapping[str, Subspace] | None = None,
    pad_id: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Two passes: forward over the fit sequences, forward and backward over the test sequences.

    Args:
        subspaces: by site name, instead of fitting any; the fit sequences then tell the shape of the activations alone.
        pad_id: what stands at padding.

    Raises:
        ValueError: settings or subspaces that do not fit the model or the corpus.
    """
    fit, test = corpus.split(settings.fit_fraction, settings.seed)
    if settings.bootstrap:
        check_kept_rows(model.description, plan.residual_sites, plan.maps, test.tokens)
    batching = {
        "padding_side": settings.padding_side,
        "pad_id": pad_id,
        "skip_first": settings.skip_first,
        "skip_special": settings.skip_special,
    }
    activations = record_activations(
        model,
        fit.batches(settings.batch_size, **batching),
        plan.fit_sites,
        loss=loss,
        sample=settings.fit_rows if subspaces is None and needs_rows(settings.fit) else 0,
        seed=settings.seed,
        progress=progress,
        tokens=fit.tokens,
    )
    proxies = fit_proxies(activations, settings) if subspaces is None else given_proxies(plan.fit_sites, subspaces)
    check_proxies(proxies)
    recorded = record_gradients(
        model,
        test.batches(settings.batch_size, **batching),
        plan.residual_sites,
        plan.maps,
        loss=loss,
        input_bases={reads: proxies[site].basis for reads, site in plan.fit_site_of.items()},
        keep_rows=settings.bootstrap > 0,
        progress=progress,
        tokens=test.tokens,
    )
    measurements = measure_gradients(recorded, proxies, plan.fit_site_of, settings, progress)
    if settings.bootstrap:
        measurements = with_uncertainty(measurements, recorded, proxies, settings, progress)
    spaces = tuple(summarise_space(site, record, proxies[site]) for site, record in activations.items())
    return Report(
        model=model.description,
        corpus=CorpusDescription.of(
            corpus,
            fit,
            test,
            fit_rows=next(iter(activations.values())).moments.count,
            test_rows=recorded.rows,
            loss=recorded.loss,
            loss_unit=loss.unit,
        ),
        settings=settings,
        spaces=spaces,
        measurements=with_adjusted_p_values(measurements),
        warnings=(*corpus.warnings(settings.prepend_bos), *plan.warnings, *concentration_warnings(spaces)),
        versions=library_versions(),
        created=now(),
        subspaces={site.name: proxy for site, proxy in proxies.items()},
    )
