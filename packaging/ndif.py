"""Make the environment that runs a real NDIF server, the remote side of nnsight, without a GPU.

    python3 packaging/ndif.py

It lies in the user's cache folder, outside this repository, and has no tangent_lens in it, as NDIF's own servers have
none. A second run finds it there. The last line printed is the environment's python; tests/integration starts the
server with it.

Only the standard library is used, and the syntax is kept so old that an old Python can still read the file and look
for a newer one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import environment
import matrix
from environment import SetupError, complaint, pip_install, run, say, venv_python

# NDIF asks for 3.12 or newer; its code runs on 3.11 as well.
PYTHONS = ((3, 12), (3, 13), (3, 11))
TORCH = environment.CPU_TORCH.partition("+")[0]
# nnsight 0.8.1 no longer takes an argument that this NDIF gives it; nnsight 0.8.1 as a client talks to 0.8.0 here.
NDIF = "ndif==0.1.2"
REQUIREMENTS = (
    "nnsight==0.8.0",
    "transformers==5.22.2",
    "ray[default]==2.60.0",
    "moto[server]>=5,<6",  # stands in for the object store
    # anyio 4.15 imports half of itself late, which fails after nnsight has given every object its save(): the API then
    # answers requests of more than 1 MB with "There was an error parsing the body".
    "anyio<4.14",
    "accelerate",
    "boto3",
    "click",
    "fastapi",
    "gunicorn",
    "peft",
    "psutil",
    "pydantic",
    "python-dotenv",
    "python-multipart",
    "pyyaml",
    "redis",
    "uvicorn[standard]",
    "zstandard",
)


# Python


def candidates(version):
    """Interpreters of that version: on the PATH, and those that pyenv keeps off it."""
    name = "python{}.{}".format(*version)
    found = shutil.which(name)
    root = Path(os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv")))
    kept = sorted((root / "versions").glob("{}.{}*/bin/python".format(*version)))
    return ([found] if found else []) + [str(path) for path in kept]


def choose_python():
    for version in PYTHONS:
        for python in candidates(version):
            if environment.python_version(python) == version:
                return python, version
    raise SetupError(
        "An NDIF server needs Python 3.12 (3.13 and 3.11 do as well), and none was found on the PATH or in pyenv's "
        "folder; install one, for example with: pyenv install 3.12."
    )


# Redis


def redis_server():
    """The path of redis-server, installed with apt where that is possible."""
    found = shutil.which("redis-server")
    if found:
        return found
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        say("Installing redis-server with apt-get.")
        # A failed update is no reason to stop: the lists that are there may do.
        run(["apt-get", "update", "-q"])
        done = run(["apt-get", "install", "-y", "-q", "--no-install-recommends", "redis-server"])
        found = shutil.which("redis-server")
        if found:
            return found
        say(complaint(done.stdout))
    raise SetupError(
        "An NDIF server needs the program redis-server, 6.2 or newer, and it is not on the PATH; install it "
        "(on Debian and Ubuntu: apt-get install redis-server; on macOS: brew install redis), then run this again."
    )


# The environment


def folder_for(version):
    return matrix.cache_folder().absolute() / "environments" / "ndif-{}.{}".format(*version)


def mark(version):
    """Changes with whatever would be installed."""
    return matrix.digest(["{}.{}".format(*version), TORCH, NDIF, *REQUIREMENTS])


def stamped(venv):
    try:
        return json.loads((venv / environment.STAMP).read_text(encoding="utf-8"))["requirements"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def up_to_date(venv, version):
    return stamped(venv) == mark(version) and venv_python(venv).exists()


def install_torch(venv):
    """The CPU build where it is at hand; elsewhere the index's own, which works without a GPU too."""
    if pip_install(venv, "--only-binary", ":all:", environment.CPU_TORCH).returncode == 0:
        return
    say(
        f"No CPU build of {TORCH} is at hand for this Python; installing the package index's own, of several gigabytes."
    )
    matrix.check(pip_install(venv, "--only-binary", ":all:", TORCH), f"{TORCH} could not be installed")


def install_server(venv):
    """NDIF comes without its dependencies: told to overlook the Python it asks for, pip overlooks it for them all."""
    install_torch(venv)
    say("Installing what the NDIF server needs.")
    matrix.check(pip_install(venv, TORCH, *REQUIREMENTS), "What the NDIF server needs could not be installed")
    done = pip_install(venv, "--no-deps", "--ignore-requires-python", NDIF)
    matrix.check(done, f"{NDIF} could not be installed")


def make(venv, python, version):
    if venv.exists():
        say(f"{venv.name} is out of date or half made: making it anew.")
        shutil.rmtree(str(venv))
    started = time.monotonic()
    environment.make_venv(venv, python, version)
    install_server(venv)
    (venv / environment.STAMP).write_text(json.dumps({"requirements": mark(version)}) + "\n", encoding="utf-8")
    say(f"{venv.name} is ready after {time.monotonic() - started:.0f} s.")


def setup():
    """Bring the environment up to date and return its python."""
    python, version = choose_python()
    redis_server()
    venv = folder_for(version)
    if environment.ROOT in venv.parents:
        raise SetupError(f"{venv} lies inside this repository; set TANGENT_LENS_CACHE to a folder outside.")
    if not up_to_date(venv, version):
        with matrix.held(venv, alone=True):
            if not up_to_date(venv, version):
                make(venv, python, version)
    return venv_python(venv)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        say(str(setup()))
    except (SetupError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
