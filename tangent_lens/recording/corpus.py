"""From texts to token batches: windows, padding, special tokens, the split into fit and test sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tangent_lens.models.protocol import Batch

# The longest window of a text, in tokens, unless a person says otherwise.
TEXT_WINDOW = 128


@dataclass(frozen=True)
class Corpus:
    """Token sequences ready for a model.

    Attributes:
        sequences: one array of token ids each, of 2 tokens or more.
        name: what a report calls it.
        special_ids: ids that ``skip_special`` leaves out of the statistics.
        left_out: what did not become a sequence, in sentences.
        begins_with: the special tokens that every window begins with, as text; "" for none.
    """

    sequences: tuple[np.ndarray, ...]
    name: str = "tokens"
    special_ids: frozenset[int] = frozenset()
    left_out: tuple[str, ...] = field(default=())
    begins_with: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @classmethod
    def from_texts(
        cls,
        texts: str | Iterable[str],
        tokenizer: Any,
        *,
        sequence_length: int = TEXT_WINDOW,
        pack: bool = False,
        max_sequences: int | None = None,
        prepend_bos: bool | None = None,
        name: str = "texts",
    ) -> Corpus:
        """Cut texts into windows of at most ``sequence_length`` tokens.

        Args:
            texts: one text or any iterable of texts; it is read only as far as ``max_sequences`` asks.
            tokenizer: a HuggingFace tokenizer.
            sequence_length: longest window, special tokens included.
            pack: False (default): no window holds tokens of two texts. True: the texts follow one another,
                separated by the end-of-text token where the tokenizer has one, so that every window but the last is full.
            max_sequences: stop after this many windows.
            prepend_bos: begin every window with the beginning-of-text token; None does what the tokenizer does by itself.
            name: what a report calls the corpus.

        Raises:
            ValueError: no text, only empty texts, windows too short, or no beginning-of-text token to prepend.
        """
        before, after = _special_affixes(tokenizer, prepend_bos)
        room = sequence_length - len(before) - len(after)
        if room < 1 or sequence_length < 2:
            least = max(2, 1 + len(before + after))
            raise ValueError(f"sequence_length {sequence_length} leaves no room for 2 tokens; use at least {least}")
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences {max_sequences} asks for nothing; use 1 or more, or None for all")
        streams = _token_streams(texts, tokenizer, pack)
        windows = (np.array(before + piece + after, dtype=np.int32) for piece in _windows(streams, room))
        corpus = cls._of(itertools.islice(windows, max_sequences), name, frozenset(tokenizer.all_special_ids))
        return replace(corpus, begins_with=tokenizer.decode(before) if before else "")

    @classmethod
    def from_tokens(
        cls,
        tokens: Int[Tensor, "batch pos"] | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        *,
        name: str = "tokens",
        special_ids: Iterable[int] = (),
    ) -> Corpus:
        """Sequences that are token ids already: a tensor (with its mask, if padded) or lists of any lengths.

        Raises:
            ValueError: ids that are not integers, a mask of another shape, or no sequence of 2 tokens.
        """
        if attention_mask is not None:
            attention_mask = torch.as_tensor(attention_mask)
            if not isinstance(tokens, Tensor) or tokens.shape != attention_mask.shape:
                raise ValueError("an attention mask needs a token tensor of the same shape (batch, position)")
            rows: Iterable[Any] = (row[kept.bool()] for row, kept in zip(tokens, attention_mask, strict=True))
        else:
            rows = tokens[None] if isinstance(tokens, Tensor) and tokens.ndim == 1 else tokens
        return cls._of((_as_ids(row) for row in rows), name, frozenset(int(i) for i in special_ids))

    @classmethod
    def _of(cls, windows: Iterable[np.ndarray], name: str, special_ids: frozenset[int]) -> Corpus:
        every = list(windows)
        sequences = tuple(window for window in every if len(window) >= 2)
        short = len(every) - len(sequences)
        if not sequences:
            what = f"only {short} sequences of fewer than 2 tokens" if short else "no tokens at all"
            raise ValueError(f"the corpus {name!r} holds {what}; give text with at least 2 tokens in a sequence")
        left_out = (f"{short} sequences of fewer than 2 tokens left out: they have no next token",) if short else ()
        return cls(sequences, name, special_ids, left_out)

    def warnings(self, prepend_bos: bool | None) -> tuple[str, ...]:
        """Sentences on what a reader may not expect of the sequences.

        Args:
            prepend_bos: what the person asked for; None leaves it to the tokenizer.
        """
        if not self.begins_with or prepend_bos is not None:
            return self.left_out
        return (
            *self.left_out,
            f"every sequence begins with the special token {self.begins_with!r}, the beginning-of-text token this tokenizer "
            "sets by itself (the tokenizer of a TransformerLens model always does); prepend_bos=False leaves it out",
        )

    def limited(self, sequence_length: int | None = None, max_sequences: int | None = None) -> Corpus:
        """The same sequences, cut into windows of at most ``sequence_length`` tokens, and no more than ``max_sequences``.

        Raises:
            ValueError: limits that leave nothing.
        """
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences {max_sequences} asks for nothing; use 1 or more, or None for all")
        if sequence_length is None:
            return replace(self, sequences=self.sequences[:max_sequences])
        if sequence_length < 2:
            raise ValueError(f"sequence_length {sequence_length} leaves no room for 2 tokens; use at least 2")
        windows = (
            sequence[start : start + sequence_length]
            for sequence in self.sequences
            for start in range(0, len(sequence), sequence_length)
        )
        cut = Corpus._of(itertools.islice(windows, max_sequences), self.name, self.special_ids)
        return replace(cut, left_out=(*self.left_out, *cut.left_out), begins_with=self.begins_with)

    def split(self, fit_fraction: float = 0.5, seed: int = 0) -> tuple[Corpus, Corpus]:
        """Disjoint fit and test sequences, chosen by the seed alone.

        Raises:
            ValueError: a fraction outside (0, 1), or too few sequences for two parts.
        """
        parts = split_places(
            len(self.sequences), fit_fraction, seed, "sequence", "give more text or a shorter sequence_length"
        )
        fit, test = (tuple(self.sequences[index] for index in part) for part in parts)
        return replace(self, sequences=fit), replace(self, sequences=test)

    def batches(
        self,
        batch_size: int = 8,
        *,
        padding_side: str = "right",
        pad_id: int = 0,
        skip_first: bool = False,
        skip_special: bool = False,
    ) -> Iterator[Batch]:
        """Batches of sequences of similar length, the longest first (so that memory peaks at once).

        Args:
            batch_size: sequences in a batch. No result depends on it beyond rounding.
            padding_side: ``right`` or ``left``; no result depends on it beyond rounding.
            pad_id: what stands at padding; the mask hides it.
            skip_first: leave the first position of each sequence out of the statistics.
            skip_special: leave special tokens out of the statistics.

        Raises:
            ValueError: a batch size below 1 or an unknown padding side.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be 1 or more")
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side {padding_side!r} must be 'left' or 'right'")
        skipped = self.special_ids if skip_special else frozenset()
        ordered = sorted(self.sequences, key=len, reverse=True)
        cuts = (ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size))
        return (_pad(cut, padding_side, pad_id, skip_first, skipped) for cut in cuts)


