"""Which tokens are masked: decided by the seed and the sequence alone, in the numbers asked for; and the loss over them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance.families import tiny_model
from explicit import PROPERTY, array
from hypothesis import given
from hypothesis import strategies as st
from model_snapshot import Snapshot

import tangent_lens as tln
from tangent_lens.lens import Lens
from tangent_lens.models.protocol import Batch
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.masking import MaskedLoss

VOCABULARY, MASK, SPECIAL = 40, 3, frozenset({0, 1, 2})
NOTHING = -100


def ready(**options) -> MaskedLoss:
    """A loss that knows a vocabulary of 40 words, of which the first four are special."""
    options = {"mask_id": MASK, "special_ids": SPECIAL} | options
    return MaskedLoss(**options).for_model(None, VOCABULARY)


def masked(sequences, loss: MaskedLoss, **options) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(original, what the model reads, targets) of every sequence, padding cut off; in the order of the batches."""
    corpus, found = Corpus.from_tokens(sequences), []
    for batch in corpus.batches(**options):
        prepared = loss.prepare(batch)
        for row, mask in enumerate(batch.attention_mask):
            assert bool((prepared.targets[row, ~mask] == NOTHING).all())
            assert torch.equal(prepared.tokens[row, ~mask], batch.tokens[row, ~mask])
            found.append(
                tuple(tuple(one[row, mask].tolist()) for one in (batch.tokens, prepared.tokens, prepared.targets))
            )
    return found


def batch_of(*sequences: list[int], side: str = "right", dtype: torch.dtype = torch.long) -> Batch:
    (batch,) = Corpus.from_tokens(sequences).batches(len(sequences), padding_side=side)
    return dataclasses.replace(batch, tokens=batch.tokens.to(dtype))


