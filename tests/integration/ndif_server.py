"""A real NDIF server on loopback, without a GPU, started and taken down by the tests.

    with NdifServer() as server:
        os.environ["NDIF_HOST"] = server.url        # before nnsight is imported, or nnsight.CONFIG.API.HOST later

Redis, an object store, Ray and NDIF's API run in an environment of their own (packaging/ndif.py), on free ports, and
keep what they write in a temporary folder.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "TANGENT_LENS_NDIF_SERVER"
PORTS = ("redis", "store", "ray", "client", "dashboard", "agent", "agent_grpc", "metrics", "api")
RUNNER = "ndif.services.ray.sandbox.runner"
# NDIF places models by the memory of GPUs; it is told of one that is not there.
RESOURCES = {"head": 10, "cuda_memory_bytes": 2_000_000_000, "cpu_memory_bytes": 2_000_000_000}

# What runs on the server in the place of NDIF's own actors, which load onto GPUs. The second gives every request to
# NDIF's sandbox, as a server does with the key of somebody it does not trust.
ACTORS = """
import gc

import ray
from nnsight.modeling.huggingface import HuggingFaceModel

from ndif.services.ray.deployments.modeling.base import BaseModelDeployment
from ndif.services.ray.sandbox.model import SandboxModelDeployment


class OnCpu:
    CACHEABLE = False

    def load_from_disk(self):
        model = HuggingFaceModel.from_model_key(
            self.model_key, dispatch=True, dtype=self.dtype_name, device="cpu", **self.kwargs
        )
        model._module.requires_grad_(False)
        return model

    def __init__(self, *arguments, **options):
        import torch

        torch.set_num_threads(1)
        torch.cuda.synchronize = lambda *ignored: None
        super().__init__(*arguments, **options)
        self.gpu_mem_bytes_by_id = {}


@ray.remote(num_cpus=0.1, max_restarts=-1)
class CpuModelActor(OnCpu, BaseModelDeployment):
    pass


@ray.remote(num_cpus=0.1, max_restarts=-1)
class CpuSandboxModelActor(OnCpu, SandboxModelDeployment):
    async def run(self, request):
        request.trusted = False
        await super().run(request)
"""


class ServerError(Exception):
    """The server did not do what it was asked to; the sentence says where to look."""


def free_ports(names):
    """A free loopback port for each name; all are held until the last is found, so that no two are the same."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name in names:
            holder = stack.enter_context(socket.socket())
            holder.bind(("127.0.0.1", 0))
            found[name] = holder.getsockname()[1]
        return found


