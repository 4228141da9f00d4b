"""From a model's attention calls to the tangent dominance of every layer, in one pass of a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.attention_layer import LayerAttention
from tangent_lens.measures.attention_report import AttentionSettings
from tangent_lens.measures.attention_rows import ChosenRows
from tangent_lens.measures.enrichment import FrequencyBuckets
from tangent_lens.measures.frequency import token_frequencies
from tangent_lens.models.attention import AttentionCall, AttentionReader
from tangent_lens.models.protocol import Batch, Model
from tangent_lens.models.state import evaluation_mode
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.passes import passing
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.taps import SiteNeverFired
from tangent_lens.subspaces.subspace import Subspace


def record_attention(
    model: Model,
    reader: AttentionReader,
    batches: Iterable[Batch],
    proxies: Mapping[int, Subspace],
    settings: AttentionSettings,
    *,
    chosen: ChosenRows | None = None,
    token_buckets: Tensor | None = None,
    frequency_labels: Sequence[str] = (),
    progress: Progress | None = None,
    tokens: int = 0,
) -> tuple[tuple[AttentionDominance, ...], float]:
    """One forward pass over the batches; what each layer's attention computes is split and summed at once.

    Args:
        proxies: the tangent proxy of the residual stream that each layer's attention reads, by layer.
        chosen: the query rows on which the controls are measured; all by default.
        token_buckets: for every token of the vocabulary its frequency bucket, -1 for none; for that axis, with
            ``frequency_labels`` of the buckets.

    Returns:
        One entry a layer, and the worst relative difference of parts and model on the first batch.

    Raises:
        UnsupportedModel: parts that do not add up to what the model computed.
        SiteNeverFired: a layer whose attention was not called, or not once a pass.
    """
    layers = {
        layer: LayerAttention(layer, reader.weights(layer), proxy, settings, frequency_labels)
        for layer, proxy in proxies.items()
    }
    called: list[int] = []
    current: dict[str, Any] = {"first": True}

    def receive(call: AttentionCall) -> None:
        called.append(call.layer)
        batch: Batch = current["batch"]
        layers[call.layer].take(call, batch, current["buckets"], current["chosen"], current["first"])

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(reader.watching(tuple(layers), receive))
        for batch in passing(batches, Selection(), model, "attention scores", tokens, progress):
            current |= {"batch": batch, "buckets": None if token_buckets is None else token_buckets[batch.tokens.cpu()]}
            current["chosen"] = (chosen or ChosenRows())(batch)
            reader.run(batch)
            _check_called(called, tuple(layers))
            called.clear()
            current["first"] = False
    return tuple(one.result() for one in layers.values()), max(one.worst_sum for one in layers.values())


def _check_called(called: Sequence[int], layers: Sequence[int]) -> None:
    if sorted(called) != sorted(layers):
        missing = sorted(set(layers) - set(called)) or sorted(called)
        raise SiteNeverFired(
            f"attention of layers {missing}: called {len(called)} times in a forward pass for {len(layers)} layers; each "
            "layer's attention must run once"
        )


def frequency_buckets(sequences: Iterable[Any], vocabulary: int, buckets: int) -> tuple[Tensor, tuple[str, ...]]:
    """Buckets of tokens by how often they occur, each with about the same number of occurrences, the rarest first.

    Args:
        sequences: token ids of the corpus, one array a sequence.
        vocabulary: number of tokens.
        buckets: how many; fewer come back where the corpus has too few tokens of different frequency.

    Returns:
        The bucket of every token (-1 for tokens that do not occur), and how often the tokens of each bucket occur.
    """
    frequencies = token_frequencies(Corpus(tuple(np.asarray(sequence) for sequence in sequences)), vocabulary)
    found = FrequencyBuckets.by_mass(frequencies, buckets)
    counts, place = frequencies.counts.astype(np.int64), found.bucket_of.numpy()
    return found.bucket_of, tuple(_times(counts[place == bucket]) for bucket in range(len(found)))


def _times(counts: np.ndarray) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low} times" if low == high else f"{low} to {high} times"
