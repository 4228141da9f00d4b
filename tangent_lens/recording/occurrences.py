"""Some occurrences of some tokens, chosen before the model runs, so that what will be kept is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tangent_lens.models.protocol import Batch
from tangent_lens.recording.row_choice import RowChoice, mixed


@dataclass(frozen=True, eq=False)
class Occurrences:
    """Equally many occurrences of every chosen token.

    Attributes:
        buckets: the chosen tokens by how often they occur, the rarest first.
        counts: how often each of them occurs in the corpus, bucket by bucket.
        sequences, positions: where the chosen occurrences stand (n,), in the order in which batches bring them.
        tokens: which token each of them is (n,).
        each: occurrences a token.
        eligible: how many tokens had so many.
        seed: of the choice.
    """

    buckets: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    sequences: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    each: int
    eligible: int
    seed: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def chosen(self) -> tuple[int, ...]:
        """All chosen tokens, the rarest first."""
        return tuple(token for bucket in self.buckets for token in bucket)

    def only(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, of which only these occurrences enter the statistics.

        Args:
            batches: of the corpus that they were chosen from, read from the start.
        """
        first = 0
        for batch in batches:
            size = len(batch.tokens)
            begin, end = np.searchsorted(self.sequences, [first, first + size])
            rows = torch.from_numpy(self.sequences[begin:end] - first)
            # Padding may be on either side: a position counts from its own sequence's first token.
            places = batch.attention_mask.long().argmax(dim=1)[rows] + torch.from_numpy(self.positions[begin:end])
            keep = torch.zeros_like(batch.keep)
            keep[rows, places] = True
            yield replace(batch, keep=keep)
            first += size


def choose_occurrences(
    batches: Iterable[Batch], each: int, *, buckets: int = 3, tokens: int = 15, seed: int = 0
) -> Occurrences:
    """Tokens that occur often enough, and so many occurrences of each.

    Tokens are ordered by how often they occur and cut into buckets of equally many; which of a bucket are taken, and which of
    their occurrences, depends on the seed and the sequences alone.

    Args:
        batches: of a corpus; only kept positions count.
        each: occurrences of each token; tokens with fewer are left out, of those with more so many are drawn.
        buckets: of frequency.
        tokens: of each bucket, at most.

    Raises:
        ValueError: numbers below 1, or fewer tokens than buckets.
    """
    if min(each, buckets, tokens) < 1:
        raise ValueError(f"{each} occurrences of {tokens} tokens in {buckets} buckets: all must be 1 or more")
    ids, sequences, positions, numbers = _places(batches, seed)
    found, counts = np.unique(ids, return_counts=True)
    enough = counts >= each
    if enough.sum() < buckets:
        most = int(counts.max()) if len(counts) else 0
        raise ValueError(
            f"{int(enough.sum())} tokens occur {each} times or more (the most frequent {most} times), and {buckets} buckets need "
            "one each; ask for fewer occurrences or buckets, or give more text"
        )
    order = np.lexsort((found[enough], counts[enough]))
    cuts = np.array_split(found[enough][order], buckets)
    chosen = tuple(_some(cut, tokens, seed) for cut in cuts)
    count_of = dict(zip(found.tolist(), counts.tolist(), strict=True))
    kept = np.concatenate([_smallest(ids, numbers, token, each) for bucket in chosen for token in bucket])
    kept = kept[np.lexsort((positions[kept], sequences[kept]))]
    return Occurrences(
        buckets=chosen,
        counts=tuple(tuple(count_of[token] for token in bucket) for bucket in chosen),
        sequences=sequences[kept],
        positions=positions[kept],
        tokens=ids[kept],
        each=each,
        eligible=int(enough.sum()),
        seed=seed,
    )


def _places(batches: Iterable[Batch], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Token, sequence, position and random number of every kept position."""
    found: list[tuple[np.ndarray, ...]] = []
    first = 0
    for batch in batches:
        choice = RowChoice.of(batch, first)
        rows = batch.tokens[..., None]
        kept = (
            choice.row_tokens(rows),
            choice.row_sequences(rows),
            choice.row_positions(),
            choice.row_numbers(rows, seed),
        )
        found.append(tuple(one.numpy() for one in kept))
        first += len(batch.tokens)
    if not found:
        raise ValueError("the corpus is empty, so no token occurs; give some text")
    ids, sequences, positions, numbers = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return ids, sequences, positions, numbers


def _some(tokens: np.ndarray, most: int, seed: int) -> tuple[int, ...]:
    """At most so many, by random numbers of the tokens themselves; in the order given."""
    numbers = mixed(tokens.astype(np.uint64) ^ mixed(np.array([seed % 2**64], dtype=np.uint64)))
    kept = np.sort(np.argsort(numbers, kind="stable")[:most])
    return tuple(int(one) for one in tokens[kept])


def _smallest(ids: np.ndarray, numbers: np.ndarray, token: int, each: int) -> np.ndarray:
    own = np.flatnonzero(ids == token)
    return own[np.argsort(numbers[own], kind="stable")[:each]]


def clouds_of(rows: torch.Tensor, tokens: np.ndarray | torch.Tensor, chosen: Sequence[int]) -> dict[int, torch.Tensor]:
    """The rows of every token, in the order in which they came."""
    ids = torch.as_tensor(tokens)
    return {token: rows[ids == token] for token in chosen}
