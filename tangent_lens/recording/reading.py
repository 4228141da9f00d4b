"""From whatever a person hands over, texts, token ids or the inputs of a module, to a corpus."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tangent_lens.recording.corpus import TEXT_WINDOW, Corpus

# A mapping is what a HuggingFace tokenizer returns: input_ids and attention_mask.
Texts = str | Mapping[str, Any] | Iterable[str] | Iterable[Sequence[int]] | Tensor | Corpus


def read_corpus(
    texts: Texts,
    tokenizer: Any,
    *,
    sequence_length: int | None = None,
    pack: bool = False,
    max_sequences: int | None = None,
    prepend_bos: bool | None = None,
    name: str = "texts",
) -> Corpus:
    """Texts or token ids as sequences.

    Args:
        texts: a text, texts, token ids, or a :class:`Corpus`.
        tokenizer: for texts; None where there is none.
        sequence_length: longest window: 128 tokens for texts; token ids stay as they are unless it is given.
        pack, prepend_bos: of texts only; see :meth:`Corpus.from_texts`.
        max_sequences: no more than these.
        name: what a report calls them.

    Raises:
        ValueError: nothing to read, texts without a tokenizer, or options that token ids cannot follow.
    """
    found = _token_ids(texts, tokenizer, name)
    if isinstance(found, Corpus):
        if pack or prepend_bos is not None:
            raise ValueError("pack and prepend_bos are for texts; token ids are sequences already, so leave them out")
        return found.limited(sequence_length, max_sequences)
    if tokenizer is None:
        raise ValueError(
            "this model came without a tokenizer; pass Lens(model, tokenizer=...), or token ids instead of texts"
        )
    return Corpus.from_texts(
        found,
        tokenizer,
        sequence_length=TEXT_WINDOW if sequence_length is None else sequence_length,
        pack=pack,
        max_sequences=max_sequences,
        prepend_bos=prepend_bos,
        name=name,
    )


def _token_ids(texts: Texts, tokenizer: Any, name: str) -> Corpus | str | Iterable[str]:
    """The corpus of token ids, or the texts if texts they are; only the first item is looked at."""
    if isinstance(texts, (Corpus, str)):
        return texts
    special = () if tokenizer is None else tuple(tokenizer.all_special_ids)
    if isinstance(texts, Mapping) and "input_ids" in texts:
        encoded: Mapping[Any, Any] = texts
        mask = encoded.get("attention_mask")
        return Corpus.from_tokens(torch.as_tensor(encoded["input_ids"]), mask, name=name, special_ids=special)
    if isinstance(texts, (Mapping, os.PathLike)) or hasattr(texts, "columns"):
        raise ValueError(
            f"a {type(texts).__name__} is no list of texts; pass the texts themselves, for example table['text'] or "
            "path.read_text(), or token ids"
        )
    if isinstance(texts, Tensor):
        return Corpus.from_tokens(texts, name=name, special_ids=special)
    items: Iterator[Any] = iter(texts)
    first = next(items, None)
    if first is None:
        raise ValueError("no text was given; pass a string, a list of strings, or token ids")
    whole = itertools.chain([first], items)
    return whole if isinstance(first, str) else Corpus.from_tokens(whole, name=name, special_ids=special)  # pyright: ignore[reportArgumentType]
