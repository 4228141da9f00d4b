"""The command about local geometry: exponents about the means of single tokens, curvature, gradients, depth, training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tangent_lens.cli_frequency import checkpoints_of
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
    Revision,
    Seed,
    SequenceLength,
    Split,
    Text,
    TextColumn,
    rank_of,
    texts_of,
)
from tangent_lens.cli_running import load_lens, teaching_errors
from tangent_lens.reports.console import show as print_result


def geometry(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[str, typer.Option(help="Whose rows, for example resid_post.4,14,24.")] = "resid_post.*",
    m: Annotated[
        str,
        typer.Option(
            "--m", help="Dimension of the tangent spaces: a whole number, a share of the variance, or a rule."
        ),
    ] = "participation_ratio",
    nearest: Annotated[float, typer.Option(help="Share of a token's rows that its tangent space is fitted to.")] = 1.0,
    occurrences: Annotated[int, typer.Option(help="Rows of each token; rarer tokens are left out.")] = 100,
    buckets: Annotated[int, typer.Option(help="Buckets of frequency, of equally many tokens.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of each bucket.")] = 15,
    gradient_layers: Annotated[
        int, typer.Option(help="Layers, evenly apart, whose weight gradients are split; 0 for none.")
    ] = 4,
    maps: Annotated[str, typer.Option(help="Which maps there.")] = "query,mlp_in",
    depth: Annotated[
        bool, typer.Option(help="Dimensions and neighbourhoods at every site (the dimension extra).")
    ] = True,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="At every checkpoint instead: a folder of saved checkpoints, a glob of folders, or, of revisions of MODEL on "
            r"the hub, a regular expression with a group step, such as 'step(?P<step>\d+)'. Without gradients."
        ),
    ] = None,
    at_most: Annotated[
        int, typer.Option("--at-most", help="So many checkpoints, spread over the steps. 0 for all.")
    ] = 8,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
    seed: Seed = 0,
    sequences: Annotated[int, typer.Option(help="At most this many sequences. 0 for all.")] = 320,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    keep_first: Annotated[bool, typer.Option(help="Keep first positions, which may hold massive activations.")] = False,
    keep_special: Annotated[bool, typer.Option(help="Keep special tokens.")] = False,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Print how occurrences of a token lie about its mean: exponents of tangent and normal part, curvature, gradients, depth.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with teaching_errors():
        texts, name = texts_of(text or [], lines, dataset, column, split)
        options: dict[str, Any] = {
            "m": rank_of(m),
            "nearest": nearest,
            "occurrences": occurrences,
            "buckets": buckets,
            "tokens": tokens,
            "maps": tuple(one for one in maps.split(",") if one),
            "depth": depth,
            "seed": seed,
            "skip_first": not keep_first,
            "skip_special": not keep_special,
            "batch_size": batch_size,
            "max_sequences": sequences or None,
            "sequence_length": sequence_length,
            "pack": pack,
            "prepend_bos": prepend_bos,
            "name": name,
        }
        if checkpoints is None:
            lens = load_lens(model, backend, revision, dtype, device)
            result = lens.geometry(texts, sites, gradient_layers=gradient_layers, **options)
        else:
            from tangent_lens.dynamics.geometry_run import geometry_checkpoints

            result = geometry_checkpoints(
                checkpoints_of(checkpoints, model, at_most, dtype, device), texts, sites, **options
            )
        print_result(result)
        if plot is not None:
            result.plot().savefig(plot, dpi=150)
            Console(stderr=True).print(f"plot drawn into {plot}")
