"""Sums by token: what they hold, row by row in NumPy; and that no cut of the rows changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as some

from tangent_lens.recording.moments import NonFiniteRows
from tangent_lens.recording.token_sums import BucketSums, TokenDistances, TokenSums, checked_tokens

TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 9, size=300))
ROWS = random_rows(300, 7)
CHOSEN = [0, 3, 4, 8]


def filled(rows=ROWS, tokens=TOKENS, chosen=CHOSEN, cuts=1):
    sums = TokenSums(chosen, rows.shape[1])
    for part, own in zip(rows.tensor_split(cuts), tokens.tensor_split(cuts), strict=True):
        sums.update(part, own)
    return sums


def measured(sums, rows=ROWS, tokens=TOKENS, cuts=1):
    distances = TokenDistances(sums)
    for part, own in zip(rows.tensor_split(cuts), tokens.tensor_split(cuts), strict=True):
        distances.update(part, own)
    return distances


def of_token(token, rows=ROWS, tokens=TOKENS):
    """By hand: number of rows, mean, sum of squared distances, sum of distances."""
    own = [row for row, one in zip(array(rows), tokens.tolist(), strict=True) if one == token]
    mean = sum(own) / len(own)
    squares = [sum((value - centre) ** 2 for value, centre in zip(row, mean, strict=True)) for row in own]
    return len(own), mean, sum(squares), sum(square**0.5 for square in squares)


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=0)


@pytest.mark.parametrize("cuts", [1, 2, 7, 300])
@pytest.mark.parametrize("chosen", [CHOSEN, [5], list(range(8, -1, -1))])
def test_are_those_of_each_token_alone_however_rows_are_cut(cuts, chosen):
    sums = filled(chosen=chosen, cuts=cuts)
    distances = measured(sums, cuts=cuts)
    assert sums.tokens.tolist() == sorted(chosen)
    for place, token in enumerate(sorted(chosen)):
        count, mean, square, distance = of_token(token)
        assert int(sums.count[place]) == int(distances.count[place]) == count > 10
        close(sums.mean[place], mean, 1e-10)
        close(sums.square[place], square)
        close(distances.distance[place], distance)


@PROPERTY
@given(some.permutations(range(40)), some.integers(0, 40), some.integers(0, 40))
def test_order_and_merging_change_nothing(order, first, second):
    rows, tokens = ROWS[:40], TOKENS[:40] % 3
    whole = filled(rows, tokens, [0, 1, 2])
    turned, own = rows[list(order)], tokens[list(order)]
    low, high = sorted((first, second))
    parts = [
        filled(turned[place], own[place], [0, 1, 2]) for place in (slice(low), slice(low, high), slice(high, None))
    ]
    merged = parts[2]
    merged.merge(parts[0])
    merged.merge(parts[1])
    assert merged.count.tolist() == whole.count.tolist()
    close(merged.mean, whole.mean, 1e-10)
    close(merged.square, whole.square)
    halves = [measured(whole, turned[place], own[place]) for place in (slice(low), slice(low, None))]
    halves[0].merge(halves[1])
    close(halves[0].distance, measured(whole, rows, tokens).distance)
    assert halves[0].count.tolist() == whole.count.tolist()


def test_rows_far_from_the_origin_lose_no_digits():
    far = ROWS + 1e7
    sums = filled(far, cuts=9)
    close(sums.square, filled(ROWS).square, 1e-7)
    close(measured(sums, far, cuts=4).distance, measured(filled(ROWS)).distance, 1e-7)


def test_moving_all_rows_moves_the_means_alone():
    shift = torch.arange(7.0).double()
    close(filled(ROWS + shift).mean, filled().mean + shift, 1e-10)
    close(filled(ROWS + shift).square, filled().square, 1e-10)


def test_turning_the_space_changes_no_distance():
    turn = random_frame(7, 7, seed=3)
    close(filled(ROWS @ turn).square, filled().square, 1e-10)
    close(measured(filled(ROWS @ turn), ROWS @ turn).distance, measured(filled()).distance, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_rows_are_summed_in_float64(dtype):
    rows = ROWS.to(dtype)
    assert rows.dtype == dtype
    close(filled(rows).square, filled(rows.double()).square, 1e-14)


def test_a_token_that_never_comes_has_no_rows():
    sums = filled(chosen=[4, 77])
    assert sums.count.tolist() == [of_token(4)[0], 0]
    assert sums.square[1] == 0 and bool(torch.isfinite(sums.mean).all())
    other = filled(chosen=[4, 77])
    other.merge(sums)
    assert other.count.tolist() == [2 * of_token(4)[0], 0] and bool(torch.isfinite(other.mean).all())


def test_nothing_is_added_where_one_chosen_row_is_not_finite():
    sums, rows = filled(), ROWS.clone()
    before = sums.square.clone()
    rows[TOKENS == 1] = torch.nan
    sums.update(rows[TOKENS == 1], TOKENS[TOKENS == 1])
    assert torch.equal(sums.square, before)
    rows[(TOKENS == 3).nonzero()[-1]] = torch.inf
    with pytest.raises(NonFiniteRows, match="some rows are NaN or infinite"):
        sums.update(rows, TOKENS)
    assert torch.equal(sums.square, before)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "1 or more integer ids"),
        ([1.5], "1 or more integer ids, not torch.float32"),
        ([[1]], r"not torch.int64 of shape \(1, 1\)"),
        ([2, 2], "2 token ids, 1 different ones"),
        ([-1, 2], "from -1 on"),
    ],
)
def test_tokens_are_checked(tokens, message):
    with pytest.raises(ValueError, match=message):
        checked_tokens(tokens)


def test_what_does_not_fit_is_refused():
    sums = filled()
    with pytest.raises(ValueError, match=r"rows of shape \(300, 6\) cannot join rows \(n, 7\)"):
        sums.update(ROWS[:, :6], TOKENS)
    with pytest.raises(ValueError, match=r"300 rows and \(299,\) tokens"):
        sums.update(ROWS, TOKENS[1:])
    with pytest.raises(ValueError, match="sums of other tokens or another width"):
        sums.merge(filled(chosen=[0, 3, 4, 7]))
    with pytest.raises(ValueError, match="distances to other means"):
        measured(sums).merge(measured(filled(ROWS + 1)))


class TestBuckets:
    BASIS = random_frame(7, 2)
    BUCKET_OF = torch.tensor([0, 0, 1, 2, 2, -1, 1, 0, -1])

    def filled(self, rows=ROWS, tokens=TOKENS, cuts=1):
        sums = BucketSums(self.BASIS, self.BUCKET_OF)
        for part, own in zip(rows.tensor_split(cuts), tokens.tensor_split(cuts), strict=True):
            sums.update(part, own)
        return sums

    @pytest.mark.parametrize("cuts", [1, 5, 300])
    def test_hold_the_energy_of_their_rows(self, cuts):
        sums = self.filled(cuts=cuts)
        for bucket in range(3):
            own = [
                row for row, token in zip(array(ROWS), TOKENS.tolist(), strict=True) if self.BUCKET_OF[token] == bucket
            ]
            along = [sum(float(row @ direction) ** 2 for direction in array(self.BASIS).T) for row in own]
            assert int(sums.count[bucket]) == len(own) > 20
            close(sums.total[bucket], sum(float(row @ row) for row in own))
            close(sums.along[bucket], sum(along))
        assert sums.left_out == sum(token in (5, 8) for token in TOKENS.tolist()) > 0
        assert int(sums.count.sum()) + sums.left_out == 300

    def test_merge_to_the_sums_of_all_rows(self):
        merged, whole = self.filled(ROWS[:100], TOKENS[:100]), self.filled()
        merged.merge(self.filled(ROWS[100:], TOKENS[100:]))
        assert merged.count.tolist() == whole.count.tolist() and merged.left_out == whole.left_out
        close(merged.total, whole.total)
        close(merged.along, whole.along)

    def test_of_tiny_rows_do_not_vanish(self):
        tiny = self.filled((ROWS * 1e-25).float())
        close(tiny.along / tiny.total, self.filled().along / self.filled().total, 1e-5)

    def test_refuse_what_does_not_fit(self):
        with pytest.raises(ValueError, match="no token is in any bucket"):
            BucketSums(self.BASIS, torch.tensor([-1, -1]))
        with pytest.raises(ValueError, match="tokens 3 to 9 do not fit buckets of a vocabulary of 9"):
            self.filled(ROWS[:2], torch.tensor([3, 9]))
        with pytest.raises(ValueError, match="along another subspace or by other buckets"):
            self.filled().merge(BucketSums(random_frame(7, 2, seed=4), self.BUCKET_OF))
