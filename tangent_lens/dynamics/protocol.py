"""The paper's protocol over training checkpoints: proxies fitted once on early activations, gradients early and late."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from tangent_lens.dynamics.embedding_updates import embedding_of, update_energies, update_sums
from tangent_lens.dynamics.report import CheckpointPoint, DynamicsReport, UpdateEnergy
from tangent_lens.dynamics.state import RunState, identity_of, projected
from tangent_lens.dynamics.windows import EARLY, LATE, Windows, early_and_late
from tangent_lens.measures.analysis import (
    GatheredGradient,
    concentration_warnings,
    fit_proxies,
    gather_gradients,
    measure_gathered,
    summarise_space,
)
from tangent_lens.measures.dimension import intrinsic_dimension
from tangent_lens.measures.enrichment import FrequencyBuckets
from tangent_lens.measures.frequency import token_frequencies
from tangent_lens.measures.plan import Plan, check_proxies, plan_measurement
from tangent_lens.measures.report import CorpusDescription, Settings, library_versions, now
from tangent_lens.measures.uncertainty import with_adjusted_p_values
from tangent_lens.models.checkpoints import CheckpointSource
from tangent_lens.models.protocol import Model, ModelDescription, pad_id_of
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import choose_loss
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.passes import ActivationRecord, record_activations, record_gradients
from tangent_lens.recording.token_sums import BucketSums
from tangent_lens.sites import Site, SiteSelection, resid_post, resolve
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.methods import needs_rows
from tangent_lens.subspaces.subspace import Subspace

# Rows of each site for the intrinsic dimension, whose cost grows with the square.
DIMENSION_ROWS = 1000


@dataclass(frozen=True)
class Choices:
    """What a run over checkpoints adds to the settings of a measurement.

    Attributes:
        early, late, by: see :func:`~tangent_lens.dynamics.windows.early_and_late`.
        refit: also fit a proxy at each checkpoint, measure against it, and compare it with the early one.
        everywhere: measure the checkpoints between early and late, too.
        dimensions: intrinsic dimension (TwoNN) of the activations of each checkpoint (the ``dimension`` extra).
        buckets: of token frequency, for the updates of the embedding.
    """

    early: float = 0.3
    late: float = 0.3
    by: str = "step"
    refit: bool = False
    everywhere: bool = True
    dimensions: bool = False
    buckets: int = 4


def measure_dynamics(
    source: CheckpointSource,
    corpus: Corpus,
    settings: Settings,
    choices: Choices | None = None,
    *,
    sites: SiteSelection | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> DynamicsReport:
    """Two passes over the checkpoints, one in memory at a time: early ones to fit on, and all to take gradients of.

    After each checkpoint everything is written to one file; a run that was stopped, however rudely, goes on from there and
    ends with the same numbers to the last bit.

    Args:
        settings: of every measurement; only PCA, whole sums and no bootstrap.
        sites: of the residual gradients; resid_post of every layer by default.
        folder: for that file; None for the user's cache folder. It is deleted when the run is complete.
        resume: False starts anew.

    Raises:
        ValueError: settings or windows that do not fit.
        CheckpointProblem: a checkpoint that cannot be opened; the same call goes on from there.
    """
    choices = choices or Choices()
    _check(settings)
    windows = early_and_late(source.steps, choices.early, choices.late, by=choices.by)
    names = [checkpoint.name for checkpoint in source]
    what = {"source": source.name, "checkpoints": names, "sites": str(sites), "choices": asdict(choices)}
    identity = identity_of(what | {"settings": asdict(settings), "versions": library_versions()}, corpus)
    run = _Run(corpus, settings, choices, sites, windows, RunState.at(folder, identity, resume=resume), progress)
    run.fit_early(source)
    run.take_gradients(source)
    report = run.report()
    run.state.forget()
    return report


def _check(settings: Settings) -> None:
    if needs_rows(settings.fit):
        raise ValueError(
            f"fit {settings.fit!r} works on rows, and those of several checkpoints are not kept; use 'pca'"
        )
    if settings.bootstrap:
        raise ValueError("a run over checkpoints has no bootstrap; use bootstrap=0, or lens.measure on one checkpoint")
    if settings.statistics == "sketch":
        raise ValueError("a run over checkpoints pools whole sums; use statistics='exact'")


class _Run:
    """One run over checkpoints."""

    def __init__(
        self,
        corpus: Corpus,
        settings: Settings,
        choices: Choices,
        sites: SiteSelection | None,
        windows: Windows,
        state: RunState,
        progress: Progress | None,
    ) -> None:
        self.corpus, self.settings, self.choices, self.sites = corpus, settings, choices, sites
        self.windows, self.state, self.progress = windows, state, progress or NoProgress()
        self.fitted_on, self.tested_on = corpus.split(settings.fit_fraction, settings.seed)

    def fit_early(self, source: CheckpointSource) -> None:
        """Pool the activations of the early checkpoints."""
        for checkpoint in source:
            if checkpoint.step not in self.windows.early or checkpoint.step in self.state.fitted:
                continue
            with source.open(checkpoint) as model:
                self._check_same_kind(model, checkpoint.name)
                plan = self._plan(model)
                records = self._activations(model, _with_embedding(plan.fit_sites, model))
            for site, record in records.items():
                moments = _whole(record)
                pooled = self.state.fit.setdefault(site, SecondMoments(moments.width, name=moments.name))
                pooled.merge(moments)
            self.state.fitted.append(checkpoint.step)
            self.state.save()

    def take_gradients(self, source: CheckpointSource) -> None:
        """Measure every checkpoint against the pooled early proxies."""
        proxies = self.proxies
        check_proxies(proxies)
        for checkpoint in source:
            window = self.windows.of(checkpoint.step)
            if checkpoint.step in self.state.measured or not (window or self.choices.everywhere):
                continue
            with source.open(checkpoint) as model:
                self._check_same_kind(model, checkpoint.name)
                self._take(checkpoint.step, checkpoint.name, window, model, proxies)
            self.state.save()

    def _take(self, step: int, name: str, window: str, model: Model, proxies: Mapping[Site, Subspace]) -> None:
        plan, settings = self._plan(model), self.settings
        records = self._activations(model, plan.fit_sites)
        own = fit_proxies(records, settings)
        loss = choose_loss(None, model, settings.seed)
        bases = {reads: proxies[site].basis for reads, site in plan.fit_site_of.items()}
        record = record_gradients(
            model,
            self.tested_on.batches(settings.batch_size, **self._batching(model)),
            plan.residual_sites,
            plan.maps,
            loss=loss,
            input_bases={} if self.choices.refit else bases,
            progress=self.progress,
            tokens=self.tested_on.tokens,
        )
        measured = measure_gathered(
            self._pooling(window, gather_gradients(record, plan.fit_site_of), proxies), proxies, settings, self.progress
        )
        refitted = ()
        if self.choices.refit:
            refitted = measure_gathered(gather_gradients(record, plan.fit_site_of), own, settings, self.progress)
        self.state.points.append(
            CheckpointPoint(
                step=step,
                name=name,
                window=window,
                loss=record.loss,
                measurements=with_adjusted_p_values(measured),
                refitted=with_adjusted_p_values(refitted),
                overlaps={site.name: own[site].overlap(proxies[site]) for site in own} if self.choices.refit else {},
                spaces=tuple(summarise_space(site, one, own[site]) for site, one in records.items()),
                dimensions=self._dimensions(records),
            )
        )
        self._follow_embedding(window, model, proxies)
        self.state.facts |= {
            "model": asdict(model.description),
            "test_rows": record.rows,
            "fit_rows": _whole(next(iter(records.values()))).count,
            "loss_unit": loss.unit,
            "warnings": list(plan.warnings),
        }

    def _pooling(
        self, window: str, gathered: Iterable[GatheredGradient], proxies: Mapping[Site, Subspace]
    ) -> Iterable[GatheredGradient]:
        """Pass gradients on, and keep those of a window that a report shows: of sites, and of all maps of an input."""
        for one in gathered:
            if window and (one.place[0] == "residual" or one.place[-1]):
                self.state.pool(window, [projected(one, proxies[one.fit_site].basis)])
            yield one

    def _follow_embedding(self, window: str, model: Model, proxies: Mapping[Site, Subspace]) -> None:
        """Add the update since the checkpoint before, if both are in one window."""
        after, tangent = embedding_of(model), proxies.get(Site("embedding"))
        if after is None or tangent is None:
            return
        before, same_window = self.state.kept.get("embedding"), self.state.facts.get("window") == window
        if before is not None and window and same_window:
            sums, known = (
                update_sums(before, after, tangent, self._buckets(len(after))),
                self._updates(window, len(after)),
            )
            if known is not None:
                sums.merge(known)
            numbers = torch.stack([sums.count.double(), sums.total, sums.along])
            self.state.kept[f"updates {window}"] = torch.cat([numbers, torch.full((1, len(sums.count)), sums.left_out)])
        self.state.kept["embedding"] = after
        self.state.facts["window"], self.state.facts["vocabulary"] = window, len(after)

    def _updates(self, window: str, vocabulary: int) -> BucketSums | None:
        numbers = self.state.kept.get(f"updates {window}")
        if numbers is None:
            return None
        tangent = self.proxies[Site("embedding")]
        sums = BucketSums(tangent.basis, self._buckets(vocabulary).bucket_of, name="embedding updates")
        sums.count, sums.total, sums.along = numbers[0].long(), numbers[1].clone(), numbers[2].clone()
        sums.left_out = int(numbers[3, 0])
        return sums

    def _buckets(self, vocabulary: int) -> FrequencyBuckets:
        return FrequencyBuckets.by_mass(token_frequencies(self.corpus, vocabulary), self.choices.buckets)

    @cached_property
    def proxies(self) -> dict[Site, Subspace]:
        """The early proxies, once all early checkpoints are pooled."""
        return {
            site: fit_pca(moments, self.settings.rank, center=self.settings.center)
            for site, moments in self.state.fit.items()
        }

    def _check_same_kind(self, model: Model, name: str) -> None:
        """What is pooled, also with what an interrupted run left, must be of one kind.

        Raises:
            ValueError: another architecture, size or precision.
        """
        shape = model.description
        kind = [shape.architecture, shape.parameters, shape.dtype]
        known = self.state.facts.setdefault("kind", kind)
        if known != kind:
            raise ValueError(
                f"{name} is a {kind[0]} of {kind[1]:,} parameters in {kind[2]}, and the checkpoints before it were {known[0]}, "
                f"{known[1]:,}, {known[2]}; load all alike, or start anew with resume=False"
            )

    def _plan(self, model: Model) -> Plan:
        chosen = resolve(self.sites or resid_post(), model.sites, model.absent, model.misleading_names)
        return plan_measurement(model, chosen, self.settings)

    def _activations(self, model: Model, sites: Sequence[Site]) -> dict[Site, ActivationRecord]:
        settings = self.settings
        return record_activations(
            model,
            self.fitted_on.batches(settings.batch_size, **self._batching(model)),
            sites,
            loss=choose_loss(None, model, settings.seed),
            sample=DIMENSION_ROWS if self.choices.dimensions else 0,
            seed=settings.seed,
            progress=self.progress,
            tokens=self.fitted_on.tokens,
        )

    def _batching(self, model: Model) -> dict[str, Any]:
        settings = self.settings
        return {
            "padding_side": settings.padding_side,
            "pad_id": pad_id_of(model),
            "skip_first": settings.skip_first,
            "skip_special": settings.skip_special,
        }

    def _dimensions(self, records: Mapping[Site, ActivationRecord]) -> dict[str, float]:
        samples = {site: record.sample for site, record in records.items() if record.sample is not None}
        return {site.name: intrinsic_dimension(one.rows, "two_nn").dimension for site, one in samples.items()}

    def report(self) -> DynamicsReport:
        """What is to be said at the end."""
        state, facts, proxies = self.state, self.state.facts, self.proxies
        early, late = (
            with_adjusted_p_values(measure_gathered(state.pools[window].values(), proxies, self.settings))
            for window in (EARLY, LATE)
        )
        points = tuple(sorted(state.points, key=lambda point: point.step))
        last = points[-1]
        return DynamicsReport(
            model=ModelDescription(**facts["model"]),
            corpus=CorpusDescription.of(
                self.corpus,
                self.fitted_on,
                self.tested_on,
                fit_rows=facts["fit_rows"],
                test_rows=facts["test_rows"],
                loss=last.loss,
                loss_unit=facts["loss_unit"],
            ),
            settings=self.settings,
            windows=self.windows,
            points=points,
            early=early,
            late=late,
            updates=self._update_energies(),
            warnings=(*facts["warnings"], *concentration_warnings(last.spaces)),
            versions=library_versions(),
            created=now(),
            subspaces={site.name: proxy for site, proxy in proxies.items()},
        )

    def _update_energies(self) -> tuple[UpdateEnergy, ...]:
        if "vocabulary" not in self.state.facts:
            return ()
        vocabulary = self.state.facts["vocabulary"]
        buckets, found = self._buckets(vocabulary), []
        for window in (EARLY, LATE):
            sums = self._updates(window, vocabulary)
            if sums is not None:
                found += update_energies(window, sums, buckets)
        return tuple(found)


def _whole(record: ActivationRecord) -> SecondMoments:
    assert isinstance(record.moments, SecondMoments)
    return record.moments


def _with_embedding(sites: Sequence[Site], model: Model) -> list[Site]:
    embedding = Site("embedding")
    return list(sites) if embedding in sites or embedding not in model.sites else [embedding, *sites]
