"""Parts of queries and keys against the model's own arithmetic, norm by norm, and against splits done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_cases import causal
from attention_loops import Case, loops
from explicit import PROPERTY, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from tangent_lens.measures.attention_inputs import AllowedPairs, ScoreParts
from tangent_lens.measures.attention_parts import (
    FrozenNorm,
    SplitLinear,
    apply_frozen_norm,
    apply_rotary,
    control_coordinates,
    split_linear,
    split_rows,
)
from tangent_lens.measures.attention_sums import AttentionSums
from tangent_lens.subspaces.controls import random_normals

D, K, HEADS, WIDTH, EPS = 10, 3, 2, 4, 1e-5
seeds = st.integers(0, 10_000)


def rows_of(seed: int = 0, batch: int = 2, length: int = 6) -> torch.Tensor:
    return random_rows(batch * length, D, seed).unflatten(0, (batch, length))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def norms() -> dict[str, FrozenNorm]:
    weight, bias = numbers(1, D), numbers(2, D)
    return {
        "RMSNorm": FrozenNorm(weight),
        "RMSNorm folded": FrozenNorm(),
        "LayerNorm": FrozenNorm(weight, bias, subtract_mean=True),
        "LayerNorm without bias": FrozenNorm(weight, None, subtract_mean=True),
        "LayerNorm folded": FrozenNorm(None, None, subtract_mean=True),
    }


def normed(rows: torch.Tensor, norm: FrozenNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """What the norm makes of the rows, and the scale that it divides them by."""
    if norm.subtract_mean:
        scale = (rows.var(dim=-1, unbiased=False, keepdim=True) + EPS).sqrt()
        return layer_norm(rows, (D,), norm.weight, norm.bias, EPS), scale
    scale = (rows.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    return rows / scale * (1 if norm.weight is None else norm.weight), scale


def heads_of(output: torch.Tensor) -> torch.Tensor:
    return output.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


@pytest.mark.parametrize("bias", [None, numbers(4, HEADS * WIDTH)], ids=["no bias", "bias"])
@pytest.mark.parametrize("norm", norms().values(), ids=norms().keys())
def test_parts_add_up_to_what_the_model_computes(norm, bias):
    rows, weight, centre = rows_of(), numbers(3, HEADS * WIDTH, D), numbers(5, D)
    inputs, scale = normed(rows, norm)
    parts, _ = split_linear(rows, centre, random_frame(D, K), weight, HEADS, bias=bias, norm=norm, scale=scale)
    expected = heads_of(torch.nn.functional.linear(inputs, weight, bias))
    assert parts.shape == (3, 2, HEADS, 6, WIDTH)
    torch.testing.assert_close(parts.sum(dim=0), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", norms().values(), ids=norms().keys())
def test_each_part_is_the_map_of_its_part_of_the_row(norm):
    rows, weight, centre, basis = rows_of(), numbers(3, HEADS * WIDTH, D), numbers(5, D), random_frame(D, K)
    _, scale = normed(rows, norm)
    parts, _ = split_linear(rows, centre, basis, weight, HEADS, norm=norm, scale=scale)
    inside = (rows - centre) @ torch.from_numpy(projector(basis))
    for place, piece in enumerate((centre.expand_as(rows), inside, rows - centre - inside)):
        piece = piece - piece.mean(dim=-1, keepdim=True) if norm.subtract_mean else piece
        piece = piece / scale * (1 if norm.weight is None else norm.weight)
        if place == 0 and norm.bias is not None:
            piece = piece + norm.bias
        torch.testing.assert_close(parts[place], heads_of(piece @ weight.T), rtol=1e-11, atol=1e-11)


@given(seed=seeds)
@PROPERTY
def test_the_part_inside_a_control_is_the_tangent_part_of_a_split_along_it(seed):
    rows, weight, centre, basis = (
        rows_of(seed),
        numbers(seed, HEADS * WIDTH, D),
        numbers(5, D),
        random_frame(D, K, seed),
    )
    norm = norms()["LayerNorm"]
    _, scale = normed(rows, norm)
    frames = random_normals(basis, 4, seed)
    shared = {"bias": numbers(6, HEADS * WIDTH), "norm": norm, "scale": scale}
    parts, inside = split_linear(rows, centre, basis, weight, HEADS, controls=frames, **shared)
    assert inside.shape == (4, 2, HEADS, 6, WIDTH)
    for frame, own in zip(frames, inside, strict=True):
        other, _ = split_linear(rows, centre, frame, weight, HEADS, **shared)
        torch.testing.assert_close(own, other[1], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(parts[1] + parts[2] - own, other[2], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(parts[0], other[0])


def test_rows_are_split_once_for_several_maps():
    rows, centre, basis = rows_of(), numbers(5, D), random_frame(D, K)
    frames = random_normals(basis, 2)
    split, coordinates = split_rows(rows, centre, basis), control_coordinates(rows, centre, frames)
    for heads in (HEADS, 1):
        weight = numbers(heads, heads * WIDTH, D)
        linear = SplitLinear.of(weight, heads, centre, basis, frames, dtype=torch.float64)
        parts, inside = split_linear(rows, centre, basis, weight, heads, controls=frames)
        torch.testing.assert_close(linear.parts(split), parts)
        torch.testing.assert_close(linear.control_parts(coordinates), inside)
    torch.testing.assert_close(split.radius(), (rows - centre).norm(dim=-1))


def test_single_precision_rows_are_split_in_single_precision():
    rows, weight, centre, basis = rows_of(), numbers(3, HEADS * WIDTH, D), numbers(5, D), random_frame(D, K)
    frames = random_normals(basis, 2)
    wide = split_linear(rows, centre, basis, weight, HEADS, controls=frames)
    single = split_linear(rows.float(), centre, basis, weight, HEADS, controls=frames)
    for found, expected in zip(single, wide, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    rows, basis = rows_of(), random_frame(D, K)
    for centre, frame, controls, taught in (
        (torch.zeros(9), basis, None, "centre of width 9"),
        (torch.zeros(D), random_frame(8, K), None, "basis of width 8"),
        (torch.zeros(D), basis, torch.zeros(2, 7, K), "controls of width 7"),
    ):
        with pytest.raises(ValueError, match=f"rows of width 10 cannot be split by a {taught}"):
            split_linear(rows, centre, frame, torch.zeros(8, D), 2, controls=controls)
    with pytest.raises(ValueError, match="8 outputs cannot be cut into 3 heads"):
        SplitLinear.of(torch.zeros(8, D), 3, torch.zeros(D), basis)
    with pytest.raises(ValueError, match="knows no controls"):
        SplitLinear.of(torch.zeros(8, D), 2, torch.zeros(D), basis).control_parts(torch.zeros(1, 2, 6, K))


def angles(length: int, half: int, batch: int = 2) -> torch.Tensor:
    """Another angle for every sequence, position and pair."""
    return numbers(7, batch, length, half)


def turned_by_hand(parts: torch.Tensor, angle: torch.Tensor, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """Each pair of dimensions as one complex number."""
    found, half = parts.clone(), rotary_dim // 2
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        number = torch.complex(parts[..., first], parts[..., second]) * torch.exp(1j * angle[:, None, :, pair])
        found[..., first], found[..., second] = number.real, number.imag
    return found


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8, 4, 2])
@pytest.mark.parametrize("doubled", [False, True])
def test_rotations_turn_pairs_of_dimensions(interleaved, rotary_dim, doubled):
    turned = rotary_dim or 8
    parts, angle = numbers(8, 3, 2, HEADS, 6, 8), angles(6, turned // 2)
    tables = [function(angle) for function in (torch.cos, torch.sin)]
    if doubled:
        tables = [table.repeat_interleave(2, -1) if interleaved else torch.cat([table] * 2, -1) for table in tables]
    found = apply_rotary(parts, *tables, rotary_dim, interleaved=interleaved)
    torch.testing.assert_close(found, turned_by_hand(parts, angle, turned, interleaved), rtol=1e-12, atol=1e-12)
    assert found.is_contiguous()
    one = apply_rotary(parts, *(table[0] for table in tables), rotary_dim, interleaved=interleaved)
    torch.testing.assert_close(one[:, 0], found[:, 0])


def test_rotations_are_those_of_llama_and_gpt_j():
    parts, angle = numbers(8, 1, 2, HEADS, 6, 8), angles(6, 4)
    cos, sin = (torch.cat([function(angle)] * 2, dim=-1) for function in (torch.cos, torch.sin))
    expected, _ = llama_rotary(parts[0], parts[0], cos, sin)
    torch.testing.assert_close(apply_rotary(parts, cos, sin)[0], expected)
    expected = gptj_rotary(parts[0].transpose(1, 2), angle.sin(), angle.cos()).transpose(1, 2)
    torch.testing.assert_close(apply_rotary(parts, angle.cos(), angle.sin(), interleaved=True)[0], expected)


def test_a_rotation_leaves_its_input_alone_and_reads_views():
    parts, angle = numbers(8, 3, 2, 6, HEADS, 8).transpose(2, 3), angles(6, 4)
    before = parts.clone()
    found = apply_rotary(parts, angle.cos(), angle.sin())
    assert torch.equal(parts, before)
    torch.testing.assert_close(found, turned_by_hand(before, angle, 8, False))


def test_rotations_that_do_not_fit_are_refused():
    parts, table = numbers(8, 3, 2, HEADS, 6, 8), angles(6, 4)
    for rotary_dim in (3, 10, 0):
        with pytest.raises(ValueError, match=f"rotary_dim {rotary_dim} must be even and between 2 and d_head = 8"):
            apply_rotary(parts, table, table, rotary_dim)
    with pytest.raises(ValueError, match="must both end in rotary_dim = 6 or half of it"):
        apply_rotary(parts, table, table, 6)


@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize("layer", [False, True], ids=["RMS", "LayerNorm"])
@pytest.mark.parametrize("own", [False, True], ids=["shared weight", "weight of each head"])
def test_query_norms_act_part_by_part(over_heads, layer, own):
    parts = numbers(9, 3, 2, HEADS, 6, WIDTH)
    whole = parts.sum(dim=0)
    axes = (1, 3) if over_heads else (3,)
    moved = whole - whole.mean(dim=axes, keepdim=True) if layer else whole
    scale = (moved.square().mean(dim=axes, keepdim=True) + EPS).sqrt()
    size = HEADS * WIDTH if own else WIDTH
    weight, bias = numbers(10, size), numbers(11, size)
    found = apply_frozen_norm(parts, scale, weight=weight, bias=bias, subtract_mean=layer, over_heads=over_heads)
    by_head = [(values.view(HEADS, 1, WIDTH) if own else values) for values in (weight, bias)]
    torch.testing.assert_close(found.sum(dim=0), moved / scale * by_head[0] + by_head[1], rtol=1e-12, atol=1e-12)
    for place in (1, 2):
        alone = apply_frozen_norm(
            parts[place : place + 1], scale, weight=weight, subtract_mean=layer, over_heads=over_heads
        )
        torch.testing.assert_close(alone[0], found[place])
    grid = {name: values.view(HEADS, WIDTH) if own else values for name, values in (("weight", weight), ("bias", bias))}
    same = apply_frozen_norm(parts, scale, **grid, subtract_mean=layer, over_heads=over_heads)
    torch.testing.assert_close(same, found)


def test_a_norm_over_all_heads_equals_pytorch_on_heads_side_by_side():
    parts = numbers(9, 3, 2, HEADS, 6, WIDTH)
    flat = parts.sum(dim=0).transpose(1, 2).flatten(2)
    weight, bias = numbers(10, HEADS * WIDTH), numbers(11, HEADS * WIDTH)
    scale = (flat.var(dim=-1, unbiased=False, keepdim=True) + EPS).sqrt()[:, None]
    found = apply_frozen_norm(parts, scale, weight=weight, bias=bias, subtract_mean=True, over_heads=True).sum(dim=0)
    torch.testing.assert_close(found, heads_of(layer_norm(flat, (HEADS * WIDTH,), weight, bias, EPS)))


def test_norm_weights_of_another_size_are_refused():
    parts = numbers(9, 3, 2, HEADS, 6, WIDTH)
    for name in ("weight", "bias"):
        with pytest.raises(ValueError, match=rf"norm's {name} has 4 or 2 \* 4 entries, not the shape \(5,\)"):
            apply_frozen_norm(parts, torch.ones(2, 1, 6, 1), **{name: torch.ones(5)})


def whole_layer(rows, centre, basis, frames, queries, keys, **more) -> tuple[AttentionSums, Case]:
    """A LayerNorm, maps with biases and a rotation, from residual rows to sums."""
    norm = norms()["LayerNorm"]
    _, scale = normed(rows, norm)
    length = rows.shape[1]
    angle = 0.3 * torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1])
    sides = {}
    for name, weight, heads in (("queries", queries, HEADS), ("keys", keys, 1)):
        bias = numbers(heads, len(weight))
        parts, inside = split_linear(
            rows, centre, basis, weight, heads, controls=frames, bias=bias, norm=norm, scale=scale
        )
        sides[name] = apply_rotary(parts, angle.cos(), angle.sin())
        sides[f"control_{name}"] = apply_rotary(inside, angle.cos(), angle.sin())
    case = Case(**sides, allowed=causal(len(rows), length), **more)
    sums = AttentionSums(HEADS, len(frames))
    sums.update(ScoreParts(**sides, pairs=AllowedPairs.of(case.allowed)))
    return sums, case


def test_a_control_is_a_plain_split_with_that_subspace_in_the_tangents_place():
    """The whole way: from residual rows through norm, maps and rotation, once with the control as the tangent."""
    rows, centre, basis = rows_of(1), numbers(5, D), random_frame(D, K)
    frames = random_normals(basis, 3)
    weights = numbers(3, HEADS * WIDTH, D), numbers(4, WIDTH, D)
    sums, case = whole_layer(rows, centre, basis, frames, *weights)
    result = sums.result()
    for place, frame in enumerate(frames):
        other = whole_layer(rows, centre, frame, basis[None], *weights)[0].result()
        for found, expected in (
            ([values[place] for values in result.random], other.dominance),
            ([values[place] for values in result.random_kl], other.kl),
            *(([values[place] for values in result.random_shares[name]], other.shares[name]) for name in other.shares),
        ):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert result.dominance == pytest.approx([loops(case, head).dominance for head in range(HEADS)], rel=1e-10)


def maps_that_read(basis: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key maps that see these directions of the residual stream and no others."""
    reading = torch.from_numpy(projector(basis))
    return tuple(numbers(seed + place, size, D) @ reading for place, size in enumerate((HEADS * WIDTH, WIDTH)))


