"""Training checkpoints in step order: revisions on the hub, folders, or states of a model at hand; one in memory at a time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tangent_lens.models.checkpoint_opening import CheckpointProblem, Opener, open_folder, open_revision, open_state
from tangent_lens.models.loading import wrap

# How projects name the revisions of a training run; a name must match as a whole. Later stages that count their steps
# anew are left out (the second stage of OLMo 2): name them with a pattern of your own.
REVISION_NAMES = {
    "Pythia": r"step(?P<step>\d+)",
    "OLMo": r"step(?P<step>\d+)-tokens[\d.]+[MBT]",
    "OLMo 2": r"stage1-step(?P<step>\d+)-tokens[\d.]+[MBT]",
    "SmolLM2": r"step-(?P<step>\d+)",
    "SmolLM3": r"stage\d+-step-(?P<step>\d+)",
    "FineWeb ablations": r"step-(?P<step>\d+)-[\d.]+[MBT]T?",
    "BLOOM": r"global_?step_?(?P<step>\d+)",
}
_ANY_NAME = r"(?:.*[-_/])?(?:step|checkpoint|ckpt|iter|iteration)s?[-_]?(?P<step>\d+k?)"
_LAST_NUMBER = r".*?(?P<step>\d+)\D*"
# What transformers' Trainer writes.
_TRAINER_FOLDER = r"checkpoint-(?P<step>\d+)"
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Checkpoint:
    """One state of a model in training.

    Attributes:
        step: the training step.
        name: the revision, the folder's name, or ``step 100``.
        source: the hub id, the folder, or what the model is called.
    """

    step: int
    name: str
    source: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class CheckpointSource:
    """Checkpoints in the order of their steps, and how one is opened.

    Attributes:
        name: where they come from.
        checkpoints: in the order of their steps, no step twice.
        opener: opens one; a model is loaded only then.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    opener: Opener

    def __post_init__(self) -> None:
        """Sort by step.

        Raises:
            ValueError: two checkpoints of one step.
        """
        ordered = sorted(self.checkpoints, key=lambda one: one.step)
        for before, after in itertools.pairwise(ordered):
            if before.step == after.step:
                raise ValueError(
                    f"{self.name}: {before.name!r} and {after.name!r} are both step {after.step}; give a pattern that matches "
                    "one of them, with a group named step, such as r'main-step(?P<step>\\d+)'"
                )
        object.__setattr__(self, "checkpoints", tuple(ordered))

    @property
    def steps(self) -> tuple[int, ...]:
        """Their steps, rising."""
        return tuple(one.step for one in self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.checkpoints)

    def open(self, checkpoint: Checkpoint | int) -> AbstractContextManager[Any]:
        """Load one checkpoint for as long as a ``with`` block lasts.

        Args:
            checkpoint: one of these, or its step.

        Returns:
            A context that yields a :class:`~tangent_lens.models.protocol.Model`. At its end the weights leave the memory
            even where somebody still holds the model, which cannot run any more then.

        Raises:
            CheckpointProblem: (on entering) it cannot be loaded.
            ValueError: no such step.
        """
        step = checkpoint.step if isinstance(checkpoint, Checkpoint) else checkpoint
        found = next((one for one in self.checkpoints if one.step == step), None)
        if found is None:
            raise ValueError(f"{self.name} has no checkpoint of step {step}; it has steps {_listed(self.steps)}")
        return self.opener(found)

    def choose(
        self,
        *,
        steps: Iterable[int] | None = None,
        first: int | None = None,
        last: int | None = None,
        every: int | None = None,
        at_most: int | None = None,
        spacing: str = "log",
    ) -> CheckpointSource:
        """Some of the checkpoints; one rule a call, and calls can follow one another.

        Args:
            steps: these steps exactly.
            first, last: so many from the start, or from the end.
            every: each so-manieth, beginning with the first.
            at_most: so many, the first and the last among them, nearest to evenly ``log`` (of step + 1) or ``linear``
                places; fewer where several places have the same nearest checkpoint.

        Raises:
            ValueError: no rule or several, a number below 1, a step that is not there, or an unknown spacing.
        """
        rules = {"steps": steps, "first": first, "last": last, "every": every, "at_most": at_most}
        given = {name: value for name, value in rules.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"choose takes one of {', '.join(rules)} at a time, not {list(given) or 'none'}; chain the calls"
            )
        ((rule, value),) = given.items()
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{rule}={value} chooses nothing; use 1 or more")
        if steps is not None:
            chosen = self._places_of(steps)
        elif at_most is not None:
            chosen = spread_places(self.steps, at_most, spacing)
        else:
            place = {"first": slice(first), "last": slice(-(last or 0), None), "every": slice(None, None, every)}[rule]
            chosen = list(range(len(self)))[place]
        return replace(self, checkpoints=tuple(self.checkpoints[place] for place in chosen))

    def _places_of(self, steps: Iterable[int]) -> list[int]:
        wanted = sorted(set(steps))
        missing = [step for step in wanted if step not in self.steps]
        if missing or not wanted:
            raise ValueError(f"{self.name} has no checkpoints of steps {missing}; it has steps {_listed(self.steps)}")
        return [self.steps.index(step) for step in wanted]

    def __repr__(self) -> str:
        return f"CheckpointSource({self.name}: {len(self)} checkpoints, steps {_listed(self.steps)})"


