"""A small language model trained on the spot from plain text: what remains when no model can be fetched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tangent_lens.progress import NoProgress, Progress

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the tokenizer's trainer numbers special tokens first
VOCABULARY_SIZE = 2048
CONTEXT_LENGTH = 128
BATCH_SIZE = 16
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 10
# Takes the model, its tokenizer, the steps done, and the loss of the last one (None before the first).
AfterStep = Callable[[PreTrainedModel, PreTrainedTokenizerFast, int, float | None], None]


def train_small_model(
    texts: Sequence[str],
    *,
    seconds: float | None = 60,
    steps: int | None = None,
    seed: int = 0,
    after_step: AfterStep | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Train a byte-level BPE tokenizer and then a GPT-NeoX model of about 1.3 million parameters on ``texts``.

    The same texts, seed and ``steps`` give the same model on the same machine, unless ``seconds`` cuts the training
    short. torch's global random state is left as it was.

    Args:
        texts: the training texts, each a document of its own.
        seconds: the longest the training of the model may take; the tokenizer and the set-up are not counted.
        steps: the number of training steps, each of 16 x 128 tokens. Training stops at whichever limit comes first.
        seed: decides the initial weights and which stretches of text are drawn.
        after_step: is called before the first step and after every one, with the model as it trains; its time counts as
            training.
        progress: is told of the steps, or seconds, done and of the loss.

    Returns:
        The model in evaluation mode, on the CPU in float32, and its tokenizer.

    Raises:
        TypeError: ``texts`` is a single string.
        ValueError: no limit is given, a limit is not positive, ``texts`` holds no text, or too little for one batch.
    """
    _check_limits(seconds, steps)
    progress = progress or NoProgress()
    tokenizer = _train_tokenizer(texts, progress)
    tokens = _packed_tokens(texts, tokenizer)
    model = _new_model(tokenizer, seed)

    def watch(step: int, loss: float | None) -> None:
        if after_step is not None:
            after_step(model, tokenizer, step, loss)

    steps_done = _train(model, tokens, math.inf if seconds is None else seconds, steps, seed, watch, progress)
    name = f"small-gpt-neox (trained here, {steps_done} steps, seed {seed})"
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = name
    return model.eval(), tokenizer


def _check_limits(seconds: float | None, steps: int | None) -> None:
    if seconds is None and steps is None:
        raise ValueError("Training would never end: seconds and steps are both None. Give one of them, or both.")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds is {seconds}, but must be above 0. Give more, or None and a number of steps.")
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1. Give more, or None and a number of seconds.")


def _train_tokenizer(texts: Sequence[str], progress: Progress) -> PreTrainedTokenizerFast:
    if isinstance(texts, str):
        raise TypeError("texts is a single string, but must be a sequence of texts. Put it in a list: [text].")
    if not any(text.strip() for text in texts):
        raise ValueError(f"There is nothing to train on: the {len(texts)} texts given hold no text. Give some.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    progress.start("training a tokenizer")
    try:
        tokenizer.train_from_iterator(texts, trainer)
    finally:
        progress.finish()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
    )


def _packed_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All texts one after the other, with the end-of-text token before, between and after them."""
    packed = [END_OF_TEXT_ID]
    # The backend does not warn of texts longer than the context, which is no matter here.
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts)):
        packed += [*encoding.ids, END_OF_TEXT_ID]
    needed = BATCH_SIZE * CONTEXT_LENGTH
    if len(packed) < needed:
        raise ValueError(
            f"The texts hold {len(packed):,} tokens, but one batch of {BATCH_SIZE} x {CONTEXT_LENGTH} takes "
            f"{needed:,}. Give more text."
        )
    return torch.tensor(packed)


def _new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        architectures=["GPTNeoXForCausalLM"],
    )
    # The initial weights come from the global CPU generator. torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GPTNeoXForCausalLM(config)


@torch.enable_grad()
def _train(
    model: GPTNeoXForCausalLM,
    tokens: torch.Tensor,
    seconds: float,
    steps: int | None,
    seed: int,
    watch: Callable[[int, float | None], None],
    progress: Progress,
) -> int:
    """Train until the first limit is reached and return the number of steps done."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    # With steps given, time has no say in the learning rate, so that the outcome does not depend on it.
    limit, unit = (seconds, "seconds") if steps is None else (steps, "steps")
    step, elapsed, position = 0, 0.0, 0.0
    progress.start("training a small model", limit, unit)
    try:
        began = time.monotonic()
        watch(0, None)
        while position < limit and elapsed < seconds:
            learning_rate = _learning_rate(step, position / limit)
            loss = _train_step(model, optimizer, _draw_batch(tokens, generator), learning_rate)
            step += 1
            watch(step, loss)
            elapsed = time.monotonic() - began
            reached = min(elapsed, seconds) if steps is None else step
            progress.advance(reached - position, f"loss {loss:.3f}")
            position = reached
    finally:
        progress.finish()
    return step


def _draw_batch(tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(tokens) - CONTEXT_LENGTH + 1, (BATCH_SIZE, 1), generator=generator)
    return tokens[starts + torch.arange(CONTEXT_LENGTH)]


def _learning_rate(step: int, done: float) -> float:
    """A short linear warm-up in steps, and a cosine decay to 0 over the part of the training that is ``done``."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * done)) / 2


def _train_step(
    model: GPTNeoXForCausalLM, optimizer: torch.optim.Optimizer, batch: torch.Tensor, learning_rate: float
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