def server_python() -> Path:
    """The python of the server's environment, which is made first where it is missing."""
    command = [sys.executable, str(ROOT / "packaging" / "ndif.py")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ServerError(f"The NDIF server's environment could not be made:\n{done.stdout}{done.stderr}")
    return Path(done.stdout.splitlines()[-1])


def answers(url: str, timeout: float = 2.0) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class NdifServer:
    """NDIF with everything it needs; a context manager.

    untrusted: run every request in NDIF's sandbox, which has no gradients; NDIF itself does so with the requests of
        keys without the tag "trusted".
    variables: more environment variables for the server's processes, such as HF_ENDPOINT.
    """

    def __init__(self, untrusted: bool = False, variables: dict[str, str] | None = None, patience: float = 180.0):
        self.python = server_python()
        self.untrusted = untrusted
        self.patience = patience
        self.ports = free_ports(PORTS)
        self.url = f"http://127.0.0.1:{self.ports['api']}"
        # Short: the path of a Unix socket, which Ray makes in it, has about a hundred characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="ndif-"))
        self.mark = uuid.uuid4().hex
        atexit.register(self.stop)
        self.leaders: dict[str, subprocess.Popen] = {}
        self.variables = self._environment() | (variables or {})
        (self.folder / "actors").mkdir()
        (self.folder / "actors" / "cpu_actors.py").write_text(ACTORS, encoding="utf-8")

    def __enter__(self) -> NdifServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    # Up

    def start(self) -> None:
        """Start everything, at the same address every time, and return when the server takes jobs."""
        self._start("redis", [shutil.which("redis-server", path=self.variables["PATH"]), *self._redis_options()])
        self._start("store", [self._program("moto_server"), "-H", "127.0.0.1", "-p", str(self.ports["store"])])
        self._start("ray", [self._program("ray"), "start", *self._ray_options()])
        self._wait("redis", lambda: listens(self.ports["redis"]))
        self._start_api()
        self._wait("ray", lambda: answers(f"http://127.0.0.1:{self.ports['dashboard']}/api/version"))
        self._wait("ray", lambda: listens(self.ports["client"]))
        self._start_controller()
        self._wait("store", lambda: listens(self.ports["store"]))
        self.wait_until_connected()

    def start_api(self) -> None:
        """Start the API again after kill_api."""
        self._start_api()
        self.wait_until_connected()

    def wait_until_connected(self) -> None:
        self._wait("api", lambda: answers(f"{self.url}/connected"))

    def _start_api(self) -> None:
        options = ["--config", "python:ndif.services.api.gunicorn_conf", "--bind", f"127.0.0.1:{self.ports['api']}"]
        self._start("api", [self._program("gunicorn"), *options, "ndif.services.api.app:app"])

    def _start_controller(self) -> None:
        """The command returns when Ray has the controller, which goes on running there."""
        module = "ndif.services.ray.deployments.controller.controller"
        variables = self.variables | {"RAY_ADDRESS": f"127.0.0.1:{self.ports['ray']}"}
        done = self._start("controller", [str(self.python), "-m", module], variables)
        if done.wait(timeout=self.patience) != 0:
            raise ServerError(f"NDIF's controller did not start:\n{self._tail('controller')}")
        self._forget("controller")

    def _start(self, name: str, command: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen:
        """Each program leads a session of its own, by which its children are known after it is gone."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=variables or self.variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.leaders[name] = process
        return process

    def _wait(self, name: str, condition) -> None:
        until = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > until:
                raise ServerError(
                    f"The NDIF server was not ready after {self.patience:.0f} s: {name} does not answer. The end of "
                    f"its log:\n{self._tail(name)}"
                )
            time.sleep(0.1)

    # Down

    def stop(self) -> None:
        """Take everything down and delete the folder; twice does no harm."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """Kill every process at once, as a machine that loses its power does; start() brings the server back."""
        self._kill(self.processes)
        self._forget(*self.leaders)

    def kill_api(self) -> None:
        """Kill the API and its dispatcher; Redis, the object store, Ray and the models stay."""
        session = self.leaders["api"].pid
        self._kill(lambda: self._of_sessions([session]))
        self._forget("api")

    def kill_model_worker(self) -> None:
        """Kill the processes that hold models. NDIF starts them again; until then it answers requests with an error."""
        found = [process for process in self.processes() if self._title(process).startswith("ray::Cpu")]
        if not found:
            raise ServerError("No process holds a model: NDIF starts one for the first request; send one before.")
        self._kill(lambda: found)

    def processes(self) -> list[psutil.Process]:
        """All that this server started and that still run, whatever became of their parents."""
        return self._of_sessions([leader.pid for leader in self.leaders.values()], marked=True)

    def _of_sessions(self, sessions, marked: bool = False) -> list[psutil.Process]:
        sessions = set(sessions)
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in sessions or (marked and process.environ().get(MARK) == self.mark):
                    found |= {process, *process.children(recursive=True)}
        return [process for process in found if self._alive(process)]

    def _kill(self, processes) -> None:
        """Kill until none is left: one may have started another in the meantime."""
        until = time.monotonic() + 30
        while left := processes():
            left = [process for process in left if self._alive(process)]
            if not left:
                return
            for process in left:
                self._remove_socket(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
            if time.monotonic() > until:
                raise ServerError(f"These processes of the NDIF server cannot be killed: {left}; end them by hand.")

    def _forget(self, *names: str) -> None:
        """A process that is waited for gives its number back, which then is nobody's session or somebody else's."""
        for name in names:
            self.leaders.pop(name).wait(timeout=30)

    def _remove_socket(self, process: psutil.Process) -> None:
        """A sandbox's runner puts its socket into the system's temporary folder and does not survive to remove it."""
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if RUNNER in words:
                os.unlink(words[words.index(RUNNER) + 1])

    @staticmethod
    def _alive(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @staticmethod
    def _title(process: psutil.Process) -> str:
        with contextlib.suppress(psutil.Error):
            return " ".join(process.cmdline())
        return ""

    # What it wrote

    def log_text(self) -> str:
        """Whatever any of the server's processes logged since the first start."""
        files = [*self.folder.glob("*.log"), *(self.folder / "ray").glob("session_2*/logs/**/*")]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()]
        return "\n".join(texts)

    def _tail(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-30:])

    # Settings

    def _program(self, name: str) -> str:
        return str(self.python.parent / name)

    def _redis_options(self) -> list[str]:
        port = str(self.ports["redis"])
        return ["--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", str(self.folder)]

    def _ray_options(self) -> list[str]:
        ports = self.ports
        return [
            "--head",
            "--block",
            "--disable-usage-stats",
            "--node-ip-address=127.0.0.1",
            f"--port={ports['ray']}",
            f"--ray-client-server-port={ports['client']}",
            "--include-dashboard=true",  # NDIF's controller asks the dashboard for the nodes
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={ports['dashboard']}",
            f"--dashboard-agent-listen-port={ports['agent']}",
            f"--dashboard-agent-grpc-port={ports['agent_grpc']}",
            f"--metrics-export-port={ports['metrics']}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--num-cpus=4",
            "--num-gpus=1",
            f"--resources={json.dumps(RESOURCES)}",
            "--object-store-memory=200000000",
            f"--temp-dir={self.folder / 'ray'}",
        ]

    def _environment(self) -> dict[str, str]:
        """Nothing of the caller's but the few variables that any program needs: no key, no proxy, no cluster's address."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TZ", "TMPDIR") if name in os.environ}
        ports = self.ports
        actor = "CpuSandboxModelActor" if self.untrusted else "CpuModelActor"
        return kept | {
            MARK: self.mark,
            "PATH": os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": str(self.folder / "actors"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hub"),
            # With it on, Ray's proxy for clients loses a child now and then, and the client waits for 40 s.
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            # Without it Ray takes 127.0.0.1 for a mistake and listens on the machine's outward address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "NDIF_REDIS_URL": f"redis://127.0.0.1:{ports['redis']}",
            "NDIF_OBJECT_STORE_URL": f"http://127.0.0.1:{ports['store']}",
            "NDIF_OBJECT_STORE_ACCESS_KEY": "anybody",
            "NDIF_OBJECT_STORE_SECRET_KEY": "anything",
            "NDIF_RAY_ADDRESS": f"ray://127.0.0.1:{ports['client']}",
            "NDIF_RAY_HEAD_PORT": str(ports["ray"]),
            "NDIF_API_PORT": str(ports["api"]),
            "NDIF_MODEL_IMPORT_PATH": f"cpu_actors.{actor}",
            "NDIF_DEFAULT_DTYPE": "float32",
            "NDIF_DEFAULT_PADDING_BIAS": "0",
            "NDIF_SANDBOX_POOL_SIZE": "1",
        }
