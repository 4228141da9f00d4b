"""The sums of finished jobs, kept until the run is complete: a run started again goes on where it was."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tangent_lens.models import server_functions
from tangent_lens.models.fetching import cache_folder
from tangent_lens.storage import FileProblem, load_tensors, save_tensors

Sums = dict[str, dict[str, Any]]


class RunStore:
    """One file: the joined sums, and which jobs they hold. It is replaced at once, so no job is in it twice or by half.

    Args:
        folder: None for the user's cache folder.
        identity: everything that decides the sums; another run never goes on with these.
        resume: False forgets what is there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: str, *, resume: bool = True) -> None:
        base = cache_folder() / "remote" if folder is None else Path(folder)
        self.path = base / f"{identity[:24]}.safetensors"
        self.done: frozenset[int] = frozenset()
        self.sums: Sums | None = None
        if not resume:
            self.forget()
        elif self.path.is_file():
            self._read()

    def add(self, job: int, sums: Sums, request: Mapping[str, Any]) -> None:
        """Join the sums of one job, and write all down."""
        if job in self.done:
            raise ValueError(f"job {job} is in these sums already")
        self.sums = sums if self.sums is None else server_functions.joined(self.sums, sums, request)
        self.done |= {job}
        self._write()

    def forget(self) -> None:
        """The run is complete."""
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        tensors, plain = {}, {}
        for key, one in (self.sums or {}).items():
            for name, value in one.items():
                (tensors if isinstance(value, Tensor) else plain)[f"{key}|{name}"] = value
        save_tensors(self.path, "remote sums", tensors, {"done": sorted(self.done), "plain": plain})

    def _read(self) -> None:
        try:
            tensors, facts = load_tensors(self.path, "remote sums")
        except FileProblem:
            # Sums of another version, or half a file of a full disk: they cost a job each, and are made again.
            return
        self.sums = {}
        for name, value in {**facts["plain"], **tensors}.items():
            key, _, field = name.rpartition("|")
            self.sums.setdefault(key, {})[field] = value
        self.done = frozenset(facts["done"])


def identity_of(model_key: str, request: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], a_job: int) -> str:
    """A hash of all that decides the sums of a run and how it is cut into jobs."""
    found = hashlib.sha256()
    found.update(inspect.getsource(server_functions).encode())
    for value in (model_key, a_job, request, list(batches)):
        _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{key}:".encode())
            _feed(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(b"[")
        for one in value:
            _feed(found, one)
    else:
        found.update(json.dumps(value).encode())
