"""Runs every cell of this environment, or shows what several environments found.

    python tests/conformance/run.py [--families gpt2,llama] [--backends bridge] [--json FILE]
    python tests/conformance/run.py --show FILE [FILE ...] [--markdown]

The exit code is 1 if any cell is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, show."""
    options = _options(arguments)
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    from conformance.cells import WRONG
    from conformance.showing import as_markdown, as_table, read_json, write_json
    from rich.console import Console

    cells = read_json(options.show) if options.show else _run(options)
    if options.json:
        write_json(cells, options.json)
    if options.markdown:
        print(as_markdown(cells))
    else:
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(as_table(cells))
    return int(any(cell.verdict == WRONG for cell in cells))


def _run(options: argparse.Namespace) -> list:
    from conformance.backends import backends_here
    from conformance.cells import run_cell
    from conformance.families import FAMILIES
    from conformance.showing import line_of

    families = _chosen(options.families, tuple(FAMILIES), "family")
    backends = _chosen(options.backends, backends_here(), "backend")
    cells, began = [], time.monotonic()
    for name in families:
        for backend in backends:
            start = time.monotonic()
            cells.append(run_cell(name, backend))
            print(f"{time.monotonic() - start:5.1f} s  {line_of(cells[-1])}", file=sys.stderr, flush=True)
    print(f"{len(cells)} cells in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return cells


def _chosen(names: str | None, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    if not names:
        return known
    asked = tuple(names.split(","))
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise SystemExit(f"no {what} {', '.join(unknown)} here; known: {', '.join(known)}")
    return asked


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="comma-separated; all by default")
    parser.add_argument("--backends", help="comma-separated; all of this environment by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="merge these instead of running")
    parser.add_argument("--markdown", action="store_true", help="a table for a README")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    # This folder's modules go by `conformance.`; an environment in which tangent_lens is not installed takes it from here.
    sys.path[:1] = [str(tests)]
    sys.path.append(str(tests.parent))
    raise SystemExit(main())
