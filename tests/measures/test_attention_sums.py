"""Streamed attention sums against loops over single pairs, and against what must not change them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_cases import (
    causal,
    check_loops,
    check_sums,
    chosen,
    masks,
    normal_numbers,
    padded,
    parts_of,
    random_case,
    sums_of,
    with_everything,
)
from attention_loops import FOUR, Case
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures import attention_sums
from tangent_lens.measures.attention import SHARES
from tangent_lens.measures.attention_inputs import AllowedPairs
from tangent_lens.measures.attention_sums import AttentionSums

seeds = st.integers(0, 10_000)
EDGES = (1, 2, 4)


@pytest.mark.parametrize("mask", masks().values(), ids=masks().keys())
def test_every_number_equals_loops_over_single_pairs(mask):
    check_loops(random_case(1, **mask))


@pytest.mark.parametrize("heads_and_keys", [(4, 4), (4, 1), (6, 3), (1, 1)])
def test_heads_share_keys_in_consecutive_groups(heads_and_keys):
    heads, kv_heads = heads_and_keys
    check_loops(random_case(2, heads=heads, kv_heads=kv_heads, length=5))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias_axes", [(4, 7, 7), (1, 4, 7, 7), (2, 4, 7, 7), None])
def test_a_bias_and_a_soft_cap_act_as_in_the_model(softcap, bias_axes):
    bias = None if bias_axes is None else 1.5 * normal_numbers(np.random.default_rng(5), *bias_axes)
    check_loops(random_case(3, bias=bias, softcap=softcap))


@given(seed=seeds, length=st.integers(2, 9), block=st.integers(1, 9), kv_heads=st.sampled_from([1, 2, 4]))
@PROPERTY
def test_random_shapes_masks_and_blocks_equal_the_loops(seed, length, block, kv_heads):
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(2, 1, length, length, generator=generator) < 0.7
    allowed[:, :, -1] = True
    case = random_case(seed, kv_heads=kv_heads, length=length, controls=1, allowed=allowed)
    check_loops(case, rows_a_block=block)


def test_the_nine_parts_and_the_bias_make_up_the_scores():
    case = random_case(4, controls=3, bias=normal_numbers(np.random.default_rng(1), 4, 7, 7))
    result = sums_of(case).result()
    for head in range(4):
        assert sum(values[head] for values in result.shares.values()) == pytest.approx(1, abs=1e-12)
        for place in range(3):
            assert sum(values[head][place] for values in result.random_shares.values()) == pytest.approx(1, abs=1e-12)
    assert tuple(result.shares) == SHARES
    assert result.shares["bias"] == tuple(values[0] for values in result.random_shares["bias"])


def test_without_a_bias_its_share_is_zero():
    assert sums_of(random_case()).result().shares["bias"] == (0.0,) * 4


@given(seed=seeds)
@PROPERTY
def test_dominances_are_shares_and_divergences_are_not_negative(seed):
    result = sums_of(random_case(seed, length=5)).result()
    assert all(0 <= value <= 1 for value in result.dominance + sum(result.random, ()))
    assert all(value >= 0 for value in result.kl + sum(result.random_kl, ()))


def without(case: Case, *names: str) -> Case:
    """The same case with parts (0 centre, 1 tangent, 2 normal) set to zero."""
    places = [("centre", "tangent", "normal").index(name) for name in names]
    sides = {name: getattr(case, name).clone() for name in ("queries", "keys")}
    for side in sides.values():
        side[places] = 0
    return dataclasses.replace(case, **sides)


def test_scores_of_tangents_alone_have_dominance_one_and_lose_nothing():
    result = sums_of(without(random_case(controls=0), "normal")).result()
    assert result.dominance == (1.0,) * 4
    assert result.kl == pytest.approx((0,) * 4, abs=1e-13)


def test_scores_of_normals_alone_have_dominance_zero():
    result = sums_of(without(random_case(controls=0), "tangent", "centre")).result()
    assert result.dominance == (0.0,) * 4
    assert result.shares["normal_normal"] == pytest.approx((1,) * 4)
    assert min(result.kl) > 0.1


def test_tangent_queries_that_meet_normal_keys_are_no_dominance():
    case = random_case(controls=0)
    case.queries[2], case.keys[1] = 0, 0
    assert sums_of(case).result().dominance == (0.0,) * 4


def test_scores_of_the_centre_alone_have_no_dominance():
    case = without(random_case(), "tangent", "normal")
    case.control_queries, case.control_keys = (0 * side for side in (case.control_queries, case.control_keys))
    result = sums_of(case).result()
    assert all(math.isnan(value) for value in result.dominance + result.p_value + sum(result.random, ()))
    assert result.kl == pytest.approx((0,) * 4, abs=1e-13)
    assert result.shares["centre_centre"] == pytest.approx((1,) * 4)


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_constant_added_to_all_keys_changes_nothing(part, size):
    case = random_case(6)
    moved = dataclasses.replace(case, keys=case.keys.clone())
    moved.keys[part] += size * torch.tensor([1.0, -2.0, 0.5])
    check_sums(sums_of(moved), sums_of(case), rel=1e-12 * size)


def test_a_constant_added_to_a_whole_row_of_scores_changes_nothing():
    case, generator = random_case(6), np.random.default_rng(0)
    bias = 50 * normal_numbers(generator, 2, 4, 7, 1).expand(2, 4, 7, 7)
    check_sums(sums_of(dataclasses.replace(case, bias=bias)), sums_of(case), rel=1e-11)


def test_grouped_queries_equal_keys_repeated_for_every_head():
    case = random_case(7, heads=6, kv_heads=2)
    repeated = dataclasses.replace(
        case,
        keys=case.keys.repeat_interleave(3, dim=2),
        control_keys=case.control_keys.repeat_interleave(3, dim=2),
    )
    check_sums(sums_of(case), sums_of(repeated))


@pytest.mark.parametrize(
    "cuts", [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[3, 1], [4, 0, 2]], [[4, 3, 2, 1, 0]]]
)
def test_neither_batches_nor_order_change_a_sum(cuts):
    case = with_everything()
    parts = [chosen(case, places) for places in cuts]
    check_sums(sums_of(*parts, distance_edges=EDGES), sums_of(case, distance_edges=EDGES))


def test_recordings_merge_by_adding():
    case = with_everything()
    first, second = (sums_of(chosen(case, places), distance_edges=EDGES) for places in ([0, 1], [2, 3, 4]))
    first.merge(second)
    check_sums(first, sums_of(case, distance_edges=EDGES))
    empty = AttentionSums(4, 2, distance_edges=EDGES, frequency_buckets=4, scaling=True)
    empty.merge(first)
    check_sums(empty, first, rel=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("more", [1, 4])
def test_padding_on_either_side_changes_nothing_whatever_stands_there(side, more):
    case = with_everything()
    found = sums_of(padded(case, more, side), distance_edges=EDGES)
    check_sums(found, sums_of(case, distance_edges=EDGES))


@pytest.mark.parametrize("rows_a_block", [1, 2, 4, 9])
@pytest.mark.parametrize("at_once", [1, 200, 10**6])
def test_how_the_work_is_cut_changes_nothing(rows_a_block, at_once, monkeypatch):
    case = with_everything()
    expected = sums_of(case, distance_edges=EDGES)
    monkeypatch.setattr(attention_sums, "SCORES_AT_ONCE", at_once)
    check_sums(sums_of(case, rows_a_block=rows_a_block, distance_edges=EDGES), expected)


def test_single_precision_is_close_and_stays_single():
    case = random_case(10, length=40, width=16, controls=3)
    given = {item.name: getattr(case, item.name) for item in dataclasses.fields(case)}
    single = Case(**{name: value.float() if name not in ("allowed",) and isinstance(value, torch.Tensor) else value
                     for name, value in given.items()})  # fmt: skip
    check_sums(sums_of(single), sums_of(case), rel=2e-5)
    assert all(value.dtype == torch.float64 for value in sums_of(single).sums.values())


def test_half_precision_parts_are_summed_in_single_precision():
    case = random_case(10, controls=0)
    half = dataclasses.replace(case, queries=case.queries.bfloat16(), keys=case.keys.bfloat16())
    same = dataclasses.replace(case, queries=half.queries.float(), keys=half.keys.float())
    check_sums(sums_of(half), sums_of(same), rel=0)


def test_parts_that_are_views_are_read_like_others():
    case = random_case(11)
    views = {
        name: getattr(case, name).transpose(2, 3).contiguous().transpose(2, 3)
        for name in ("queries", "keys", "control_queries", "control_keys")
    }
    check_sums(sums_of(dataclasses.replace(case, **views)), sums_of(case))


def test_gradients_are_not_followed():
    case = random_case(0)
    case.queries.requires_grad_()
    assert not any(value.requires_grad for value in sums_of(case).sums.values())


def test_pairs_outside_a_window_count_no_more_than_pairs_that_do_not_exist():
    """The last rows of a sliding window see what a shorter sequence shows them."""
    case = random_case(12, length=8, allowed=causal(2, 8, window=3))
    late = dataclasses.replace(case, kept=torch.arange(8).expand(2, 8) >= 5)
    tail = {name: getattr(case, name)[..., 3:, :] for name in ("queries", "keys", "control_queries", "control_keys")}
    short = Case(**tail, allowed=causal(2, 5, window=3), kept=torch.arange(5).expand(2, 5) >= 2)
    check_sums(sums_of(late), sums_of(short))


def test_masks_of_one_head_each_equal_that_head_alone():
    allowed = torch.stack([causal(2, 7), causal(2, 7, window=2)], dim=1).flatten(1, 2).repeat(1, 2, 1, 1)
    case = random_case(13, kv_heads=4, allowed=allowed)
    together = sums_of(case)
    for head in range(4):
        sides = ("queries", "keys", "control_queries", "control_keys")
        alone = Case(
            **{name: getattr(case, name)[:, :, head : head + 1] for name in sides}, allowed=allowed[:, head : head + 1]
        )
        for key, values in sums_of(alone).sums.items():
            np.testing.assert_allclose(together.sums[key][head], values[0], rtol=1e-11, atol=1e-11, err_msg=key)


def test_equal_controls_are_equal_to_the_tangent_itself():
    case = random_case(14)
    case.control_queries, case.control_keys = case.queries[1:2], case.keys[1:2]
    result = sums_of(case).result()
    assert [values[0] for values in result.random] == pytest.approx(result.dominance, rel=1e-12)
    assert [values[0] for values in result.random_kl] == pytest.approx(result.kl, rel=1e-12)
    for name in SHARES:
        assert [values[0] for values in result.random_shares[name]] == pytest.approx(result.shares[name], abs=1e-12)
    assert result.p_value == result.kl_p_value == result.share_p_value("tangent_tangent") == (1.0,) * 4


def test_controls_may_be_summed_over_some_of_the_rows():
    case = random_case(15, batch=5)
    whole, some = sums_of(case).result(), sums_of(chosen(case, [1, 3]))
    alone = sums_of(dataclasses.replace(case, control_queries=None, control_keys=None))
    assert (alone.result().random, alone.result().random_rows) == (((),) * 4, (0,) * 4)
    result, sampled = alone.result(controls=some), some.result()
    for name in ("dominance", "shares", "kl", "rows", "pairs"):
        assert getattr(result, name) == getattr(whole, name)
    for name in ("random", "random_kl", "random_shares"):
        assert getattr(result, name) == getattr(sampled, name)
    assert (result.rows[0], result.random_rows[0]) == (30, 12)


@pytest.mark.parametrize("bias_axes", [(4, 7, 7), (1, 4, 7, 7), (3, 4, 7, 7), None])
def test_some_rows_of_some_sequences_are_the_rows_of_a_whole_batch_that_are_kept(bias_axes):
    bias = None if bias_axes is None else normal_numbers(np.random.default_rng(5), *bias_axes)
    case = random_case(15, batch=3, bias=bias, softcap=2.0)
    kept = torch.zeros(3, 7, dtype=torch.bool)
    kept[0, 2], kept[2, 1], kept[2, 5] = True, True, True
    sequences, numbers, valid = torch.tensor([0, 2]), torch.tensor([[2, 0], [1, 5]]), torch.tensor([[1, 0], [1, 1]]) > 0
    place = numbers[:, None, :, None]
    pairs = AllowedPairs.of(case.allowed[sequences].take_along_dim(place, 2), valid)
    own = case.control_queries[:, sequences].take_along_dim(place[None], 3)
    some = parts_of(case).with_controls(sequences, numbers, pairs, own, case.control_keys[:, sequences])
    found = AttentionSums(4, 2)
    found.update(some)
    expected = sums_of(dataclasses.replace(case, kept=kept))
    for sums in (found, expected):
        del sums.sums["left_out_rows"]
    check_sums(found, expected)


def test_rows_with_fewer_than_two_keys_are_left_out_and_counted():
    allowed = causal(2, 7)
    allowed[1, :, 3] = False
    allowed[1, :, 4] = False
    allowed[1, :, 4, 0] = True
    result = sums_of(random_case(allowed=allowed)).result()
    assert result.left_out_rows == (4,) * 4
    assert result.rows == (10,) * 4
    nonsense = random_case(allowed=allowed)
    nonsense.queries[:, 1, :, 3:5] = math.inf
    nonsense.control_queries[:, 1, :, 3:5] = math.nan
    assert sums_of(nonsense).result() == result


def test_a_head_that_no_row_speaks_of_has_no_result():
    sums = sums_of(random_case(length=1))
    assert (sums.sums["rows"] == 0).all() and (sums.sums["left_out_rows"] == 2).all()
    with pytest.raises(ValueError, match=r"no query row with two or more allowed keys.*use longer sequences"):
        sums.result()


def test_the_cap_changes_patterns_and_not_the_split():
    case = random_case(16)
    plain, capped = sums_of(case).result(), sums_of(dataclasses.replace(case, softcap=0.5)).result()
    loose = sums_of(dataclasses.replace(case, softcap=1e6)).result()
    assert capped.dominance == plain.dominance
    assert capped.shares == plain.shares
    for found, expected in zip(capped.random, plain.random, strict=True):
        assert found == pytest.approx(expected, rel=1e-11)
    assert all(abs(a - b) > 1e-3 for a, b in zip(capped.kl, plain.kl, strict=True))
    assert loose.kl == pytest.approx(plain.kl, rel=1e-6)
    assert loose.random_kl[0] == pytest.approx(plain.random_kl[0], rel=1e-6)


def test_large_scores_keep_a_finite_divergence():
    case = random_case(17)
    case.queries *= 300
    result = sums_of(case).result()
    for head in range(4):
        assert math.isfinite(result.kl[head])
        assert math.isfinite(max(result.random_kl[head]))
        assert result.kl[head] == pytest.approx(loops_of_large(case, head), rel=1e-9)


def loops_of_large(case: Case, head: int) -> float:
    """KL row by row from log-softmax by its definition."""
    total, rows = 0.0, 0
    for sequence in range(2):
        for row in range(1, 7):
            q, k = case.queries[:, sequence, head, row], case.keys[:, sequence, head // 2, : row + 1]
            parts = torch.einsum("ad,bkd->abk", q, k)
            whole, without = parts.sum((0, 1)), parts.sum((0, 1)) - parts[1, 2] - parts[2, 1] - parts[2, 2]
            logs = [scores - torch.logsumexp(scores, 0) for scores in (whole, without)]
            total += float((logs[0].exp() * (logs[0] - logs[1])).sum())
            rows += 1
    return total / rows


def test_sums_survive_a_file():
    sums = sums_of(with_everything(), distance_edges=EDGES)
    again = AttentionSums(4, 2, distance_edges=EDGES, frequency_buckets=4, scaling=True)
    again.load_tensors(sums.tensors("layer.3."), "layer.3.")
    check_sums(again, sums, rel=0)
    assert str(dataclasses.asdict(again.result(layer=3))) == str(dataclasses.asdict(sums.result(layer=3)))
    with pytest.raises(ValueError, match="these sums were not made with"):
        AttentionSums(4, 3).load_tensors(sums.tensors())


def test_long_sequences_are_best_handed_in_one_by_one():
    sums = AttentionSums(8)
    assert [sums.sequences_at_once(length) for length in (1, 32, 64, 128, 4096)] == [32768, 32, 8, 2, 1]


def test_what_the_caller_says_reaches_the_result():
    result = sums_of(random_case()).result(layer=5, tangent_share=0.3)
    assert (result.layer, result.variance_baseline) == (5, pytest.approx(0.09))
    assert "4 heads, 12 rows" in repr(sums_of(random_case()))


def test_nan_and_infinity_are_refused_and_nothing_is_added():
    sums, case = sums_of(random_case()), random_case(1)
    before = {key: value.clone() for key, value in sums.sums.items()}
    for name, place in (("queries", (1, 0, 2, 4)), ("keys", (2, 1, 0, 3)), ("control_keys", (1, 0, 1, 2))):
        bad = dataclasses.replace(case, **{name: getattr(case, name).clone()})
        getattr(bad, name)[place] = math.nan
        with pytest.raises(ValueError, match=r"of head \d is NaN or infinite"):
            sums.update(parts_of(bad))
    assert all(torch.equal(value, before[key]) for key, value in sums.sums.items())


def test_batches_of_another_kind_than_announced_are_refused():
    case = random_case(radius=torch.ones(2, 7), frequency=torch.zeros(2, 7, dtype=torch.long))
    for sums, taught in (
        (
            AttentionSums(3, 2, frequency_buckets=1, scaling=True, name="here"),
            "here: 4 query heads came, 3 were announced",
        ),
        (AttentionSums(4, 5, frequency_buckets=1, scaling=True), "2 controls came, 5 were announced"),
        (AttentionSums(4, 2, scaling=True), "frequency came but was not announced"),
        (AttentionSums(4, 2, frequency_buckets=1), "radius came but was not announced"),
    ):
        with pytest.raises(ValueError, match=taught):
            sums.update(parts_of(case))
    plain = random_case()
    with pytest.raises(ValueError, match="radius was announced but did not come"):
        AttentionSums(4, 2, scaling=True).update(parts_of(plain))
    case.frequency[1, 2] = 7
    with pytest.raises(ValueError, match="frequency bucket 7 is outside the 4 announced"):
        sums_of(case)
    case.frequency[1, 2], case.radius[1, 2] = 0, math.nan
    with pytest.raises(ValueError, match="the radius of some row is NaN"):
        sums_of(case)


def test_sums_of_nothing_are_refused():
    for arguments in ((0,), (2, -1)):
        with pytest.raises(ValueError, match="cannot be summed"):
            AttentionSums(*arguments)
    for edges in ((0, 1), (2, 2), (4, 1)):
        with pytest.raises(ValueError, match="must increase from 1 or more"):
            AttentionSums(2, distance_edges=edges)
    with pytest.raises(ValueError, match="cannot be merged"):
        AttentionSums(2).merge(AttentionSums(3))


def test_four_are_the_parts_without_centre():
    assert [f"{a}_{b}" for a, b in FOUR] == [name for name in SHARES if "centre" not in name and name != "bias"]
