"""A rehearsal of NDIF in seconds: real payloads, run in a clean process without this library and with frozen weights.

nnsight's own ``remote="local"`` checks only that a payload can be read again: it runs it in this process, where the
library can be imported and the weights ask for gradients. Most mistakes of shipping pass there and fail on a server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nnsight.ndif
from nnsight.schema.response import ResponseModel, Status
from rehearsal.server import answer, receive, send

from tangent_lens.models.ndif_backend import QuietBackend

# nnsight would ship the whole library, where it is installed in editable mode; a person who installed the wheel has no such
# luck, so what travels must be what the library itself registers.
nnsight.ndif._PULLED_ENV = True


class RehearsalServer:
    """A process that holds the model of a folder; used in a ``with`` block."""

    def __init__(self, folder: Path | str, task: str = "text-generation", dtype: str = "float32") -> None:
        self.command = [sys.executable, str(Path(__file__).with_name("server.py")), str(folder), task, dtype]
        self.payloads = 0
        # Faults to act out, one for each coming job: what `fail` names.
        self.faults: list[Exception | None] = []

    def __enter__(self) -> RehearsalServer:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(self.command, **pipes, env=environment, cwd="/")
        assert receive(self.process.stdout) == b"ready", "the rehearsal server did not come up"
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def run(self, payload: bytes) -> bytes:
        self.payloads += 1
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        send(self.process.stdin, payload)
        return receive(self.process.stdout)

    def backend(self, envoy: Any) -> RehearsalBackend:
        """What ``Remote(backend=...)`` wants."""
        return RehearsalBackend(envoy, self)


class HereServer:
    """The same in this process, for many models: what is shipped is written down and read again, but not far from home."""

    def __init__(self, held: Any) -> None:
        self.held = held
        held._module.requires_grad_(False)

    def run(self, payload: bytes) -> bytes:
        return answer(self.held, payload)

    def backend(self, envoy: Any) -> RehearsalBackend:
        """What ``Remote(backend=...)`` wants."""
        return RehearsalBackend(envoy, self)


class RehearsalBackend(QuietBackend):
    """One job; everything but the wire is the real thing."""

    def __init__(self, envoy: Any, server: RehearsalServer | HereServer) -> None:
        super().__init__(envoy)
        self.server = server

    def _post(self, request: Any, blob: bytes) -> ResponseModel:
        self.answer = self.server.run(blob)
        return ResponseModel(id="rehearsal", status=Status.RECEIVED)

    def poll(self, tracer: Any = None) -> Any:
        kind, content = self.answer[:1], self.answer[1:]
        done = kind == b"+"
        self.status = Status.COMPLETED if done else Status.ERROR
        text = "" if done else content.decode()
        return self.handle(ResponseModel(id="rehearsal", status=self.status, description=text, data=content))
