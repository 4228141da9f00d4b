"""Results as plain values, and back: what JSON can hold, without losing a digit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tangent_lens.measures.attention import AttentionScaling, DominanceByBucket
from tangent_lens.measures.bootstrap import Interval, Uncertainty
from tangent_lens.measures.energy import EnergyTest
from tangent_lens.measures.isotropy import IsotropyTest
from tangent_lens.measures.spectrum import Spectrum

_PARTS = {
    "energy": EnergyTest,
    "isotropy": IsotropyTest,
    "spectrum": Spectrum,
    "by_distance": DominanceByBucket,
    "by_frequency": DominanceByBucket,
    "scaling": AttentionScaling,
    "uncertainty": Uncertainty,
    "energy_interval": Interval,
    "lift_interval": Interval,
    "delta_iso_interval": Interval,
}
_NOT_FINITE = {"Infinity": math.inf, "NaN": math.nan}


def build(kind: Any, content: Mapping[str, Any]) -> Any:
    """A dataclass from its JSON form; lists become tuples again."""
    values = {}
    for name, value in content.items():
        # `energy` is a whole test inside a measurement, and a number inside that test.
        if name in _PARTS and isinstance(value, Mapping):
            values[name] = build(_PARTS[name], value)
        else:
            values[name] = _restored(value)
    return kind(**values)


def _restored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _restored(one) for name, one in value.items()}
    if isinstance(value, list):
        return tuple(_restored(one) for one in value)
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; a lift can be infinite, and D of a head without scores is not a number."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else value
    return value