def split_places(total: int, fit_fraction: float, seed: int, what: str, way_out: str) -> tuple[list[int], list[int]]:
    """Which of ``total`` places are fitted on and which are tested on, chosen by the seed alone.

    Raises:
        ValueError: a fraction outside (0, 1), or fewer than two places.
    """
    if not 0 < fit_fraction < 1:
        raise ValueError(f"fit_fraction {fit_fraction} must lie between 0 and 1, for example 0.5")
    if total < 2:
        raise ValueError(f"{total} {what} cannot be split into fit and test; {way_out}")
    fitted = min(max(round(total * fit_fraction), 1), total - 1)
    order = np.random.default_rng(seed).permutation(total)
    return sorted(order[:fitted].tolist()), sorted(order[fitted:].tolist())


def reference_prose() -> list[str]:
    """English prose that every Python carries: the reference manual behind ``help()`` (465,000 characters)."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def _pad(sequences: Sequence[np.ndarray], side: str, pad_id: int, skip_first: bool, skipped: frozenset[int]) -> Batch:
    longest = max(len(sequence) for sequence in sequences)
    shape = (len(sequences), longest)
    tokens = torch.full(shape, pad_id, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(shape, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        length = len(sequence)
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        tokens[row, place] = torch.from_numpy(sequence.astype(np.int64))
        mask[row, place] = True
        positions[row, place] = torch.arange(length)
    keep = mask & (positions > 0) if skip_first else mask.clone()
    if skipped:
        keep &= ~torch.isin(tokens, torch.tensor(sorted(skipped)))
    return Batch(tokens, mask, positions, keep)


def _special_affixes(tokenizer: Any, prepend_bos: bool | None) -> tuple[list[int], list[int]]:
    """The special tokens that stand before and after every window."""
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), 0)
    before, after = list(whole[:start]), list(whole[start + len(probe) :])
    bos = tokenizer.bos_token_id
    if prepend_bos and bos not in before:
        if bos is None:
            raise ValueError(
                "prepend_bos=True, but this tokenizer has no beginning-of-text token; leave prepend_bos out"
            )
        before = [bos, *before]
    if prepend_bos is False:
        before = [token for token in before if token != bos]
    return before, after


def _token_streams(texts: str | Iterable[str], tokenizer: Any, pack: bool) -> Iterator[Iterator[int]]:
    texts = [texts] if isinstance(texts, str) else texts

    def ids_of(text: Any) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a text must be a string, not {type(text).__name__}; token ids go to Corpus.from_tokens")
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []

    if not pack:
        return (iter(ids_of(text)) for text in texts)
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return iter([itertools.chain.from_iterable(ids + separator for text in texts if (ids := ids_of(text)))])


def _windows(streams: Iterable[Iterator[int]], room: int) -> Iterator[list[int]]:
    for stream in streams:
        while window := list(itertools.islice(stream, room)):
            yield window


def _as_ids(row: Any) -> np.ndarray:
    ids = np.asarray(row.cpu() if isinstance(row, Tensor) else row)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"a token sequence must be a list of integer ids, not {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise ValueError(f"token ids run from {ids.min()} to {ids.max()}; no vocabulary holds them")
    return ids.astype(np.int32)