def plain_layer(rows, basis, frames, queries, keys) -> AttentionSums:
    """No norm, no bias, no rotation."""
    sides = {}
    for name, weight, heads in (("queries", queries, HEADS), ("keys", keys, 1)):
        sides[name], sides[f"control_{name}"] = split_linear(
            rows, rows.mean(dim=(0, 1)), basis, weight, heads, controls=frames
        )
    sums = AttentionSums(HEADS, len(frames))
    sums.update(ScoreParts(**sides, pairs=AllowedPairs.of(causal(*rows.shape[:2]))))
    return sums


def test_maps_that_read_the_tangent_alone_are_dominated_by_it():
    rows, basis = rows_of(2), random_frame(D, K)
    result = plain_layer(rows, basis, random_normals(basis, 5), *maps_that_read(basis, 20)).result()
    assert result.dominance == pytest.approx((1, 1), abs=1e-12)
    assert result.kl == pytest.approx((0, 0), abs=1e-12)
    assert max(max(values) for values in result.random) < 1e-20
    assert result.p_value == (1 / 6, 1 / 6)


def test_maps_that_read_normals_alone_have_no_tangent_dominance():
    rows, basis = rows_of(2), random_frame(D, K)
    reads = random_normals(basis, 1, seed=8)[0]
    result = plain_layer(
        rows, basis, torch.cat([reads[None], random_normals(basis, 4)]), *maps_that_read(reads, 20)
    ).result()
    assert result.dominance == pytest.approx((0, 0), abs=1e-12)
    assert [values[0] for values in result.random] == pytest.approx((1, 1), abs=1e-12)
    assert result.p_value == (1, 1)


