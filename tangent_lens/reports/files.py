"""Reports on disk: ``report.json`` for people and programs, the subspaces beside it as safetensors. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tangent_lens.measures.attention_report import AttentionReport
from tangent_lens.measures.plain import build, finite
from tangent_lens.measures.report import CorpusDescription, Measurement, Report, Settings, Space
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

REPORT, ATTENTION_REPORT, DYNAMICS_REPORT = "report", "attention report", "dynamics report"
_LOADERS = {
    REPORT: "a report of gradients; load it with Report.load",
    ATTENTION_REPORT: "a report of attention scores; load it with AttentionReport.load",
    DYNAMICS_REPORT: "a report of training dynamics; load it with DynamicsReport.load",
}
_Built = TypeVar("_Built")


def save_report(report: Report | AttentionReport, folder: str | os.PathLike[str]) -> None:
    """Write a report's folder.

    Raises: as :func:`write_report`.
    """
    kind = ATTENTION_REPORT if isinstance(report, AttentionReport) else REPORT
    write_report(folder, kind, report.to_dict(), report.subspaces)


def write_report(
    folder: str | os.PathLike[str], kind: str, content: Mapping[str, Any], subspaces: Mapping[str, Subspace]
) -> None:
    """Write a report of one kind, in plain values, and its subspaces.

    The subspaces go under a name made of their own hash; ``report.json`` names it and is replaced in one step, so that
    whoever reads, or whatever crashes, meets the whole old report or the whole new one.

    Raises:
        FileProblem: a report of another kind is there, which would be lost.
    """
    folder = Path(folder)
    check_folder(folder, kind)
    tensors = {}
    for site, subspace in subspaces.items():
        tensors |= subspace.tensors(f"{site}/")
    packed = tensors_to_bytes("subspaces", tensors, {})
    digest = hashlib.sha256(packed).hexdigest()
    beside = f"subspaces-{digest[:12]}.safetensors"
    write_bytes_atomically(folder / beside, packed)
    document = {
        "kind": kind,
        "format": FORMAT_VERSION,
        "subspaces_file": beside,
        "subspaces_sha256": digest,
        "origins": {site: dict(subspace.origin) for site, subspace in subspaces.items()},
        **content,
    }
    text = json.dumps(finite(document), indent=1, allow_nan=False)
    write_bytes_atomically(folder / "report.json", text.encode())
    for old in folder.glob("subspaces-*.safetensors"):
        if old.name != beside:
            old.unlink(missing_ok=True)


def load_report(folder: str | os.PathLike[str]) -> Report:
    """Read what :func:`save_report` wrote of gradients.

    Raises:
        FileNotFoundError: no report is there.
        FileProblem: it is damaged, cut short, of another kind, or of a newer format.
    """
    return read_report(folder, REPORT, _report_of)


def read_report(
    folder: str | os.PathLike[str], kind: str, assemble: Callable[[Mapping[str, Any], dict[str, Subspace]], _Built]
) -> _Built:
    """Read a report of one kind; ``assemble`` makes it of its JSON form and its subspaces.

    Raises: as :func:`load_report`.
    """
    path = Path(folder) / "report.json"
    if not path.is_file():
        raise FileNotFoundError(f"no report at {folder}: it should hold a report.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("kind") in _LOADERS and document["kind"] != kind:
            raise FileProblem(
                f"{folder} holds {_LOADERS[document['kind']]}, or show it with: tangent-lens show {folder}"
            )
        check_format(path, kind, document)
        return assemble(document, _load_subspaces(Path(folder), document))
    except FileProblem:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise FileProblem(f"{path} is damaged or was cut short ({problem}); measure again") from problem


def kind_of_report(folder: str | os.PathLike[str]) -> str | None:
    """Which kind of report a folder holds; None where there is none, or none that can be read."""
    try:
        document = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        return document.get("kind")
    except (OSError, ValueError, AttributeError):
        return None


def check_folder(folder: str | os.PathLike[str], kind: str) -> None:
    """Refuse a folder with a report of another kind, which would be lost."""
    found = kind_of_report(folder)
    if found in _LOADERS and found != kind:
        described = _LOADERS[found].split(";")[0]
        raise FileProblem(f"{folder} holds {described}, which would be lost; name another folder")


def _report_of(document: Mapping[str, Any], subspaces: dict[str, Subspace]) -> Report:
    return Report(
        **shared_fields(document, Settings),
        spaces=spaces_of(document),
        measurements=tuple(build(Measurement, one) for one in document["measurements"]),
        subspaces=subspaces,
    )


def shared_fields(document: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """What reports of every kind hold."""
    return {
        "model": build(ModelDescription, document["model"]),
        "corpus": build(CorpusDescription, document["corpus"]),
        "settings": build(settings, document["settings"]),
        "warnings": tuple(document["warnings"]),
        "versions": document["versions"],
        "created": document["created"],
    }


def spaces_of(document: Mapping[str, Any]) -> tuple[Space, ...]:
    """The sites at which proxies were fitted."""
    return tuple(build(Space, one) for one in document["spaces"])


def _load_subspaces(folder: Path, document: Mapping[str, Any]) -> dict[str, Subspace]:
    path = folder / document["subspaces_file"]
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != document["subspaces_sha256"]:
        raise FileProblem(f"{path} is missing or was changed after report.json was written; measure again")
    tensors, _ = load_tensors(path, "subspaces")
    return {site: Subspace.from_tensors(tensors, origin, f"{site}/") for site, origin in document["origins"].items()}
