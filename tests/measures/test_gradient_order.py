"""Orders of the tangent and the normal gradient: against loops, on manifolds with known answers, and on the parabola."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import binom

from tangent_lens.measures import gradient_rows
from tangent_lens.measures.gradient_order import DEGENERATE, gradient_order
from tangent_lens.measures.gradient_rows import TokenGradients, outer_sums, parabola_gradients

SEEDS = range(200)


def random_group(token=0, n=60, m=2, p=3, out=4, seed=0):
    """Rows whose mean gradient is not zero in either part."""
    generator = np.random.default_rng([seed, token])
    tangent, signals = generator.normal(size=(n, m)), generator.normal(size=(n, out))
    signals[:, 0] += tangent[:, 0]
    normal = 0.3 * generator.normal(size=(n, p))
    normal[:, -1] += 0.2 * (tangent**2).sum(axis=1)
    signals[:, -1] += 1
    return TokenGradients(token, *(torch.from_numpy(part) for part in (tangent, normal, signals)))


GROUPS = tuple(random_group(token, n=40 + token) for token in range(10))


def products(signals, part):
    """Every delta_i u_i^T, one at a time."""
    return [np.outer(delta, u) for delta, u in zip(array(signals), array(part), strict=True)]


def mean_norm(matrices):
    return np.linalg.norm(sum(matrices) / len(matrices))


def pair_mean(matrices):
    """Mean of <A_i, A_j> over pairs of different rows."""
    pairs = list(itertools.permutations(range(len(matrices)), 2))
    return sum(float((matrices[i] * matrices[j]).sum()) for i, j in pairs) / len(pairs)


def exact_p_value(matrices):
    """Over every pattern of signs."""
    found = np.linalg.norm(sum(matrices)) * (1 - 1e-9)
    signs = itertools.product([1, -1], repeat=len(matrices))
    lengths = [np.linalg.norm(sum(s * one for s, one in zip(row, matrices, strict=True))) for row in signs]
    return np.mean([length >= found for length in lengths])


def radii(group):
    return np.hypot(*(np.linalg.norm(array(part), axis=1) for part in (group.tangent, group.normal)))


def symmetric_parabola(n):
    u = torch.linspace(0.01, 1, n // 2, dtype=torch.float64)
    u = torch.cat([u, -u])[:, None]
    return TokenGradients(0, u, u**2, torch.ones(n, 1))


def paraboloid(token, signal, n=300, size=0.01, one_sided=False, curved=1.0):
    """x = (u, curvatures of u), u normal in two dimensions, and the signal of every row."""
    generator = np.random.default_rng(token)
    u = size * generator.normal(size=(n, 2))
    if one_sided:
        u[:, 0] = np.abs(u[:, 0])
    normal = curved * np.stack([u[:, 0] ** 2 + u[:, 1] ** 2, u[:, 0] * u[:, 1]], axis=1)
    return TokenGradients(token, *(torch.from_numpy(part) for part in (u, normal, signal(u, normal, generator))))


def constant_signals(u, normal, generator):
    return np.full((len(u), 3), [1.0, -2.0, 0.5])


def regression_signals(u, normal, generator):
    """Wx - y of a W that is wrong by much in every direction, about a mean residual of 0, with noise."""
    rows = np.concatenate([u, normal], axis=1)
    return rows @ np.arange(12).reshape(4, 3) + 1e-3 * generator.normal(size=(len(u), 3))


class TestAgainstLoops:
    @pytest.mark.parametrize("out", [1, 4, 40])
    @pytest.mark.parametrize("place", ["tangent", "normal"])
    def test_mean_gradients_and_their_unbiased_squares(self, place, out):
        group = random_group(out=out)
        (one,) = gradient_order([group]).tokens
        matrices = products(group.signals, getattr(group, place))
        assert getattr(one, place) == pytest.approx(mean_norm(matrices), rel=1e-12)
        assert getattr(one, f"{place}_square") == pytest.approx(pair_mean(matrices), rel=1e-9)
        assert getattr(one, f"{place}_rows") == pytest.approx(np.mean([np.linalg.norm(a) for a in matrices]), rel=1e-12)

    def test_ratio_coherence_and_radius(self):
        (one,) = gradient_order([GROUPS[3]]).tokens
        tangent, normal = (products(GROUPS[3].signals, part) for part in (GROUPS[3].tangent, GROUPS[3].normal))
        assert one.ratio == pytest.approx(math.sqrt(pair_mean(normal) / pair_mean(tangent)), rel=1e-9)
        assert one.coherence == pytest.approx(
            math.sqrt(pair_mean(tangent)) / np.mean([np.linalg.norm(a) for a in tangent]), rel=1e-9
        )
        assert one.radius == pytest.approx(np.median(radii(GROUPS[3])), rel=1e-12)
        assert one.rows == one.given == 43 and not one.degenerate and one.why is None

    @PROPERTY
    @given(some.integers(8, 14), some.integers(1, 3), some.integers(1, 9), some.integers(0, 99))
    def test_either_way_of_summing_is_the_double_loop(self, n, m, out, seed):
        group = random_group(n=n, m=m, out=out, seed=seed)
        matrices = products(group.signals, group.tangent)
        sums = outer_sums(group.signals, group.tangent)
        chosen = torch.from_numpy(np.random.default_rng(seed).permutation(n) < 5).double()
        inside = [one for one, keep in zip(matrices, chosen, strict=True) if keep]
        assert float(sums.unbiased(chosen[None])) == pytest.approx(pair_mean(inside), rel=1e-8, abs=1e-12)
        signs = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], size=n))
        expected = np.linalg.norm(sum(sign * one for sign, one in zip(signs.numpy(), matrices, strict=True))) ** 2
        assert float(sums.squares(signs[None])) == pytest.approx(expected, rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("seed", range(4))
    def test_p_value_is_that_of_all_patterns_of_signs(self, seed):
        group = random_group(n=10, seed=seed)
        (one,) = gradient_order([group], flips=9999, seed=seed).tokens
        exact = exact_p_value(products(group.signals, group.tangent))
        assert one.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 9999) + 1e-4)

    def test_p_value_depends_on_no_batch(self, monkeypatch):
        whole = gradient_order([GROUPS[0]]).tokens[0].p_value
        monkeypatch.setattr(gradient_rows, "_BATCH", 1)
        assert gradient_order([GROUPS[0]]).tokens[0].p_value == pytest.approx(whole, abs=0.02)

    def test_balls(self):
        found = gradient_order(GROUPS, balls=4)
        for part, mean in (("tangent", found.tangent_mean), ("normal", found.normal_mean)):
            squares, lengths = np.zeros((10, 4)), np.zeros((10, 4))
            for place, group in enumerate(GROUPS):
                matrices, t = products(group.signals, getattr(group, part)), radii(group)
                scale = np.mean([np.linalg.norm(one) for one in matrices])
                for ball in range(4):
                    nearest = np.argsort(t)[: math.ceil((ball + 1) * len(t) / 4)]
                    squares[place, ball] = pair_mean([matrices[row] for row in nearest]) / scale**2
                    lengths[place, ball] = t[nearest].mean() / np.median(t)
            assert mean.squares == pytest.approx(squares.mean(axis=0), rel=1e-8)
            assert mean.radii == pytest.approx(lengths.mean(axis=0), rel=1e-12)
            assert mean.tokens == 10 and mean.left_out == 0

    def test_row_slopes_are_those_of_a_regression_with_a_dummy_a_token(self):
        found = gradient_order(GROUPS)
        for part, order in (("tangent", found.tangent_rows), ("normal", found.normal_rows)):
            lengths = [np.linalg.norm(array(getattr(group, part)), axis=1) for group in GROUPS]
            sizes = [np.linalg.norm(array(group.signals), axis=1) for group in GROUPS]
            y = np.concatenate([np.log(size * length) for size, length in zip(sizes, lengths, strict=True)])
            t = np.concatenate([np.log(radii(group)) for group in GROUPS])
            dummies = np.repeat(np.eye(10), [len(group) for group in GROUPS], axis=0)
            solution = np.linalg.lstsq(np.column_stack([t, dummies]), y, rcond=None)[0]
            assert order.slope.exponent == pytest.approx(solution[0], rel=1e-9)
            assert (order.slope.rows, order.slope.groups, order.left_out) == (len(y), 10, 0)


class TestParabola:
    @pytest.mark.parametrize("n", [8, 20, 200, 2000])
    def test_symmetric_is_named_degenerate(self, n):
        found = gradient_order([symmetric_parabola(n)])
        (one,) = found.tokens
        assert found.verdict == DEGENERATE == "tangent gradient degenerate" and found.degenerate == 1
        assert one.ratio is None and found.median_ratio is None and one.p_value == 1 and one.coherence == 0
        assert one.tangent == pytest.approx(0, abs=1e-15) and one.normal > 0.3
        assert found.tangent_mean.exponent is None and found.tangent_mean.reason == DEGENERATE

    @pytest.mark.parametrize("n", [12, 100, 2000])
    def test_at_random_has_a_ratio_no_oftener_than_the_test_errs(self, n):
        found = gradient_order([parabola_gradients(n, seed, token=seed) for seed in SEEDS], flips=499)
        finite = [one for one in found.tokens if one.ratio is not None]
        assert len(finite) <= binom.ppf(0.999, len(SEEDS), 0.05)
        assert all(one.ratio <= 50 * one.normal_rows / one.tangent_rows for one in found.tokens if one.ratio)
        # Chance tells a mean of about 2 standard errors from 0, so that no ratio is above E[u^2] / (2 sd / sqrt(n)) by much.
        assert all(one.ratio < math.sqrt(n) for one in finite)
        assert found.verdict == DEGENERATE and found.tangent_mean.exponent is None

    def test_of_very_many_rows(self):
        group = parabola_gradients(200_000, 4)
        found = gradient_order([group], most=200_000, flips=199)
        assert found.verdict == DEGENERATE and found.tokens[0].rows == 200_000
        drawn = gradient_order([group])
        assert drawn.verdict == DEGENERATE and (drawn.tokens[0].rows, drawn.tokens[0].given) == (2048, 200_000)

    def test_a_tiny_mean_that_many_rows_tell_from_zero_is_degenerate_still(self):
        """E[delta u] = tilt / 3 = 0.003 against E|delta||u| = 1/2: coherence 0.007, ratio 100."""
        group = parabola_gradients(100_000, 0, tilt=0.01)
        (one,) = gradient_order([group], most=100_000, flips=199).tokens
        assert one.p_value <= 0.05 and one.why.startswith("its rows cancel: coherence 0.00") and one.ratio is None
        (freed,) = gradient_order([group], most=100_000, flips=199, floor=0).tokens
        assert freed.ratio == pytest.approx(100, rel=0.5)

    @pytest.mark.parametrize("tilt", [-2.0, 1.0, 4.0])
    def test_tilted_has_a_ratio_that_no_radius_changes(self, tilt):
        for radius in (1.0, 0.3):
            groups = [parabola_gradients(2000, seed, tilt=tilt, radius=radius, token=seed) for seed in range(12)]
            found = gradient_order(groups, flips=199)
            assert found.degenerate == 0 and found.median_ratio == pytest.approx(
                1 / abs(tilt), rel=0.2 / abs(tilt) + 0.05
            )
            assert found.verdict == f"normal / tangent {found.median_ratio:#.3g} (median over 12 of 12 tokens)"
        assert gradient_order(groups[:1]).verdict.startswith("normal / tangent ")
        assert "median" not in gradient_order(groups[:1]).verdict

    def test_stepped_has_a_ratio_in_proportion_to_the_radius(self):
        for radius in (1.0, 0.1, 0.01):
            groups = [parabola_gradients(1000, seed, step=0.5, radius=radius, token=seed) for seed in range(12)]
            found = gradient_order(groups, flips=199)
            assert found.degenerate == 0 and found.median_ratio == pytest.approx(2 / 3 * radius / 0.5, rel=0.05)
        assert found.tangent_mean.exponent == pytest.approx(1, abs=0.05)
        assert found.normal_mean.exponent == pytest.approx(2, abs=0.05)

    def test_tilted_has_a_tangent_mean_of_the_second_order(self):
        groups = [parabola_gradients(1000, seed, tilt=8.0, radius=0.1, token=seed) for seed in range(40)]
        found = gradient_order(groups, flips=199, balls=4)
        # A little below 1: signals 1 - 8 u have smaller logarithms on average the larger |u|.
        assert found.tangent_rows.slope.exponent == pytest.approx(1, abs=0.15)
        assert found.tangent_mean.low <= 2 <= found.tangent_mean.high
        assert found.tangent_mean.exponent == pytest.approx(2, abs=0.3)

    def test_most_degenerate_is_the_verdict_on_all(self):
        fine = [parabola_gradients(500, seed, step=0.5, token=seed) for seed in range(4)]
        flat = [replace(symmetric_parabola(500), token=9 + place) for place in range(5)]
        found = gradient_order(fine + flat)
        assert found.verdict == DEGENERATE and found.degenerate == 5 and found.median_ratio > 0
        found = gradient_order(fine + flat[:4])
        assert found.verdict.endswith("(median over 4 of 8 tokens)") and found.degenerate == 4


class TestManifolds:
    def test_constant_signals_on_one_side_have_exponents_one_and_two(self):
        found = gradient_order([paraboloid(token, constant_signals, one_sided=True) for token in range(20)])
        assert found.degenerate == 0
        for order, expected in ((found.tangent_rows, 1), (found.normal_rows, 2)):
            assert order.slope.exponent == pytest.approx(expected, abs=0.02)
        for order, expected in ((found.tangent_mean, 1), (found.normal_mean, 2)):
            assert order.low <= expected <= order.high and order.exponent == pytest.approx(expected, abs=0.05)

    def test_exponents_hold_the_truth_about_as_often_as_they_say(self):
        inside = np.zeros(2)
        for trial in range(60):
            tokens = range(12 * trial, 12 * trial + 12)
            groups = [paraboloid(token, constant_signals, n=64, one_sided=True) for token in tokens]
            found = gradient_order(groups, flips=99)
            orders = (found.tangent_mean, found.normal_mean)
            inside += [one.low <= truth <= one.high for one, truth in zip(orders, (1, 2), strict=True)]
        assert (inside / 60 >= 0.85).all()

    def test_signals_that_vanish_at_the_mean_raise_every_order_by_one(self):
        """delta = O(t): rows of orders 2 and 3, a tangent mean of order 2; the normal mean is odd in u up to order 4."""
        found = gradient_order([paraboloid(token, regression_signals) for token in range(20)])
        assert found.degenerate == 0
        assert found.tangent_rows.slope.exponent == pytest.approx(2, abs=0.1)
        assert found.normal_rows.slope.exponent == pytest.approx(3, abs=0.1)
        assert found.tangent_mean.low <= 2 <= found.tangent_mean.high
        assert found.median_ratio < 0.1

    def test_constant_signals_on_both_sides_are_degenerate(self):
        found = gradient_order([paraboloid(token, constant_signals) for token in range(20)])
        assert found.verdict == DEGENERATE and found.tangent_mean.exponent is None
        assert found.tangent_rows.slope.exponent == pytest.approx(1, abs=0.02)
        assert found.normal_mean.exponent == pytest.approx(2, abs=0.05)

    @pytest.mark.parametrize("curved", [0.0, 1e-15])
    def test_flat_has_a_ratio_of_zero_and_no_normal_order(self, curved):
        groups = [
            paraboloid(token, constant_signals, one_sided=True, size=1.0, curved=curved, n=100) for token in range(8)
        ]
        found = gradient_order(groups)
        assert {one.ratio for one in found.tokens} == {0} and found.verdict.startswith("normal / tangent 0.00 (")
        assert found.normal_rows.slope is None and found.normal_rows.left_out == 800
        assert found.normal_rows.reason.startswith("0 rows give no slope")
        assert found.normal_mean.exponent is None and "not positive" in found.normal_mean.reason
        assert found.tangent_mean.exponent == pytest.approx(1, abs=0.1)

    def test_a_mean_in_noise_has_no_exponent(self):
        """Signals that know nothing of x: both means are 0."""
        noise = lambda u, normal, generator: generator.normal(size=(len(u), 3))  # noqa: E731
        found = [
            gradient_order([paraboloid(20 * trial + token, noise, n=64) for token in range(12)]) for trial in range(20)
        ]
        assert all(one.verdict == DEGENERATE and one.tangent_mean.exponent is None for one in found)
        assert sum(one.normal_mean.exponent is not None for one in found) <= 3

    def test_about_the_rows_own_mean_a_constant_signal_cancels(self):
        group = paraboloid(0, constant_signals, one_sided=True)
        centred = replace(group, tangent=group.tangent - group.tangent.mean(dim=0))
        (one,) = gradient_order([centred]).tokens
        assert one.degenerate and one.tangent == pytest.approx(0, abs=1e-12)
        assert one.tangent_square == pytest.approx(
            -5.25 * float(centred.tangent.square().sum()) / (300 * 299), rel=1e-9
        )

    def test_few_tokens_have_no_interval(self):
        found = gradient_order([paraboloid(token, constant_signals, one_sided=True) for token in range(7)])
        assert found.tangent_mean.exponent == pytest.approx(1, abs=0.1)
        assert found.tangent_mean.low is None and found.tangent_mean.high is None and found.tangent_mean.tokens == 7

    def test_short_tokens_have_no_balls(self):
        found = gradient_order([*GROUPS, random_group(50, n=15)])
        assert (found.tangent_mean.tokens, found.tangent_mean.left_out) == (10, 1) and len(found.tokens) == 11
        alone = gradient_order([parabola_gradients(12, 0, step=0.9)])
        assert alone.normal_mean.exponent is None and alone.normal_mean.radii == ()
        assert alone.normal_mean.reason == "no token has rows enough for the balls"

    def test_rows_at_one_distance_have_no_exponent(self):
        tangent = torch.ones(40, 1)
        found = gradient_order([TokenGradients(0, tangent, tangent, torch.ones(40, 1))])
        assert found.tokens[0].ratio == pytest.approx(1) and found.tokens[0].coherence == pytest.approx(1)
        assert found.tangent_mean.exponent is None and "at one distance" in found.tangent_mean.reason
        assert found.tangent_rows.slope is None and "no exponent" in found.tangent_rows.reason


def numbers(found):
    """All that must not change: numbers of every token, slopes and exponents."""
    tokens = [(one.tangent, one.normal, one.tangent_square, one.normal_square, one.p_value) for one in found.tokens]
    return sum(tokens, ()) + orders(found)


def orders(found):
    slopes = [(one.slope.exponent, one.slope.low) for one in (found.tangent_rows, found.normal_rows)]
    means = [(one.exponent, one.low, one.high) for one in (found.tangent_mean, found.normal_mean)]
    assert None not in means[0] + means[1]
    return sum(slopes + means, ()) + tuple(one.ratio for one in found.tokens)


def changed(change, **options):
    groups = [paraboloid(token, constant_signals, n=80, one_sided=True, size=0.3) for token in range(10)]
    return gradient_order(groups, balls=4, **options), gradient_order(
        [change(one) for one in groups], balls=4, **options
    )


class TestInvariances:
    @pytest.mark.parametrize(("part", "width"), [("tangent", 2), ("normal", 2), ("signals", 3)])
    def test_rotations(self, part, width):
        turn = random_frame(width, width, seed=1)
        one, other = changed(lambda group: replace(group, **{part: getattr(group, part) @ turn}))
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-7)

    def test_ambient_coordinates(self):
        frame = random_frame(50, 2).T
        one, other = changed(lambda group: replace(group, normal=group.normal @ frame))
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-7)

    @pytest.mark.parametrize("most", [2048, 50])
    def test_order_of_rows(self, most):
        def shuffled(group):
            order = torch.from_numpy(np.random.default_rng(1).permutation(len(group)))
            return TokenGradients(group.token, group.tangent[order], group.normal[order], group.signals[order])

        one, other = changed(shuffled, most=most)
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-7)
        assert {row.rows for row in one.tokens} == {min(80, most)}

    def test_order_of_tokens(self):
        one, other = gradient_order(GROUPS), gradient_order(GROUPS[::-1])
        for first, second in zip(one.tokens, other.tokens[::-1], strict=True):
            assert first == second
        assert other.normal_rows.slope.exponent == pytest.approx(one.normal_rows.slope.exponent, rel=1e-12)
        assert other.tangent_mean.squares == pytest.approx(one.tangent_mean.squares, rel=1e-12)

    def test_one_token_tells_the_same_alone(self):
        assert gradient_order(GROUPS[4:5]).tokens[0] == gradient_order(GROUPS).tokens[4]

    @pytest.mark.parametrize("scale", [1e-30, 3.0, 1e30])
    def test_scale_of_the_signals(self, scale):
        one, other = changed(lambda group: replace(group, signals=scale * group.signals))
        assert orders(other) == pytest.approx(orders(one), rel=1e-7)
        assert [row.normal / scale for row in other.tokens] == pytest.approx([row.normal for row in one.tokens])

    @pytest.mark.parametrize("scale", [1e-20, 7.0, 1e20])
    def test_scale_of_x(self, scale):
        one, other = changed(lambda group: replace(group, tangent=scale * group.tangent, normal=scale * group.normal))
        assert orders(other) == pytest.approx(orders(one), rel=1e-7)
        assert [row.radius / scale for row in other.tokens] == pytest.approx([row.radius for row in one.tokens])
        assert [row.coherence for row in other.tokens] == pytest.approx([row.coherence for row in one.tokens])

    def test_the_seed_alone_decides(self):
        assert gradient_order(GROUPS, most=30) == gradient_order(GROUPS, most=30)
        assert gradient_order(GROUPS, most=30) != gradient_order(GROUPS, most=30, seed=1)


class TestResult:
    def test_has_a_row_a_token(self):
        found = gradient_order([*GROUPS, replace(symmetric_parabola(60), token=77)])
        frame = found.to_pandas()
        assert list(frame.token) == [*range(10), 77] and frame.degenerate.tolist() == [
            one.degenerate for one in found.tokens
        ]
        assert frame.ratio.isna()[10] and frame.why[10] == "not told from 0 (p = 1)"
        assert repr(GROUPS[2]) == "TokenGradients(token 2: 42 rows)"

    def test_rows_without_a_part_are_left_out_and_counted(self):
        tangent, signals = GROUPS[0].tangent.clone(), GROUPS[0].signals.clone()
        tangent[3] = 0
        signals[[5, 6]] = 0
        found = gradient_order([replace(GROUPS[0], tangent=tangent, signals=signals)])
        assert (found.tangent_rows.left_out, found.normal_rows.left_out) == (3, 2)
        assert found.tangent_rows.slope.rows == 37 and found.normal_rows.slope.rows == 38

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"token": -1}, "token -1 is no id"),
            ({"tangent": torch.ones(40)}, r"tangent \(40,\), normal \(40, 3\), signals \(40, 4\) must each"),
            ({"normal": torch.ones(40, 0)}, r"normal \(40, 0\)"),
            ({"signals": torch.ones(39, 4)}, "do not have the same rows"),
            ({"signals": torch.zeros(40, 4)}, "every signal is zero"),
            ({"tangent": torch.zeros(40, 2), "normal": torch.zeros(40, 3)}, "no row lies away from the mean"),
            ({"normal": torch.full((40, 3), math.nan)}, "the normal rows hold NaN or infinity"),
            ({"signals": torch.full((40, 4), math.inf)}, "the signals rows hold NaN or infinity"),
        ],
    )
    def test_rows_that_are_none_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            replace(GROUPS[0], **changes)

    def test_too_few_rows_are_refused(self):
        with pytest.raises(ValueError, match=r"token 3 has 7 rows, too few .* fewer than 8"):
            random_group(3, n=7)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"balls": 2}, "2 balls show no exponent"),
            ({"flips": 9}, "9 flips give no p-value"),
            ({"level": 95}, "level 95 must lie between 0 and 1"),
            ({"floor": 1.0}, r"floor 1.0 must lie in \[0, 1\)"),
            ({"most": 4}, "most=4 rows a token are too few"),
        ],
    )
    def test_options_out_of_range_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            gradient_order(GROUPS, **options)

    def test_tokens_that_are_none_or_twice_are_refused(self):
        with pytest.raises(ValueError, match="no token was given"):
            gradient_order([])
        with pytest.raises(ValueError, match="token 0 is there 2 times"):
            gradient_order([*GROUPS, GROUPS[0]])
