"""Files of numbers: safetensors with a JSON header of facts, written atomically, read without pickle."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

FORMAT_VERSION = 1


class FileProblem(ValueError):
    """A saved file that cannot be read: truncated, of another kind, or of a newer format."""


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def tensors_to_bytes(kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """One safetensors file in memory. ``facts`` must be plain JSON values."""
    header = {"tangent_lens": json.dumps({"kind": kind, "format": FORMAT_VERSION, "facts": facts})}
    return to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=header)


def save_tensors(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write tensors and facts to one ``.safetensors`` file, atomically."""
    write_bytes_atomically(Path(path), tensors_to_bytes(kind, tensors, facts))


def load_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote.

    Raises:
        FileNotFoundError: nothing is there.
        FileProblem: the file is truncated, of another kind, or of a newer format.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("tangent_lens", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, json.JSONDecodeError) as problem:
        raise FileProblem(f"{path} is damaged or was cut short ({problem}); save it again from its source") from problem
    if header is None:
        raise FileProblem(f"{path} is a safetensors file, but tangent_lens did not write it")
    check_format(path, kind, header)
    return tensors, header["facts"]


def check_format(path: str | os.PathLike[str], kind: str, header: Mapping[str, Any]) -> None:
    """Refuse a file of another kind or of a format newer than this library knows."""
    if header.get("format", 0) > FORMAT_VERSION:
        raise FileProblem(
            f"{path} has format {header['format']}, newer than the {FORMAT_VERSION} this version of tangent_lens reads; "
            "upgrade with: pip install --upgrade tangent-lens"
        )
    if header.get("kind") != kind:
        raise FileProblem(f"{path} holds a {header.get('kind')!r}, not a {kind!r}")


def as_float64(tensor: Tensor) -> Tensor:
    """The same numbers as a float64 tensor on the CPU, where every analysis is done."""
    return torch.as_tensor(tensor).detach().to(device="cpu", dtype=torch.float64)