def hub_checkpoints(
    repo_id: str,
    pattern: str | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    delete_downloads: bool = False,
    token: str | bool | None = None,
) -> CheckpointSource:
    """The branches and tags of a hub repository that are named by training steps.

    Args:
        repo_id: such as ``EleutherAI/pythia-160m``.
        pattern: a regular expression for whole names with a group ``step``; by default the naming of
            :data:`REVISION_NAMES` that most names follow, or else any name that ends in ``step``, ``checkpoint``, ``ckpt``
            or ``iter`` and a number.
        dtype, device: of the loaded models, as :func:`tangent_lens.models.loading.load` takes them.
        delete_downloads: at the end of a block, delete what this opening itself has downloaded to the hub's cache; files
            that were there before stay.
        token: for listing a private repository; by default the one that is logged in.

    Raises:
        CheckpointProblem: the hub has no such repository, or cannot be reached.
        ValueError: no name matches, two names are one step, or a pattern without the group ``step``.
    """
    names = _revisions(repo_id, token)
    matcher = re.compile(pattern) if pattern else _usual_naming(names)
    where = f"the hub repository {repo_id}"
    found = _matching(names, matcher, where, "branches and tags")
    opener = partial(open_revision, repo_id, dtype=dtype, device=device, delete_downloads=delete_downloads)
    return CheckpointSource(repo_id, tuple(Checkpoint(step, name, repo_id) for step, name in found), opener)


def folder_checkpoints(
    where: str | Path, pattern: str | None = None, *, dtype: str = "float32", device: str = "cpu"
) -> CheckpointSource:
    """Saved HuggingFace models in local folders, such as ``checkpoint-500`` of the Trainer.

    Args:
        where: the folder that holds them, or a glob such as ``runs/*/step*``.
        pattern: a regular expression for whole folder names with a group ``step``; by default ``checkpoint-<step>`` where
            a folder holds such, and else the last number of each name.
        dtype, device: as for :func:`hub_checkpoints`.

    Raises:
        ValueError: nothing is there, no name matches, two are one step, or a folder without a saved model.
    """
    paths = {str(path): path for path in _folders(where)}
    if not paths:
        raise ValueError(f"{where} holds no folders; give the folder that holds the checkpoints, or a glob")
    trainer = any(re.fullmatch(_TRAINER_FOLDER, path.name) for path in paths.values())
    matcher = re.compile(pattern or (_TRAINER_FOLDER if trainer else _LAST_NUMBER))
    names = [path.name for path in paths.values()]
    found = [(step_of(path.name, matcher), path) for path in paths.values()]
    kept = [Checkpoint(step, path.name, str(path)) for step, path in found if step is not None]
    if not kept:
        raise ValueError(f"{where}: no folder is named by a training step; there are {_listed(sorted(names))}")
    for one in kept:
        if not (Path(one.source) / "config.json").is_file():
            raise ValueError(
                f"{one.source} holds no config.json, so it is no saved HuggingFace model; leave it out by pattern"
            )
    return CheckpointSource(str(where), tuple(kept), partial(open_folder, dtype=dtype, device=device))


