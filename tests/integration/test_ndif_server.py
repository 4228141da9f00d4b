"""Remote traces on a real NDIF server; `make test-ndif` runs them, an ordinary pytest does not."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import torch
from conftest import tiny_model
from ndif_server import NdifServer
from transformers import AutoTokenizer

pytestmark = [pytest.mark.ndif, pytest.mark.slow]

KEY = "f3b0c442-98fc-4c14-9afb-f4c8996fb924"
FAMILIES = ("gpt_neox", "llama")
LAYER = 1
REFUSAL = "OutOfOrderError: '.*grad.*' was requested but the model already ran past it"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer_folder):
    """A saved model of each family, which the server loads by the folder's path."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, torch.float32).save_pretrained(found[family])
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, found[family])
    return found


@pytest.fixture(scope="module")
def server():
    with NdifServer() as running:
        yield running


@pytest.fixture(scope="module")
def untrusting():
    with NdifServer(untrusted=True) as running:
        yield running


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def aim(monkeypatch):
    """Sends the remote traces of the test to a server."""
    import nnsight

    def at(server):
        monkeypatch.setattr(nnsight.CONFIG.API, "HOST", server.url)
        monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", KEY)
        monkeypatch.setattr(nnsight.CONFIG.APP, "REMOTE_LOGGING", False)

    return at


@pytest.fixture
def remote_model(folders, monkeypatch):
    """An nnsight model without weights, known to the server by its folder's path."""
    import nnsight
    from nnsight.modeling import huggingface

    def model(family):
        path = str(folders[family])
        # nnsight asks the hub for a repository's canonical name; a folder has none.
        monkeypatch.setitem(huggingface._ID_CACHE, path, path)
        return nnsight.TransformersModel(path, task="text-generation", tokenizer=AutoTokenizer.from_pretrained(path))

    return model


@pytest.fixture
def tokens():
    return torch.arange(24).reshape(2, 12) + 3


def blocks(model, family):
    return model.gpt_neox.layers if family == "gpt_neox" else model.model.layers


def embedding(model, family):
    return model.gpt_neox.embed_in if family == "gpt_neox" else model.model.embed_tokens


def first(output):
    return output[0] if isinstance(output, tuple) else output


def summed_loss(logits, tokens):
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1), reduction="sum")


def local_hidden(family, tokens):
    with torch.no_grad():
        return tiny_model(family, torch.float32)(tokens, output_hidden_states=True).hidden_states[LAYER + 1]


def local_gradient(family, tokens):
    model = tiny_model(family, torch.float32)
    output = model(tokens, output_hidden_states=True)
    return torch.autograd.grad(summed_loss(output.logits, tokens), output.hidden_states[LAYER + 1])[0]


def second_moment(hidden):
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows.T @ rows


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def remote_second_moment(model, family, tokens):
    with model.trace(tokens, remote=True):
        hidden = first(blocks(model, family)[LAYER].output)
        rows = hidden.reshape(-1, hidden.shape[-1])
        moment = (rows.T @ rows).save()
    return moment


def remote_backward_block(model, family, tokens):
    """The server holds its parameters frozen, so the embedding's output is where the graph has to begin."""
    with model.trace(tokens, remote=True):
        embedding(model, family).output.requires_grad_(True)
        hidden = first(blocks(model, family)[LAYER].output)
        loss = summed_loss(model.output.logits, tokens)
        with loss.backward():
            gradient = hidden.grad.save()
    return gradient


def remote_autograd(model, family, tokens):
    with model.trace(tokens, remote=True):
        embedding(model, family).output.requires_grad_(True)
        hidden = first(blocks(model, family)[LAYER].output)
        loss = summed_loss(model.output.logits, tokens)
        gradient = torch.autograd.grad(loss, [hidden])[0].save()
    return gradient


def remote_error(model, tokens):
    with model.trace(tokens, remote=True):
        model.gpt_neox.layers[LAYER].output.save()
        raise ValueError("these words")


def poll(backend, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (result := backend()) is not None:
            return result
        time.sleep(0.1)
    raise AssertionError(f"The job is {backend.status} after {seconds} s.")


def patiently(job, seconds=60):
    """Run a job again while NDIF answers that it cannot submit it."""
    from nnsight.intervention.backends.remote import RemoteError

    until = time.monotonic() + seconds
    while True:
        try:
            return job()
        except RemoteError as error:
            if "Error submitting request" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.5)


# A server that trusts


def test_the_server_is_up_and_on_loopback_only(server):
    with urllib.request.urlopen(f"{server.url}/connected") as response:
        assert response.status == 200
    heard = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert heard == {"127.0.0.1"}


def test_a_reduction_runs_on_the_server(server, aim, remote_model, family, tokens):
    aim(server)
    moment = remote_second_moment(remote_model(family), family, tokens)
    assert_close(moment, second_moment(local_hidden(family, tokens)))


