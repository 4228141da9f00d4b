"""A real training run of a tiny model, measured at its checkpoints, for the tests of its views."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from conftest import tiny_model
from plain_reference import random_tokens

import tangent_lens as tln
from tangent_lens.dynamics.report import DynamicsReport

STEPS = (0, 1, 2, 3, 4, 8, 9, 10)


@contextmanager
def quick_collections() -> Iterator[None]:
    """A model that is let go of is collected as garbage, among all that other tests have left in memory: not that, too."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train(layers: int = 3):
    """A model, and its state at each of the steps."""
    model = tiny_model("gpt_neox", torch.float32, layers=layers)
    tokens = random_tokens(16, 12, seed=3)
    tokens[:, 1::2] = tokens[:, :1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    states = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            states.append((step, copy.deepcopy(model.state_dict())))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, states, tokens.tolist()


@cache
def run_report(**options) -> DynamicsReport:
    """Early are steps 0 to 3, late 8 to 10; 4 is between."""
    model, states, tokens = train(options.pop("layers", 3))
    source = tln.state_checkpoints(model, states, name=options.pop("model", "tiny/[run]"))
    asked = {"rank": 3, "controls": 19, "seed": 4, "refit": True, "dimensions": True, "name": "numbers"} | options
    with TemporaryDirectory() as folder:
        return tln.measure_checkpoints(source, tokens, folder=folder, progress=False, **asked)


def at_later_steps(report: DynamicsReport, factor: int = 15_000) -> DynamicsReport:
    """The same at steps as large as those of real runs."""
    points = tuple(dataclasses.replace(point, step=factor * point.step) for point in report.points)
    early, late = (tuple(factor * step for step in steps) for steps in (report.windows.early, report.windows.late))
    return dataclasses.replace(
        report, points=points, windows=dataclasses.replace(report.windows, early=early, late=late)
    )


def save_folders(where: Path, tokenizer) -> Path:
    """The checkpoints as a Trainer would save them, with a tokenizer each."""
    model, states, _ = train()
    for step, state in states:
        model.load_state_dict(state)
        model.save_pretrained(where / f"checkpoint-{step}")
        tokenizer.save_pretrained(where / f"checkpoint-{step}")
    return where