def state_checkpoints(
    model: Any, states: Iterable[tuple[int, Any]], *, tokenizer: Any = None, name: str | None = None
) -> CheckpointSource:
    """States of one model object, loaded into it in turn; at the end of a block it has its own weights again.

    Args:
        model: what :func:`tangent_lens.models.loading.wrap` takes.
        states: (step, state dict) pairs, or (step, function that returns one): functions keep memory free.
        name: what a report calls the model.

    Raises:
        ValueError: no states, or two of one step.
    """
    loaders: dict[int, Any] = {}
    for step, state in states:
        if step in loaders:
            raise ValueError(f"two states are both step {step}; give each step once")
        loaders[int(step)] = state
    if not loaders:
        raise ValueError(
            "no states were given; pass (step, state dict) pairs, or functions in place of the state dicts"
        )
    shown = name or wrap(model, tokenizer).description.name
    found = tuple(Checkpoint(step, f"step {step}", shown) for step in loaders)
    return CheckpointSource(shown, found, partial(open_state, model, loaders, tokenizer, name))


def step_of(name: str, matcher: re.Pattern[str]) -> int | None:
    """The step in a name, or None where the name does not match as a whole; ``20k`` is 20000.

    Raises:
        ValueError: a pattern without the group ``step``, or a group that holds no number.
    """
    if "step" not in matcher.groupindex:
        raise ValueError(f"the pattern {matcher.pattern!r} has no group named step; write r'...(?P<step>\\d+)...'")
    match = matcher.fullmatch(name)
    if match is None or match["step"] is None:
        return None
    number = re.fullmatch(r"(\d+)([kK]?)", match["step"])
    if number is None:
        raise ValueError(f"the step {match['step']!r} of {name!r} is no number; let the group step match digits only")
    return int(number[1]) * (1000 if number[2] else 1)


def spread_places(steps: Sequence[int], at_most: int, spacing: str) -> list[int]:
    """Places of at most so many steps, spread evenly on a scale, the first and the last among them."""
    scales: dict[str, Callable[[Any], Any]] = {"log": np.log1p, "linear": lambda values: values}
    if spacing not in scales:
        raise ValueError(f"spacing {spacing!r} must be 'log' or 'linear'")
    if at_most == 1:
        return [len(steps) - 1]
    places = scales[spacing](np.asarray(steps, dtype=np.float64))
    wanted = np.linspace(places[0], places[-1], at_most)
    return sorted({int(np.abs(places - one).argmin()) for one in wanted})


def _revisions(repo_id: str, token: str | bool | None) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        refs = HfApi(token=token).list_repo_refs(repo_id)
    except (RepositoryNotFoundError, HFValidationError) as problem:
        raise CheckpointProblem(
            f"the hub has no model repository {repo_id!r} that you may read; check the name, or log in with: hf auth login"
        ) from problem
    # The HTTP libraries of different versions of huggingface_hub share no class of errors.
    except Exception as problem:
        raise CheckpointProblem(
            f"the branches and tags of {repo_id} could not be listed ({type(problem).__name__}: {problem}); check the "
            "network and HF_ENDPOINT, or use folder_checkpoints on folders that you have"
        ) from problem
    return sorted({ref.name for ref in (*refs.branches, *refs.tags)})


def _usual_naming(names: Sequence[str]) -> re.Pattern[str]:
    """The known naming that most names follow."""
    usual = [re.compile(pattern) for pattern in REVISION_NAMES.values()]
    hits = {one: sum(one.fullmatch(name) is not None for name in names) for one in usual}
    best = max(usual, key=lambda one: hits[one])
    return best if hits[best] else re.compile(_ANY_NAME, re.IGNORECASE)


def _matching(names: Sequence[str], matcher: re.Pattern[str], where: str, what: str) -> list[tuple[int, str]]:
    found = [(step, name) for name in names if (step := step_of(name, matcher)) is not None]
    if not found:
        raise ValueError(
            f"{where}: none of its {len(names)} {what} is named by a training step ({_listed(names)}); give a pattern with a "
            "group named step, such as r'my-run-(?P<step>\\d+)'"
        )
    return found


def _folders(where: str | Path) -> list[Path]:
    path = Path(where).expanduser()
    if path.is_dir():
        return sorted(child for child in path.iterdir() if child.is_dir())
    from glob import glob

    return sorted(Path(found) for found in glob(str(path)) if Path(found).is_dir())


def _listed(things: Sequence[Any]) -> str:
    """All of a few; of many, the first and the last."""
    shown = [str(thing) for thing in things]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN - 2], "...", shown[-1]]
    return ", ".join(shown)
