"""The model trained on the spot: repeatable, learning, and saved and loaded like any other."""

from __future__ import annotations

import time
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangent_lens.models.small import train_small_model

TEXTS = list(topics.values())
SOME_TEXTS = TEXTS[:12]


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small wait for each other's threads for seconds when other work keeps a core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RecordedProgress:
    """Keeps the tasks as started, the amounts of the last one, and every loss told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, float | None, str]] = []
        self.amounts: list[float] = []
        self.losses: list[float] = []
        self.finished = 0

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        self.started.append((description, total, unit))
        self.amounts = []

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        self.amounts.append(amount)
        self.losses.append(float(note.removeprefix("loss ")))

    def finish(self) -> None:
        self.finished += 1


def test_same_steps_and_seed_give_the_same_model():
    first, first_tokenizer = train_small_model(SOME_TEXTS, steps=5, seconds=None)
    torch.rand(7)
    second, second_tokenizer = train_small_model(SOME_TEXTS, steps=5, seconds=None)
    other, _ = train_small_model(SOME_TEXTS, steps=5, seconds=None, seed=1)
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    for name, values in first.state_dict().items():
        assert torch.equal(values, second.state_dict()[name]), name
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_loss_falls_within_sixty_steps():
    progress = RecordedProgress()
    model, tokenizer = train_small_model(TEXTS, steps=60, seconds=None, progress=progress)
    assert progress.started[-1] == ("training a small model", 60, "steps")
    assert progress.amounts == [1] * 60
    assert progress.finished == len(progress.started)
    assert progress.losses[0] > 7
    assert progress.losses[-1] < progress.losses[0] - 1.5
    assert len(tokenizer) == 2048
    assert 1.2e6 < model.num_parameters() < 1.4e6


def test_every_step_is_told_and_changes_nothing():
    told = []

    def after_step(model, tokenizer, step, loss):
        assert len(tokenizer) == model.config.vocab_size and model.training
        told.append((step, loss, model.gpt_neox.final_layer_norm.bias.detach().clone()))

    progress = RecordedProgress()
    plain, _ = train_small_model(SOME_TEXTS, steps=3, seconds=None, progress=progress)
    watched, _ = train_small_model(SOME_TEXTS, steps=3, seconds=None, after_step=after_step)
    steps, losses, biases = zip(*told, strict=True)
    assert steps == (0, 1, 2, 3)
    assert losses[0] is None and [round(loss, 3) for loss in losses[1:]] == progress.losses
    assert not biases[0].any() and len({bias.sum().item() for bias in biases}) == 4
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name


def test_seconds_end_the_training():
    progress = RecordedProgress()
    began = time.monotonic()
    train_small_model(SOME_TEXTS, seconds=0.01, progress=progress)
    assert progress.started[-1] == ("training a small model", 0.01, "seconds")
    assert sum(progress.amounts) == pytest.approx(0.01)
    train_small_model(SOME_TEXTS, seconds=0.01, steps=1_000_000)
    assert time.monotonic() - began < 60


def test_global_random_state_is_untouched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_small_model(SOME_TEXTS, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_trains_where_gradients_are_off():
    with torch.no_grad():
        progress = RecordedProgress()
        train_small_model(SOME_TEXTS, steps=2, seconds=None, progress=progress)
        assert len(progress.losses) == 2
        assert not torch.is_grad_enabled()


def test_model_and_tokenizer_survive_saving(tmp_path):
    model, tokenizer = train_small_model(SOME_TEXTS, steps=1, seed=3)
    assert not model.training
    assert model.config.architectures == ["GPTNeoXForCausalLM"]
    assert model.name_or_path == model.config.name_or_path == "small-gpt-neox (trained here, 1 steps, seed 3)"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded_model, loaded_tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    text = "Two  spaces,\n\ta tab and café 😀"
    tokens = tokenizer(text)["input_ids"]
    assert loaded_tokenizer(text)["input_ids"] == tokens
    assert loaded_tokenizer.decode(tokens) == tokenizer.decode(tokens) == text
    assert loaded_tokenizer.bos_token_id == loaded_tokenizer.eos_token_id == loaded_tokenizer.pad_token_id == 0
    with torch.no_grad():
        inputs = torch.tensor([tokens])
        assert torch.equal(loaded_model(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize("texts", [[], ["", "  \n"]])
def test_empty_texts_are_refused(texts):
    with pytest.raises(ValueError, match=f"the {len(texts)} texts given hold no text"):
        train_small_model(texts, steps=1)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"hold \d+ tokens, but one batch of 16 x 128 takes 2,048"):
        train_small_model(["A short text.", "And another."], steps=1)


def test_a_single_string_is_refused():
    with pytest.raises(TypeError, match="a single string"):
        train_small_model(TEXTS[0], steps=1)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"seconds": None, "steps": None}, "both None"),
        ({"seconds": 0}, "seconds is 0, but must be above 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"steps": 0}, "steps is 0, but must be at least 1"),
    ],
)
def test_impossible_limits_are_refused(limits, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_small_model(SOME_TEXTS, **limits)
