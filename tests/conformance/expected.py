"""What every cell must say, for the versions that were looked at: a cell that changes, even to a refusal, is to be noticed.

What is in no list here must be right, whole, and refused in no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.backends import library_of
from conformance.cells import Cell
from conformance.families import FAMILIES
from conformance.judging import LIBRARY_DIFFERS, NOT_OFFERED, OK

MASKED = {name for name, family in FAMILIES.items() if family.objective == "masked"}
CAUSAL = set(FAMILIES) - MASKED
_NAN = "NaN or infinite"
# Bridges of these compute a softmax in float32: a padding row that may look at nothing becomes NaN in float64, and with a
# sliding window there are such rows on the right too.
_SOFTMAX_IN_FLOAT32 = CAUSAL - {"gpt2", "gpt_neox", "gpt_neox_sequential", "phi3"}
_SLIDING = ("mistral", "gemma2", "gemma3")


@dataclass(frozen=True)
class Column:
    """What is special in one library.

    Attributes:
        not_offered, differs: families.
        refused: by family, the check that is refused and words of the refusal.
        lacks: by family, kinds of places that the contract gives and this library has not.
    """

    not_offered: frozenset[str] = frozenset()
    differs: frozenset[str] = frozenset()
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    lacks: Mapping[str, frozenset[str]] = field(default_factory=dict)


def _nan(families: set[str], *more: str) -> dict[str, dict[str, str]]:
    """Left padding brings NaN, and right padding too where windows slide; ``more``: in float32 as well."""
    found = {}
    for family in families:
        sides = ("left", "right") if family in _SLIDING else ("left",)
        found[family] = {f"gradients {side}{suffix}": _NAN for side in sides for suffix in ("", *more)}
    return found


_EAGER_IN_FLOAT64 = {"gemma2": {"gradients left": _NAN, "gradients right": _NAN}}
_ENCODER = Column(
    not_offered=frozenset(FAMILIES) - {"bert"}, refused={"bert": {"gradients left": "padding_side 'left'"}}
)
_NOT_IN_2 = frozenset({"olmo", "olmo2", "olmoe", "qwen3_moe", *MASKED})
_NOT_IN_3 = frozenset({"qwen3_moe", *MASKED})
_NO_BRIDGE_IN_3 = frozenset({"roberta", "camembert", "modernbert", "eurobert"})
_NO_BRIDGE = _NO_BRIDGE_IN_3 - {"roberta"}
# Loaded in float64 this one falls over inside the library; float32 is what is compared.
_IN_FLOAT32_ONLY = {"qwen2": {"gradients left float32": _NAN}}
COLUMNS = {
    ("huggingface", "4.57"): Column(
        not_offered=frozenset({"eurobert"}),
        refused=_EAGER_IN_FLOAT64,
        lacks=dict.fromkeys(("gemma", "gemma2"), frozenset({"embedding"})),
    ),
    ("huggingface", "5.24"): Column(refused=_EAGER_IN_FLOAT64),
    ("hooked_transformer", "2.18"): Column(_NOT_IN_2, differs=frozenset({"gpt_neox_sequential"})),
    ("hooked_transformer", "3.9"): Column(_NOT_IN_3),
    ("hooked_transformer_processed", "2.18"): Column(_NOT_IN_2, differs=frozenset({"gpt_neox_sequential", "mixtral"})),
    ("hooked_transformer_processed", "3.9"): Column(_NOT_IN_3),
    ("hooked_encoder", "2.18"): _ENCODER,
    ("hooked_encoder", "3.9"): _ENCODER,
    ("bridge", "3.9"): Column(_NO_BRIDGE_IN_3, refused=_nan(_SOFTMAX_IN_FLOAT32)),
    ("bridge", "4.3"): Column(_NO_BRIDGE, refused=_nan(_SOFTMAX_IN_FLOAT32)),
    ("bridge_compatibility", "3.9"): Column(
        _NO_BRIDGE_IN_3, refused=_nan(CAUSAL - {"qwen2"}, " float32") | _IN_FLOAT32_ONLY
    ),
    ("bridge_compatibility", "4.3"): Column(_NO_BRIDGE),
}


def column_of(backend: str) -> Column | None:
    """What was seen of this backend in the installed version; None of a version that was not looked at."""
    # nnsight holds the very module of transformers, so it offers, refuses and lacks the same.
    backend = "huggingface" if backend == "nnsight" else backend
    version = ".".join(library_of(backend).split()[-1].split(".")[:2])
    return COLUMNS.get((backend, version))


def surprises(cell: Cell) -> list[str]:
    """How a cell differs from what was seen before."""
    column = column_of(cell.backend)
    if column is None:
        return []
    verdict = NOT_OFFERED if cell.family in column.not_offered else OK
    verdict = LIBRARY_DIFFERS if cell.family in column.differs else verdict
    if cell.verdict != verdict:
        return [f"{cell.verdict} ({cell.sentence}) where {verdict} was"]
    if verdict != OK:
        return []
    refused, found = column.refused.get(cell.family, {}), []
    for check in sorted(refused.keys() | cell.refused.keys()):
        said, words = cell.refused.get(check), refused.get(check)
        if said is None:
            found.append(f"{check} was refused and is no longer")
        elif words is None:
            found.append(f"{check} is refused and was not: {said}")
        elif words not in said:
            found.append(f"{check} is refused in other words than {words!r}: {said}")
    lacks = column.lacks.get(cell.family, frozenset())
    if set(cell.lacks) != set(lacks):
        found.append(f"lacks {sorted(cell.lacks)} where it lacked {sorted(lacks)}")
    return found
