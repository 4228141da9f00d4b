"""The summed causal loss against explicit log-probabilities, one position at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.losses import causal_loss_sum, causal_targets

VOCABULARY = 7
LENGTHS = (5, 3, 1, 4)


def padded(side: str, dtype: torch.dtype = torch.float64):
    """Logits, tokens and mask of four sequences; the same numbers stand at the same tokens on either padding side."""
    generator = torch.Generator().manual_seed(0)
    longest = max(LENGTHS)
    logits = torch.full((len(LENGTHS), longest, VOCABULARY), 9.0, dtype=dtype)
    tokens = torch.full((len(LENGTHS), longest), 6)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        values = torch.randn(length, VOCABULARY, generator=generator, dtype=torch.float64)
        logits[row, place] = (3 * values).to(dtype)
        tokens[row, place] = torch.randint(VOCABULARY, (length,), generator=generator)
        mask[row, place] = True
    return logits, tokens, mask


def token_rows(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values[mask]


def explicit_loss(logits, tokens, mask) -> tuple[float, int]:
    """Walk over every sequence and every position."""
    total, count = 0.0, 0
    for values, ids, kept in zip(array(logits), tokens.numpy(), mask.numpy(), strict=True):
        for position in range(len(ids) - 1):
            if kept[position] and kept[position + 1]:
                total -= values[position][ids[position + 1]] - np.log(np.exp(values[position]).sum())
                count += 1
    return total, count


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_the_sum_over_positions(side):
    loss, count = causal_loss_sum(*padded(side))
    expected, targets = explicit_loss(*padded(side))
    assert count == targets == sum(length - 1 for length in LENGTHS)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(expected, rel=1e-13)


@given(cut=st.lists(st.booleans(), min_size=len(LENGTHS) - 1, max_size=len(LENGTHS) - 1))
@PROPERTY
def test_no_cut_into_batches_changes_the_sum_or_its_gradient(cut):
    logits, tokens, mask = padded("right")
    mask[2, :2] = True  # A batch of a single one-token sequence would have no target at all.
    whole, cut_up = (logits.clone().requires_grad_() for _ in range(2))
    causal_loss_sum(whole, tokens, mask)[0].backward()
    starts = [0, *(place + 1 for place, here in enumerate(cut) if here), len(LENGTHS)]
    targets = 0
    for start, end in itertools.pairwise(starts):
        loss, count = causal_loss_sum(cut_up[start:end], tokens[start:end], mask[start:end])
        loss.backward()
        targets += count
    assert targets == causal_loss_sum(logits, tokens, mask)[1]
    assert torch.allclose(cut_up.grad, whole.grad, rtol=1e-13, atol=1e-15)


def test_the_padding_side_changes_nothing():
    results = []
    for side in ("left", "right"):
        logits, tokens, mask = padded(side)
        logits.requires_grad_()
        loss, _ = causal_loss_sum(logits, tokens, mask)
        loss.backward()
        results.append((float(loss.detach()), token_rows(logits.grad, mask)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-14)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_last_positions_get_no_gradient_and_others_softmax_minus_target(side):
    logits, tokens, mask = padded(side)
    logits.requires_grad_()
    causal_loss_sum(logits, tokens, mask)[0].backward()
    expected = torch.zeros_like(logits)
    for row, length in enumerate(LENGTHS):
        first = logits.shape[1] - length if side == "left" else 0
        for position in range(first, first + length - 1):
            expected[row, position] = logits[row, position].detach().softmax(dim=0)
            expected[row, position, tokens[row, position + 1]] -= 1
    assert torch.allclose(logits.grad, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(logits.grad == 0, expected == 0)


def test_targets_are_the_next_tokens():
    tokens = torch.tensor([[4, 5, 6, 0], [0, 0, 5, 6]])
    mask = torch.tensor([[True, True, True, False], [False, False, True, True]])
    assert causal_targets(tokens, mask).tolist() == [[5, 6, -100, -100], [-100, -100, 6, -100]]


def test_no_target_reaches_across_a_gap():
    tokens = torch.tensor([[4, 5, 6, 3]])
    mask = torch.tensor([[True, False, True, True]])
    assert causal_targets(tokens, mask).tolist() == [[-100, -100, 3, -100]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_summed_in_float32(dtype):
    logits, tokens, mask = padded("right", dtype)
    loss, _ = causal_loss_sum(logits, tokens, mask)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(explicit_loss(logits, tokens, mask)[0], rel=1e-6)
    assert float(loss) == float(causal_loss_sum(logits.float(), tokens, mask)[0])


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, 0.0], [0.0, 0.0]]])
    loss, _ = causal_loss_sum(logits, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
    assert float(loss) == 1e4


@pytest.mark.parametrize("length", [1, 4])
def test_a_batch_without_a_target_is_an_error(length):
    logits, tokens = torch.zeros(3, length, VOCABULARY), torch.zeros(3, length, dtype=torch.long)
    mask = torch.zeros(3, length, dtype=torch.bool)
    mask[:, 0] = True
    message = rf"no position of this batch \(3 sequences of up to {length} tokens\) has a next token.*at least 2 tokens"
    with pytest.raises(ValueError, match=message):
        causal_loss_sum(logits, tokens, mask)
