"""What an NDIF server's words mean to whoever waits for a job; each was heard from a real one, or stands in its source."""

from __future__ import annotations

import httpx
import nnsight
import pytest
from nnsight.intervention.backends.remote import RemoteError

from tangent_lens.models.ndif_backend import server_errors
from tangent_lens.models.remote_jobs import GradientsRefused, JobLost, Remote, RemoteRunFailed, Traffic

TRACEBACK = 'Traceback (most recent call last):\n  File "payload.py", line 3, in attend\n    x = 1 / 0\n'


def meaning(problem):
    with pytest.raises((JobLost, RemoteRunFailed)) as caught, server_errors():
        raise problem
    return caught.value


@pytest.mark.parametrize(
    "problem",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        ConnectionRefusedError(111, "Connection refused"),
        RemoteError("Failed to send request: [Errno 111] Connection refused"),
        RemoteError("Failed to send request: Service temporarily unavailable: compute backend is reconnecting"),
        RemoteError(
            "Error submitting request to model deployment. Please try again later. Sorry for the inconvenience."
        ),
        RemoteError("Your job was cancelled or preempted by the server."),
    ],
)
def test_nobodys_fault_is_tried_again(problem):
    assert isinstance(meaning(problem), JobLost)


@pytest.mark.parametrize(
    "last",
    [
        "nnsight.intervention.interleaver.OutOfOrderError: '140691391405648.grad.i0' was requested but the model already ran "
        "past it",
        "RuntimeError: The differentiated Tensor at index 0 appears to not have been used in the graph. Set allow_unused=True",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    ],
)
def test_a_sandbox_without_gradients_is_recognised(last):
    found = meaning(RemoteError(TRACEBACK + last))
    assert isinstance(found, GradientsRefused) and "lens.shape" in str(found)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            TRACEBACK + "ZeroDivisionError: division by zero\n",
            "failed on the server: ZeroDivisionError: division by zero",
        ),
        # An error of the job that only sounds like a lost connection fails again.
        (TRACEBACK + "FileNotFoundError: [Errno 2] No such file", r"failed on the server: FileNotFoundError"),
        ("Your job exceeded the execution timeout of 3600s.", "batches_per_job"),
        (TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory.", "statistics='sketch'"),
        ("Failed to send request: API key is missing", "API key is missing"),
        ("", "no reason"),
    ],
)
def test_what_would_fail_again_is_told_in_a_sentence(said, words):
    found = meaning(RemoteError(said))
    assert type(found) is RemoteRunFailed
    with pytest.raises(RemoteRunFailed, match=words):
        raise found


def test_a_key_that_the_server_repeats_is_cut_out(monkeypatch):
    monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", "secret-key")
    found = meaning(RemoteError("Failed to send request: the key 'secret-key' is malformed"))
    assert "secret-key" not in str(found) and "<your key>" in str(found)
    assert found.__cause__ is None


def test_traffic_is_said_in_words():
    assert str(Traffic(1, 0, 0, 12_345, 2_000_000)) == "1 job; 0.01 MB sent, 2.00 MB received"
    assert str(Traffic(3, 1, 2, 0, 0)).startswith("3 jobs (1 sent again), 2 more from an interrupted run; ")


def test_remote_is_true_false_or_a_remote():
    assert Remote.of(False) is None and Remote.of(True) == Remote()
    own = Remote(batches_per_job=2)
    assert Remote.of(own) is own
