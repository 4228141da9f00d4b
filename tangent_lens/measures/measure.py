"""A whole measurement of gradients: subspaces on the fit sequences, gradients on the test sequences, one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tangent_lens.measures.analysis import (
    concentration_warnings,
    fit_proxies,
    given_proxies,
    measure_gradients,
    summarise_space,
)
from tangent_lens.measures.plan import Plan, check_proxies
from tangent_lens.measures.report import CorpusDescription, Report, Settings, library_versions, now
from tangent_lens.measures.sketched_analysis import (
    fit_sketched_proxies,
    gradient_sketch,
    measure_sketched_gradients,
    record_sketched_activations,
    summarise_sketched_space,
)
from tangent_lens.measures.statistics_choice import SKETCH, choose_statistics
from tangent_lens.measures.uncertainty import check_kept_rows, with_adjusted_p_values, with_uncertainty
from tangent_lens.models.protocol import Model
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.losses import Loss
from tangent_lens.recording.passes import ActivationRecord, record_activations, record_gradients
from tangent_lens.recording.sketch_receivers import ActivationSketch
from tangent_lens.sites import Site
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
    """Two passes: forward over the fit sequences, forward and backward over the test sequences. (Sketches are fitted on two
    passes over the fit sequences: the first finds where to look.)

    Args:
        subspaces: by site name, instead of fitting any; the fit sequences then tell the shape of the activations alone.
        pad_id: what stands at padding.

    Raises:
        ValueError: settings or subspaces that do not fit the model or the corpus.
    """
    settings = replace(settings, statistics=choose_statistics(model, plan, settings))
    fit, test = corpus.split(settings.fit_fraction, settings.seed)
    if settings.bootstrap:
        check_kept_rows(model.description, plan.residual_sites, plan.maps, test.tokens)
    batching = {
        "padding_side": settings.padding_side,
        "pad_id": pad_id,
        "skip_first": settings.skip_first,
        "skip_special": settings.skip_special,
    }
    given = None if subspaces is None else given_proxies(plan.fit_sites, subspaces)
    sketched = settings.statistics == SKETCH

    def pass_of_fit(sketch: ActivationSketch | None = None) -> dict[Site, ActivationRecord]:
        return record_activations(
            model,
            fit.batches(settings.batch_size, **batching),
            plan.fit_sites,
            loss=loss,
            sample=settings.fit_rows if given is None and needs_rows(settings.fit) else 0,
            seed=settings.seed,
            sketch=sketch,
            progress=progress,
            tokens=fit.tokens,
        )

    activations = record_sketched_activations(pass_of_fit, settings, given) if sketched else pass_of_fit()
    proxies = given or (fit_sketched_proxies if sketched else fit_proxies)(activations, settings)
    check_proxies(proxies)
    recorded = record_gradients(
        model,
        test.batches(settings.batch_size, **batching),
        plan.residual_sites,
        plan.maps,
        loss=loss,
        input_bases={reads: proxies[site].basis for reads, site in plan.fit_site_of.items()},
        keep_rows=settings.bootstrap > 0,
        sketch=gradient_sketch(plan.residual_sites, plan.fit_site_of, proxies, settings, model.device)
        if sketched
        else None,
        progress=progress,
        tokens=test.tokens,
    )
    measured = measure_sketched_gradients if sketched else measure_gradients
    measurements = measured(recorded, proxies, plan.fit_site_of, settings, progress)
    if settings.bootstrap:
        measurements = with_uncertainty(measurements, recorded, proxies, settings, progress)
    summarised = summarise_sketched_space if sketched else summarise_space
    spaces = tuple(summarised(site, record, proxies[site]) for site, record in activations.items())
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
