"""Commands about the subspaces themselves: how they overlap, and what a model loses without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tangent_lens.cli_options import (
    Backend,
    BatchSize,
    Controls,
    DatasetName,
    Device,
    Dtype,
    Fit,
    Lines,
    ModelName,
    OnNdif,
    Pack,
    PrependBos,
    Rank,
    Revision,
    Seed,
    SequenceLength,
    Sequences,
    SkipFirst,
    Split,
    Text,
    TextColumn,
    rank_of,
    texts_of,
)
from tangent_lens.cli_running import load_lens, load_report, teaching_errors
from tangent_lens.reports.console import show as print_result


def ablate(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[str, typer.Option(help="Where to remove, one site after the other.")] = "resid_post.*",
    rank: Rank = "16",
    fit: Fit = "pca",
    controls: Controls = 20,
    seed: Seed = 0,
    sequences: Sequences = 64,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Remove the fitted subspace of each site while the model runs, and print how much its loss rises, against normals.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with teaching_errors():
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = load_lens(model, backend, revision, dtype, device)
        print_result(
            lens.ablate(
                texts,
                sites,
                rank=rank_of(rank),
                fit=fit,
                controls=controls,
                seed=seed,
                max_sequences=sequences or None,
                sequence_length=sequence_length,
                pack=pack,
                prepend_bos=prepend_bos,
                skip_first=skip_first,
                batch_size=batch_size,
                name=name,
            )
        )


def shape(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[str, typer.Option(help="Whose activations.")] = "resid_post.*",
    rows: Annotated[int, typer.Option(help="Rows of each site for cosines and intrinsic dimensions.")] = 2000,
    dimensions: Annotated[bool, typer.Option(help="Also intrinsic dimensions (the dimension extra).")] = True,
    seed: Seed = 0,
    sequences: Sequences = 64,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    remote: OnNdif = False,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Print the shape of the activations of every layer: isotropy, spectrum, cosines, intrinsic dimension.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with teaching_errors():
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = load_lens(model, "nnsight" if remote else backend, revision, dtype, device)
        print_result(
            lens.shape(
                texts,
                sites,
                rows=rows,
                dimensions=("two_nn", "mle") if dimensions else (),
                seed=seed,
                skip_first=skip_first,
                max_sequences=sequences or None,
                sequence_length=sequence_length,
                pack=pack,
                prepend_bos=prepend_bos,
                batch_size=batch_size,
                remote=remote,
                name=name,
            )
        )


def overlaps(
    folders: Annotated[list[Path], typer.Argument(help="Folders of one or more saved reports.")],
    site: Annotated[
        str, typer.Option(help="Which subspaces: those of the sites whose names begin so, for example resid_post.")
    ] = "resid_post",
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
) -> None:
    """Print how far the subspaces of saved reports overlap: between layers, and between runs or checkpoints."""
    with teaching_errors():
        from tangent_lens.measures.overlaps import compare_subspaces

        found = {}
        for folder in folders:
            run = f"{folder.name}/" if len(folders) > 1 else ""
            report = load_report(folder, maps=False, heads=False)
            found |= {
                f"{run}{name}": one
                for name, one in report.subspaces.items()
                if name.split(".")[0] == site or name == site
            }
        if not found:
            raise ValueError(f"no report here holds subspaces of {site}; name another --site")
        result = compare_subspaces(found)
        print_result(result)
        if plot is not None:
            result.plot().savefig(plot, dpi=150)
            Console(stderr=True).print(f"plot drawn into {plot}")
