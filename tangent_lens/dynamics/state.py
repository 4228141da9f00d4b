"""What a run over checkpoints has so far: sums that grow, and one point a finished checkpoint. One file, replaced at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangent_lens.dynamics.report import CheckpointPoint
from tangent_lens.measures.analysis import GatheredGradient
from tangent_lens.measures.energy import BackwardSignals
from tangent_lens.measures.plain import build, finite
from tangent_lens.measures.report import Measurement, Space
from tangent_lens.models.fetching import cache_folder
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.moments import ProjectedSums, SecondMoments
from tangent_lens.sites import Site
from tangent_lens.storage import FileProblem, load_tensors, save_tensors

_KIND = "dynamics state"


class RunState:
    """The state of one run.

    Attributes:
        fitted: steps whose activations are in ``fit``; fit: their pooled moments, by site.
        points: one entry a finished checkpoint.
        pools: by window and name, the gradients of its finished checkpoints together.
        kept: other tensors that go on from one checkpoint to the next, by name (the embedding before).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fitted: list[int] = []
        self.fit: dict[Site, SecondMoments] = {}
        self.spaces: dict[int, tuple[Space, ...]] = {}
        self.points: list[CheckpointPoint] = []
        self.pools: dict[str, dict[str, GatheredGradient]] = {}
        self.kept: dict[str, Tensor] = {}
        self.facts: dict[str, Any] = {}

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None, identity: str, *, resume: bool = True) -> RunState:
        """The state of a run that was interrupted, or a new one.

        Args:
            folder: None for the user's cache folder.
            identity: all that decides the numbers; another run never goes on with this one's.
        """
        base = cache_folder() / "dynamics" if folder is None else Path(folder)
        path = base / f"{identity[:24]}.safetensors"
        state = cls(path)
        if not resume:
            path.unlink(missing_ok=True)
        elif path.is_file():
            try:
                state._read()
            except FileProblem:
                # Of another version: its checkpoints are measured again.
                state = cls(path)
        return state

    @property
    def measured(self) -> set[int]:
        """Steps of the finished checkpoints."""
        return {point.step for point in self.points}

    def forget(self) -> None:
        """The run is complete."""
        self.path.unlink(missing_ok=True)

    def pool(self, window: str, gathered: Iterable[GatheredGradient]) -> None:
        """Add the gradients of one checkpoint to those of its window."""
        pool = self.pools.setdefault(window, {})
        for one in gathered:
            pool[one.name] = one if one.name not in pool else pool[one.name].merged(one)

    def save(self) -> None:
        """Write all down."""
        tensors: dict[str, Tensor] = {f"kept|{name}": tensor for name, tensor in self.kept.items()}
        for site, moments in self.fit.items():
            tensors |= moments.tensors(f"fit|{site.name}|")
        pools = {}
        for window, pool in self.pools.items():
            pools[window] = [_described(one) for one in pool.values()]
            for one in pool.values():
                tensors |= _tensors(one, f"pool|{window}|{one.name}|")
        points = [finite(asdict(point)) for point in self.points]
        spaces = {str(step): [finite(asdict(one)) for one in spaces] for step, spaces in self.spaces.items()}
        facts = {"fitted": self.fitted, "fit": [_site(one) for one in self.fit], "points": points, "pools": pools}
        # A header of safetensors is limited; points of long runs are not.
        text = json.dumps(facts | {"spaces": spaces, "facts": self.facts})
        tensors["facts"] = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
        save_tensors(self.path, _KIND, tensors, {})

    def _read(self) -> None:
        tensors, _ = load_tensors(self.path, _KIND)
        facts = json.loads(bytes(tensors["facts"].numpy()).decode())
        self.fitted, self.facts = facts["fitted"], facts["facts"]
        self.kept = {name.split("|", 1)[1]: tensor for name, tensor in tensors.items() if name.startswith("kept|")}
        for content in facts["fit"]:
            site = Site(**content)
            name = f"activations at {site}"
            self.fit[site] = SecondMoments.from_tensors(tensors, f"fit|{site.name}|", name=name)
        self.points = [point_of(content) for content in facts["points"]]
        self.spaces = {int(step): _spaces(content) for step, content in facts["spaces"].items()}
        for window, pool in facts["pools"].items():
            found = (_gathered(content, tensors, window) for content in pool)
            self.pools[window] = {one.name: one for one in found}


def _site(site: Site) -> dict[str, Any]:
    return {"kind": site.kind, "layer": site.layer, "label": site.label}


def point_of(content: Mapping[str, Any]) -> CheckpointPoint:
    """A point from its JSON form."""
    nested: dict[str, Any] = {
        name: tuple(build(Measurement, one) for one in content[name]) for name in ("measurements", "refitted")
    }
    rest = {name: value for name, value in content.items() if name not in (*nested, "spaces")}
    return CheckpointPoint(**build(dict, rest), **nested, spaces=_spaces(content["spaces"]))


def _spaces(content: Sequence[Mapping[str, Any]]) -> tuple[Space, ...]:
    return tuple(build(Space, one) for one in content)


def _described(one: GatheredGradient) -> dict[str, Any]:
    signals = [{"mean_square": signal.mean_square, "cross": signal.cross} for signal in one.signals]
    return {"place": list(one.place), "fit_site": _site(one.fit_site), "rows": one.rows.name, "signals": signals}


def _tensors(one: GatheredGradient, prefix: str) -> dict[str, Tensor]:
    found = one.rows.tensors(prefix)
    for number, signal in enumerate(one.signals):
        inputs = signal.inputs
        assert isinstance(inputs, ProjectedSums), "pooled signals are projected before"
        # Copies, since several maps share one tensor and safetensors takes each memory once.
        sums = [inputs.square_total(), inputs.square_along(inputs.basis), float(inputs.count)]
        found[f"{prefix}inputs|{number}|sums"] = torch.tensor(sums, dtype=torch.float64)
        found[f"{prefix}inputs|{number}|sum"] = inputs.sum().clone()
        found[f"{prefix}basis"] = inputs.basis.clone()
    return found


def projected(gathered: GatheredGradient, basis: Tensor) -> GatheredGradient:
    """The same with no more of the map's input rows than the shuffled control along this basis needs."""
    signals = []
    for signal in gathered.signals:
        inputs, sums = signal.inputs, ProjectedSums(basis)
        sums.join(inputs.count, inputs.sum().cpu(), inputs.square_total(), inputs.square_along(basis))
        signals.append(BackwardSignals(signal.mean_square, signal.cross, sums))
    return replace(gathered, signals=tuple(signals))


def _gathered(content: Mapping[str, Any], tensors: dict[str, Tensor], window: str) -> GatheredGradient:
    place = tuple(content["place"])
    prefix = f"pool|{window}|{place[1]}|"
    signals = []
    for number, signal in enumerate(content["signals"]):
        total, along, count = tensors[f"{prefix}inputs|{number}|sums"].tolist()
        inputs = ProjectedSums(tensors[f"{prefix}basis"])
        inputs.join(int(count), tensors[f"{prefix}inputs|{number}|sum"], total, along)
        signals.append(BackwardSignals(signal["mean_square"], signal["cross"], inputs))
    rows = SecondMoments.from_tensors(tensors, prefix, name=content["rows"])
    return GatheredGradient(place, Site(**content["fit_site"]), rows, tuple(signals))


def identity_of(what: Mapping[str, Any], corpus: Corpus) -> str:
    """A hash of all that decides the numbers of a run."""
    found = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode())
    for sequence in corpus.sequences:
        found.update(np.asarray(sequence, dtype=np.int64).tobytes() + b"|")
    return found.hexdigest()
