"""What a measurement will do, settled and checked before the model runs for minutes."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tangent_lens.measures.report import Settings
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS, LinearMap, Model, width_of
from tangent_lens.models.quantisation import EIGHT_BIT
from tangent_lens.sites import Site
from tangent_lens.subspaces.controls import check_normal_controls_fit
from tangent_lens.subspaces.methods import check_method, needs_rows
from tangent_lens.subspaces.ranks import known_rank
from tangent_lens.subspaces.subspace import Subspace


@dataclass(frozen=True)
class Plan:
    """Where gradients are measured and where their proxies are fitted.

    Attributes:
        residual_sites: sites of the residual gradients.
        maps: linear maps of the weight gradients.
        fit_site_of: for the input site of each map, where its proxy is fitted.
        warnings: what was asked for and is not there, in sentences.
    """

    residual_sites: tuple[Site, ...]
    maps: tuple[LinearMap, ...]
    fit_site_of: Mapping[Site, Site]
    warnings: tuple[str, ...]

    @property
    def fit_sites(self) -> list[Site]:
        """Every site at which a proxy is fitted, in the order of the forward pass."""
        wanted = dict.fromkeys([*self.residual_sites, *self.fit_site_of.values()])
        return sorted(wanted, key=lambda site: site.order)


def plan_measurement(model: Model, sites: Sequence[Site], settings: Settings) -> Plan:
    """Choose the maps beside the sites and the places of the proxies.

    Raises:
        ValueError: settings that mean nothing, or that this model does not allow.
    """
    _check_settings(settings)
    maps = _maps_beside_sites(model, sites, settings.maps) if "weight" in settings.gradients else ()
    places = ", ".join(site.name for site in sites)
    if settings.gradients == ("weight",) and not maps:
        raise ValueError(f"no linear map reads {places}, so it has no weight gradient")
    warnings = _absent_maps(model, settings) if "weight" in settings.gradients and model.maps else ()
    if "weight" in settings.gradients and model.maps and not maps:
        asked = ", ".join(settings.maps)
        warnings = (f"no weight gradient was measured: none of the linear maps asked for ({asked}) reads {places}",)
    if EIGHT_BIT in model.description.dtype:
        warnings = (
            *warnings,
            "8-bit weights: outlier columns are chosen over a whole batch, so numbers depend on batch_size",
        )
    fit_site_of = {one.reads: _fit_site(model, one.reads, settings.fit_site) for one in maps}
    plan = Plan(tuple(sites) if "residual" in settings.gradients else (), maps, fit_site_of, warnings)
    rank = known_rank(settings.rank)
    if rank is not None:
        widths = [width_of(model.description, site) for site in plan.fit_sites]
        for width in filter(None, widths):
            check_normal_controls_fit(rank, width)
    return plan


def check_proxies(proxies: Mapping[Site, Subspace]) -> None:
    """Refuse proxies too large for a normal control, which a variance share can ask for, before any gradient is taken.

    Raises:
        ValueError: with the site, its rank and the limit.
    """
    for site, proxy in proxies.items():
        if 2 * proxy.rank > proxy.d:
            raise ValueError(
                f"{site}: what was asked for is of rank {proxy.rank}, and a normal control needs 2*rank <= d = {proxy.d}; "
                "ask for a smaller share, or a whole number"
            )


def _check_settings(settings: Settings) -> None:
    unknown = set(settings.gradients) - {"residual", "weight"}
    if unknown or not settings.gradients:
        raise ValueError(f"gradients {settings.gradients} must name 'residual', 'weight' or both")
    if settings.fit_site not in ("input", "residual"):
        raise ValueError(f"fit_site {settings.fit_site!r} must be 'input' (after the norm) or 'residual' (before it)")
    check_method(settings.fit)
    if not settings.center and needs_rows(settings.fit):
        raise ValueError(f"center=False is of PCA; {settings.fit} says itself whether it centres")
    for name in ("controls", "seed", "batch_size", "bootstrap", "fit_rows"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise ValueError(f"{name} {value!r} must be a whole number, 0 or more")
    if settings.controls < 1:
        raise ValueError(f"{settings.controls} controls give no comparison; use 1 or more")
    if settings.bootstrap and settings.bootstrap < 100:
        raise ValueError(
            f"bootstrap {settings.bootstrap} resampled corpora give no interval; use 100 or more, or 0 for none"
        )
    if settings.statistics not in ("auto", "exact", "sketch"):
        raise ValueError(f"statistics {settings.statistics!r} must be 'auto', 'exact' (whole sums) or 'sketch'")
    problem = why_no_sketch(settings)
    if settings.statistics == "sketch" and problem:
        raise ValueError(f"statistics='sketch': {problem}, or statistics='exact'")
    if not 0 <= settings.shrinkage <= 1:
        raise ValueError(f"shrinkage {settings.shrinkage} must lie between 0 (none) and 1")


def why_no_sketch(settings: Settings) -> str | None:
    """What among the settings a sketch cannot serve, in a sentence; None where it can."""
    if settings.bootstrap:
        return f"bootstrap={settings.bootstrap} resamples whole rows, and a sketch keeps none; use bootstrap=0"
    if settings.fit not in ("pca", "given"):
        return f"fit={settings.fit!r} works on rows or on whole matrices; use fit='pca', or give subspaces="
    if settings.fit == "pca" and not isinstance(known_rank(settings.rank), int):
        return (
            f"rank {settings.rank!r} needs the whole spectrum, and a sketch holds its leading part; give a whole number"
        )
    return None


def _maps_beside_sites(model: Model, sites: Sequence[Site], kinds: Sequence[str]) -> tuple[LinearMap, ...]:
    """The maps of the layers selected; of a site inside the attention or the MLP, only the maps beside it."""
    known = (*ATTENTION_MAPS, *MLP_MAPS)
    unknown = set(kinds) - set(known)
    if unknown or not kinds:
        raise ValueError(f"maps {sorted(unknown) or '()'} are not known; choose from {', '.join(known)}")
    wanted = {(site.layer, kind) for site in sites for kind in _kinds_beside(site.kind) if kind in kinds}
    return tuple(one for one in model.maps if (one.layer, one.kind) in wanted)


def _absent_maps(model: Model, settings: Settings) -> tuple[str, ...]:
    missing = [kind for kind in settings.maps if kind in model.absent]
    reasons = dict.fromkeys(model.absent[kind] for kind in missing)
    return tuple(f"no weight gradient of {', '.join(missing)} was measured: {reason}" for reason in reasons)


def _kinds_beside(site_kind: str) -> tuple[str, ...]:
    if site_kind == "embedding":
        return ()
    if site_kind in ("attention_input", "query", "key", "value"):
        return ATTENTION_MAPS
    return MLP_MAPS if site_kind == "mlp_input" else (*ATTENTION_MAPS, *MLP_MAPS)


def _fit_site(model: Model, reads: Site, where: str) -> Site:
    if where == "input":
        return reads
    if reads.kind in ("resid_pre", "resid_mid"):
        return reads
    between = reads.kind == "mlp_input" and "resid_mid" not in model.absent
    return Site("resid_mid" if between else "resid_pre", reads.layer)
