"""A whole training run in one call: checkpoints and texts in, early and late out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tangent_lens.dynamics.protocol import Choices, measure_dynamics
from tangent_lens.dynamics.report import DynamicsReport
from tangent_lens.measures.report import Settings
from tangent_lens.models.checkpoints import CheckpointSource
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.losses import choose_loss
from tangent_lens.recording.reading import Texts, read_corpus
from tangent_lens.sites import SiteSelection


def measure_checkpoints(
    source: CheckpointSource,
    texts: Texts,
    sites: SiteSelection | None = None,
    *,
    rank: int | float | str = 16,
    controls: int = 20,
    seed: int = 0,
    gradients: str | Sequence[str] = ("residual", "weight"),
    maps: str | Sequence[str] = (*ATTENTION_MAPS, *MLP_MAPS),
    fit_site: str = "input",
    early: float = 0.3,
    late: float = 0.3,
    by: str = "step",
    refit: bool = False,
    everywhere: bool = True,
    dimensions: bool = False,
    buckets: int = 4,
    max_sequences: int | None = None,
    sequence_length: int | None = None,
    pack: bool = False,
    prepend_bos: bool | None = None,
    skip_first: bool = False,
    skip_special: bool = False,
    batch_size: int = 8,
    name: str = "texts",
    folder: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool | Progress = True,
) -> DynamicsReport:
    """Early and late in training: proxies fitted once on pooled early activations, then the gradients of every checkpoint.

    One checkpoint is in memory at a time. What is done is written down after each; a run that was stopped goes on from there
    when it is called again.

    Args:
        source: of :func:`hub_checkpoints`, :func:`folder_checkpoints` or :func:`state_checkpoints`; ``source.choose`` thins it.
        texts: a text, texts, token ids, or a :class:`Corpus`; texts are read with the tokenizer of the first checkpoint.
        sites: where residual gradients are measured; resid_post of every layer by default.
        rank, controls, seed, gradients, maps, fit_site: as of :meth:`Lens.measure`.
        early, late, by: the shares of training, by ``step`` or by ``count`` of checkpoints.
        refit: also fit a proxy at each checkpoint, measure against it, and compare it with the early one.
        everywhere: measure the checkpoints between early and late, too.
        dimensions: intrinsic dimension of the activations of each checkpoint (the ``dimension`` extra).
        buckets: of token frequency, for the updates of the embedding.
        max_sequences, sequence_length, pack, prepend_bos, skip_first, skip_special, batch_size: as of :meth:`Lens.measure`.
        name: what the report calls the texts.
        folder: for what is done so far; None for the user's cache folder. It is deleted when the run is complete.
        resume: False starts anew.
        progress: show bars where the output is a terminal.

    Raises:
        ValueError: settings, windows or texts that do not fit.
        CheckpointProblem: a checkpoint that cannot be opened; the same call goes on from there.
    """
    reading = {
        "sequence_length": sequence_length,
        "pack": pack,
        "max_sequences": max_sequences,
        "prepend_bos": prepend_bos,
    }
    # Texts are read once: all checkpoints see the same tokens.
    with source.open(source.steps[0]) as model:
        corpus = read_corpus(texts, model.tokenizer, name=name, **reading)
        loss = choose_loss(None, model, seed).name
    settings = Settings(
        rank=rank,
        controls=controls,
        seed=seed,
        gradients=(gradients,) if isinstance(gradients, str) else tuple(gradients),
        maps=(maps,) if isinstance(maps, str) else tuple(maps),
        loss=loss,
        fit_site=fit_site,
        skip_first=skip_first,
        skip_special=skip_special,
        batch_size=batch_size,
        **reading,
    )
    choices = Choices(early, late, by, refit, everywhere, dimensions, buckets)
    shown = chosen_progress(progress)
    return measure_dynamics(
        source, corpus, settings, choices, sites=sites, folder=folder, resume=resume, progress=shown
    )
