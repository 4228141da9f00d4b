"""Whole measurements on a real NDIF server, which has another Python than this one and nothing of this library."""

from __future__ import annotations

import shutil
import subprocess
import threading

import nnsight
import pytest
import torch
from conftest import tiny_model
from ndif_server import NdifServer
from transformers import AutoTokenizer

import tangent_lens as tln

pytestmark = [pytest.mark.ndif, pytest.mark.slow]

KEY = "f3b0c442-98fc-4c14-9afb-f4c8996fb924"
LENGTHS = (9, 12, 5, 7, 8, 3, 11, 12, 6, 10)
OPTIONS = {"rank": 3, "controls": 5, "batch_size": 2, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("neox")
    tiny_model("gpt_neox", torch.float32).save_pretrained(folder)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def server():
    with NdifServer() as running:
        yield running


@pytest.fixture
def aim(monkeypatch):
    """Sends the jobs of the test to a server."""

    def at(server):
        monkeypatch.setattr(nnsight.CONFIG.API, "HOST", server.url)
        monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", KEY)

    return at


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 90, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def lens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tln.Lens(nnsight.TransformersModel(str(folder), task="text-generation", tokenizer=tokenizer))


@pytest.fixture(scope="module")
def here(folder):
    return tln.Lens(tiny_model("gpt_neox", torch.float32), AutoTokenizer.from_pretrained(folder))


def remote(folder, **options):
    return tln.Remote(folder=folder, poll_seconds=0.05, **options)


def assert_same(found, expected):
    assert [one.name for one in found.measurements] == [one.name for one in expected.measurements]
    for one, other in zip(found.measurements, expected.measurements, strict=True):
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=1e-5), one.name
        assert one.isotropy.delta == pytest.approx(other.isotropy.delta, rel=1e-4, abs=1e-7), one.name
    assert found.corpus.loss == pytest.approx(expected.corpus.loss, rel=1e-6)
    assert (found.corpus.fit_rows, found.corpus.test_rows) == (expected.corpus.fit_rows, expected.corpus.test_rows)


class TestOneServer:
    def test_another_python_without_this_library(self, server):
        code = "import importlib.util, sys; print(*sys.version_info[:2], importlib.util.find_spec('tangent_lens'))"
        said = subprocess.run([server.python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
        assert said.split()[-1] == "None"

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("jobs", [1, 8])
    def test_a_measurement_is_that_of_the_model_here(self, server, aim, lens, here, texts, tmp_path, jobs, side):
        aim(server)
        found = lens.measure(texts, padding_side=side, remote=remote(tmp_path, batches_per_job=jobs), **OPTIONS)
        assert_same(found, here.measure(texts, padding_side=side, **OPTIONS))
        assert not list(tmp_path.iterdir())

    def test_moments_are_those_of_the_model_here(self, server, aim, lens, here, texts, tmp_path):
        aim(server)
        found = lens.record(texts, "resid_post.*", remote=remote(tmp_path), progress=False)
        expected = here.record(texts, "resid_post.*", progress=False)
        for site, moments in expected.items():
            for stream in ("activations", "gradients"):
                one, other = getattr(found[site], stream), getattr(moments, stream)
                assert one.count == other.count
                assert float((one.scatter - other.scatter).abs().max() / other.scatter.abs().max()) < 1e-5

    def test_an_error_inside_comes_back_as_a_sentence(self, server, aim, lens, texts, tmp_path):
        aim(server)
        model = lens._runner(remote(tmp_path))
        request = {"places": [], "gradients": True, "directions": {}, "directions_of": {}}
        batch = {"arguments": {"input_ids": torch.arange(5)[None]}, "targets": None}
        from tangent_lens.progress import NoProgress

        with pytest.raises(tln.RemoteRunFailed, match=r"failed on the server: AttributeError: .*NoneType.*flatten"):
            model.jobs.run(request, [batch], NoProgress())

    def test_a_model_that_the_server_does_not_know(self, server, aim, lens, texts, tmp_path, monkeypatch):
        aim(server)
        key = lens._structure.envoy.to_model_key().replace("neox", "nowhere")
        monkeypatch.setattr(lens._structure.envoy, "to_model_key", lambda: key)
        with pytest.raises(tln.RemoteRunFailed):
            lens.measure(texts, remote=remote(tmp_path), **OPTIONS)

    def test_no_key_is_written_down(self, server, aim, lens, texts, tmp_path, caplog, capfd):
        aim(server)
        watcher = Watcher(after=2, act=lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            lens.measure(texts, remote=remote(tmp_path, batches_per_job=1), **OPTIONS | {"progress": watcher})
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files and not any(KEY.encode() in path.read_bytes() for path in files)
        assert KEY not in caplog.text + "".join(capfd.readouterr())
        # NDIF itself notes whose request it serves; nothing that this library sends repeats it.
        assert KEY not in server.log_text().replace(f"api_key={KEY}", "")


class Watcher:
    """A progress display that does something once so many jobs have come back."""

    def __init__(self, after, act):
        self.after, self.act, self.seen = after, act, set()

    def start(self, description, total=None, unit=""):
        self.description = description

    def advance(self, amount=1.0, note=""):
        if "COMPLETED" in note:
            self.seen.add((self.description, note.partition(":")[0]))
        if self.act is not None and len(self.seen) == self.after and amount:
            act, self.act = self.act, None
            act()

    def finish(self):
        pass


class TestFailures:
    def test_a_server_killed_in_the_middle_and_started_again(self, aim, lens, here, texts, tmp_path):
        with NdifServer() as server:
            aim(server)
            back = threading.Thread(target=server.start)

            def kill():
                server.kill()
                back.start()

            watcher = Watcher(after=3, act=kill)
            options = OPTIONS | {"progress": watcher}
            found = lens.measure(texts, remote=remote(tmp_path, batches_per_job=1, retries=30, patience=5), **options)
            back.join()
            assert watcher.act is None
        assert_same(found, here.measure(texts, **OPTIONS))

    def test_a_worker_killed_in_the_middle(self, server, aim, lens, here, texts, tmp_path):
        aim(server)
        watcher = Watcher(after=3, act=server.kill_model_worker)
        options = OPTIONS | {"progress": watcher}
        found = lens.measure(texts, remote=remote(tmp_path, batches_per_job=1, retries=30, patience=20), **options)
        assert watcher.act is None
        assert_same(found, here.measure(texts, **OPTIONS))

    def test_a_key_that_is_not_trusted_gets_no_gradients_and_all_else(self, aim, lens, here, texts, tmp_path):
        with NdifServer(untrusted=True) as server:
            aim(server)
            with pytest.raises(tln.GradientsRefused, match=r"no backward passes.*lens\.shape"):
                lens.measure(texts, remote=remote(tmp_path), **OPTIONS)
            options = {"dimensions": (), "sites": "resid_post.*", "progress": False}
            found = lens.shape(texts, remote=remote(tmp_path), **options).to_pandas()
            expected = here.shape(texts, **options).to_pandas()
            assert found["iso_score"].tolist() == pytest.approx(expected["iso_score"].tolist(), rel=1e-5)
