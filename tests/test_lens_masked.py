"""Masked language models end to end: measured behind their masks, whatever the batches; against plain forward passes."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from functools import cache

import pytest
import torch
from conformance.families import FAMILIES, NotInThisVersion, tiny_model
from model_snapshot import Snapshot, unusual_state
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tangent_lens as tln
from tangent_lens.lens import Lens
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.reports.console import as_text
from tangent_lens.sites import Site

# Their first ids are special; RoBERTa counts positions by its padding id, which stands in the texts like any word.
MASKED = ("bert", "roberta", "modernbert", "eurobert")
MASK, SPECIAL, FIRST_WORD, VOCABULARY = 4, frozenset(range(5)), 5, 100
LOSS = MaskedLoss(share=0.3, mask_id=MASK, special_ids=SPECIAL)
RANK = 3


def sequences(count: int = 14, seed: int = 0) -> list[list[int]]:
    """Between two special tokens some words, and now and then a special token among them; all of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(FIRST_WORD, VOCABULARY, (4 + 2 * n,), generator=generator).tolist() for n in range(count)]
    for sequence in drawn[::3]:
        sequence[len(sequence) // 2] = 1
    return [[0, *sequence, 2] for sequence in drawn]


def model_of(name: str):
    try:
        return tiny_model(name)
    except NotInThisVersion as missing:
        pytest.skip(str(missing))


def tolerance_of(name: str) -> float:
    """Norms in float32 round differently in a batch of another shape."""
    return 1e-8 if FAMILIES[name].exact else 1e-3


def measured(name: str, **options):
    asked = {"rank": RANK, "controls": 4, "loss": LOSS, "progress": False} | options
    return Lens(model_of(name)).measure(sequences(), **asked)


@cache
def report_of(name: str):
    return measured(name)


def numbers_of(report) -> dict[tuple[str, ...], float]:
    found = {("loss",): report.corpus.loss}
    for one in report.measurements:
        for part in ("energy", "isotropy"):
            for field, value in asdict(getattr(one, part)).items():
                for place, number in enumerate(value if isinstance(value, tuple) else (value,)):
                    found[one.name, part, field, str(place)] = number
    for space in report.spaces:
        found[space.site, "iso"], found[space.site, "share"] = space.iso_score, space.variance_share
    return found


def assert_same_numbers(found, expected, tolerance: float) -> None:
    found, expected = numbers_of(found), numbers_of(expected)
    assert found.keys() == expected.keys() and len(found) > 30
    for place, value in expected.items():
        assert found[place] is value or found[place] == pytest.approx(value, rel=tolerance, abs=tolerance), place


def plain(name: str, tokens: list[torch.Tensor], targets: list[torch.Tensor] | None = None):
    """Each sequence alone, without padding or mask: rows of the inner layers, and what the summed loss leaves behind."""
    model = model_of(name)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    slopes: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    total, count = 0.0, 0
    for place, ids in enumerate(tokens):
        counted = {"position_ids": torch.arange(len(ids))[None] + 2} if name == "roberta" else {}
        output = model(input_ids=ids[None], output_hidden_states=True, **counted)
        for layer in rows:
            output.hidden_states[layer + 1].retain_grad()
            rows[layer].append(output.hidden_states[layer + 1].detach()[0])
        if targets is None:
            continue
        wanted = (targets[place] != -100).nonzero().flatten().tolist()
        loss = -sum(output.logits[0, at].log_softmax(-1)[targets[place][at]] for at in wanted)
        loss.backward()
        total, count = total + float(loss.detach()), count + len(wanted)
        for layer in rows:
            slopes[layer].append(output.hidden_states[layer + 1].grad[0])
    together = [{layer: torch.cat(parts) for layer, parts in kind.items() if parts} for kind in (rows, slopes)]
    return (*together, total, count, model)


def masked(halves) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a masked model reads and what it shall say, sequence by sequence (test_masking.py looks at the choice itself)."""
    loss, found = LOSS.for_model(None, VOCABULARY), []
    for sequence in halves:
        (batch,) = Corpus.from_tokens([sequence.tolist()]).batches(1)
        found.append(loss.prepare(batch))
    return [one.tokens[0] for one in found], [one.targets[0] for one in found]


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    scale = float(expected.abs().max())
    return scale > 0 and float((found - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("name", MASKED)
class TestEveryFamily:
    @pytest.mark.parametrize(
        "options", [{"batch_size": 1}, {"batch_size": 3, "padding_side": "left"}, {"padding_side": "left"}]
    )
    def test_neither_batch_size_nor_padding_side_changes_a_number(self, name, options):
        assert_same_numbers(measured(name, **options), report_of(name), tolerance_of(name))

    def test_the_same_run_twice_is_the_same_report(self, name):
        again, first = measured(name).to_dict(), report_of(name).to_dict()
        assert {**again, "created": ""} == {**first, "created": ""}

    def test_the_loss_is_the_mean_over_masked_tokens(self, name):
        _, test = Corpus.from_tokens(sequences()).split(0.5, 0)
        *_, total, count, _ = plain(name, *masked(test.sequences))
        report = report_of(name)
        assert report.corpus.loss == pytest.approx(total / count, rel=tolerance_of(name) / 100)
        assert report.corpus.test_tokens == test.tokens > 3 * count

    def test_gradients_and_activations_behind_the_masks(self, name):
        tokens, targets = masked(Corpus.from_tokens(sequences()).sequences)
        rows, slopes, *_ = plain(name, tokens, targets)
        found = Lens(model_of(name)).record(sequences(), "resid_post.0:2", loss=LOSS, progress=False)
        for layer in (0, 1):
            moments, tolerance = found[Site("resid_post", layer)], tolerance_of(name)
            assert moments.activations.count == moments.gradients.count == sum(map(len, sequences()))
            assert near(moments.activations.second_moment(), rows[layer].T @ rows[layer], tolerance)
            assert near(moments.gradients.second_moment(), slopes[layer].T @ slopes[layer], tolerance)

    def test_without_gradients_nothing_is_masked(self, name):
        raw = [torch.tensor(sequence) for sequence in sequences()]
        rows, *_ = plain(name, raw)
        behind, *_ = plain(name, masked(Corpus.from_tokens(sequences()).sequences)[0])
        options = {"gradients": False, "progress": False}
        for asked in ({}, {"loss": LOSS}):
            found = Lens(model_of(name)).record(sequences(), "resid_post.0:2", **options, **asked)
            for layer in (0, 1):
                moments = found[Site("resid_post", layer)].activations
                assert near(moments.second_moment(), rows[layer].T @ rows[layer], tolerance_of(name))
                assert not near(moments.second_moment(), behind[layer].T @ behind[layer], 10 * tolerance_of(name))

    def test_proxies_are_fitted_behind_the_masks_too(self, name):
        fit, _ = Corpus.from_tokens(sequences()).split(0.5, 0)
        rows, *_ = plain(name, masked(fit.sequences)[0])
        for layer in (0, 1):
            _, directions = torch.linalg.eigh(torch.cov(rows[layer].T))
            leading, basis = directions[:, -RANK:], report_of(name).subspaces[f"resid_post.{layer}"].basis
            assert near(basis @ basis.T, leading @ leading.T, 100 * tolerance_of(name))

    def test_weight_gradients_are_those_of_the_parameters(self, name):
        _, test = Corpus.from_tokens(sequences()).split(0.5, 0)
        *_, model = plain(name, *masked(test.sequences))
        path = {
            "bert": "bert.encoder.layer.1.attention.self.query",
            "roberta": "roberta.encoder.layer.1.attention.self.query",
            "modernbert": "model.layers.1.attn.Wqkv",
            "eurobert": "model.layers.1.self_attn.q_proj",
        }[name]
        gradient = model.get_submodule(path).weight.grad[:32]
        one = report_of(name).of("query.1")
        basis = report_of(name).subspaces[one.fit_site].basis
        share = float((gradient @ basis).square().sum() / gradient.square().sum())
        assert one.energy.energy == pytest.approx(share, rel=tolerance_of(name))

    def test_the_report_names_the_loss_and_keeps_the_name(self, name, tmp_path):
        report = report_of(name)
        assert report.settings.loss == LOSS.name == "masked-token (0.3 of the tokens, 80/10/10, seed 0)"
        assert report.corpus.loss_unit == "masked token"
        report.save(tmp_path)
        again = tln.Report.load(tmp_path)
        assert (again.settings, again.corpus) == (report.settings, report.corpus)
        assert again.measurements == report.measurements
        for shown in (report, again):
            header = " ".join(as_text(shown, width=160).split())
            assert f"{LOSS.name} loss {report.corpus.loss:.3f} nats a masked token" in header
            assert as_text(shown, width=80)

    def test_the_model_comes_back_as_it_was(self, name):
        model = model_of(name)
        unusual_state(model)
        before = Snapshot.of(model)
        Lens(model).measure(sequences(), "resid_post.1", rank=RANK, controls=1, loss=LOSS, progress=False)
        before.assert_unchanged(model)


class TestSeeds:
    def test_the_seed_of_the_run_is_that_of_the_masks(self):
        model = model_of("bert")
        tokenizer = make_tokenizer()
        names = {seed: Lens(model, tokenizer).measure(TEXTS, seed=seed, **QUICK).settings.loss for seed in (0, 3)}
        assert names == {seed: f"masked-token (0.15 of the tokens, 80/10/10, seed {seed})" for seed in (0, 3)}

    def test_a_loss_keeps_a_seed_of_its_own(self):
        report = measured("bert", loss=dataclasses.replace(LOSS, seed=7), seed=3, sites="resid_post.1")
        assert report.settings.loss.endswith("seed 7)") and report.settings.seed == 3

    def test_seed_share_and_style_change_the_loss(self):
        losses = {report_of("bert").corpus.loss}
        for change in ({"seed": 1}, {"share": 0.5}, {"style": "plain"}):
            losses.add(measured("bert", loss=dataclasses.replace(LOSS, **change), sites="resid_post.1").corpus.loss)
        assert len(losses) == 4

    def test_the_masks_of_a_loss_with_a_seed_do_not_follow_the_seed_of_the_run(self):
        lens = Lens(model_of("bert"))
        for loss, same in ((LOSS, True), ("masked", False)):
            lens = Lens(model_of("bert"), make_tokenizer())
            runs = [lens.record(sequences(), "resid_post.1", loss=loss, seed=seed, progress=False) for seed in (0, 5)]
            first, second = (moments.gradients.square_total() for found in runs for moments in found.values())
            assert (first == second) == same


SPECIAL_WORDS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
WORDS = {word: number for number, word in enumerate((*SPECIAL_WORDS, *map(str, range(FIRST_WORD, VOCABULARY))))}
TEXTS = [" ".join(list(WORDS)[one] for one in sequence[1:-1]) for sequence in sequences()]
QUICK = {"sites": "resid_post.1", "rank": RANK, "controls": 2, "progress": False}


def make_tokenizer(mask: bool = True) -> PreTrainedTokenizerFast:
    """A word is a number and its own id; special tokens stand around every text."""
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [("<s>", 0), ("</s>", 2)]
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    special = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL_WORDS, strict=True))
    if not mask:
        del special["mask_token"]
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class TestTokenizers:
    def test_a_tokenizer_says_what_the_mask_is(self):
        report = Lens(model_of("bert"), make_tokenizer()).measure(TEXTS, **QUICK)
        loss = MaskedLoss(mask_id=4, special_ids=frozenset({0, 1, 2, 3}))
        expected = Lens(model_of("bert")).measure(sequences(), loss=loss, **QUICK)
        assert report.settings.loss == loss.name
        assert report.measurements == expected.measurements and report.corpus.loss == expected.corpus.loss
        for asked in ("masked", MaskedLoss()):
            again = Lens(model_of("bert"), make_tokenizer()).measure(TEXTS, loss=asked, **QUICK)
            assert again.measurements == report.measurements

    def test_without_a_mask_token_the_sentence_says_how_to_give_one(self):
        for lens in (Lens(model_of("bert"), make_tokenizer(mask=False)), Lens(model_of("bert"))):
            with pytest.raises(ValueError, match=r"no mask token is known.*loss=MaskedLoss\(mask_id=\.\.\.\)"):
                lens.measure(sequences(), **QUICK)
            assert lens.measure(sequences(), loss=MaskedLoss(mask_id=4), **QUICK).corpus.loss > 0

    def test_special_tokens_left_out_are_those_of_the_text_and_not_the_masks(self):
        lens = Lens(model_of("bert"), make_tokenizer())
        words = sum(one not in (0, 1, 2, 3, 4) for sequence in sequences() for one in sequence)
        every = sum(map(len, sequences()))
        for skip, rows in ((True, words), (False, every)):
            (moments,) = lens.record(TEXTS, "resid_post.1", skip_special=skip, progress=False).values()
            assert moments.gradients.count == moments.activations.count == rows
        assert words < every - 2 * len(TEXTS)

    def test_padding_with_the_tokenizers_own_token_is_never_masked_or_counted(self):
        """RoBERTa's positions depend on the padding id."""
        for name in ("bert", "roberta"):
            lens = Lens(model_of(name), make_tokenizer())
            found = [lens.measure(TEXTS, batch_size=size, **QUICK) for size in (1, 14)]
            assert found[0].corpus.loss == pytest.approx(found[1].corpus.loss, rel=1e-10)
            assert_same_numbers(*found, tolerance=1e-7)


def test_a_causal_loss_of_a_masked_model_is_refused_and_so_is_the_reverse():
    with pytest.raises(
        ValueError, match=r"causal loss was asked for, and BertForMaskedLM is a masked language model; leave loss"
    ):
        measured("bert", loss="causal")
    with pytest.raises(ValueError, match=r"masked loss was asked for, and LlamaForCausalLM is a causal language model"):
        Lens(tiny_model("llama")).record(sequences(), loss=LOSS, progress=False)
