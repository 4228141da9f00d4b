"""Dominance by key distance, token frequency and radius against loops over single pairs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_cases import causal, check_loops, masks, normal_numbers, parts_of, random_case, sums_of
from attention_loops import Case, loops


def check_buckets(found, expected: dict, buckets: list[list[int]], head: int) -> None:
    for place, keys in enumerate(buckets):
        entries = [expected[key] for key in keys if key in expected]
        squares = np.sum([four for _, four in entries], axis=0) if entries else np.zeros(4)
        assert found.pairs[head][place] == sum(count for count, _ in entries)
        if squares.sum() > 0:
            assert found.dominance[head][place] == pytest.approx(squares[0] / squares.sum(), rel=1e-10)
        else:
            assert math.isnan(found.dominance[head][place])


@pytest.mark.parametrize("mask", ["causal", "encoder with padding", "one mask a head"])
def test_dominance_by_key_distance(mask):
    case = random_case(18, controls=0, **masks()[mask])
    found = sums_of(case, distance_edges=(1, 2, 4, 20)).result().by_distance
    assert found.axis == "key distance"
    assert found.labels == ("0", "1", "2-3", "4-19", "20+")
    for head in range(4):
        check_buckets(found, loops(case, head).by_distance, [[0], [1], [2, 3], list(range(4, 20)), [20]], head)


@pytest.mark.parametrize("mask", ["causal", "encoder with padding", "one mask a head"])
def test_dominance_by_frequency_of_the_query_token(mask):
    frequency = torch.tensor([[0, 1, 2, -1, 2, 1, 0], [2, 2, 0, 1, -5, 1, 0]])
    case = random_case(19, controls=0, frequency=frequency, **masks()[mask])
    found = sums_of(case, frequency_buckets=4).result().by_frequency
    assert (found.axis, found.labels) == ("query token frequency", ("0", "1", "2", "3"))
    for head in range(4):
        check_buckets(found, loops(case, head).by_frequency, [[0], [1], [2], [3]], head)


@pytest.mark.parametrize("mask", ["causal", "encoder with padding", "one mask a head"])
def test_squares_by_radius(mask):
    radius = torch.from_numpy(np.random.default_rng(2).uniform(0.05, 30, size=(2, 7)))
    radius[0, 4] = 0
    case = random_case(20, controls=0, radius=radius, **masks()[mask])
    found = sums_of(case).result().scaling
    for head in range(4):
        bins: dict[int, list] = {}
        for middle, raw, four in loops(case, head).pair_list:
            if middle > 0:
                bins.setdefault(math.floor(4 * math.log2(middle)), []).append((middle, raw, four))
        seen = [place for place, count in enumerate(found.pairs[head]) if count]
        assert len(seen) == len(bins)
        for place, (_, pairs) in zip(seen, sorted(bins.items()), strict=True):
            raw, four = (np.sum([pair[at] for pair in pairs], axis=0) for at in (1, 2))
            middle = math.exp(np.mean([math.log(pair[0]) for pair in pairs]))
            assert found.pairs[head][place] == len(pairs)
            assert found.radius[head][place] == pytest.approx(middle, rel=1e-12)
            assert found.dominance[head][place] == pytest.approx(four[0] / four.sum(), rel=1e-10)
            for name, square in zip(found.mean_square, (raw[0], raw[1] + raw[2], raw[3]), strict=True):
                assert found.mean_square[name][head][place] == pytest.approx(square / len(pairs), rel=1e-10)


def test_exponents_of_parts_that_scale_exactly():
    """v = t w and n = t^2 w' along fixed vectors, radii on one grid: TT ~ t^2, TN and NT ~ t^3, NN ~ t^4 exactly."""
    steps = torch.from_numpy(np.random.default_rng(0).integers(0, 9, size=(3, 12)))
    radius = 0.01 * 2.0 ** (steps.double() / 2 + 0.1)
    fixed = normal_numbers(np.random.default_rng(1), 3, 2)
    size = torch.stack([torch.ones_like(radius), radius, radius**2])[:, :, None, :, None]
    sides = {
        "queries": size * fixed[:, None, None, None].expand(3, 3, 2, 12, 2),
        "keys": size * fixed[:, None, None, None].expand(3, 3, 2, 12, 2),
    }
    case = Case(**sides, allowed=causal(3, 12), radius=radius)
    found = sums_of(case).result().scaling
    for name, exponent in (("tangent_tangent", 2), ("normal_normal", 4)):
        assert found.exponent[name] == pytest.approx((exponent,) * 2, abs=1e-10)
        assert found.standard_error[name] == pytest.approx((0, 0), abs=1e-9)
    # A mixed part is t_i t_j^2 + t_i^2 t_j: the same bin holds pairs of unequal radii, so it only follows on average.
    assert found.exponent["mixed"] == pytest.approx((3, 3), abs=0.1)


def test_exponents_within_sequences_of_one_radius_are_exact_for_every_part():
    generator, radii = np.random.default_rng(3), torch.tensor([0.1, 0.3, 1.0, 4.0, 20.0], dtype=torch.float64)
    radius = radii[:, None].expand(5, 6)
    size = torch.stack([torch.ones_like(radius), radius, radius**2])[:, :, None, :, None]
    directions = {name: normal_numbers(generator, 3, 1, 2, 6, 3) for name in ("queries", "keys")}
    case = Case(**{name: size * one for name, one in directions.items()}, allowed=causal(5, 6), radius=radius)
    found = sums_of(case).result().scaling
    assert found.radius == (pytest.approx(radii.tolist()), pytest.approx(radii.tolist()))
    for name, exponent in (("tangent_tangent", 2), ("mixed", 3), ("normal_normal", 4)):
        assert found.exponent[name] == pytest.approx((exponent,) * 2, abs=1e-10)


def test_rows_at_the_centre_have_no_place_on_the_axis_of_radii():
    case = random_case(21, controls=0, radius=torch.zeros(2, 7, dtype=torch.float64))
    found = sums_of(case).result()
    assert found.scaling.radius == ((), (), (), ())
    assert all(math.isnan(value) for value in found.scaling.exponent["mixed"])
    assert found.dominance == sums_of(dataclasses.replace(case, radius=None)).result().dominance


def test_queries_and_keys_of_other_positions_have_no_distance():
    case = random_case(controls=0)
    case.queries, case.allowed = case.queries[..., :4, :], case.allowed[:, :, :4]
    check_loops(case)
    with pytest.raises(ValueError, match="key distances need the same positions"):
        sums_of(case, distance_edges=(1,))
    with pytest.raises(ValueError, match="4 queries and 7 keys"):
        parts_of(case, radius=torch.ones(2, 4))
