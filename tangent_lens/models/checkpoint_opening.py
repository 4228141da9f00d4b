"""One checkpoint in memory for as long as a block lasts, and nothing left of it afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from tangent_lens.models.loading import load, wrap
from tangent_lens.models.protocol import Model

# Takes a Checkpoint.
Opener = Callable[[Any], AbstractContextManager[Model]]


class CheckpointProblem(OSError):
    """Checkpoints that cannot be listed or opened."""


@contextmanager
def open_revision(
    repo_id: str, checkpoint: Any, *, dtype: str, device: str, delete_downloads: bool = False
) -> Iterator[Model]:
    """A revision of a hub repository."""
    cache = HubCache.of(repo_id)
    before = cache.files() if delete_downloads else frozenset()
    try:
        with _loaded(repo_id, checkpoint, dtype, device) as model:
            yield model
    finally:
        if delete_downloads:
            # transformers looks up in the main revision what this one lacks, such as a tokenizer.
            cache.delete_new((checkpoint.name, "main"), before)


@contextmanager
def open_folder(checkpoint: Any, *, dtype: str, device: str) -> Iterator[Model]:
    """A saved model in a folder, which is only read."""
    with _loaded(checkpoint.source, checkpoint, dtype, device) as model:
        yield model


@contextmanager
def open_state(
    model: Any, states: Mapping[int, Any], tokenizer: Any, name: str | None, checkpoint: Any
) -> Iterator[Model]:
    """A state dict in a model that is there already; its own weights come back.

    Raises:
        ValueError: a state that does not fit the model.
    """
    wrapped = wrap(model) if hasattr(model, "tap_point") else None
    wrapped = wrapped or wrap(model, tokenizer, name=name, revision=checkpoint.name)
    state = states[checkpoint.step]
    state = state() if callable(state) else state
    _check_state(wrapped.module, state, checkpoint.name)
    own = {key: tensor.detach().clone() for key, tensor in wrapped.module.state_dict().items()}
    try:
        wrapped.module.load_state_dict(state, strict=False)
        del state
        yield wrapped
    finally:
        wrapped.module.load_state_dict(own)


class HubCache:
    """The files of one repository in the hub's cache.

    Attributes:
        folder: with ``blobs``, ``refs``, ``snapshots`` and ``.no_exist`` inside, as huggingface_hub lays it out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, repo_id: str) -> HubCache:
        """Where the hub's cache keeps a model repository."""
        from huggingface_hub import constants
        from transformers.utils import hub

        # transformers 4 may have been told to keep its files in a place of its own.
        cache = getattr(hub, "TRANSFORMERS_CACHE", constants.HF_HUB_CACHE)
        return cls(Path(cache) / f"models--{repo_id.replace('/', '--')}")

    def files(self) -> frozenset[Path]:
        """Every file and link in it."""
        found = (Path(root, name) for root, _, names in os.walk(self.folder) for name in names)
        return frozenset(found)

    def delete_new(self, revisions: Iterable[str], before: frozenset[Path]) -> None:
        """Delete the files of these revisions that were not there before, and contents that no other revision shares."""
        new = self.files() - before
        own = {path for revision in revisions for path in self._of_revision(revision, new)}
        shared = {path.resolve() for path in self.files() - own if path.is_symlink()}
        contents = {path.resolve() for path in own if path.is_symlink()}
        for path in own | {path for path in new if path.resolve() in contents - shared}:
            path.unlink(missing_ok=True)
        for root, _, _ in os.walk(self.folder, topdown=False):
            if not any(Path(root).iterdir()):
                Path(root).rmdir()

    def _of_revision(self, revision: str, files: Iterable[Path]) -> set[Path]:
        """Those of the files that huggingface_hub keeps under the name of a revision or of its commit."""
        named = self.folder / "refs" / revision
        commit = named.read_text().strip() if named.is_file() else revision
        return {path for path in files if path == named or commit in path.relative_to(self.folder).parts[1:-1]}


@contextmanager
def _loaded(source: str, checkpoint: Any, dtype: str, device: str) -> Iterator[Model]:
    try:
        model = load(source, revision=checkpoint.name, dtype=dtype, device=device)
    except OSError as problem:
        raise CheckpointProblem(
            f"step {checkpoint.step} ({checkpoint.name} of {checkpoint.source}) could not be loaded: {problem}"
        ) from problem
    try:
        yield model
    finally:
        _release(model)


def _release(model: Model) -> None:
    """Let go of the weights, also where somebody still holds the model; tensors taken out of it stay."""
    kind = model.device.type
    model.module.to("meta")
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()


def _check_state(module: torch.nn.Module, state: Any, name: str) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{name}: a state must be a state dict or a function that returns one, not {type(state).__name__}"
        )
    own = module.state_dict(keep_vars=True)
    foreign = sorted(set(state) - set(own))
    # Tied weights are one tensor under several names, of which a saved file keeps one.
    filled = {id(own[key]) for key in state if key in own}
    missing = [key for key, tensor in own.items() if id(tensor) not in filled]
    if foreign or missing:
        raise ValueError(
            f"{name}: this state does not fit the model: it lacks {missing[:3] or 'nothing'} and has {foreign[:3] or 'nothing'} "
            "that the model has not; give state dicts of this very model"
        )
    for key, tensor in state.items():
        if tensor.shape != own[key].shape:
            raise ValueError(
                f"{name}: {key} is {tuple(tensor.shape)} in this state and {tuple(own[key].shape)} in the model"
            )
