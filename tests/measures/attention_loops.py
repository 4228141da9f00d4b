"""Attention-score parts one pair at a time, in plain float64 Python: what the vectorised sums are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from explicit import array
from torch import Tensor

PARTS = ("centre", "tangent", "normal")
FOUR = (("tangent", "tangent"), ("tangent", "normal"), ("normal", "tangent"), ("normal", "normal"))


@dataclass
class Case:
    """One batch of random parts, with all that may come along."""

    queries: Tensor
    keys: Tensor
    allowed: Tensor
    kept: Tensor | None = None
    control_queries: Tensor | None = None
    control_keys: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    frequency: Tensor | None = None
    radius: Tensor | None = None

    def of_control(self, place: int) -> Case:
        """The same with one control in the tangent's place."""
        sides = {}
        for name in ("queries", "keys"):
            centre, tangent, normal = getattr(self, name)
            inside = getattr(self, f"control_{name}")[place]
            sides[name] = torch.stack([centre, inside, tangent + normal - inside])
        return Case(**sides, allowed=self.allowed, kept=self.kept, bias=self.bias, softcap=self.softcap)


@dataclass
class Loops:
    """Sums of one head."""

    rows: int = 0
    pairs: int = 0
    left_out: int = 0
    squares: dict = field(default_factory=lambda: dict.fromkeys(FOUR, 0.0))
    products: dict = field(default_factory=dict)
    square: float = 0.0
    kl: float = 0.0
    by_distance: dict = field(default_factory=dict)
    by_frequency: dict = field(default_factory=dict)
    pair_list: list = field(default_factory=list)

    @property
    def dominance(self) -> float:
        return self.squares[FOUR[0]] / sum(self.squares.values())

    def shares(self) -> dict[str, float]:
        return {name: product / self.square for name, product in self.products.items()}


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def centred(values: list[float]) -> list[float]:
    return [value - sum(values) / len(values) for value in values]


def capped(score: float, softcap: float | None) -> float:
    return score if softcap is None else softcap * math.tanh(score / softcap)


def loops(case: Case, head: int) -> Loops:
    """Everything about one head, one query row after the other."""
    queries, keys = array(case.queries), array(case.keys)
    group = queries.shape[2] // keys.shape[2]
    allowed = case.allowed.numpy()
    found = Loops(products={f"{a}_{b}": 0.0 for a in PARTS for b in PARTS} | {"bias": 0.0})
    for sequence in range(queries.shape[1]):
        for row in range(queries.shape[3]):
            if case.kept is not None and not case.kept[sequence, row]:
                continue
            mask = allowed[sequence, min(head, allowed.shape[1] - 1), row]
            places = [place for place in range(keys.shape[3]) if mask[place]]
            if len(places) < 2:
                found.left_out += 1
                continue
            _one_row(case, found, head, head // group, sequence, row, places, queries, keys)
    return found


def _one_row(case, found, head, kv_head, sequence, row, places, queries, keys) -> None:
    raw = {
        (a, b): [
            float(np.dot(queries[one, sequence, head, row], keys[other, sequence, kv_head, place])) for place in places
        ]
        for one, a in enumerate(PARTS)
        for other, b in enumerate(PARTS)
    }
    bias = [0.0] * len(places)
    if case.bias is not None:
        one = case.bias if case.bias.ndim == 3 else case.bias[min(sequence, len(case.bias) - 1)]
        bias = [float(one[head, row, place]) for place in places]
    parts = {pair: centred(scores) for pair, scores in raw.items()}
    total = centred([sum(scores[at] for scores in raw.values()) + bias[at] for at in range(len(places))])
    found.rows += 1
    found.pairs += len(places)
    found.square += sum(score**2 for score in total)
    for (a, b), scores in parts.items():
        found.products[f"{a}_{b}"] += sum(score * whole for score, whole in zip(scores, total, strict=True))
    found.products["bias"] += sum(score * whole for score, whole in zip(centred(bias), total, strict=True))
    for pair in FOUR:
        found.squares[pair] += sum(score**2 for score in parts[pair])
    found.kl += _divergence(raw, bias, case.softcap)
    for at, place in enumerate(places):
        four = [parts[pair][at] ** 2 for pair in FOUR]
        _add(found.by_distance, abs(row - place), four)
        if case.frequency is not None:
            _add(found.by_frequency, int(case.frequency[sequence, row]), four)
        if case.radius is not None:
            middle = math.sqrt(float(case.radius[sequence, row]) * float(case.radius[sequence, place]))
            found.pair_list.append((middle, [raw[pair][at] ** 2 for pair in FOUR], four))


def _divergence(raw, bias, softcap) -> float:
    keys = range(len(bias))
    whole = softmax([capped(sum(scores[at] for scores in raw.values()), softcap) + bias[at] for at in keys])
    left = [pair for pair in raw if pair not in FOUR[1:]]
    without = softmax([capped(sum(raw[pair][at] for pair in left), softcap) + bias[at] for at in keys])
    return sum(p * math.log(p / q) for p, q in zip(whole, without, strict=True) if p > 0)


def _add(into: dict, key: int, four: list[float]) -> None:
    entry = into.setdefault(key, [0, [0.0] * 4])
    entry[0] += 1
    entry[1] = [before + new for before, new in zip(entry[1], four, strict=True)]
