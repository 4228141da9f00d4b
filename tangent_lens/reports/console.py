"""Showing results: on a terminal, as plain text, in a notebook. And the progress bar."""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tangent_lens.progress import Progress

NOTEBOOK_WIDTH = 116
# Of output that goes into a file or another program.
PIPED_WIDTH = 100
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.25;font-family:Menlo,Consolas,monospace">{code}</pre>'
)


def show(result: Any, width: int | None = None) -> None:
    """Print a result; coloured where the output is a terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=width or (PIPED_WIDTH if piped else None)).print(result)


def as_text(result: Any, width: int | None = None) -> str:
    """A result as plain text, as wide as the terminal (100 characters where there is none)."""
    buffer = io.StringIO()
    columns = width or shutil.get_terminal_size(fallback=(PIPED_WIDTH, 24)).columns
    # force_jupyter=False: inside a notebook rich would display at once instead of writing to the buffer.
    Console(file=buffer, width=columns, no_color=True, force_terminal=False, force_jupyter=False).print(result)
    return buffer.getvalue().rstrip("\n")


def as_html(result: Any, width: int = NOTEBOOK_WIDTH) -> str:
    """A result as HTML for a notebook."""
    options: dict[str, Any] = {"force_terminal": True, "force_jupyter": False, "color_system": "truecolor"}
    console = Console(record=True, file=io.StringIO(), width=width, **options)
    console.print(result)
    return console.export_html(inline_styles=True, code_format=_HTML)


def terminal_progress() -> Progress | None:
    """A progress display on the terminal; None where errors do not go to one."""
    return TerminalProgress() if sys.stderr.isatty() else None


class TerminalProgress:
    """One bar at a time with its speed and the time left; it vanishes when its task is over."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._display: RichProgress | None = None

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        """Begin a task."""
        self.finish()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _Speed(unit),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._display = RichProgress(*columns, console=self._console, transient=True)
        self._display.start()
        self._display.add_task(description, total=total, note="")

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """``amount`` more units are done."""
        if self._display is not None:
            self._display.update(self._display.task_ids[0], advance=amount, note=note)

    def finish(self) -> None:
        """The task is over."""
        if self._display is not None:
            self._display.stop()
            self._display = None


class _Speed(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Units a second, once known."""
        speed = task.finished_speed or task.speed
        if speed is None or not self._unit:
            return Text("")
        if self._unit == "bytes":
            return Text(f"{speed / 1e6:,.1f} MB/s", style="dim")
        return Text(f"{speed:,.0f} {self._unit}/s" if speed >= 10 else f"{speed:.1f} {self._unit}/s", style="dim")
