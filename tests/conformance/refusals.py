"""When is an exception a refusal, and not a crash?"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tangent_lens

_PACKAGE = Path(tangent_lens.__file__).parent
_SHORTEST_SENTENCE = 25


class Refused(Exception):
    """tangent_lens said no, in a sentence."""


class Crashed(Exception):
    """Something fell over."""


def or_refused(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the function returns.

    Raises:
        Refused: it raised a TypeError, ValueError or RuntimeError that a ``raise`` in tangent_lens wrote a sentence for.
        Crashed: it raised anything else.
    """
    try:
        return function(*arguments, **options)
    except Exception as error:
        if is_refusal(error):
            raise Refused(f"{type(error).__name__}: {error}") from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        raise Crashed(f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:200]}") from error


def is_refusal(error: Exception) -> bool:
    """A library's or torch's own words are no refusal, nor is a slip of Python inside tangent_lens."""
    if not isinstance(error, (TypeError, ValueError, RuntimeError)) or len(str(error)) < _SHORTEST_SENTENCE:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    if _PACKAGE not in Path(last.filename).parents:
        return False
    return linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise ")
