"""``remote=True``, rehearsed: real payloads in a process without this library, whose weights are frozen."""

from __future__ import annotations

from typing import ClassVar

import httpx
import nnsight
import numpy as np
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from rehearsal.backend import RehearsalServer
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

import tangent_lens as tln
from tangent_lens.measures import statistics_choice
from tangent_lens.measures.plan import plan_measurement
from tangent_lens.measures.remote_cost import remote_cost
from tangent_lens.recording import sketch_receivers

RANK, CONTROLS = 3, 5
LENGTHS = (9, 12, 5, 7, 8, 3, 11, 12, 6, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_folder):
    """A saved model, as a server and its clients know it: by its name."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pythia")
    shape = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=100, max_position_embeddings=16, **shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with RehearsalServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 100, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def remote_lens(folder):
    """A client: it holds the structure, and no weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tln.Lens(nnsight.TransformersModel(str(folder), task="text-generation", tokenizer=tokenizer))


@pytest.fixture(scope="module")
def local_lens(folder):
    return tln.Lens(GPTNeoXForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def remote(server, tmp_path):
    server.faults.clear()
    return lambda **options: tln.Remote(backend=server.backend, folder=tmp_path, poll_seconds=0.01, **options)


def measured(lens, texts, **options):
    options = {"rank": RANK, "controls": CONTROLS, "batch_size": 2, "progress": False} | options
    return lens.measure(texts, **options)


def assert_same(found, expected, tolerance=1e-5):
    assert [one.name for one in found.measurements] == [one.name for one in expected.measurements]
    for one, other in zip(found.measurements, expected.measurements, strict=True):
        for part, number in (
            ("energy", "energy"),
            ("energy", "lift"),
            ("energy", "signal_lift"),
            ("isotropy", "delta"),
        ):
            values = (getattr(getattr(each, part), number) for each in (one, other))
            one_value, other_value = values
            assert one_value == (None if other_value is None else pytest.approx(other_value, rel=tolerance, abs=1e-7))
    for one, other in zip(found.spaces, expected.spaces, strict=True):
        assert one.top_position == other.top_position and one.iso_score == pytest.approx(other.iso_score, rel=tolerance)
    assert found.corpus.loss == pytest.approx(expected.corpus.loss, rel=1e-6)
    assert (found.corpus.fit_rows, found.corpus.test_rows) == (expected.corpus.fit_rows, expected.corpus.test_rows)


class TestNumbers:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("jobs", [1, 8])
    def test_are_those_of_the_model_here(self, remote_lens, local_lens, texts, remote, side, jobs):
        found = measured(remote_lens, texts, padding_side=side, remote=remote(batches_per_job=jobs))
        assert_same(found, measured(local_lens, texts, padding_side=side))

    def test_the_weights_never_come_here(self, remote_lens, texts, remote):
        report = measured(remote_lens, texts, remote=remote())
        assert all(parameter.is_meta for parameter in remote_lens._structure.module.parameters())
        assert report.model.library.startswith("nnsight") and report.model.library.endswith("remote")

    def test_the_report_says_what_the_server_computes_in(self, folder, remote_lens, texts, tmp_path):
        with RehearsalServer(folder, dtype="bfloat16") as half:
            options = tln.Remote(backend=half.backend, folder=tmp_path, poll_seconds=0.01)
            assert measured(remote_lens, texts, gradients="residual", remote=options).model.dtype == "bfloat16"

    def test_skipped_positions_and_single_sites(self, remote_lens, local_lens, texts, remote):
        options = {"skip_first": True, "sites": "resid_post.1", "gradients": "residual"}
        assert_same(measured(remote_lens, texts, remote=remote(), **options), measured(local_lens, texts, **options))

    def test_recordings_hold_the_same_moments(self, remote_lens, local_lens, texts, remote):
        found = remote_lens.record(texts, "resid_post.*", remote=remote(), progress=False)
        expected = local_lens.record(texts, "resid_post.*", progress=False)
        for site, moments in expected.items():
            for stream in ("activations", "gradients"):
                one, other = getattr(found[site], stream), getattr(moments, stream)
                assert one.count == other.count
                assert torch.allclose(one.scatter, other.scatter, rtol=1e-5, atol=1e-6 * float(other.scatter.max()))

    def test_samples_hold_the_same_rows(self, remote_lens, local_lens, texts, remote):
        options = {"rows": 20, "seed": 3, "batch_size": 3, "progress": False}
        found = remote_lens.sample(texts, "resid_post.*", remote=remote(batches_per_job=1), **options)
        expected = local_lens.sample(texts, "resid_post.*", **options)
        for site, sample in expected.items():
            assert torch.equal(found[site].tokens, sample.tokens)
            assert torch.equal(found[site].sequences, sample.sequences)
            assert found[site].seen == sample.seen and found[site].name == sample.name
            assert torch.allclose(found[site].rows, sample.rows, rtol=1e-5, atol=1e-6)

    def test_fits_and_shapes(self, remote_lens, local_lens, texts, remote):
        options = {"sites": "resid_post.1", "progress": False}
        for method in ("pca", "semi_nmf"):
            (found,) = remote_lens.fit(texts, method=method, rank=RANK, remote=remote(), **options).values()
            (expected,) = local_lens.fit(texts, method=method, rank=RANK, **options).values()
            assert found.overlap(expected) > 1 - 1e-6
        found = remote_lens.shape(texts, dimensions=(), remote=remote(), **options).of("resid_post.1")
        expected = local_lens.shape(texts, dimensions=(), **options).of("resid_post.1")
        assert found.mean_cosine == pytest.approx(expected.mean_cosine, abs=1e-6)


class TestSketches:
    OPTIONS: ClassVar[dict] = {"statistics": "sketch", "batch_size": 4}

    @pytest.mark.parametrize("jobs", [1, 8])
    def test_are_those_of_the_model_here(self, remote_lens, local_lens, texts, remote, jobs):
        found = measured(remote_lens, texts, remote=remote(batches_per_job=jobs), **self.OPTIONS)
        expected = measured(local_lens, texts, **self.OPTIONS)
        assert found.settings.statistics == "sketch"
        assert_same(found, expected, tolerance=1e-4)

    def test_are_chosen_where_whole_sums_are_too_much_to_fetch(self, remote_lens, texts, remote, monkeypatch):
        monkeypatch.setattr(statistics_choice, "MOST_TO_TRAVEL", 1e4)
        assert measured(remote_lens, texts, remote=remote()).settings.statistics == "sketch"
        assert measured(remote_lens, texts, rank=0.3, remote=remote()).settings.statistics == "exact"

    def test_of_a_server_that_draws_other_numbers_are_refused(self, remote_lens, texts, remote, monkeypatch):
        monkeypatch.setattr(sketch_receivers, "gaussian_number", lambda *_: 12345)
        with pytest.raises(RuntimeError, match="draws other random numbers"):
            measured(remote_lens, texts, remote=remote(), **self.OPTIONS)


class TestTraffic:
    def test_is_counted_and_said(self, remote_lens, texts, remote, server):
        assert remote_lens.traffic is None
        start = server.payloads
        server.faults += [None, httpx.ConnectError("refused")]
        measured(remote_lens, texts, remote=remote(batches_per_job=1))
        traffic = remote_lens.traffic
        assert (traffic.jobs, traffic.sent_again, traffic.kept) == (6, 1, 0) and server.payloads - start == 7
        assert traffic.received_bytes > 1000 and traffic.sent_bytes > 1000
        assert str(traffic).startswith("6 jobs (1 sent again); ")

    @pytest.mark.parametrize("statistics", ["exact", "sketch"])
    def test_is_what_the_estimate_says(self, remote_lens, texts, remote, statistics):
        report = measured(remote_lens, texts, remote=remote(batches_per_job=2), statistics=statistics)
        model, sites = remote_lens._structure, remote_lens.resolve("resid_post.*")
        plan = plan_measurement(model, sites, report.settings)
        cost = remote_cost(model, plan, report.settings, fit_batches=3, test_batches=3, batches_per_job=2)
        assert cost.jobs == remote_lens.traffic.jobs
        # What torch.save writes around some hundred small tensors is more than what they hold, and zstd less.
        assert 0.5 < cost.received_bytes / remote_lens.traffic.received_bytes < 1.2

    def test_a_display_sees_the_status_of_every_job(self, remote_lens, texts, remote):
        class Display:
            notes: ClassVar[list[str]] = []

            def start(self, description, total=None, unit=""):
                self.notes.append(description)

            def advance(self, amount=1.0, note=""):
                self.notes.append(note)

            def finish(self):
                pass

        measured(remote_lens, texts, remote=remote(batches_per_job=2), progress=Display())
        assert {"activations, remote", "gradients, remote"} <= set(Display.notes)
        assert any(
            note.startswith("job 2 of 2: COMPLETED, 0.") and note.endswith("MB received") for note in Display.notes
        )


class TestLostJobs:
    def test_are_sent_again_and_counted_once(self, remote_lens, local_lens, texts, remote, server):
        server.faults += [None, httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), None]
        assert_same(measured(remote_lens, texts, remote=remote(batches_per_job=1)), measured(local_lens, texts))

    def test_lost_too_often_end_in_a_sentence(self, remote_lens, texts, remote, server):
        server.faults += [httpx.ConnectError("refused")] * 3
        with pytest.raises(tln.RemoteRunFailed, match=r"lost 3 times.*ConnectError.*goes on from there"):
            measured(remote_lens, texts, remote=remote(retries=2))

    def test_a_run_started_again_goes_on_where_it_was(self, remote_lens, local_lens, texts, remote, server):
        start = server.payloads
        server.faults += [None] * 4 + [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            measured(remote_lens, texts, remote=remote(batches_per_job=1))
        interrupted = server.payloads - start
        report = measured(remote_lens, texts, remote=remote(batches_per_job=1))
        whole = server.payloads - start - interrupted
        # 5 fit and 5 test sequences, 2 a batch, 1 batch a job: 6 jobs, 4 of which were done.
        assert (interrupted, whole) == (5, 2)
        assert_same(report, measured(local_lens, texts))

    def test_nothing_is_left_of_a_complete_run(self, remote_lens, texts, remote, tmp_path, server):
        measured(remote_lens, texts, remote=remote())
        assert not list(tmp_path.iterdir())
        start = server.payloads
        measured(remote_lens, texts, remote=remote())
        assert server.payloads > start

    @pytest.mark.parametrize("change", [{"skip_first": True}, {"seed": 1}, {"sites": "resid_post.0"}])
    def test_another_run_does_not_go_on_with_these_sums(self, remote_lens, local_lens, texts, remote, server, change):
        server.faults += [None, KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            measured(remote_lens, texts, remote=remote(batches_per_job=1))
        found = measured(remote_lens, texts, remote=remote(batches_per_job=1), **change)
        assert_same(found, measured(local_lens, texts, **change))

    def test_resume_can_be_turned_off(self, remote_lens, texts, remote, server):
        for expected in (6, 6):
            start = server.payloads
            server.faults += [None] * 5 + [KeyboardInterrupt()]
            with pytest.raises(KeyboardInterrupt):
                measured(remote_lens, texts, remote=remote(batches_per_job=1, resume=False))
            assert server.payloads - start == expected

    def test_no_key_is_written_down(self, remote_lens, texts, remote, server, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", "a-very-secret-key")
        server.faults += [None] * 4 + [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            measured(remote_lens, texts, remote=remote(batches_per_job=1))
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files and not any(b"a-very-secret-key" in path.read_bytes() for path in files)
        assert "a-very-secret-key" not in caplog.text


class TestRefusals:
    def test_an_error_on_the_server_comes_back_as_a_sentence_at_once(self, remote_lens, texts, remote, server):
        start = server.payloads
        server.faults += [RemoteError("Traceback (most recent call last):\n  ...\nValueError: no such head")]
        with pytest.raises(tln.RemoteRunFailed, match="failed on the server: ValueError: no such head"):
            measured(remote_lens, texts, remote=remote())
        assert server.payloads == start + 1

    def test_what_would_have_rows_travel(self, remote_lens, texts, remote):
        with pytest.raises(ValueError, match="bootstrap=0"):
            measured(remote_lens, texts, bootstrap=100, remote=remote())
        with pytest.raises(ValueError, match="cross=False"):
            remote_lens.record(texts, cross=True, remote=remote(), progress=False)

    def test_a_loss_of_ones_own(self, remote_lens, texts, remote):
        with pytest.raises(ValueError, match="cannot travel"):
            measured(remote_lens, texts, loss=lambda output, batch: output.logits.sum(), remote=remote())

    def test_a_model_that_is_here(self, local_lens, texts, remote):
        with pytest.raises(ValueError, match="leave remote out"):
            measured(local_lens, texts, remote=remote())

    @pytest.mark.parametrize("options", [{"batches_per_job": 0}, {"retries": -1}, {"patience": 0}])
    def test_options_that_mean_nothing(self, options):
        with pytest.raises(ValueError, match=r"or more|more than"):
            tln.Remote(**options)


class TestTheRehearsal:
    """It must fail where a real server fails."""

    def test_the_library_is_not_there(self, remote_lens, server):
        from tangent_lens.sites import resid_post

        envoy = remote_lens._structure.envoy
        backend = server.backend(envoy)
        with envoy.session(backend=backend):
            found = nnsight.save(resid_post(0))  # noqa: F841
        with pytest.raises(RemoteError, match="No module named 'tangent_lens'"):
            backend()

    def test_its_weights_have_no_gradient(self, remote_lens, server):
        envoy = remote_lens._structure.envoy
        backend = server.backend(envoy)
        with envoy.trace(torch.arange(5)[None], backend=backend):
            envoy.output.logits.sum().backward()
        with pytest.raises(RemoteError, match="does not require grad"):
            backend()


def test_local_geometry_is_that_of_a_run_here(remote_lens, local_lens, remote):
    draw = np.random.default_rng(1)
    texts = [(2 + draw.zipf(1.3, size=12) % 60).tolist() for _ in range(60)]
    options = {"occurrences": 24, "buckets": 2, "tokens": 3, "m": 2, "neighbours": 5, "linear_m": 3, "progress": False}
    here = local_lens.geometry(texts, gradient_layers=0, **options)
    there = remote_lens.geometry(texts, gradient_layers=0, remote=remote(), **options)
    assert there.buckets == here.buckets and remote_lens.traffic.jobs > 0
    for found, expected in ((there.to_pandas(), here.to_pandas()), (there.depth.to_pandas(), here.depth.to_pandas())):
        numbers = expected.select_dtypes("number").columns
        np.testing.assert_allclose(found[numbers], expected[numbers], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="gradient_layers=0"):
        remote_lens.geometry(texts, gradient_layers=1, remote=remote(), **options)
