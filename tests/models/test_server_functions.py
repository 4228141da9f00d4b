"""The functions that are shipped to a server: their numbers, and that nothing in them fails to travel."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangent_lens.models import server_functions
from tangent_lens.models.server_functions import (
    ROWS_A_PRODUCT,
    joined,
    left_directions,
    packed,
    position_sums,
    projected_sums,
    stream_sums,
    summed_loss,
    unpacked,
    weight_sums,
)
from tangent_lens.recording.moments import ProjectedSums, SecondMoments
from tangent_lens.recording.sketch import gaussian_number, left_seed
from tangent_lens.recording.sketch import left_directions as client_left_directions


def rows_of(count, width=6, seed=0, scale=1.0, mean=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, width, generator=generator, dtype=torch.float64) @ torch.randn(
        width, width, generator=generator, dtype=torch.float64
    )
    return (spread * scale + mean).to(dtype)


def scatter_of(rows):
    centred = rows.double() - rows.double().mean(dim=0)
    return centred.T @ centred


class TestStreams:
    @pytest.mark.parametrize("count", [1, 7, ROWS_A_PRODUCT, 2 * ROWS_A_PRODUCT + 5])
    def test_are_those_of_second_moments(self, count):
        rows = rows_of(count)
        found, expected = stream_sums(rows, None), SecondMoments.of(rows)
        assert found["count"] == expected.count
        assert torch.allclose(found["mean"], expected.mean, rtol=1e-12, atol=1e-14)
        assert torch.allclose(found["scatter"], expected.scatter, rtol=1e-6, atol=1e-6 * float(expected.scatter.max()))

    def test_keep_their_digits_where_the_mean_is_large(self):
        rows = rows_of(3000, mean=1e4)
        found, expected = stream_sums(rows, None)["scatter"], scatter_of(rows)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6

    def test_keep_rows_whose_squares_would_vanish(self):
        rows = rows_of(50, scale=1e-25)
        found, expected = stream_sums(rows, None)["scatter"], scatter_of(rows)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6

    @pytest.mark.parametrize("width", [1, 4])
    def test_along_directions_are_products_with_the_whole(self, width):
        rows = rows_of(2 * ROWS_A_PRODUCT + 5, mean=3.0)
        directions = rows_of(6, width, seed=1, dtype=torch.float64)
        found, scatter = stream_sums(rows, directions), scatter_of(rows)
        assert torch.allclose(found["through"], scatter @ directions, rtol=1e-5, atol=1e-5 * float(scatter.max()))
        assert torch.allclose(found["diagonal"], scatter.diagonal(), rtol=1e-5)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans(), st.integers(0, 1000))
    def test_join_to_the_sums_of_all_rows(self, counts, sketched, seed):
        rows = rows_of(sum(counts), seed=seed, mean=5.0, dtype=torch.float64)
        directions = rows_of(6, 3, seed=1, dtype=torch.float64) if sketched else None
        request = {"directions": {"w": directions}, "directions_of": {"a": ["w"]} if sketched else {}}
        parts = [{"a": stream_sums(part, directions)} for part in rows.split(counts)]
        found = {}
        for part in parts:
            found = joined(found, part, request)
        whole = stream_sums(rows, directions)
        for name, value in whole.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(found["a"][name], value, rtol=1e-9, atol=1e-9), name
        assert found["a"]["count"] == len(rows)


class TestOtherSums:
    def test_projected_sums_are_those_of_the_library(self):
        rows = rows_of(300, mean=1.0)
        basis = torch.linalg.qr(rows_of(6, 2, seed=2, dtype=torch.float64))[0]
        found, expected = projected_sums(rows, basis), ProjectedSums(basis)
        expected.update(rows)
        assert torch.allclose(found["sum"], expected.sum(), rtol=1e-5)
        assert float(found["total"]) == pytest.approx(expected.square_total(), rel=1e-6)
        assert float(found["along"]) == pytest.approx(expected.square_along(basis), rel=1e-6)

    def test_weight_gradients_are_sums_of_outer_products(self):
        rows, signals = rows_of(5000), rows_of(5000, 4, seed=1)
        found = weight_sums(rows, signals, None)
        expected = signals.double().T @ rows.double()
        assert torch.allclose(found["gradient"], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert torch.allclose(found["signal_square_sum"], signals.double().square().sum(dim=0), rtol=1e-6)
        directions = rows_of(6, 3, seed=4, dtype=torch.float64)
        along = weight_sums(rows, signals, directions)["through"]
        assert torch.allclose(along, expected @ directions, rtol=1e-4, atol=1e-4 * float(along.abs().max()))
        left = left_directions({"out": 4, "rows": 5, "number": 7})
        both = weight_sums(rows, signals, directions, left)
        assert torch.equal(both["through"], along) and both["left"].shape == (6, 6)
        assert torch.allclose(both["left"], left @ expected, rtol=1e-4, atol=1e-4 * float(both["left"].abs().max()))

    def test_left_directions_are_those_that_the_client_draws(self):
        seed = left_seed("3/query.0")
        recipe = {"out": 12, "rows": 5, "number": gaussian_number(12, 5, seed)}
        assert torch.equal(left_directions(recipe), client_left_directions(12, 5, "3/query.0"))

    def test_positions_are_watched_where_rows_are_kept(self):
        keep = torch.tensor([[True, True, False], [False, True, True]])
        positions = torch.tensor([[0, 1, 2], [0, 0, 20]])
        rows = rows_of(4)
        found = position_sums(rows, {"keep": keep, "positions": positions})
        assert found["count"][:3].tolist() == [2, 1, 0] and float(found["count"].sum()) == 3
        assert torch.allclose(found["sum"][0], (rows[0] + rows[2]).double())
        assert float(found["square_sum"][1]) == pytest.approx(float(rows[1].double().square().sum()))

    def test_the_loss_is_a_sum_over_targets(self):
        logits = rows_of(8, 6).view(2, 4, 6)
        targets = torch.tensor([[1, 2, -100, 0], [5, -100, -100, 3]])
        loss, count = summed_loss(logits, targets)
        chosen = targets != -100
        expected = -logits.double().log_softmax(-1)[chosen].gather(1, targets[chosen][:, None]).sum()
        assert count == 5 and float(loss) == pytest.approx(float(expected), rel=1e-6)


class TestHalfPrecisionServers:
    """A server whose weights are of half precision runs everything under autocast."""

    @pytest.mark.parametrize("directions", [None, rows_of(6, 3, seed=1)])
    def test_sums_are_taken_in_the_precision_of_the_rows(self, directions):
        rows, signals = rows_of(100), rows_of(100, 4, seed=1)
        basis = torch.linalg.qr(rows_of(6, 2, seed=2))[0]
        plain = (stream_sums(rows, directions), projected_sums(rows, basis), weight_sums(rows, signals, directions))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (rows @ basis).dtype == torch.bfloat16
            found = (stream_sums(rows, directions), projected_sums(rows, basis), weight_sums(rows, signals, directions))
        for one, other in zip(plain, found, strict=True):
            for name, value in one.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(value, other[name]), name


class TestTravelling:
    def test_packing_loses_no_more_than_float32_does(self):
        rows = rows_of(100, scale=1e-30, dtype=torch.float64)
        sums = {"a": stream_sums(rows, None), "s": {"kind": "rows", "rows": rows.float()}}
        sums |= {"w": weight_sums(rows, rows, None), "b": stream_sums(rows, rows_of(6, 2, dtype=torch.float64))}
        back = unpacked(packed(sums))
        for key, one in sums.items():
            for name, value in one.items():
                if not isinstance(value, torch.Tensor):
                    assert back[key][name] == value
                elif name == "rows":
                    assert torch.equal(back[key][name], value)
                else:
                    assert float((back[key][name] - value).abs().max() / value.abs().max()) < 1e-7, (key, name)
        assert back["a"]["scatter"].dtype == torch.float64

    def test_one_triangle_of_a_symmetric_matrix_travels(self):
        sums = packed({"a": stream_sums(rows_of(50, 100), None)})
        assert sums["a"]["scatter"].numel() == 100 * 101 // 2 and sums["a"]["scatter"].dtype == torch.float32

    def test_nothing_in_the_module_stays_behind(self):
        """Tried on a real server: decorators, classes, imports inside functions and of this library do not arrive."""
        tree = ast.parse(inspect.getsource(server_functions))
        imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert [ast.unparse(node) for node in imported] == ["import torch"]
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.AsyncFunctionDef))]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert functions and not any(node.decorator_list for node in functions)
        # Annotations would be evaluated, or shipped, by whatever Python the server runs.
        assert not any(node.returns or any(one.annotation for one in node.args.args) for node in functions)
