"""Batches that a person made for a module of their own: nothing is cut, doubled, reordered or lost on the way."""

from __future__ import annotations

import pytest
import torch
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import Inputs
from tangent_lens.recording.inputs import InputCorpus


def numbered(*sizes: int) -> list[torch.Tensor]:
    """Batches of these sizes, no number twice among them."""
    numbers = iter(torch.arange(sum(sizes), dtype=torch.float64)[:, None])
    return [torch.stack([next(numbers) for _ in range(size)]) for size in sizes]


def firsts(corpus: InputCorpus) -> list[float]:
    return [float(batch.value[0]) for batch in corpus.sequences]


sizes_of_batches = st.lists(st.integers(1, 6), min_size=2, max_size=12)


@given(sizes=sizes_of_batches, limit=st.none() | st.integers(1, 15))
@PROPERTY
def test_every_batch_comes_once_in_its_order_as_the_very_object(sizes, limit):
    batches = numbered(*sizes)
    corpus = InputCorpus.of(iter(batches), max_sequences=limit)
    assert [id(batch.value) for batch in corpus.batches()] == [id(batch) for batch in batches[:limit]]
    assert corpus.tokens == sum(sizes[:limit])


@given(sizes=sizes_of_batches, share=st.floats(0.01, 0.99), seed=st.integers(0, 50))
@PROPERTY
def test_fit_and_test_share_no_batch_and_leave_none_out(sizes, share, seed):
    corpus = InputCorpus.of(numbered(*sizes), name="mine")
    fit, test = corpus.split(share, seed)
    assert sorted(firsts(fit) + firsts(test)) == firsts(corpus)
    assert firsts(fit) == sorted(firsts(fit)) and firsts(test) == sorted(firsts(test))
    assert len(fit.sequences) == min(max(round(share * len(sizes)), 1), len(sizes) - 1)
    assert fit.name == test.name == "mine"


def test_the_seed_alone_decides_the_split():
    splits = {
        seed: [firsts(part) for part in InputCorpus.of(numbered(*[2] * 12)).split(0.5, seed)] for seed in range(6)
    }
    again = {seed: [firsts(part) for part in InputCorpus.of(numbered(*[2] * 12)).split(0.5, seed)] for seed in range(6)}
    assert splits == again
    assert len({tuple(fit) for fit, _ in splits.values()}) > 3


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 100}, {"padding_side": "left", "pad_id": 3}, {}])
def test_a_batch_size_changes_nothing_of_what_the_person_made(options):
    corpus = InputCorpus.of(numbered(3, 1, 4))
    assert list(corpus.batches(**options)) == list(corpus.sequences)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(7, 2), 7),
        ((torch.zeros(5, 2), torch.zeros(3)), 5),
        ([torch.zeros(4), 2.0], 4),
        (("a name", torch.zeros(6, 1)), 6),
        ({"flag": True, "x": torch.zeros(8, 2)}, 8),
        ({"temperature": torch.tensor(0.5), "x": torch.zeros(2, 9)}, 2),
        ({"flag": True}, 1),
        (torch.tensor(3.0), 1),
        (3, 1),
    ],
    ids=str,
)
def test_the_size_is_the_first_dimension_of_the_first_tensor_that_has_one(batch, size):
    (found,) = InputCorpus.of([batch]).sequences
    assert found.size == size and found.value is batch


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        (
            torch.zeros(8, 3),
            r"a Tensor is one batch; pass a list of batches, for example \[inputs\[:8\], inputs\[8:\]\]",
        ),
        ({"x": torch.zeros(8, 3)}, r"a dict is one batch; pass a list of batches"),
        ("a text", r"a str is one batch; pass a list of batches"),
        ([], r"no batch was given; pass a list of what the module is called with"),
        (iter(()), r"no batch was given"),
    ],
)
def test_what_is_no_list_of_batches_is_refused_with_what_to_pass(batches, sentence):
    with pytest.raises(ValueError, match=sentence):
        InputCorpus.of(batches)


