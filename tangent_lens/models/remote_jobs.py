"""Jobs on an NDIF server: sent, watched, fetched, and sent again when they are lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tangent_lens.models.server_functions import unpacked
from tangent_lens.progress import Progress

Sums = dict[str, dict[str, Any]]


class RemoteRunFailed(RuntimeError):
    """A job that the server could not, or would not, do; the sentence says what can be done."""


class GradientsRefused(RemoteRunFailed):
    """The server runs forward passes for this key and no backward passes."""


class JobLost(Exception):
    """A job whose result will not come, through no fault of the job; it may be sent again."""


@dataclass(frozen=True)
class Remote:
    """How a run on NDIF goes.

    Attributes:
        batches_per_job: batches whose sums are joined on the server before they travel. More make fewer downloads; fewer
            make a lost job cheaper.
        retries: how often a lost job is sent again, after ever longer pauses (half a minute in all).
        patience: seconds without a word of a job after which it counts as lost.
        poll_seconds: between two looks at a job's status.
        folder: where the sums of finished jobs are kept until the run is complete, so that a run started again goes on where
            it was; None for the user's cache folder.
        resume: False starts anew, whatever is there.
        backend: makes the nnsight backend of one job from the model; None for NDIF. For rehearsals.
    """

    batches_per_job: int = 8
    retries: int = 5
    patience: float = 60.0
    poll_seconds: float = 0.5
    folder: str | os.PathLike[str] | None = None
    resume: bool = True
    backend: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.batches_per_job < 1:
            raise ValueError(f"batches_per_job {self.batches_per_job} sends nothing; use 1 or more")
        if self.retries < 0 or self.patience <= 0 or self.poll_seconds <= 0:
            raise ValueError("retries must be 0 or more, patience and poll_seconds more than 0")

    @classmethod
    def of(cls, wanted: bool | Remote) -> Remote | None:
        """What ``remote=`` of a measurement means; None for here."""
        if isinstance(wanted, Remote):
            return wanted
        return cls() if wanted else None


@dataclass(frozen=True)
class Traffic:
    """What a run on a server took.

    Attributes:
        jobs: that were finished; sent_again: that were lost before; kept: whose sums an earlier run had fetched already.
        sent_bytes, received_bytes: over the wire, as they were (compressed).
    """

    jobs: int
    sent_again: int
    kept: int
    sent_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        again = f" ({self.sent_again} sent again)" if self.sent_again else ""
        kept = f", {self.kept} more from an interrupted run" if self.kept else ""
        sent, received = (f"{count / 1e6:,.2f} MB" for count in (self.sent_bytes, self.received_bytes))
        return f"{self.jobs} job{'' if self.jobs == 1 else 's'}{again}{kept}; {sent} sent, {received} received"


class Jobs:
    """Runs the functions of :mod:`~tangent_lens.models.server_functions` on a server, one job after another.

    Attributes:
        sent_bytes, received_bytes: what went over the wire.
        finished, repeated, kept: jobs, as in :class:`Traffic`.
    """

    def __init__(self, envoy: Any, options: Remote) -> None:
        self.envoy = envoy
        self.options = options
        self.sent_bytes = self.received_bytes = 0
        self.finished = self.repeated = self.kept = 0
        self._stores: list[Any] = []

    @property
    def model_key(self) -> str:
        """What the server knows the model by."""
        return self.envoy.to_model_key()

    def remember(self, store: Any) -> None:
        """Sums that are needed until the whole measurement is complete; :meth:`complete` forgets them."""
        self._stores.append(store)

    def complete(self) -> Traffic:
        """The measurement is there: no sums of finished jobs are needed any more."""
        for store in self._stores:
            store.forget()
        self._stores.clear()
        return Traffic(self.finished, self.repeated, self.kept, self.sent_bytes, self.received_bytes)

    def run(
        self, request: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], progress: Progress, said: str = ""
    ) -> Sums:
        """The sums of these batches, from one job; a lost job is sent again, and only the sums that arrive count.

        Args:
            said: what the progress line calls the job.

        Raises:
            RemoteRunFailed: the job itself fails on the server, or it was lost too often.
            GradientsRefused: the server takes no gradients for this key.
        """
        for attempt in range(self.options.retries + 1):
            try:
                found = self._once(request, batches, progress, said)
            except JobLost as lost:
                if attempt == self.options.retries:
                    raise RemoteRunFailed(
                        f"a job was lost {attempt + 1} times, the last time because {lost}. The sums of the jobs before it are "
                        "kept: the same call goes on from there once the server answers again"
                    ) from lost
                self.repeated += 1
                progress.advance(0, f"{said}: lost ({lost}), sent again")
                time.sleep(min(2.0 ** (attempt + 1) * self.options.poll_seconds, 30.0))
            else:
                self.finished += 1
                return found
        raise AssertionError("a loop of one turn or more returns or raises")

    def _once(
        self, request: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], progress: Progress, said: str
    ) -> Sums:
        from tangent_lens.models.ndif_backend import QuietBackend, send, server_errors

        backend = (self.options.backend or QuietBackend)(self.envoy)
        try:
            with server_errors():
                send(self.envoy, backend, request, batches)
                result = self._await(backend, progress, said)
        finally:
            self.sent_bytes += backend.sent_bytes
            self.received_bytes += backend.received_bytes
        return unpacked(result["travelling"])

    def _await(self, backend: Any, progress: Progress, said: str) -> Mapping[str, Any]:
        """Ask for the result until it is there, or until nothing has changed for too long."""
        while True:
            result = backend()
            status = getattr(backend.status, "value", "SENT")
            progress.advance(0, f"{said}: {status}, {self.received_bytes / 1e6:.1f} MB received")
            if result is not None:
                return result
            if time.monotonic() - backend.heard > self.options.patience:
                raise JobLost(f"the server said nothing of it for {self.options.patience:.0f} s, after {status}")
            time.sleep(self.options.poll_seconds)