def words(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Sequences without any special token."""
    return np.random.default_rng(seed).integers(MASK + 1, VOCABULARY, size=(count, length)).tolist()


token_sequences = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=15), min_size=1, max_size=8)
shares = st.floats(0.01, 0.99)
styles = st.sampled_from(["80/10/10", "plain"])
sides = st.sampled_from(["left", "right"])


class TestTheChoice:
    @given(sequences=token_sequences, order=st.randoms(use_true_random=False), data=st.data(), style=styles)
    @PROPERTY
    def test_neither_order_neighbours_padding_nor_batch_size_changes_it(self, sequences, order, data, style):
        loss = ready(share=0.4, style=style)
        alone = {original: (read, targets) for one in sequences for original, read, targets in masked([one], loss)}
        mixed = [*sequences, *words(2, 9)]
        order.shuffle(mixed)
        options = {
            "batch_size": data.draw(st.integers(1, 6)),
            "padding_side": data.draw(sides),
            "pad_id": data.draw(st.integers(0, 9)),
        }
        together = masked(mixed, loss, **options)
        assert len(together) == len(mixed)
        for original, read, targets in together:
            assert alone.get(original, (read, targets)) == (read, targets)

    @given(sequence=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=30), seed=st.integers(0, 2**40))
    @PROPERTY
    def test_the_width_of_the_numbers_changes_nothing(self, sequence, seed):
        loss = ready(seed=seed)
        wide, narrow = (loss.prepare(batch_of(sequence, dtype=dtype)) for dtype in (torch.int64, torch.int32))
        assert wide.tokens.tolist() == narrow.tokens.tolist() and wide.targets.tolist() == narrow.targets.tolist()
        assert narrow.tokens.dtype == torch.int32 and narrow.targets.dtype == torch.int64

    @pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint8], ids=lambda kind: kind.__name__)
    def test_whatever_integers_the_person_has(self, dtype):
        sequences = words(4, 12)
        given_as = [np.array(one, dtype=dtype) for one in sequences]
        assert masked(given_as, ready()) == masked(torch.tensor(sequences), ready()) == masked(sequences, ready())

    @given(
        sequence=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12),
        place=st.integers(0, 5),
        style=styles,
    )
    @PROPERTY
    def test_equal_sequences_are_masked_alike_wherever_they_stand(self, sequence, place, style):
        others = words(5, 12, seed=place)
        others[place:place] = [sequence]
        found = masked([*others, sequence], ready(style=style), batch_size=3)
        assert len({rest for rest in found if rest[0] == tuple(sequence)}) == 1

    def test_a_sequence_is_not_masked_like_its_beginning_or_its_mirror_image(self):
        (sequence,) = words(1, 60)
        places = [
            {index for index, target in enumerate(targets) if target != NOTHING}
            for one in (sequence, sequence[:59], sequence[::-1], [*sequence[1:], sequence[0]])
            for _, _, targets in masked([one], ready(share=0.5))
        ]
        assert all(one != other for index, one in enumerate(places) for other in places[:index])

    def test_another_seed_is_another_choice(self):
        sequences = words(3, 40)
        found = {seed: tuple(masked(sequences, ready(seed=seed))) for seed in (0, 1, 2, 10, 11, 110, 2**63)}
        assert len(set(found.values())) == len(found)
        assert found[11] == tuple(masked(sequences, ready(seed=11)))

    def test_every_word_of_a_sequence_is_equally_likely_to_be_chosen(self):
        sequences = [[0, *one, 1] for one in words(2000, 10)]
        counts = Counter(
            index
            for _, _, targets in masked(sequences, ready(share=0.3))
            for index, one in enumerate(targets)
            if one != NOTHING
        )
        assert sum(counts.values()) == 3 * 2000 and set(counts) == set(range(1, 11))
        spread = math.sqrt(2000 * 0.3 * 0.7)
        assert all(abs(count - 600) < 5 * spread for count in counts.values())

    def test_nothing_random_of_the_process_is_drawn_or_read(self):
        np.random.seed(1)
        torch.manual_seed(1)
        states = np.random.get_state()[1].copy(), torch.get_rng_state()
        first = masked(words(3, 20), ready())
        assert (np.random.get_state()[1] == states[0]).all() and torch.equal(torch.get_rng_state(), states[1])
        np.random.seed(2)
        torch.manual_seed(2)
        assert masked(words(3, 20), ready()) == first

    def test_it_is_the_same_in_every_process_and_version(self):
        """Reports name only the seed: with it, anyone must find the same masks. Change this only with the name."""
        ((_, read, targets),) = masked([list(range(10, 30))], ready(seed=7))
        assert [index for index, one in enumerate(targets) if one != NOTHING] == [5, 7, 18]
        assert [read[index] for index in (5, 7, 18)] == [15, MASK, MASK]


class TestWhatIsMasked:
    @given(sequences=token_sequences, share=shares, style=styles, seed=st.integers(0, 9))
    @PROPERTY
    def test_the_share_of_the_words_and_at_least_one(self, sequences, share, style, seed):
        for original, read, targets in masked(sequences, ready(share=share, style=style, seed=seed)):
            candidates = [index for index, one in enumerate(original) if one not in SPECIAL and one != MASK]
            chosen = [index for index, one in enumerate(targets) if one != NOTHING]
            assert len(chosen) == (max(1, round(share * len(candidates))) if candidates else 0)
            assert set(chosen) <= set(candidates)
            assert all(targets[index] == original[index] for index in chosen)
            assert all(read[index] == original[index] for index in range(len(original)) if index not in chosen)
            stand_ins = [read[index] for index in chosen if read[index] != MASK]
            assert not set(stand_ins) & SPECIAL and all(0 <= one < VOCABULARY for one in stand_ins)
            if style == "plain":
                assert not stand_ins

    @pytest.mark.parametrize(("share", "expected"), [(0.15, 15), (0.5, 50), (0.001, 1), (0.999, 100), (0.125, 12)])
    def test_the_share_is_honoured_exactly(self, share, expected):
        ((_, _, targets),) = masked(words(1, 100), ready(share=share))
        assert sum(one != NOTHING for one in targets) == expected

    def test_of_a_single_word_among_special_tokens_it_is_that_word(self):
        ((_, read, targets),) = masked([[0, 1, 17, MASK, 2]], ready(style="plain"))
        assert targets == (NOTHING, NOTHING, 17, NOTHING, NOTHING) and read == (0, 1, MASK, MASK, 2)

    def test_the_mask_token_itself_is_never_to_be_predicted(self):
        loss = MaskedLoss(share=0.9, mask_id=MASK, special_ids=frozenset()).for_model(None, VOCABULARY)
        assert loss.special_ids == {MASK}
        for original, _, targets in masked([[MASK, 10, MASK, 11, 12, MASK]] * 2, loss):
            assert all(target == NOTHING for one, target in zip(original, targets, strict=True) if one == MASK)

    def test_eighty_ten_ten(self):
        """Of 18,000 masked tokens; a stand-in drawn at random is now and then the word itself."""
        fates, stand_ins = Counter(), Counter()
        for original, read, targets in masked(words(400, 50), ready(share=0.9)):
            for before, now, target in zip(original, read, targets, strict=True):
                if target != NOTHING:
                    fates["mask" if now == MASK else "same" if now == before else "other"] += 1
                    stand_ins[now] += now not in (MASK, before)
        count, distinct = sum(fates.values()), VOCABULARY - 4
        assert count == 400 * 45
        expected = {"mask": 0.8, "same": 0.1 + 0.1 / distinct, "other": 0.1 - 0.1 / distinct}
        for fate, share in expected.items():
            assert abs(fates[fate] - count * share) < 5 * math.sqrt(count * share * (1 - share)), fate
        each = fates["other"] / distinct
        assert len(+stand_ins) == distinct
        assert all(abs(stand_ins[one] - each) < 5 * math.sqrt(each) for one in range(4, VOCABULARY))

    def test_plain_masks_all(self):
        for _, read, targets in masked(words(20, 30), ready(share=0.5, style="plain")):
            assert all((now == MASK) == (target != NOTHING) for now, target in zip(read, targets, strict=True))

    def test_a_sequence_of_special_tokens_stays_as_it_is(self):
        ((original, read, targets),) = masked([[0, 1, 2, MASK, 0]], ready())
        assert read == original and set(targets) == {NOTHING}


class TestPreparing:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_the_batch_itself_is_not_changed(self, side):
        batch = batch_of(*words(2, 9), words(1, 5)[0], side=side)
        before = {
            one.name: value.clone()
            for one in dataclasses.fields(batch)
            if (value := getattr(batch, one.name)) is not None
        }
        prepared = ready(share=0.5).prepare(batch)
        assert batch.targets is None and prepared is not batch
        assert not torch.equal(prepared.tokens, batch.tokens)
        for name, value in before.items():
            assert torch.equal(getattr(batch, name), value)
            if name != "tokens":
                assert torch.equal(getattr(prepared, name), value)

    def test_what_is_prepared_stays_as_it_is(self):
        prepared = ready(share=0.5).prepare(batch_of(*words(2, 9)))
        again = ready(share=0.5).prepare(prepared)
        assert torch.equal(again.tokens, prepared.tokens) and torch.equal(again.targets, prepared.targets)

    def test_it_needs_to_know_the_mask_token(self):
        for loss in (MaskedLoss(), MaskedLoss(mask_id=MASK)):
            with pytest.raises(ValueError, match=r"knows no mask token yet; hand it to lens\.measure or lens\.record"):
                loss.prepare(batch_of([10, 11]))


def prepared_batch(side: str = "right", **options):
    batch = batch_of(*words(2, 9), [0, 1, 2], words(1, 4, seed=5)[0], side=side)
    return ready(share=0.5, **options).prepare(batch)


def random_logits(batch: Batch, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(*batch.tokens.shape, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def explicit_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    """One position at a time."""
    total, count = 0.0, 0
    for values, wanted in zip(array(logits), targets.numpy(), strict=True):
        for scores, target in zip(values, wanted, strict=True):
            if target != NOTHING:
                total += math.log(sum(math.exp(score) for score in scores)) - scores[target]
                count += 1
    return total, count


class TestTheLoss:
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("style", ["plain", "80/10/10"])
    def test_it_is_the_sum_over_masked_positions(self, side, style):
        batch = prepared_batch(side, style=style)
        logits = random_logits(batch)
        loss, count = ready()(logits, batch)
        expected, wanted = explicit_loss(logits, batch.targets)
        assert count == wanted == 4 + 4 + 0 + 2
        assert loss.dtype == torch.float64 and loss.shape == ()
        assert float(loss) == pytest.approx(expected, rel=1e-13)

    @pytest.mark.parametrize("name", ["logits", "prediction_logits"])
    def test_whatever_a_library_returns(self, name):
        batch = prepared_batch()
        logits = random_logits(batch)
        assert float(ready()(SimpleNamespace(**{name: logits}), batch)[0]) == float(ready()(logits, batch)[0])
        with pytest.raises(TypeError, match=r"a SimpleNamespace without logits"):
            ready()(SimpleNamespace(hidden=logits), batch)

    def test_its_gradient_is_that_of_the_softmax_at_masked_positions_and_zero_elsewhere(self):
        batch = prepared_batch("left")
        logits = random_logits(batch).requires_grad_(True)
        ready()(logits, batch)[0].backward()
        expected = logits.detach().softmax(-1)
        for row, position in (batch.targets != NOTHING).nonzero().tolist():
            expected[row, position, batch.targets[row, position]] -= 1
        expected[batch.targets == NOTHING] = 0
        assert torch.allclose(logits.grad, expected, rtol=1e-12, atol=1e-14)
        assert ((logits.grad != 0).any(-1) == (batch.targets != NOTHING)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_narrow_logits_are_summed_in_float32(self, dtype):
        batch = prepared_batch()
        logits = random_logits(batch, dtype)
        loss, _ = ready()(logits, batch)
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(explicit_loss(logits, batch.targets)[0], rel=1e-6)

    def test_special_tokens_alone_count_nothing_and_their_gradient_is_zero(self):
        batch = ready().prepare(batch_of([0, 1, 2], [2, MASK]))
        logits = random_logits(batch).requires_grad_(True)
        loss, count = ready()(logits, batch)
        loss.backward()
        assert (float(loss.detach()), count) == (0.0, 0)
        assert torch.equal(logits.grad, torch.zeros_like(logits))


class TestForAModel:
    def test_the_tokenizer_says_what_was_left_open(self):
        tokenizer = SimpleNamespace(mask_token_id=5, all_special_ids=[0, 1, 5, 8])
        loss = MaskedLoss(share=0.3, style="plain", seed=4)
        found = loss.for_model(tokenizer, VOCABULARY)
        assert (found.mask_id, found.special_ids) == (5, {0, 1, 5, 8})
        assert (found.share, found.style, found.seed, found.name) == (0.3, "plain", 4, loss.name)
        assert (loss.mask_id, loss.special_ids) == (None, None)

    def test_what_the_person_says_goes_before(self):
        tokenizer = SimpleNamespace(mask_token_id=5, all_special_ids=[0, 1, 5])
        assert MaskedLoss(mask_id=7).for_model(tokenizer, VOCABULARY).mask_id == 7
        assert MaskedLoss(mask_id=7).for_model(tokenizer, VOCABULARY).special_ids == {0, 1, 5, 7}
        assert MaskedLoss(special_ids=frozenset({9})).for_model(tokenizer, VOCABULARY).special_ids == {5, 9}
        assert MaskedLoss(mask_id=0, special_ids=frozenset()).for_model(tokenizer, VOCABULARY).special_ids == {0}

    @pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(), SimpleNamespace(mask_token_id=None)], ids=str)
    def test_no_mask_token_is_an_error_with_two_ways_out(self, tokenizer):
        with pytest.raises(
            ValueError, match=r"no mask token is known.*MaskedLoss\(mask_id=\.\.\.\), or Lens\(model, tokenizer"
        ):
            MaskedLoss().for_model(tokenizer, VOCABULARY)

    @pytest.mark.parametrize("mask_id", [VOCABULARY, 999, -1])
    def test_a_mask_outside_the_vocabulary_is_an_error_with_both_numbers(self, mask_id):
        with pytest.raises(ValueError, match=rf"mask_id {mask_id} is outside this model's vocabulary of {VOCABULARY}"):
            MaskedLoss(mask_id=mask_id).for_model(None, VOCABULARY)
        with pytest.raises(ValueError, match=rf"mask_id {mask_id} is outside"):
            MaskedLoss().for_model(SimpleNamespace(mask_token_id=mask_id), VOCABULARY)


class TestItself:
    @pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, -0.1, 1.5, 15, math.nan, math.inf])
    def test_a_share_outside_0_and_1_is_refused(self, share):
        with pytest.raises(
            ValueError, match=rf"share {share} of masked tokens must lie between 0 and 1, for example 0\.15"
        ):
            MaskedLoss(share=share)

    @pytest.mark.parametrize("style", ["", "all", "80/20", None])
    def test_an_unknown_style_lists_the_known_ones(self, style):
        with pytest.raises(ValueError, match=rf"style {style!r} must be one of 80/10/10, plain"):
            MaskedLoss(style=style)

    @pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None])
    def test_a_seed_is_a_whole_number(self, seed):
        with pytest.raises(ValueError, match=rf"seed {seed!r} must be a whole number, 0 or more"):
            MaskedLoss(seed=seed)

    def test_it_cannot_be_changed(self):
        loss = MaskedLoss()
        for name, value in (
            ("share", 0.5),
            ("style", "plain"),
            ("seed", 1),
            ("mask_id", 4),
            ("special_ids", frozenset()),
        ):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(loss, name, value)
        assert loss == MaskedLoss() and hash(loss) == hash(MaskedLoss())

    def test_its_name_tells_apart_whatever_changes_its_numbers(self):
        names = {
            MaskedLoss(share, style, seed).name
            for share in (0.15, 0.3)
            for style in ("plain", "80/10/10")
            for seed in (0, 1)
        }
        assert len(names) == 8
        assert (
            MaskedLoss().name == "masked-token (0.15 of the tokens, 80/10/10, seed 0)"
            and MaskedLoss().unit == "masked token"
        )

    def test_it_is_public(self):
        assert tln.MaskedLoss is MaskedLoss


@pytest.fixture(scope="module")
def lens():
    return Lens(tiny_model("bert"))


class TestThroughALens:
    """A BERT of vocabulary 100."""

    LOSS = MaskedLoss(mask_id=4, special_ids=frozenset(range(5)), share=0.3)

    def recorded(self, lens, sequences, **options):
        (moments,) = lens.record(sequences, "resid_post.1", **{"loss": self.LOSS, "progress": False} | options).values()
        return moments

    @pytest.mark.parametrize("batch_size", [1, 8])
    def test_a_sequence_of_special_tokens_adds_rows_without_gradient(self, lens, batch_size):
        rest = [[0, *range(10, 20), 2], [0, *range(50, 57), 2]]
        alone = self.recorded(lens, rest).gradients
        found = self.recorded(lens, [*rest, [0, 2, 2, 3], [2, 2]], batch_size=batch_size).gradients
        assert (alone.count, found.count) == (21, 27)
        assert float((found.second_moment() - alone.second_moment()).abs().max()) < 1e-12 * float(
            alone.second_moment().max()
        )
        assert float(alone.second_moment().max()) > 0

    @pytest.mark.parametrize("batch_size", [1, 8])
    def test_a_whole_corpus_of_them_is_an_error_that_names_the_loss(self, lens, batch_size):
        before = Snapshot.of(lens.model.module)
        with pytest.raises(
            ValueError, match=r"masked-token \(0\.3 of the tokens.*found nothing to predict in the whole corpus"
        ):
            self.recorded(lens, [[0, 2, 2], [0, 1, 2], [3, 3]], batch_size=batch_size)
        before.assert_unchanged(lens.model.module)

    def test_a_token_outside_the_vocabulary_is_told_wherever_the_mask_falls(self, lens):
        """A mask must not hide it: it would come back as a target that the logits do not have."""
        for seed in range(8):
            loss = dataclasses.replace(self.LOSS, seed=seed, style="plain")
            for gradients in (True, False):
                with pytest.raises(ValueError, match=r"token id 150 is outside this model's vocabulary of 100"):
                    self.recorded(lens, [[5, 150]], loss=loss, gradients=gradients)
            with pytest.raises(ValueError, match=r"token id 150 is outside this model's vocabulary of 100"):
                lens.measure([[5, 150], [6, 150]] * 4, rank=1, loss=loss, progress=False)

    def test_a_mask_outside_the_vocabulary_and_a_missing_one(self, lens):
        with pytest.raises(ValueError, match=r"mask_id 100 is outside this model's vocabulary of 100"):
            self.recorded(lens, [[5, 6]], loss=MaskedLoss(mask_id=100))
        with pytest.raises(ValueError, match=r"no mask token is known"):
            self.recorded(lens, [[5, 6]], loss=None)