def test_one_batch_cannot_be_fitted_and_tested_on():
    with pytest.raises(ValueError, match=r"1 batch cannot be split into fit and test; cut it into two or more"):
        InputCorpus.of(numbered(8)).split()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2, 7])
def test_a_share_outside_0_and_1_is_refused_with_an_example(share):
    with pytest.raises(ValueError, match=rf"fit_fraction {share} must lie between 0 and 1, for example 0\.5"):
        InputCorpus.of(numbered(2, 2)).split(share)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_asks_for_nothing_is_refused_as_for_texts(limit):
    with pytest.raises(ValueError, match=rf"max_sequences {limit} asks for nothing; use 1 or more, or None for all"):
        InputCorpus.of(numbered(2, 2, 2), max_sequences=limit)


class TestMovingToAnotherDevice:
    def test_every_tensor_moves_and_the_rest_stays(self):
        named = Inputs({"x": torch.zeros(2), "flag": True, "none": None}, 5).to("meta")
        assert named.value["x"].device.type == "meta" and named.size == 5
        assert named.value["flag"] is True and named.value["none"] is None
        placed = Inputs((torch.zeros(2), "word"), 2).to("meta")
        assert placed.value[0].device.type == "meta" and placed.value[1] == "word"
        alone = Inputs(torch.zeros(2)).to("meta")
        assert alone.value.device.type == "meta"

    def test_a_list_is_called_by_place_as_a_tuple_is(self):
        assert isinstance(Inputs([torch.zeros(2), 1]).to("cpu").value, tuple)

    def test_what_has_no_tensor_stays_as_it_is(self):
        assert Inputs(3).to("meta") == Inputs(3)


class TestThroughALens:
    """``lens.corpus`` of a module, and what it refuses."""

    @pytest.fixture
    def lens(self):
        torch.manual_seed(0)
        return Lens(nn.Linear(3, 4).double(), sites={"out": ""})

    @pytest.fixture
    def batches(self):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(4)]

    def test_it_keeps_limit_and_name(self, lens, batches):
        corpus = lens.corpus(batches, max_sequences=3, name="mine")
        assert isinstance(corpus, InputCorpus)
        assert (len(corpus.sequences), corpus.tokens, corpus.name) == (3, 12, "mine")

    @pytest.mark.parametrize("option", [{"pack": True}, {"sequence_length": 8}, {"prepend_bos": False}])
    def test_options_of_texts_are_refused_by_name(self, lens, batches, option):
        (name,) = option
        for act in (lens.corpus, lens.record, lens.measure):
            options = {} if act == lens.corpus else {"loss": lambda output, batch: output.sum()}
            with pytest.raises(ValueError, match=rf"{name}: these cut texts into windows; your module is called with"):
                act(batches, **options, **option)

    @pytest.mark.parametrize("option", [{"skip_first": True}, {"skip_special": True}])
    def test_positions_cannot_be_left_out_of_what_has_none(self, lens, batches, option):
        """Silence would be worse than an error: the report's header would say that positions were left out."""
        (name,) = option
        options = {"loss": lambda output, batch: output.sum(), "progress": False} | option
        with pytest.raises(ValueError, match=name):
            lens.record(batches, **options)
        with pytest.raises(ValueError, match=name):
            lens.measure(batches, rank=1, **options)

    def test_a_corpus_it_made_can_be_handed_back(self, lens, batches):
        corpus, site = lens.corpus(batches), lens.sites[0]
        direct = lens.record(batches, gradients=False, progress=False)[site].activations
        found = lens.record(corpus, gradients=False, progress=False)[site].activations
        assert found.count == direct.count == 16
        assert torch.equal(found.scatter, direct.scatter)

    def test_one_batch_is_enough_to_record_and_too_few_to_measure(self, lens, batches):
        assert lens.record(batches[:1], gradients=False, progress=False)[lens.sites[0]].activations.count == 4
        with pytest.raises(ValueError, match=r"1 batch cannot be split into fit and test; cut it into two or more"):
            lens.measure(batches[:1], rank=1, loss=lambda output, batch: output.sum(), progress=False)