def test_a_gradient_of_nnsights_backward_block(server, aim, remote_model, family, tokens):
    aim(server)
    assert_close(remote_backward_block(remote_model(family), family, tokens), local_gradient(family, tokens))


def test_a_gradient_of_torchs_autograd(server, aim, remote_model, family, tokens):
    aim(server)
    assert_close(remote_autograd(remote_model(family), family, tokens), local_gradient(family, tokens))


def test_a_session_adds_up_three_traces_in_one_job(server, aim, remote_model, family, tokens):
    aim(server)
    model = remote_model(family)
    with model.session(remote=True):
        total = torch.zeros(32, 32).save()
        for shift in range(3):
            with model.trace(tokens + shift):
                hidden = first(blocks(model, family)[LAYER].output)
                rows = hidden.reshape(-1, hidden.shape[-1])
                total += rows.T @ rows
    assert_close(total, sum(second_moment(local_hidden(family, tokens + shift)) for shift in range(3)))


def test_a_job_that_nobody_waits_for(server, aim, remote_model, tokens):
    aim(server)
    model = remote_model("gpt_neox")
    with model.trace(tokens, remote=True, blocking=False) as tracer:
        hidden = first(model.gpt_neox.layers[LAYER].output)
        moment = (hidden.reshape(-1, 32).T @ hidden.reshape(-1, 32)).save()  # noqa: F841
    result = poll(tracer.backend)
    assert_close(result["moment"], second_moment(local_hidden("gpt_neox", tokens)))


def test_large_tensors_travel_both_ways(server, aim, remote_model, tokens):
    aim(server)
    model = remote_model("gpt_neox")
    sent = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))  # 19 MiB of noise, which does not shrink
    with model.trace(tokens, remote=True):
        returned = (sent + 1).save()
    assert torch.equal(returned, sent + 1)


def test_the_key_is_in_no_log_but_in_ndifs_own_field(server, aim, remote_model, tokens):
    """NDIF itself writes api_key=<key> beside what it logs of a request; nothing else may have it."""
    aim(server)
    remote_second_moment(remote_model("gpt_neox"), "gpt_neox", tokens)
    text = server.log_text()
    assert "Your job has been received" in text
    assert KEY not in text.replace(f"api_key={KEY}", "")


def test_an_error_in_the_block_comes_back_with_its_words(server, aim, remote_model, tokens):
    from nnsight.intervention.backends.remote import RemoteError

    aim(server)
    with pytest.raises(RemoteError, match="ValueError: these words"):
        remote_error(remote_model("gpt_neox"), tokens)


# A server that does not


def test_an_untrusted_reduction_is_the_same(untrusting, aim, remote_model, tokens):
    aim(untrusting)
    moment = remote_second_moment(remote_model("gpt_neox"), "gpt_neox", tokens)
    assert_close(moment, second_moment(local_hidden("gpt_neox", tokens)))


def test_an_untrusted_gradient_is_refused(untrusting, aim, remote_model, tokens):
    from nnsight.intervention.backends.remote import RemoteError

    aim(untrusting)
    model = remote_model("gpt_neox")
    with pytest.raises(RemoteError, match=REFUSAL):
        remote_backward_block(model, "gpt_neox", tokens)
    with pytest.raises(RemoteError, match="appears to not have been used in the graph"):
        remote_autograd(model, "gpt_neox", tokens)


# Servers that fall and come back


def test_a_model_whose_process_was_killed_is_loaded_again(server, aim, remote_model, tokens):
    aim(server)
    model = remote_model("gpt_neox")
    wanted = second_moment(local_hidden("gpt_neox", tokens))
    assert_close(remote_second_moment(model, "gpt_neox", tokens), wanted)
    server.kill_model_worker()
    assert_close(patiently(lambda: remote_second_moment(model, "gpt_neox", tokens)), wanted)


def test_an_api_that_was_killed_comes_back_at_the_same_address(server, aim, remote_model, tokens):
    aim(server)
    server.kill_api()
    with pytest.raises(ConnectionRefusedError):
        remote_second_moment(remote_model("gpt_neox"), "gpt_neox", tokens)
    server.start_api()
    moment = remote_second_moment(remote_model("gpt_neox"), "gpt_neox", tokens)
    assert_close(moment, second_moment(local_hidden("gpt_neox", tokens)))


def test_a_server_that_was_killed_starts_again_and_stops_without_a_trace(aim, remote_model, tokens):
    running = NdifServer()
    with running:
        url = running.url
        running.kill()
        assert running.processes() == []
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/ping")
        running.start()
        assert running.url == url
        aim(running)
        moment = remote_second_moment(remote_model("gpt_neox"), "gpt_neox", tokens)
        assert_close(moment, second_moment(local_hidden("gpt_neox", tokens)))
    assert running.processes() == []
    assert not running.folder.exists()
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(running.folder) not in listed
