"""Make a virtual environment and install this project into it, in editable mode.

    python3 packaging/environment.py --venv .venv --extras plot,test

A second run with nothing changed returns at once. torch comes first and is then held where it is, and a machine
without an NVIDIA GPU gets the CPU build: the default build for Linux is a CUDA one, of several gigabytes.

Only the standard library is used, and the syntax is kept so old that an old Python can still read the file and look
for a newer one.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 10), (3, 13)
OTHER_PYTHONS = ("python3.11", "python3.12", "python3.10", "python3.13")
STAMP = "tangent-lens.json"
# Asked for by its exact local version, which only a CPU build carries: where none is at hand, pip says so at once.
CPU_TORCH = "torch==2.13.0+cpu"


class SetupError(Exception):
    """Something that the person has to know, in one sentence."""


def say(sentence):
    print(sentence, flush=True)


def run(command, **options):
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        **options,
    )


def complaint(output):
    """The end of what a tool printed, without pip's harmless remarks on the folders it did not find."""
    lines = [line for line in output.splitlines() if line.strip() and " is ignored: " not in line]
    return "\n".join("    " + line for line in lines[-15:])


def answers(command):
    try:
        return run(command, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# Python


def python_version(python):
    """(major, minor) of an interpreter, or None where it does not run."""
    try:
        done = run([python, "-c", "import sys; print(*sys.version_info[:2])"], timeout=60)
        major, minor = done.stdout.split()[-2:]
        return (int(major), int(minor)) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def choose_python():
    """The interpreter that runs this, or another on the PATH where this one is too old or too new."""
    here = sys.version_info[:2]
    if OLDEST <= here <= NEWEST:
        return sys.executable, here
    for name in OTHER_PYTHONS:
        found = shutil.which(name)
        version = python_version(found) if found else None
        if version and OLDEST <= version <= NEWEST:
            say("This is Python {}.{}; using {} instead.".format(*here, name))
            return found, version
    raise SetupError(
        "Python {}.{} does not suit: tangent-lens needs 3.10 to 3.13, and none was found on the PATH; "
        "install one, then run make PYTHON=<its path> again.".format(*here)
    )


def venv_python(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_venv(venv, python, version):
    """Make the environment where it is missing, half made, or an earlier one of ours with another Python."""
    inside = venv_python(venv)
    existing = python_version(inside) if inside.exists() else None
    if existing is not None and existing != version and (venv / STAMP).exists():
        say("Python changed from {}.{} to {}.{}: making {} anew.".format(*existing, *version, venv.name))
        shutil.rmtree(venv)
        existing = None
    if existing is not None and answers([inside, "-m", "pip", "--version"]):
        if not OLDEST <= existing <= NEWEST:
            raise SetupError(
                "{} has Python {}.{}, and tangent-lens needs 3.10 to 3.13; delete that folder, then run make "
                "again.".format(venv, *existing)
            )
        return
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SetupError(f"{venv} is there and is no virtual environment; choose another with make VENV=<folder>.")
    say("Making a virtual environment in {} with Python {}.{}.".format(venv.name, *version))
    done = run([python, "-m", "venv", venv])
    if done.returncode != 0:
        say(complaint(done.stdout))
        raise SetupError(
            "Python could not make a virtual environment; where it is the system's own, its venv package may be "
            "missing (on Debian and Ubuntu: python3-venv)."
        )
    (venv / ".gitignore").write_text("*\n", encoding="utf-8")


def pip_install(venv, *arguments):
    command = [venv_python(venv), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
    return run([*command, *arguments], cwd=str(ROOT))


# torch


def torch_requirement():
    """What pyproject.toml asks of torch, such as 'torch>=2.6', and its floor as numbers."""
    found = re.search(r'"(torch>=(\d+)\.(\d+))"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not found:
        raise SetupError('pyproject.toml should ask for torch in the form "torch>=2.6"; it is not there.')
    return found.group(1), (int(found.group(2)), int(found.group(3)))


def installed_torch(venv, floor):
    """The version of a torch that imports and is new enough, or None."""
    code = "import importlib.metadata, torch; print(importlib.metadata.version('torch'))"
    done = run([venv_python(venv), "-c", code])
    last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    numbers = re.match(r"(\d+)\.(\d+)", last[0]) if last else None
    return last[0] if numbers and (int(numbers.group(1)), int(numbers.group(2))) >= floor else None


def has_nvidia_gpu():
    try:
        done = run(["nvidia-smi", "-L"], timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def install_torch(venv):
    """Put a torch in place and return its version."""
    requirement, floor = torch_requirement()
    version = installed_torch(venv, floor)
    gpu = has_nvidia_gpu()
    if version:
        say(f"torch {version} is there already.")
        if gpu and version.endswith("+cpu"):
            say("It is a CPU build, though a GPU answers here; make clean, then make setup, gets the CUDA build.")
        return version

    # The index's own build for macOS and Windows has no CUDA inside; for Linux it has, on every processor.
    if gpu or not sys.platform.startswith("linux"):
        say("Installing torch for {}; this can take minutes.".format("the GPU" if gpu else "this machine"))
        attempts = [("pip install " + requirement, lambda: pip_install(venv, requirement))]
    else:
        say("Installing the CPU build of torch (no NVIDIA GPU answers here).")
        attempts = [
            ("pip install " + CPU_TORCH, lambda: pip_install(venv, "--only-binary", ":all:", CPU_TORCH)),
            ("uv pip install --torch-backend cpu " + requirement, lambda: uv_install(venv, requirement)),
        ]

    said = []
    for name, attempt in attempts:
        done = attempt()
        version = installed_torch(venv, floor)
        if done.returncode == 0 and version:
            return version
        said.append("  " + name + ":\n" + complaint(done.stdout))
    say("\n".join(said))
    raise SetupError(
        "torch could not be installed (tried: {}); install {} yourself in {}, then run make again.".format(
            ", then ".join(name for name, _ in attempts), requirement, venv
        )
    )


def uv_install(venv, requirement):
    """uv knows by itself where the CPU builds are kept."""
    done = pip_install(venv, "uv")
    if done.returncode != 0:
        return done
    python = venv_python(venv)
    return run([python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend", "cpu", requirement])


# The project


def known_extras():
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    return set(re.findall(r"^([a-z]+) = \[", section.partition("\n[")[0], re.MULTILINE))


def install_project(venv, extras, torch):
    target = ".[{}]".format(",".join(extras)) if extras else "."
    say(f"Installing tangent-lens{target[1:]}; the first time takes minutes.")
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "constraints.txt"
        held.write_text(f"torch=={torch}\n", encoding="utf-8")
        done = pip_install(venv, "-c", held, "-e", target)
    if done.returncode != 0:
        say(complaint(done.stdout))
        raise SetupError(f"tangent-lens{target[1:]} could not be installed: pip's words are above.")


def fingerprint(venv, version):
    """Changes with what would be installed: pyproject.toml, the version, the Python, the two places."""
    parts = [(ROOT / "pyproject.toml").read_text(encoding="utf-8"), str(ROOT), str(venv), "{}.{}".format(*version)]
    package = ROOT / "tangent_lens" / "__init__.py"
    if package.exists():
        parts += re.findall(r"^__version__.*$", package.read_text(encoding="utf-8"), re.MULTILINE)
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def read_stamp(venv):
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
        return stamp["fingerprint"], set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, set()


def write_stamp(venv, mark, extras):
    text = json.dumps({"fingerprint": mark, "extras": sorted(extras)}, indent=2)
    (venv / STAMP).write_text(text + "\n", encoding="utf-8")


def setup(venv, extras):
    python, version = choose_python()
    mark = fingerprint(venv, version)
    stamped, present = read_stamp(venv)
    if stamped == mark and venv_python(venv).exists() and ("all" in present or extras <= present):
        return
    unknown = extras - known_extras()
    if unknown:
        raise SetupError(
            "There is no extra called {}; pyproject.toml has {}.".format(
                ", ".join(sorted(unknown)), ", ".join(sorted(known_extras()))
            )
        )
    # What an earlier run installed stays asked for, so that one environment serves every make target.
    wanted = extras | (present & known_extras())
    started = time.monotonic()
    make_venv(venv, python, version)
    if pip_install(venv, "--upgrade", "pip").returncode != 0:
        say("pip could not be upgraded; going on with the one that is there.")
    torch = install_torch(venv)
    install_project(venv, sorted(wanted), torch)
    write_stamp(venv, mark, wanted)
    say(f"{venv.name} is ready, with torch {torch}, after {time.monotonic() - started:.0f} s.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv", help="the environment's folder (default: .venv)")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, with commas between")
    options = parser.parse_args()
    extras = {name.strip() for name in options.extras.split(",") if name.strip()}
    try:
        setup(ROOT / options.venv, extras)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
