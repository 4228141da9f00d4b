"""Reports on disk: ``report.json`` for people and programs, the subspaces beside it as safetensors. No pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangent_lens.measures.energy import EnergyTest
from tangent_lens.measures.isotropy import IsotropyTest
from tangent_lens.measures.report import CorpusDescription, Measurement, Report, Settings, Space
from tangent_lens.measures.spectrum import Spectrum
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.storage import (
    FORMAT_VERSION,
    FileProblem,
    check_format,
    load_tensors,
    tensors_to_bytes,
    write_bytes_atomically,
)
from tangent_lens.subspaces.subspace import Subspace

_KIND = "report"


def save_report(report: Report, folder: str | os.PathLike[str]) -> None:
    """Write a report's folder.

    The subspaces go under a name made of their own hash; ``report.json`` names it and is replaced in one step, so that
    whoever reads, or whatever crashes, meets the whole old report or the whole new one.
    """
    folder = Path(folder)
    tensors = {}
    for site, subspace in report.subspaces.items():
        tensors |= subspace.tensors(f"{site}/")
    content = tensors_to_bytes("subspaces", tensors, {})
    digest = hashlib.sha256(content).hexdigest()
    beside = f"subspaces-{digest[:12]}.safetensors"
    write_bytes_atomically(folder / beside, content)
    document = {
        "kind": _KIND,
        "format": FORMAT_VERSION,
        "subspaces_file": beside,
        "subspaces_sha256": digest,
        "origins": {site: dict(subspace.origin) for site, subspace in report.subspaces.items()},
        **report.to_dict(),
    }
    text = json.dumps(_finite(document), indent=1, allow_nan=False)
    write_bytes_atomically(folder / "report.json", text.encode())
    for old in folder.glob("subspaces-*.safetensors"):
        if old.name != beside:
            old.unlink(missing_ok=True)


def load_report(folder: str | os.PathLike[str]) -> Report:
    """Read what :func:`save_report` wrote.

    Raises:
        FileNotFoundError: no report is there.
        FileProblem: it is damaged, cut short, or of a newer format.
    """
    path = Path(folder) / "report.json"
    if not path.is_file():
        raise FileNotFoundError(f"no report at {folder}: it should hold a report.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        check_format(path, _KIND, document)
        subspaces = _load_subspaces(Path(folder), document)
        return Report(
            model=_build(ModelDescription, document["model"]),
            corpus=_build(CorpusDescription, document["corpus"]),
            settings=_build(Settings, document["settings"]),
            spaces=tuple(_build(Space, one) for one in document["spaces"]),
            measurements=tuple(_build(Measurement, one) for one in document["measurements"]),
            warnings=tuple(document["warnings"]),
            versions=document["versions"],
            created=document["created"],
            subspaces=subspaces,
        )
    except FileProblem:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise FileProblem(f"{path} is damaged or was cut short ({problem}); measure again") from problem


def _load_subspaces(folder: Path, document: Mapping[str, Any]) -> dict[str, Subspace]:
    path = folder / document["subspaces_file"]
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != document["subspaces_sha256"]:
        raise FileProblem(f"{path} is missing or was changed after report.json was written; measure again")
    tensors, _ = load_tensors(path, "subspaces")
    return {site: Subspace.from_tensors(tensors, origin, f"{site}/") for site, origin in document["origins"].items()}


_PARTS = {"energy": EnergyTest, "isotropy": IsotropyTest, "spectrum": Spectrum}


def _build(kind: Any, content: Mapping[str, Any]) -> Any:
    """A dataclass from its JSON form; lists become tuples again."""
    values = {}
    for name, value in content.items():
        # `energy` is a whole test inside a measurement, and a number inside that test.
        if name in _PARTS and isinstance(value, Mapping):
            values[name] = _build(_PARTS[name], value)
        else:
            values[name] = _restored(value)
    return kind(**values)


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(one) for one in value)
    return math.inf if value == "Infinity" else value


def _finite(value: Any) -> Any:
    """JSON has no infinity; a lift can be infinite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return "Infinity" if value == math.inf else value
