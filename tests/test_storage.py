"""Files: bit for bit what was saved, and a sentence for every file that is not."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tangent_lens.storage import (
    FORMAT_VERSION,
    FileProblem,
    as_float64,
    load_tensors,
    save_tensors,
    write_bytes_atomically,
)

FACTS = {"name": "résumé", "rows": 3, "share": 0.1, "nothing": None, "list": [1, "two"]}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "float64": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "float32": torch.randn(5, generator=generator) * 1e-40,
        "special": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
        "count": torch.tensor(2**53 + 1),
        "empty": torch.zeros(0, 3),
    }


def write_with_header(path, header) -> None:
    save_file({"one": torch.ones(2)}, path, metadata={"tangent_lens": json.dumps(header)})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_tensors_and_facts_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "new folder" / "numbers.safetensors"
    save_tensors(path, "numbers", tensors(), FACTS)
    loaded, facts = load_tensors(str(path), "numbers")
    assert facts == FACTS
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor), name


def test_views_and_tensors_that_need_a_gradient_are_saved_by_value(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    save_tensors(tmp_path / "file", "numbers", {"left": whole[:, :2], "turned": whole.T}, {})
    loaded, _ = load_tensors(tmp_path / "file", "numbers")
    assert torch.equal(loaded["left"], whole[:, :2])
    assert torch.equal(loaded["turned"], whole.T)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_file_cut_short_is_refused(tmp_path, kept):
    path = tmp_path / "numbers.safetensors"
    save_tensors(path, "numbers", tensors(), FACTS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(FileProblem, match=r"numbers\.safetensors is damaged or was cut short .*save it again"):
        load_tensors(path, "numbers")


def test_a_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "text").write_text("These are not the numbers you are looking for.")
    with pytest.raises(FileProblem, match="is damaged or was cut short"):
        load_tensors(tmp_path / "text", "numbers")
    save_file({"one": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(FileProblem, match="foreign is a safetensors file, but tangent_lens did not write it"):
        load_tensors(tmp_path / "foreign", "numbers")


def test_a_file_of_another_kind_is_refused(tmp_path):
    save_tensors(tmp_path / "file", "apples", tensors(), {})
    with pytest.raises(FileProblem, match="file holds a 'apples', not a 'pears'"):
        load_tensors(tmp_path / "file", "pears")


def test_a_newer_format_is_refused_with_the_way_to_upgrade(tmp_path):
    write_with_header(tmp_path / "file", {"kind": "numbers", "format": FORMAT_VERSION + 1, "facts": {}})
    newer = f"has format {FORMAT_VERSION + 1}, newer than the {FORMAT_VERSION}"
    with pytest.raises(FileProblem, match=f"{newer}.*pip install --upgrade tangent-lens"):
        load_tensors(tmp_path / "file", "numbers")


def test_the_present_format_is_read(tmp_path):
    write_with_header(tmp_path / "file", {"kind": "numbers", "format": FORMAT_VERSION, "facts": {"a": 1}})
    loaded, facts = load_tensors(tmp_path / "file", "numbers")
    assert facts == {"a": 1}
    assert torch.equal(loaded["one"], torch.ones(2))


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file at .*absent"):
        load_tensors(tmp_path / "absent", "numbers")
    with pytest.raises(FileNotFoundError, match="no file at"):
        load_tensors(tmp_path, "numbers")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    save_tensors(path, "numbers", {"one": torch.ones(2)}, {})
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_tensors(path, "numbers", {"one": torch.zeros(2)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_facts_that_are_no_json_write_nothing(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_tensors(tmp_path / "file", "numbers", {}, {"tensor": torch.ones(1)})
    assert os.listdir(tmp_path) == []


def test_writing_again_replaces(tmp_path):
    write_bytes_atomically(tmp_path / "file", b"a longer old content")
    write_bytes_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_as_float64_keeps_the_values():
    rows = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    wide = as_float64(rows)
    assert wide.dtype == torch.float64
    assert not wide.requires_grad
    assert wide.tolist() == [1.5, -2.0]