def test_maps_and_rows_without_a_preference_give_the_tangent_the_controls_value():
    """Isotropic rows and random maps: over many maps the tangent's mean D is that of its controls."""
    generator, observed, controls = np.random.default_rng(0), [], []
    basis = random_frame(D, K)
    frames = random_normals(basis, 20, seed=1)
    for seed in range(60):
        rows = torch.from_numpy(generator.normal(size=(4, 20, D)))
        maps = numbers(1000 + seed, HEADS * WIDTH, D), numbers(2000 + seed, WIDTH, D)
        result = plain_layer(rows, basis, frames, *maps).result()
        observed.append(np.mean(result.dominance))
        controls.append(np.mean(result.random))
    spread = np.std(observed, ddof=1) / math.sqrt(len(observed))
    assert np.mean(observed) == pytest.approx(np.mean(controls), abs=4 * spread)
    assert np.mean(observed) == pytest.approx((K / D) ** 2, rel=0.35)


def test_a_scale_of_the_scores_changes_only_the_pattern():
    rows, basis = rows_of(3), random_frame(D, K)
    frames = random_normals(basis, 2)
    queries, keys = numbers(3, HEADS * WIDTH, D), numbers(4, WIDTH, D)
    one, other = (plain_layer(rows, basis, frames, factor * queries, keys).result() for factor in (1, 0.25))
    assert other.dominance == pytest.approx(one.dominance, rel=1e-10)
    assert other.random[0] == pytest.approx(one.random[0], rel=1e-10)
    for name, values in one.shares.items():
        assert other.shares[name] == pytest.approx(values, abs=1e-10)
    assert max(other.kl) < min(one.kl)
