"""One job of nnsight's: how it is written down, sent, and asked for; and what its errors mean."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import nnsight
from nnsight.intervention.backends.remote import RemoteBackend, RemoteError

from tangent_lens.models.remote_jobs import GradientsRefused, JobLost, RemoteRunFailed
from tangent_lens.models.server_functions import batch_sums, joined, packed

# They are not installed on the server, so they travel as source.
nnsight.register(batch_sums.__module__)


class QuietBackend(RemoteBackend):
    """A job that is sent without waiting for it. It counts its bytes and leaves the progress line to others."""

    def __init__(self, envoy: Any) -> None:
        super().__init__(envoy.to_model_key(), env=envoy._remoteable_get_env(), blocking=False)
        self.display.enabled = False
        self.sent_bytes = self.received_bytes = 0
        self.heard = time.monotonic()

    def note(self, response: Any) -> bool:
        """The server answered. (It says nothing, for ever, of a job that it has lost.)"""
        self.heard = time.monotonic()
        return super().note(response)

    def _serialize(self, tracer: Any) -> bytes:
        blob = super()._serialize(tracer)
        self.sent_bytes += len(blob)
        return blob

    def finalize(self, content: bytes) -> Any:
        """Count what was downloaded, and unpack it."""
        self.received_bytes += len(content)
        return super().finalize(content)


def send(envoy: Any, backend: Any, request: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> None:
    """Write down what shall run, and send it: the block below runs on the server, not here.

    It may name nothing but what travels: plain data, functions of :mod:`~tangent_lens.models.server_functions`, nnsight.
    """
    save = nnsight.save
    with envoy.session(backend=backend):
        found = {}
        for batch in batches:
            with envoy.trace(**batch["arguments"]):
                part = save(batch_sums(envoy, request, batch))
            found = joined(found, part, request)
            part = None
        travelling = save(packed(found))  # noqa: F841 (comes back under this name)


@contextmanager
def server_errors() -> Iterator[None]:
    """What a server's refusal, its absence or an error inside the job means to the person who waits for it.

    Raises:
        JobLost: nobody answered, or what answered has lost the job.
        GradientsRefused, RemoteRunFailed: it will fail again.
    """
    try:
        yield
    except (httpx.HTTPError, ConnectionError) as problem:
        raise JobLost(f"the server did not answer ({type(problem).__name__})") from problem
    except RemoteError as problem:
        # Without the chain: the words of a server may repeat the key that came with the request.
        raise _meaning(_without_key(str(problem))) from None


# What NDIF says when nobody is to blame. It takes the job again a little later.
_LOST = (
    r"^Failed to send request: .*(Errno|timed out|temporarily unavailable|reconnecting|disconnected)",
    r"^Error submitting request to model deployment",
    r"^Your job was cancelled or preempted",
)
# Its sandbox, in which requests of keys it does not trust run, keeps no graph.
_NO_GRADIENTS = (
    r"OutOfOrderError: '\S*grad",
    r"appears to not have been used in the graph",
    r"does not require grad",
)


def _meaning(said: str) -> Exception:
    if any(re.search(words, said) for words in _LOST):
        return JobLost(_last_line(said))
    if any(re.search(words, said) for words in _NO_GRADIENTS):
        return GradientsRefused(
            "the server runs forward passes for this key and no backward passes: NDIF runs the requests of keys that it does "
            "not trust in a sandbox without gradients. Ask NDIF for a trusted key, or measure what needs no gradient: "
            "lens.record(texts, gradients=False, remote=True), lens.shape, lens.fit, lens.sample"
        )
    if "execution timeout" in said:
        return RemoteRunFailed(f"{_last_line(said)} Make the jobs smaller: Remote(batches_per_job=...), or batch_size")
    if "OutOfMemoryError" in said:
        return RemoteRunFailed(
            f"the server ran out of memory ({_last_line(said)}); use a smaller batch_size or sequence_length, fewer sites a run, "
            "or statistics='sketch'"
        )
    return RemoteRunFailed(f"the job failed on the server: {_last_line(said)}")


def _last_line(said: str) -> str:
    return ([line.strip() for line in said.splitlines() if line.strip()] or ["it gave no reason"])[-1]


def _without_key(said: str) -> str:
    key = nnsight.CONFIG.API.APIKEY
    return said.replace(key, "<your key>") if key else said
