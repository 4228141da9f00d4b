"""Which pairs count, in which blocks, and parts that do not fit together."""

from __future__ import annotations

import pytest
import torch
from attention_cases import causal, parts_of, random_case
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.attention_inputs import AllowedPairs, distance_buckets, distance_labels

seeds = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("changes", "taught"),
    [
        ({"queries": torch.zeros(2, 2, 4, 7, 3)}, "centre, tangent and normal"),
        ({"keys": torch.zeros(3, 2, 3, 7, 3)}, "heads must be a multiple of kv_heads"),
        ({"keys": torch.zeros(3, 2, 2, 7, 5)}, r"keys of shape \(3, 2, 2, 7, 5\) does not fit"),
        ({"control_keys": torch.zeros(1, 2, 2, 7, 3)}, "control_keys of shape .* does not fit"),
        ({"control_keys": None}, "come together; one of them is missing"),
        ({"bias": torch.zeros(7, 7)}, r"bias of shape \(7, 7\) must be \(4, 7, 7\) or \(2, 4, 7, 7\)"),
        ({"bias": torch.zeros(2, 1, 7, 7)}, "must be"),
        ({"pairs": AllowedPairs.of(torch.ones(2, 3, 7, 7, dtype=torch.bool))}, r"allowed of shape \(2, 3, 7, 7\)"),
        ({"pairs": AllowedPairs.of(causal(2, 6))}, r"allowed of shape \(2, 1, 6, 6\)"),
        ({"softcap": 0.0}, "softcap 0.0 must be positive"),
        ({"radius": torch.ones(2, 6)}, "radius of shape"),
        ({"frequency": torch.ones(1, 7)}, "frequency of shape"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, taught):
    with pytest.raises(ValueError, match=taught):
        parts_of(random_case(), **changes)


def test_masks_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"allowed must be bool.*make an additive mask boolean first: mask == 0"):
        AllowedPairs.of(torch.zeros(2, 1, 7, 7))
    with pytest.raises(ValueError, match=r"kept must be bool \(batch, query\) = \(2, 7\)"):
        AllowedPairs.of(causal(2, 7), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="0 rows a block"):
        AllowedPairs.of(causal(2, 7), rows_a_block=0)


@given(seed=seeds, length=st.integers(1, 12), block=st.integers(1, 12))
@PROPERTY
def test_blocks_cover_every_allowed_pair_and_know_where_some_are_missing(seed, length, block):
    generator = torch.Generator().manual_seed(seed)
    pairs = AllowedPairs.of(
        torch.rand(2, 2, length, length, generator=generator) < 0.6,
        torch.rand(2, length, generator=generator) < 0.8,
        rows_a_block=block,
    )
    seen = torch.zeros_like(pairs.allowed)
    for one in pairs.blocks:
        inside = pairs.allowed[:, :, one.queries, one.keys]
        seen[:, :, one.queries, one.keys] = inside
        sure = torch.ones(inside.shape[-1], dtype=torch.bool)
        sure[one.partial] = False
        assert inside[..., sure].all()
    assert torch.equal(seen, pairs.allowed)
    assert torch.equal(pairs.counts, pairs.allowed.sum(-1))
    assert not (pairs.counts == 1).any()


def test_distances_fall_into_buckets_that_begin_at_their_edges():
    found = distance_buckets(slice(2, 5), slice(0, 5), (1, 2, 4))
    assert found.tolist() == [[2, 1, 0, 1, 2], [2, 2, 1, 0, 1], [3, 2, 2, 1, 0]]
    assert distance_labels((1, 2, 4)) == ["0", "1", "2-3", "4+"]
    assert distance_labels((8,)) == ["0-7", "8+"]
    assert distance_labels(()) == []
