"""What every command does around its work: load, print, save, and tell errors in sentences."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from tangent_lens.reports.console import show as print_result

if TYPE_CHECKING:
    from tangent_lens.dynamics.report import DynamicsReport
    from tangent_lens.lens import Lens
    from tangent_lens.measures.attention_report import AttentionReport
    from tangent_lens.measures.report import Report
    from tangent_lens.recording.masking import MaskedLoss

    AnyReport = Report | AttentionReport | DynamicsReport


def load_lens(name: str, backend: str, revision: str | None, dtype: str, device: str) -> Lens:
    """A lens on a model by its name."""
    from tangent_lens.lens import Lens

    return Lens.from_pretrained(name, backend=backend, revision=revision, dtype=dtype, device=device)


def load_report(folder: Path, maps: bool, heads: bool) -> AnyReport:
    """A report of any kind, refused where an option is about another."""
    from tangent_lens.dynamics.report import DynamicsReport
    from tangent_lens.measures.attention_report import AttentionReport
    from tangent_lens.measures.report import Report
    from tangent_lens.reports.files import ATTENTION_REPORT, DYNAMICS_REPORT, kind_of_report

    kind = kind_of_report(folder)
    if heads and kind != ATTENTION_REPORT:
        raise ValueError(f"--heads is about reports of attention scores, and {folder} holds none")
    if maps and kind == ATTENTION_REPORT:
        raise ValueError(
            f"--maps is about reports of gradients, and {folder} holds one of attention scores; use --heads"
        )
    if maps and kind == DYNAMICS_REPORT:
        raise ValueError(
            f"--maps is about reports of gradients of one model, and {folder} holds one of training dynamics; leave it out"
        )
    return {ATTENTION_REPORT: AttentionReport, DYNAMICS_REPORT: DynamicsReport}.get(kind or "", Report).load(folder)


def print_report(report: AnyReport, single: bool) -> None:
    """A report and, if asked for, one row a linear map or head."""
    print_result(report)
    if single:
        from tangent_lens.measures.attention_report import AttentionReport
        from tangent_lens.measures.report import Report

        if isinstance(report, Report):
            print_result(report.maps())
        elif isinstance(report, AttentionReport):
            print_result(report.by_head())


def save_report(report: AnyReport, out: Path | None) -> None:
    """Where ``--out`` was given, and say how to show it again."""
    if out is not None:
        report.save(out)
        Console(stderr=True).print(
            f"saved in {escape(str(out))}; show it again with: tangent-lens show {escape(str(out))}", soft_wrap=True
        )


def masked_loss(share: float | None, style: str | None, seed: int) -> MaskedLoss | None:
    """The masked-token loss that the options ask for; None where neither was given, and the model decides."""
    if share is None and style is None:
        return None
    from tangent_lens.recording.masking import MaskedLoss

    asked = {"share": share, "style": style}
    return MaskedLoss(seed=seed, **{name: value for name, value in asked.items() if value is not None})  # pyright: ignore[reportArgumentType]


@contextmanager
def teaching_errors() -> Iterator[None]:
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


def quiet_libraries() -> None:
    """Keep other libraries' chatter off the screen; their errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
