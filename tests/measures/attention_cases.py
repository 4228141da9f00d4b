"""Batches of random parts, and what sums of them must be equal to."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_loops import Case, loops

from tangent_lens.measures.attention_inputs import AllowedPairs, ScoreParts
from tangent_lens.measures.attention_sums import AttentionSums


def causal(batch: int, length: int, window: int | None = None) -> torch.Tensor:
    places = torch.arange(length)
    back = places[:, None] - places
    near = (back >= 0) & (back < (window or length))
    return near.expand(batch, 1, length, length).clone()


def normal_numbers(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.normal(size=shape))


def random_case(
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 7,
    width: int = 3,
    controls: int = 2,
    allowed: torch.Tensor | None = None,
    **more,
) -> Case:
    """Random parts of unequal sizes, none of them with a mean of zero."""
    generator = np.random.default_rng(seed)
    sizes = torch.tensor([0.6, 1.0, 0.8], dtype=torch.float64)[:, None, None, None, None]
    sides = {
        name: sizes * (normal_numbers(generator, 3, batch, count, length, width) + normal_numbers(generator, width))
        for name, count in (("queries", heads), ("keys", kv_heads))
    }
    if controls:
        sides["control_queries"] = 0.5 * normal_numbers(generator, controls, batch, heads, length, width) + 0.2
        sides["control_keys"] = 0.5 * normal_numbers(generator, controls, batch, kv_heads, length, width) - 0.3
    return Case(**sides, allowed=causal(batch, length) if allowed is None else allowed, **more)


def parts_of(case: Case, rows_a_block: int = 32, **changes) -> ScoreParts:
    given = {item.name: getattr(case, item.name) for item in dataclasses.fields(case)}
    allowed, kept = given.pop("allowed"), given.pop("kept")
    return ScoreParts(**(given | {"pairs": AllowedPairs.of(allowed, kept, rows_a_block=rows_a_block)} | changes))


def sums_of(*cases: Case, rows_a_block: int = 32, **settings) -> AttentionSums:
    first = cases[0]
    settings = {"controls": 0 if first.control_queries is None else len(first.control_queries)} | settings
    if first.frequency is not None:
        settings.setdefault("frequency_buckets", 4)
    sums = AttentionSums(first.queries.shape[2], scaling=first.radius is not None, **settings)
    for case in cases:
        sums.update(parts_of(case, rows_a_block))
    return sums


def check_sums(sums: AttentionSums, other: AttentionSums, rel: float = 1e-11) -> None:
    assert sums.sums.keys() == other.sums.keys()
    for key, values in sums.sums.items():
        size = float(other.sums[key].abs().max())
        np.testing.assert_allclose(values, other.sums[key], rtol=rel, atol=rel * size, err_msg=key)


def masks() -> dict[str, dict]:
    generator = torch.Generator().manual_seed(3)
    by_head = torch.rand(2, 4, 7, 7, generator=generator) < 0.6
    kept = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
    return {
        "causal": {"allowed": causal(2, 7)},
        "sliding window": {"allowed": causal(2, 7, window=3)},
        "encoder": {"allowed": torch.ones(2, 1, 7, 7, dtype=torch.bool)},
        "encoder with padding": padded_encoder(),
        "causal with padding on the left": {"allowed": causal(2, 7) & kept[:, None, None, :], "kept": kept},
        "one mask a head": {"allowed": by_head},
        "rows that are skipped": {"allowed": causal(2, 7), "kept": torch.rand(2, 7, generator=generator) < 0.7},
    }


def padded_encoder(batch: int = 2, length: int = 7) -> dict:
    kept = torch.arange(length) < torch.tensor([[length], [length - 3]])[:batch]
    return {"allowed": kept[:, None, None, :].expand(batch, 1, length, length), "kept": kept}


def with_everything(seed: int = 8, batch: int = 5, length: int = 9) -> Case:
    generator = np.random.default_rng(seed)
    return random_case(
        seed,
        batch=batch,
        length=length,
        bias=normal_numbers(generator, batch, 4, length, length),
        frequency=torch.from_numpy(generator.integers(-1, 4, size=(batch, length))),
        radius=torch.from_numpy(generator.uniform(0.1, 8, size=(batch, length))),
    )


def chosen(case: Case, places: list[int]) -> Case:
    """Some sequences of a batch, in this order."""
    axes = {"allowed": 0, "kept": 0, "bias": 0, "frequency": 0, "radius": 0}
    given = {item.name: getattr(case, item.name) for item in dataclasses.fields(case)}
    picked = {
        name: value.index_select(axes.get(name, 1), torch.tensor(places))
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    }
    return Case(**(given | picked))


def check_loops(case: Case, rel: float = 1e-10, **settings) -> None:
    """Every number of every head, and every control as the tangent of a split of its own."""
    sums = sums_of(case, **settings)
    result = sums.result()
    for head in range(result.heads):
        expected = loops(case, head)
        counted = (result.rows[head], result.pairs[head], result.left_out_rows[head])
        assert counted == (expected.rows, expected.pairs, expected.left_out)
        assert sums.sums["squares"][head].tolist() == pytest.approx(list(expected.squares.values()), rel=rel)
        assert result.dominance[head] == pytest.approx(expected.dominance, rel=rel)
        assert result.kl[head] == pytest.approx(expected.kl / expected.rows, rel=rel)
        assert {name: values[head] for name, values in result.shares.items()} == pytest.approx(
            expected.shares(), rel=rel, abs=rel
        )
        for place in range(0 if case.control_queries is None else len(case.control_queries)):
            other = loops(case.of_control(place), head)
            squares = sums.sums["control_squares"][head, place].tolist()
            assert squares == pytest.approx(list(other.squares.values()), rel=rel)
            assert result.random[head][place] == pytest.approx(other.dominance, rel=rel)
            assert result.random_kl[head][place] == pytest.approx(other.kl / other.rows, rel=rel)
            assert {name: values[head][place] for name, values in result.random_shares.items()} == pytest.approx(
                other.shares(), rel=rel, abs=rel
            )


def padded(case: Case, more: int, side: str) -> Case:
    """The same sequences with padding of nonsense, NaN among it, on one side."""
    own = slice(more, None) if side == "left" else slice(0, case.queries.shape[3])
    length = case.queries.shape[3] + more
    generator = np.random.default_rng(99)

    def grown(value: torch.Tensor, axes: tuple[int, ...], filling) -> torch.Tensor:
        shape, index = list(value.shape), [slice(None)] * value.ndim
        for axis in axes:
            shape[axis], index[axis] = length, own
        new = filling(shape)
        new[tuple(index)] = value
        return new

    def nonsense(shape):
        new = normal_numbers(generator, *shape) * 100
        new[..., 0] = math.nan if side == "left" else 7
        return new

    batch = case.queries.shape[1]
    return Case(
        **{
            name: grown(getattr(case, name), (3,), nonsense)
            for name in ("queries", "keys", "control_queries", "control_keys")
        },
        allowed=grown(case.allowed, (2, 3), lambda shape: torch.zeros(shape, dtype=torch.bool)),
        kept=grown(
            torch.ones(batch, length - more, dtype=torch.bool), (1,), lambda s: torch.zeros(s, dtype=torch.bool)
        ),
        bias=grown(case.bias, (2, 3), lambda shape: torch.full(shape, math.nan, dtype=torch.float64)),
        frequency=grown(case.frequency, (1,), lambda shape: torch.zeros(shape, dtype=torch.int64)),
        radius=grown(case.radius, (1,), lambda shape: torch.full(shape, math.nan, dtype=torch.float64)),
        softcap=case.softcap,
    )
