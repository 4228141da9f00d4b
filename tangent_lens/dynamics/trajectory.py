"""How far the embedding row of each token travels over the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.dynamics.embedding_updates import embedding_of
from tangent_lens.measures.frequency import TokenFrequencies, TokenSpread, token_frequencies, trajectory_spread
from tangent_lens.models.checkpoints import CheckpointSource
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.corpus import Corpus


def trajectory_of(
    source: CheckpointSource,
    tokens: Int[Tensor, " w"] | Sequence[int] | np.ndarray | None = None,
    *,
    mean_distance: bool = False,
    progress: Progress | None = None,
) -> TokenSpread:
    """The distance of each embedding row to its own mean over checkpoints (``trajectory_spread`` of section 7).

    One checkpoint is in memory at a time.

    Args:
        source: two checkpoints or more.
        tokens: which rows; all by default.
        mean_distance: opens every checkpoint a second time. The paper's correlation is of it; mean squares need one opening.

    Raises:
        CheckpointProblem: a checkpoint that cannot be loaded.
        ValueError: fewer than two checkpoints, no embedding matrix, a token without a row, or matrices of different shapes.
    """
    if len(source) < 2:
        raise ValueError(f"{source.name}: a trajectory needs 2 checkpoints or more, and there is {len(source)}")
    chosen = None if tokens is None else torch.as_tensor(tokens).long()
    name = f"embedding rows over {len(source)} checkpoints of {source.name}"
    shown = progress or NoProgress()

    def matrices() -> Iterator[Float[Tensor, "vocabulary d"]]:
        shown.start("embeddings of checkpoints", len(source), "checkpoints")
        try:
            for checkpoint in source:
                with source.open(checkpoint) as model:
                    matrix = embedding_of(model)
                yield _checked(matrix, chosen, checkpoint.name)
                shown.advance(1, checkpoint.name)
        finally:
            shown.finish()

    rows = None if chosen is None else chosen.tolist()
    return trajectory_spread(matrices if mean_distance else matrices(), rows, name=name)


def _checked(matrix: Tensor | None, chosen: Tensor | None, name: str) -> Tensor:
    if matrix is None:
        raise ValueError(f"{name}: this model has no token embedding matrix, so no row of it travels")
    if chosen is not None and chosen.numel() and int(chosen.max()) >= len(matrix):
        raise ValueError(f"{name}: token {int(chosen.max())} has no row in an embedding of {len(matrix)} tokens")
    return matrix


def trajectory_for(
    source: CheckpointSource,
    corpus: Corpus,
    frequencies: TokenFrequencies | None,
    min_count: int,
    progress: Progress | None = None,
) -> TokenSpread:
    """The trajectories, with mean distances, of the tokens that have a frequency worth believing.

    Args:
        frequencies: given ones: every token that has one. None: tokens that the corpus holds at least ``min_count`` times.

    Raises: as :func:`trajectory_of`.
    """
    tokens = token_frequencies(corpus).seen(min_count) if frequencies is None else frequencies.seen(0)
    return trajectory_of(source, tokens, mean_distance=True, progress=progress)
