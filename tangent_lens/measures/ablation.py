"""Does the tangent matter to the model? The loss without it, against the loss without normal controls of the same rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tangent_lens.measures.energy import monte_carlo_p, sample_mean, sample_sd
from tangent_lens.measures.report import library_versions, now
from tangent_lens.models.protocol import Model, ModelDescription
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.interventions import Change, Keeping, Removal, intervene
from tangent_lens.recording.losses import Loss, UserLoss, choose_loss
from tangent_lens.recording.moments import NonFiniteRows
from tangent_lens.recording.passes import passing
from tangent_lens.recording.receivers import Selection
from tangent_lens.showing import Shown
from tangent_lens.sites import Site
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.interventions import check_width, point_about
from tangent_lens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Ablation:
    """What removing a subspace at one site does to the loss. Changes are in nats a target; positive ones make it worse.

    Attributes:
        loss: mean loss a target of the untouched model.
        removed: change of the loss without the tangent.
        random: change without each of the random normal controls of the same rank.
        p_value: (1 + #{random >= removed}) / (m + 1): small where the tangent matters more than normals do.
        trailing, following: change without the least-variance and without the next principal directions; None if the fit
            could not determine them.
        kept: change with nothing but the tangent: 0 where it carries all that the model uses.
    """

    site: str
    layer: int | None
    rank: int
    d: int
    loss: float
    removed: float
    random: tuple[float, ...]
    p_value: float
    trailing: float | None
    following: float | None
    kept: float

    @property
    def random_mean(self) -> float:
        """Mean change without a random normal."""
        return sample_mean(self.random)

    @property
    def random_sd(self) -> float:
        """Standard deviation of the sampled controls (n - 1)."""
        return sample_sd(self.random)

    @property
    def ratio(self) -> float | None:
        """removed / random_mean; None where random normals do no harm, against which nothing can be compared."""
        return self.removed / self.random_mean if self.random_mean > 0 else None


@dataclass(frozen=True, repr=False, eq=False)
class AblationReport(Shown):
    """The ablations of one run.

    Attributes:
        corpus: its name; ``sequences`` and ``tokens`` tell its size, ``targets`` what the losses are means over.
        loss: mean loss a target of the untouched model; ``loss_name`` and ``loss_unit`` say which loss.
        about: the point that parts were set to: ``centre`` or ``zero``.
        created: when, UTC.
    """

    model: ModelDescription
    corpus: str
    sequences: int
    tokens: int
    targets: int
    loss: float
    loss_name: str
    loss_unit: str
    controls: int
    seed: int
    about: str
    ablations: tuple[Ablation, ...]
    versions: Mapping[str, str]
    created: str

    def of(self, site: str) -> Ablation:
        """The ablation at one site.

        Raises:
            KeyError: not measured.
        """
        for one in self.ablations:
            if one.site == site:
                return one
        raise KeyError(f"{site} was not ablated; ablated: {', '.join(one.site for one in self.ablations)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON."""
        return asdict(self)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a site, one column a number; of the random normals mean and standard deviation."""
        import pandas

        return pandas.DataFrame([_flat_row(one) for one in self.ablations])


@dataclass(frozen=True)
class _Variant:
    """One forward pass of every batch: what is changed, and where; ``change`` is None for the untouched model."""

    site: Site | None
    name: str
    change: Change | None


def measure_ablation(
    model: Model,
    corpus: Corpus | InputCorpus,
    subspaces: Mapping[Site, Subspace],
    *,
    controls: int = 20,
    seed: int = 0,
    loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
    about: str = "centre",
    batch_size: int = 8,
    padding_side: str = "right",
    pad_id: int = 0,
    progress: Progress | None = None,
) -> AblationReport:
    """The loss with each subspace removed at its site, one site at a time, against normal controls of the same rank.

    The corpus should not be the one that the subspaces were fitted on. It passes once for the untouched model and, a site,
    once for the tangent, its complement, each rival and each control; without gradients, in evaluation mode.

    Args:
        subspaces: by site.
        controls: random normals to draw at each site.
        seed: of the controls (the same frames as of a measurement with this seed) and of the masks.
        loss: as of ``lens.measure``.
        about: ``centre`` sets what is removed to the centre of the fit; ``zero`` to zero. Of the controls, too.

    Raises:
        ValueError: no subspace, another width than the site's, 2k > d, or a loss that finds nothing to predict.
        SiteNeverFired: a site through which no tensor passed.
        NonFiniteRows: the loss is NaN or infinite.
    """
    if not subspaces:
        raise ValueError("no subspace was given, so nothing would be removed; pass {site: subspace}")
    for site, subspace in subspaces.items():
        check_width(model, site, subspace)
    objective = choose_loss(loss, model, seed)
    variants = [_Variant(None, "untouched", None)]
    variants += [
        one for site, subspace in subspaces.items() for one in _variants(site, subspace, controls, seed, about)
    ]
    batches = corpus.batches(batch_size, padding_side=padding_side, pad_id=pad_id)
    means, targets = _mean_losses(model, batches, variants, objective, progress, corpus.tokens)
    return AblationReport(
        model=model.description,
        corpus=corpus.name,
        sequences=len(corpus.sequences),
        tokens=corpus.tokens,
        targets=targets,
        loss=means[0],
        loss_name=objective.name,
        loss_unit=objective.unit,
        controls=controls,
        seed=seed,
        about=about,
        ablations=tuple(_ablation(site, subspace, variants, means) for site, subspace in subspaces.items()),
        versions=library_versions(),
        created=now(),
    )


def _variants(site: Site, subspace: Subspace, controls: int, seed: int, about: str) -> list[_Variant]:
    centre = point_about(subspace, about)
    frames = random_normals(subspace, controls, zlib.crc32(f"{seed}/{site.name}".encode()))
    found = [
        _Variant(site, "removed", Removal(subspace.basis, centre)),
        _Variant(site, "kept", Keeping(subspace.basis, centre)),
    ]
    found += [_Variant(site, name, Removal(directions, centre)) for name, directions in subspace.rivals.items()]
    return found + [_Variant(site, "random", Removal(frame, centre)) for frame in frames]


def _mean_losses(
    model: Model,
    batches: Iterable[Any],
    variants: Sequence[_Variant],
    loss: Loss,
    progress: Progress | None,
    tokens: int,
) -> tuple[list[float], int]:
    """Mean loss a target of every variant, and the number of targets. A batch is prepared once, so all see the same masks."""
    sums, targets = [0.0] * len(variants), 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        if isinstance(loss, UserLoss):
            # It checks that the person's own function depends on the sites, and for that needs a graph.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(frozen_parameters(model))
        else:
            stack.enter_context(torch.no_grad())
        for batch in passing(batches, Selection(), model, "ablations", tokens, progress, loss.prepare):
            for place, variant in enumerate(variants):
                value, count = _loss(model, batch, variant, loss)
                sums[place] += value
            targets += count
    if not targets:
        raise ValueError(f"the {loss.name} loss found nothing to predict in the whole corpus")
    return [total / targets for total in sums], targets


def _loss(model: Model, batch: Any, variant: _Variant, loss: Loss) -> tuple[float, int]:
    changes = {} if variant.site is None or variant.change is None else {variant.site: variant.change}
    with intervene(model, changes):
        value, count = loss(model.run(batch), batch)
    number = float(value.detach())
    if not math.isfinite(number):
        where = "the untouched model" if variant.site is None else f"{variant.site} ({variant.name})"
        raise NonFiniteRows(f"{where}: the loss of a batch is {number}; a wider dtype or batch_size=1 may help")
    return number, count


def _ablation(site: Site, subspace: Subspace, variants: Sequence[_Variant], means: Sequence[float]) -> Ablation:
    changes: dict[str, list[float]] = {}
    for variant, mean in zip(variants, means, strict=True):
        if variant.site == site:
            changes.setdefault(variant.name, []).append(mean - means[0])
    (removed,), (kept,), random = changes["removed"], changes["kept"], tuple(changes["random"])
    return Ablation(
        site=site.name,
        layer=site.layer,
        rank=subspace.rank,
        d=subspace.d,
        loss=means[0],
        removed=removed,
        random=random,
        p_value=monte_carlo_p(removed, random),
        trailing=changes.get("trailing", [None])[0],
        following=changes.get("next", [None])[0],
        kept=kept,
    )


def _flat_row(one: Ablation) -> dict[str, Any]:
    row = {name: value for name, value in asdict(one).items() if name != "random"}
    return row | {"random_mean": one.random_mean, "random_sd": one.random_sd, "ratio": one.ratio}
