"""From texts to batches: no token lost, doubled or mixed up, and masks that keep what they say they keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tangent_lens.recording.corpus import Corpus, reference_prose

BEGIN, END = 1, 2


def make_tokenizer(template: str = "$A", bos: str | None = "<s>", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """A word is a number and its own id; the template says which special tokens the tokenizer adds by itself."""
    vocabulary = {"<unk>": 0, "<s>": BEGIN, "</s>": END} | {str(number): number for number in range(3, 1000)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", BEGIN), ("</s>", END)]
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token=bos, eos_token=eos)


PLAIN = make_tokenizer()
BOTH_SIDES = make_tokenizer("<s> $A </s>")
NO_SPECIAL = make_tokenizer(bos=None, eos=None)


def text_of(ids) -> str:
    return " ".join(str(number) for number in ids)


def lists(corpus: Corpus) -> list[list[int]]:
    return [sequence.tolist() for sequence in corpus.sequences]


def numbered(lengths) -> list[list[int]]:
    """Lists of these lengths, no id twice among them."""
    ids = itertools.count(10)
    return [[next(ids) for _ in range(length)] for length in lengths]


def ragged(*lengths: int, **options) -> Corpus:
    return Corpus.from_tokens(numbered(lengths), **options)


lengths_of_texts = st.lists(st.integers(0, 25), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1)


@given(lengths=lengths_of_texts, window=st.integers(2, 12))
@PROPERTY
def test_windows_hold_every_token_once_and_never_two_texts(lengths, window):
    texts = numbered(lengths)
    expected = [text[start : start + window] for text in texts for start in range(0, len(text), window)]
    corpus = Corpus.from_texts([text_of(text) for text in texts], PLAIN, sequence_length=window)
    dropped = [piece for piece in expected if len(piece) == 1]
    assert lists(corpus) == [piece for piece in expected if len(piece) > 1]
    assert corpus.tokens == sum(lengths) - len(dropped)
    if dropped:
        assert corpus.left_out == (
            f"{len(dropped)} sequences of fewer than 2 tokens left out: they have no next token",
        )
    else:
        assert corpus.left_out == ()


@given(lengths=lengths_of_texts, window=st.integers(2, 12))
@PROPERTY
def test_packed_windows_are_the_separated_texts_cut_up(lengths, window):
    texts = numbered(lengths)
    stream = [token for text in texts if text for token in (*text, END)]
    corpus = Corpus.from_texts([text_of(text) for text in texts], PLAIN, sequence_length=window, pack=True)
    windows = lists(corpus)
    expected = [stream[start : start + window] for start in range(0, len(stream), window)]
    assert windows == [piece for piece in expected if len(piece) > 1]
    assert {len(piece) for piece in windows[:-1]} <= {window}


def test_packing_without_an_end_of_text_token_puts_nothing_between():
    corpus = Corpus.from_texts(["10 11 12", "13 14 15"], NO_SPECIAL, sequence_length=4, pack=True)
    assert lists(corpus) == [[10, 11, 12, 13], [14, 15]]


@pytest.mark.parametrize("pack", [False, True])
def test_special_tokens_stand_around_every_window_and_count_in_its_length(pack):
    corpus = Corpus.from_texts(text_of(range(10, 30)), BOTH_SIDES, sequence_length=7, pack=pack)
    inside = list(itertools.chain.from_iterable(window[1:-1] for window in lists(corpus)))
    assert all(window[0] == BEGIN and window[-1] == END for window in lists(corpus))
    assert max(len(window) for window in lists(corpus)) == 7
    assert inside == list(range(10, 30)) + ([END] if pack else [])


@pytest.mark.parametrize(
    ("tokenizer", "prepend", "windows"),
    [
        (PLAIN, None, [[10, 11, 12], [13, 14]]),
        (PLAIN, False, [[10, 11, 12], [13, 14]]),
        (PLAIN, True, [[1, 10, 11], [1, 12, 13], [1, 14]]),
        (make_tokenizer("<s> $A"), None, [[1, 10, 11], [1, 12, 13], [1, 14]]),
        (make_tokenizer("<s> $A"), True, [[1, 10, 11], [1, 12, 13], [1, 14]]),
        (make_tokenizer("<s> $A"), False, [[10, 11, 12], [13, 14]]),
        (make_tokenizer("<s> $A </s>"), False, [[10, 11, 2], [12, 13, 2], [14, 2]]),
        (make_tokenizer("$A </s>"), True, [[1, 10, 2], [1, 11, 2], [1, 12, 2], [1, 13, 2], [1, 14, 2]]),
        (NO_SPECIAL, False, [[10, 11, 12], [13, 14]]),
    ],
)
def test_prepend_bos(tokenizer, prepend, windows):
    assert lists(Corpus.from_texts("10 11 12 13 14", tokenizer, sequence_length=3, prepend_bos=prepend)) == windows


def test_no_beginning_to_prepend_is_an_error():
    with pytest.raises(ValueError, match="prepend_bos=True, but this tokenizer has no beginning-of-text token"):
        Corpus.from_texts("10 11", NO_SPECIAL, prepend_bos=True)


def test_one_text_or_many_of_the_saved_tokenizer(tokenizer):
    assert lists(Corpus.from_texts("3 4 5", tokenizer)) == lists(Corpus.from_texts(["3 4 5"], tokenizer)) == [[3, 4, 5]]
    assert Corpus.from_texts("3 4 5", tokenizer).special_ids == {0, 1}


def endless(read: list[int]):
    for number in itertools.count():
        read.append(number)
        yield text_of(range(10, 14))


@pytest.mark.parametrize(("pack", "windows", "texts_read"), [(False, 3, 2), (False, 4, 2), (True, 3, 2), (True, 4, 3)])
def test_texts_are_read_only_as_far_as_asked(pack, windows, texts_read):
    read: list[int] = []
    Corpus.from_texts(endless(read), PLAIN, sequence_length=3, max_sequences=windows, pack=pack)
    assert len(read) == texts_read


def test_max_sequences_takes_the_first_windows():
    whole = Corpus.from_texts(text_of(range(10, 40)), PLAIN, sequence_length=4)
    assert (
        lists(Corpus.from_texts(text_of(range(10, 40)), PLAIN, sequence_length=4, max_sequences=3)) == lists(whole)[:3]
    )
    with pytest.raises(ValueError, match="max_sequences 0 asks for nothing; use 1 or more, or None for all"):
        Corpus.from_texts("10 11", PLAIN, max_sequences=0)


@pytest.mark.parametrize("texts", ["", [], [""], ["", "   "], iter([])])
@pytest.mark.parametrize("pack", [False, True])
def test_no_text_is_an_error(texts, pack):
    with pytest.raises(ValueError, match="the corpus 'poems' holds no tokens at all; give text with at least 2 tokens"):
        Corpus.from_texts(texts, PLAIN, pack=pack, name="poems")


def test_only_texts_of_one_token_are_an_error():
    with pytest.raises(ValueError, match="the corpus 'texts' holds only 3 sequences of fewer than 2 tokens"):
        Corpus.from_texts(["10", "11", "12"], PLAIN)


def test_a_text_that_is_no_string_is_an_error():
    with pytest.raises(ValueError, match=r"a text must be a string, not list; token ids go to Corpus\.from_tokens"):
        Corpus.from_texts([[10, 11]], PLAIN)


@pytest.mark.parametrize(
    ("tokenizer", "smallest"), [(PLAIN, 2), (make_tokenizer("<s> $A"), 2), (make_tokenizer("<s> $A </s>"), 3)]
)
def test_too_short_windows_are_refused_with_the_smallest_that_works(tokenizer, smallest):
    with pytest.raises(ValueError, match=f"sequence_length {smallest - 1} leaves no room") as caught:
        Corpus.from_texts("10 11 12 13", tokenizer, sequence_length=smallest - 1)
    assert max(map(len, lists(Corpus.from_texts("10 11 12 13", tokenizer, sequence_length=smallest)))) == smallest
    assert f"use at least {smallest}" in str(caught.value)


def test_token_ids_of_any_lengths():
    assert lists(Corpus.from_tokens([[1, 2, 3], (4, 5), np.array([6, 7, 8, 9])])) == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert lists(Corpus.from_tokens(torch.arange(6).reshape(2, 3))) == [[0, 1, 2], [3, 4, 5]]
    assert lists(Corpus.from_tokens(torch.arange(4))) == [[0, 1, 2, 3]]
    assert Corpus.from_tokens([[1, 2]], name="mine", special_ids=[7, 8]).special_ids == {7, 8}


def test_a_mask_takes_padding_away_on_either_side():
    tokens = torch.tensor([[1, 2, 3, 0], [0, 0, 4, 5], [6, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    for kind in (mask, mask.bool(), mask.float()):
        assert lists(Corpus.from_tokens(tokens, kind)) == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_rows_that_are_all_padding_are_left_out_and_counted():
    mask = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0]])
    corpus = Corpus.from_tokens(torch.arange(9).reshape(3, 3), mask)
    assert lists(corpus) == [[3, 4, 5]]
    assert corpus.left_out == ("2 sequences of fewer than 2 tokens left out: they have no next token",)
    with pytest.raises(ValueError, match="holds only 3 sequences of fewer than 2 tokens"):
        Corpus.from_tokens(torch.arange(9).reshape(3, 3), torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("tokens", "described"),
    [
        ([[1.0, 2.0]], r"float64 of shape \(2,\)"),
        (torch.ones(2, 3), r"float32 of shape \(3,\)"),
        ([[True, False]], r"bool of shape \(2,\)"),
        ([["a", "b"]], r"of shape \(2,\)"),
        (torch.ones(2, 3, 4, dtype=torch.long), r"int64 of shape \(3, 4\)"),
        ([1, 2, 3], r"int64 of shape \(\)"),
    ],
)
def test_ids_that_are_no_lists_of_integers_are_refused(tokens, described):
    with pytest.raises(ValueError, match=f"a token sequence must be a list of integer ids, not .*{described}"):
        Corpus.from_tokens(tokens)


@pytest.mark.parametrize("bad", [2**32 + 5, -100])
def test_ids_that_no_vocabulary_holds_are_refused(bad):
    with pytest.raises(ValueError, match=str(bad)):
        Corpus.from_tokens([[3, bad, 4]])


def test_a_mask_of_another_shape_is_refused():
    message = r"an attention mask needs a token tensor of the same shape \(batch, position\)"
    with pytest.raises(ValueError, match=message):
        Corpus.from_tokens(torch.ones(2, 3, dtype=torch.long), torch.ones(3, 2))
    with pytest.raises(ValueError, match=message):
        Corpus.from_tokens([[1, 2, 3]], torch.ones(1, 3))


@given(count=st.integers(2, 30), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 100))
@PROPERTY
def test_a_split_is_disjoint_exhaustive_and_of_the_size_asked(count, fraction, seed):
    corpus = ragged(*[2] * count, name="mine", special_ids=[3])
    fit, test = corpus.split(fraction, seed)
    assert len(fit.sequences) == min(max(round(count * fraction), 1), count - 1)
    assert sorted(lists(fit) + lists(test)) == lists(corpus)
    assert (fit.name, test.name, fit.special_ids, test.special_ids) == ("mine", "mine", {3}, {3})


def test_a_split_depends_on_the_seed_alone():
    corpus = ragged(*[2] * 30)
    first = [lists(part) for part in corpus.split(0.5, seed=1)]
    torch.rand(3)
    np.random.rand(3)
    assert [lists(part) for part in corpus.split(0.5, seed=1)] == first
    assert [lists(part) for part in corpus.split(0.5, seed=2)] != first


def test_a_split_does_not_touch_the_global_random_state():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    ragged(*[2] * 30).split(0.5, seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2, float("nan")])
def test_fractions_outside_the_unit_interval_are_refused(fraction):
    with pytest.raises(ValueError, match=f"fit_fraction {fraction} must lie between 0 and 1"):
        ragged(2, 2, 2).split(fraction)


def test_one_sequence_cannot_be_split():
    with pytest.raises(ValueError, match="1 sequence cannot be split into fit and test; give more text or a shorter"):
        ragged(5).split()


def kept_tokens(corpus: Corpus, **options) -> list[tuple[int, int]]:
    """(token, position) of every entry that enters the statistics."""
    found = []
    for batch in corpus.batches(**options):
        found += zip(batch.tokens[batch.keep].tolist(), batch.positions[batch.keep].tolist(), strict=True)
    return sorted(found)


batch_options = {"batch_size": st.integers(1, 9), "padding_side": st.sampled_from(["left", "right"])}


@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=8), **batch_options)
@PROPERTY
def test_batches_hold_every_token_once_at_its_own_position(lengths, batch_size, padding_side):
    expected = [(token, place) for ids in numbered(lengths) for place, token in enumerate(ids)]
    assert kept_tokens(ragged(*lengths), batch_size=batch_size, padding_side=padding_side) == expected


@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=8), **batch_options)
@PROPERTY
def test_what_is_skipped_does_not_depend_on_the_batches(lengths, batch_size, padding_side):
    corpus = ragged(*lengths, special_ids=range(10, 200, 3))
    options = {"skip_first": True, "skip_special": True}
    expected = [
        (token, place)
        for ids in numbered(lengths)
        for place, token in enumerate(ids)
        if place > 0 and token not in corpus.special_ids
    ]
    assert kept_tokens(corpus, batch_size=batch_size, padding_side=padding_side, **options) == expected


@pytest.mark.parametrize(
    ("side", "tokens", "positions"),
    [
        ("right", [[10, 11, 12, 13], [14, 15, 99, 99]], [[0, 1, 2, 3], [0, 1, 0, 0]]),
        ("left", [[10, 11, 12, 13], [99, 99, 14, 15]], [[0, 1, 2, 3], [0, 0, 0, 1]]),
    ],
)
def test_padding_stands_on_the_side_asked(side, tokens, positions):
    (batch,) = ragged(4, 2).batches(padding_side=side, pad_id=99)
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert torch.equal(batch.attention_mask, batch.tokens != 99)
    assert torch.equal(batch.keep, batch.attention_mask)
    assert batch.tokens.dtype == torch.long
    assert batch.padded


def test_the_mask_that_keeps_does_not_change_the_one_that_attends():
    corpus = ragged(4, 2, special_ids=[11, 15])
    (batch,) = corpus.batches(skip_first=True, skip_special=True, padding_side="left", pad_id=15)
    assert batch.attention_mask.tolist() == [[True] * 4, [False, False, True, True]]
    assert batch.keep.tolist() == [[False, False, True, True], [False] * 4]


def test_special_tokens_stay_unless_asked():
    corpus = ragged(4, special_ids=[10, 12])
    assert next(corpus.batches()).keep.all()
    assert next(corpus.batches(skip_special=True)).keep.tolist() == [[False, True, False, True]]


def test_batches_go_from_the_longest_to_the_shortest():
    shapes = [tuple(batch.tokens.shape) for batch in ragged(2, 7, 3, 9, 4).batches(2)]
    assert shapes == [(2, 9), (2, 4), (1, 2)]


def test_sequences_of_one_length_need_no_padding():
    assert not next(ragged(3, 3).batches(2)).padded


def test_batch_options_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="batch_size 0 must be 1 or more"):
        next(ragged(3).batches(0))
    with pytest.raises(ValueError, match="padding_side 'middle' must be 'left' or 'right'"):
        next(ragged(3).batches(padding_side="middle"))


def test_the_reference_prose_is_long_english_and_always_the_same():
    texts = reference_prose()
    assert texts == reference_prose()
    assert sum(map(len, texts)) > 300_000
    assert sum(" the " in text for text in texts) > len(texts) / 2
