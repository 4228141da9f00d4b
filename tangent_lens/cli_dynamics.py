"""The command about training runs: early and late over checkpoints, with a file of settings where one is given."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tangent_lens.cli_options import (
    BatchSize,
    Controls,
    DatasetName,
    Device,
    Dtype,
    Lines,
    Out,
    Pack,
    PrependBos,
    Rank,
    Seed,
    SequenceLength,
    Sequences,
    SkipFirst,
    SkipSpecial,
    Split,
    Text,
    TextColumn,
    check_out,
    rank_of,
    texts_of,
)
from tangent_lens.cli_running import print_report, save_report, teaching_errors

if TYPE_CHECKING:
    from tangent_lens.models.checkpoints import CheckpointSource


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of the options; what is typed counts more."""
    if file is not None:
        with teaching_errors():
            values = _toml(file)
            known = [one.name for one in context.command.params if one.name not in ("config", "help")]
            unknown = sorted(set(values) - set(known))
            if unknown:
                raise ValueError(
                    f"{file}: {', '.join(unknown)} is no option of dynamics; it has {', '.join(map(str, known))}"
                )
            context.default_map = {**(context.default_map or {}), **values}
    return file


def _toml(file: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise ValueError("--config reads TOML, which Python reads from 3.11 on; give its values as options here")
    import tomllib

    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{file} is no TOML file ({problem})") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file whose values are the defaults of these options, and MODEL: model = ..., at_most = 12 (Python 3.11).",
        is_eager=True,
        callback=read_config,
    ),
]
MODEL_HELP = "A hub id whose branches or tags are checkpoints, or a local folder (or a glob) of saved checkpoints."


def dynamics(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    config: Config = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Names of the checkpoints: step*-tokens*B, where the first * is the step, or a regular expression with a "
            "group (?P<step>...). By default the usual namings."
        ),
    ] = None,
    at_most: Annotated[int, typer.Option(help="So many of the checkpoints, spread evenly; 0 for all.")] = 0,
    spacing: Annotated[str, typer.Option(help="How --at-most spreads them: linear or log.")] = "linear",
    text: Text = None,
    lines: Lines = False,
    dataset: DatasetName = None,
    column: TextColumn = "text",
    split: Split = "train",
    sites: Annotated[str, typer.Option(help="Where residual gradients are measured.")] = "resid_post.*",
    rank: Rank = "16",
    gradients: Annotated[str, typer.Option(help="residual, weight, or both with a comma.")] = "residual,weight",
    controls: Controls = 20,
    seed: Seed = 0,
    early: Annotated[float, typer.Option(help="Share of the training that is early.")] = 0.3,
    late: Annotated[float, typer.Option(help="Share of the training that is late.")] = 0.3,
    by: Annotated[str, typer.Option(help="Shares of the steps, or of the checkpoints: step or count.")] = "step",
    refit: Annotated[bool, typer.Option("--refit", help="Also fit a proxy at each checkpoint.")] = False,
    everywhere: Annotated[bool, typer.Option(help="Measure the checkpoints between early and late, too.")] = True,
    dimensions: Annotated[
        bool,
        typer.Option("--dimensions", help="Also the intrinsic dimension of the activations (the dimension extra)."),
    ] = False,
    buckets: Annotated[int, typer.Option(help="Of token frequency, for the updates of the embedding.")] = 4,
    sequences: Sequences = 128,
    sequence_length: SequenceLength = 128,
    pack: Pack = True,
    prepend_bos: PrependBos = None,
    skip_first: SkipFirst = False,
    skip_special: SkipSpecial = False,
    fit_site: Annotated[
        str,
        typer.Option(help="Fit weight proxies on the maps' own input, or on the residual stream: input or residual."),
    ] = "input",
    batch_size: BatchSize = 8,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    delete_downloads: Annotated[
        bool, typer.Option("--delete-downloads", help="Delete each checkpoint's download before the next one comes.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Go on with a run of the same settings that was stopped.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot into this file (png, pdf, svg).")] = None,
    out: Out = None,
) -> None:
    """Measure gradients early and late in training against proxies fitted early, over saved checkpoints; print the tables.

    Without --text or --dataset it reads the reference manual that every Python carries.

    A run that was stopped goes on from its last finished checkpoint when it is started again.
    """
    with teaching_errors():
        from tangent_lens.dynamics.run import measure_checkpoints
        from tangent_lens.reports.files import DYNAMICS_REPORT

        check_out(out, DYNAMICS_REPORT)
        source = source_of(model, checkpoints, dtype, device, delete_downloads)
        if at_most:
            source = source.choose(at_most=at_most, spacing=spacing)
        texts, name = texts_of(text or [], lines, dataset, column, split)
        report = measure_checkpoints(
            source,
            texts,
            sites,
            rank=rank_of(rank),
            controls=controls,
            seed=seed,
            gradients=tuple(one.strip() for one in gradients.split(",") if one.strip()),
            fit_site=fit_site,
            early=early,
            late=late,
            by=by,
            refit=refit,
            everywhere=everywhere,
            dimensions=dimensions,
            buckets=buckets,
            max_sequences=sequences or None,
            sequence_length=sequence_length,
            pack=pack,
            prepend_bos=prepend_bos,
            skip_first=skip_first,
            skip_special=skip_special,
            batch_size=batch_size,
            name=name,
            resume=resume,
        )
        save_report(report, out)
        print_report(report, single=False)
        if plot is not None:
            report.plot().savefig(plot, dpi=150)
            Console(stderr=True).print(f"plot drawn into {plot}")


def source_of(
    model: str, checkpoints: str | None, dtype: str, device: str, delete_downloads: bool = False
) -> CheckpointSource:
    """Checkpoints on this machine where the name is that of a folder or a glob; else on the hub."""
    from tangent_lens.models.checkpoints import folder_checkpoints, hub_checkpoints

    pattern, opening = step_pattern(checkpoints), {"dtype": dtype, "device": device}
    if not _is_local(model):
        return hub_checkpoints(model, pattern, delete_downloads=delete_downloads, **opening)
    if delete_downloads:
        raise ValueError(
            f"--delete-downloads is about the hub, and {model} is a folder of yours, of which nothing is deleted"
        )
    return folder_checkpoints(model, pattern, **opening)


def _is_local(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "*" in model or Path(model).is_dir()


def step_pattern(text: str | None) -> str | None:
    """A regular expression with a group ``step``: the text itself, or made of a glob whose first * is the step."""
    if text is None or "(?P<step>" in text:
        return text
    before, star, after = text.partition("*")
    if not star:
        raise ValueError(
            f"--checkpoints {text!r} does not say where the step is; write step*, where * is the step, or 'step(?P<step>\\d+)'"
        )
    return re.escape(before) + r"(?P<step>\d+[kK]?)" + ".*".join(re.escape(part) for part in after.split("*"))
