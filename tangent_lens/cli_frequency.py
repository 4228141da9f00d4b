"""The command about token frequency: spreads of tokens, gradient energy by bucket, travel of the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tangent_lens.cli_options import (
    Backend,
    BatchSize,
    DatasetName,
    Device,
    Dtype,
    Lines,
    ModelName,
    Pack,
    PrependBos,
    Rank,
    Revision,
    Seed,
    SequenceLength,
    Sequences,
    SkipFirst,
    SkipSpecial,
    Split,
    Text,
    TextColumn,
    rank_of,
    texts_of,
)
from tangent_lens.cli_running import load_lens, teaching_errors
from tangent_lens.reports.console import show as print_result

if TYPE_CHECKING:
    from tangent_lens.models.checkpoints import CheckpointSource

_STEP_GROUP = "(?P<step>"


def frequency(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[
        str, typer.Option(help="Whose rows and gradients, for example resid_post.4,14,24.")
    ] = "resid_post.*",
    rank: Rank = "16",
    min_count: Annotated[int, typer.Option(help="Occurrences that a token needs for its spread.")] = 10,
    buckets: Annotated[int, typer.Option(help="Buckets of frequency, of about equal mass.")] = 5,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Also how far embedding rows travel: a folder of saved checkpoints, a glob of folders, or, of revisions of "
            r"MODEL on the hub, a regular expression with a group step, such as 'step(?P<step>\d+)'."
        ),
    ] = None,
    at_most: Annotated[
        int,
        typer.Option("--at-most", help="So many checkpoints, spread over the steps; each is opened twice. 0 for all."),
    ] = 12,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
    seed: Seed = 0,
    sequences: Sequences = 160,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    skip_special: SkipSpecial = False,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Print how token frequency goes with the spread of a token's rows, and with gradient energy along the tangent proxy.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with teaching_errors():
        texts, name = texts_of(text or [], lines, dataset, column, split)
        source = None if checkpoints is None else checkpoints_of(checkpoints, model, at_most, dtype, device)
        lens = load_lens(model, backend, revision, dtype, device)
        report = lens.frequency(
            texts,
            sites,
            rank=rank_of(rank),
            min_count=min_count,
            buckets=buckets,
            checkpoints=source,
            seed=seed,
            max_sequences=sequences or None,
            sequence_length=sequence_length,
            pack=pack,
            prepend_bos=prepend_bos,
            skip_first=skip_first,
            skip_special=skip_special,
            batch_size=batch_size,
            name=name,
        )
        print_result(report)
        if plot is not None:
            report.plot().savefig(plot, dpi=150)
            Console(stderr=True).print(f"plot drawn into {plot}")


def checkpoints_of(where: str, model: str, at_most: int, dtype: str, device: str) -> CheckpointSource:
    """Checkpoints in folders, or the revisions of the model whose names match.

    Raises:
        ValueError: neither.
        CheckpointProblem: the hub cannot be asked.
    """
    from tangent_lens.models.checkpoints import folder_checkpoints, hub_checkpoints

    if _STEP_GROUP in where:
        found = hub_checkpoints(model, where, dtype=dtype, device=device)
    else:
        found = folder_checkpoints(where, dtype=dtype, device=device)
    return found.choose(at_most=at_most) if at_most else found
