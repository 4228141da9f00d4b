"""Does a model have every site and map that the contract gives its family, or say why not?"""

from __future__ import annotations

from typing import Any

from conformance.families import LAYERS
from conformance.reference import MAP_KINDS, SITE_KINDS, map_names, site_names

_SHORTEST_REASON = 20


def problems_of(lens: Any, name: str) -> str:
    """What is silently missing, what nobody asked for, and what is said to be absent but is there; "" if all is well."""
    found = {site.name for site in lens.sites} | {one.name for one in lens.maps}
    wanted = site_names(name) | map_names(name)
    explained = {place for place in _every_place(name) | found if _reason(lens, place)}
    groups = {
        "silently lacks": _every_place(name) - found - explained,
        "the contract has no": found - wanted,
        "has, and says it lacks,": found & explained,
    }
    return "; ".join(f"{what} {', '.join(sorted(places))}" for what, places in groups.items() if places)


def lacking(lens: Any, name: str) -> dict[str, str]:
    """Kinds of places that the contract gives this family and this model lacks, with its reasons."""
    found = {site.name for site in lens.sites} | {one.name for one in lens.maps}
    missing = (site_names(name) | map_names(name)) - found
    return {place.partition(".")[0]: _reason(lens, place) for place in sorted(missing)}


def _reason(lens: Any, place: str) -> str:
    """Why a place is absent, by its own name or by its kind."""
    absent = lens.model.absent
    reason = absent.get(place, "") or absent.get(place.partition(".")[0], "")
    return reason if len(reason) >= _SHORTEST_REASON else ""


def _every_place(name: str) -> set[str]:
    """What any model could have. That a plain MLP has no gate goes without saying."""
    maps = map_names(name)
    plain = "mlp_in.0" in maps and "mlp_gate.0" not in maps
    kinds = [kind for kind in (*SITE_KINDS, *MAP_KINDS) if not (plain and kind == "mlp_gate")]
    return {"embedding", *(f"{kind}.{layer}" for kind in kinds for layer in range(LAYERS))}
