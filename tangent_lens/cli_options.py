"""Options that several commands share, and what is read from them: texts, ranks, layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

PROSE = "Python reference manual (pydoc_data.topics)"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A hub id, a local folder, or a packaged real model: smollm2-135m, rxnfp-pretrained."
    ),
]
Backend = Annotated[str, typer.Option(help="Library that runs the model: huggingface or transformer_lens.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to save the report in.")]
Text = Annotated[list[Path] | None, typer.Option("--text", help="Plain text file; give it again for more files.")]
Lines = Annotated[bool, typer.Option("--lines", help="Every line of a --text file is a text of its own.")]
DatasetName = Annotated[str | None, typer.Option("--dataset", help="Hub id or local folder of a HuggingFace dataset.")]
TextColumn = Annotated[str, typer.Option("--column", help="Column of the dataset that holds the text.")]
Split = Annotated[str, typer.Option(help="Split of the dataset.")]
Rank = Annotated[
    str,
    typer.Option(
        help="Dimensions of the tangent proxy, a variance share such as 0.9, or a rule: effective_rank, "
        "participation_ratio, marchenko_pastur, gavish_donoho, parallel_analysis."
    ),
]
Fit = Annotated[str, typer.Option(help="How subspaces are fitted: pca, semi_nmf, nmf, ica, kmeans or dictionary.")]
Statistics = Annotated[
    str, typer.Option(help="Sum whole matrices or sketches of them: exact, sketch, or auto (by width and free memory).")
]
OnNdif = Annotated[
    bool,
    typer.Option(
        "--remote",
        help="Run where the model is, on NDIF (its key in NDIF_API_KEY). Only sums travel; no weights are loaded.",
    ),
]
Controls = Annotated[int, typer.Option(help="Random normal subspaces to compare with.")]
ControlRows = Annotated[
    int,
    typer.Option(help="About how many query rows the random normals are measured on; 0 for all, which takes longer."),
]
Seed = Annotated[int, typer.Option(help="Of the fit/test split and of the controls.")]
Sequences = Annotated[int, typer.Option(help="At most this many sequences; half fit the proxies. 0 for all.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens in a sequence.")]
Pack = Annotated[bool, typer.Option(help="Let texts follow one another inside a sequence.")]
PrependBos = Annotated[bool | None, typer.Option(help="Begin every sequence with the beginning-of-text token.")]
SkipFirst = Annotated[bool, typer.Option(help="Leave first positions out of every statistic.")]
SkipSpecial = Annotated[bool, typer.Option(help="Leave special tokens out of every statistic.")]
BatchSize = Annotated[int, typer.Option(help="Sequences run at once; changes no number.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Heads = Annotated[bool, typer.Option("--heads", help="Also print one row a layer and head, of attention scores.")]


def texts_of(files: list[Path], lines: bool, dataset: str | None, column: str, split: str) -> tuple[Any, str]:
    """The texts to read and what the report calls them."""
    if files and dataset:
        raise ValueError("--text and --dataset were both given; choose one")
    if lines and not files:
        raise ValueError("--lines is about --text files, and none was given")
    if files:
        texts = [_read_text(file) for file in files]
        if lines:
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        return texts, ", ".join(file.name for file in files)
    if dataset:
        return _dataset_texts(dataset, column, split), f"{dataset} ({split})"
    from tangent_lens.recording.corpus import reference_prose

    return reference_prose(), PROSE


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{file} is not UTF-8 text ({problem.reason} at byte {problem.start}); convert it first"
        ) from None


def _dataset_texts(name: str, column: str, split: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as missing:
        raise ImportError(
            '--dataset needs the datasets library; install it with: pip install "tangent-lens[data]"'
        ) from missing
    rows = load_dataset(name, split=split, streaming=True)
    for row in rows:
        if column not in row:
            raise ValueError(f"the dataset {name} has no column {column!r}; it has {', '.join(row)}; use --column")
        yield row[column]


def rank_of(text: str) -> int | float | str:
    """A whole number, a share, or the name of a rule."""
    from tangent_lens.subspaces.ranks import check_rank

    try:
        number: int | float | str = float(text) if "." in text else int(text)
    except ValueError:
        number = text
    if isinstance(number, float) and not 0 < number < 1:
        # Is 1.0 one direction, or all of the variance?
        raise ValueError(f"rank {text!r} must be a whole number, or a variance share such as 0.9")
    return check_rank(number)


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers with commas, for example 1,4,16,64."""
    try:
        return tuple(int(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ValueError(f"{option} {text!r} must be whole numbers with commas, for example 1,4,16,64") from None


def layer_names(text: str) -> list[str]:
    """Layers as sites of the residual stream that attention reads: 0,5,15 or 0:6 or -1."""
    return [f"resid_pre.{one.strip()}" for one in text.split(",") if one.strip()]


def check_out(out: Path | None, kind: str) -> None:
    """Find out that a report cannot be saved before the model runs, not after."""
    if out is not None:
        from tangent_lens.reports.files import check_folder

        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder")
        check_folder(out, kind)
        out.mkdir(parents=True, exist_ok=True)
