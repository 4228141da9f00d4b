"""Run a command beside every major version of TransformerLens that people use, with this project's wheel installed.

    python3 packaging/matrix.py --only 2,3 -- python -m pytest tests/models

For each version an environment is made in the user's cache folder, outside this repository: the newest release of that
major version, this project's wheel, and what the tests need. A second run finds it there; only a changed wheel is put in
again, and changed requirements make the environment anew. The command runs in the repository, with the environment's
own python and with the wheel's tangent_lens, not the checkout's; {major} in it becomes the major version.

Only the standard library is used, and the syntax is kept so old that an old Python can still read the file and look
for a newer one.
"""

import argparse
import contextlib
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

import environment
from environment import ROOT, SetupError, complaint, pip_install, run, say, venv_python

try:
    import fcntl
except ImportError:  # Windows; there two runs at once are the person's to avoid
    fcntl = None

MAJORS = ("2", "3", "4")
# The ordinary environment has the newest release of all.
DEFAULT = "2,3"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "rich")
# Before 3.11 no setting keeps the working directory, and so the checkout, from hiding the wheel.
OLDEST = (3, 11)
UNREACHABLE = re.compile(r"from versions: none|Retrying \(Retry|Max retries exceeded|Temporary failure in name resol")
WHERE = """
import json, sys, tangent_lens
from importlib.metadata import version
names = ("tangent-lens", "transformer-lens", "transformers", "torch", "numpy", "nnsight")
found = {name: version(name) for name in names}
print(json.dumps({"file": tangent_lens.__file__, "prefix": sys.prefix, "versions": found}))
"""


class Unavailable(SetupError):
    """What is missing cannot be fetched now; nothing is known against this project."""


# Where the environments are


def cache_folder():
    """The same folder as tangent_lens.models.packaged.cache_folder, which a bare Python cannot import."""
    chosen = os.environ.get("TANGENT_LENS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    users_cache = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(users_cache) if users_cache else Path.home() / ".cache") / "tangent_lens"


def environment_folder(major, version):
    return cache_folder().absolute() / "environments" / "{}-{}.{}".format(major, *version)


def choose_python():
    """The interpreter that runs this, or another on the PATH."""
    python, version = environment.choose_python()
    if version >= OLDEST:
        return python, version
    for name in environment.OTHER_PYTHONS:
        found = shutil.which(name)
        version = environment.python_version(found) if found else None
        if version and OLDEST <= version <= environment.NEWEST:
            return found, version
    raise SetupError("The matrix needs Python 3.11 to 3.13; none was found on the PATH; run make PYTHON=<its path>.")


@contextlib.contextmanager
def held(folder, alone):
    """Keep other runs from changing an environment while a command uses it, and from using it while it is made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(str(folder) + ".lock", "w") as lock:
        if fcntl is not None:
            kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except OSError:
                say(f"Another run is at work in {folder.name}; waiting for it.")
                fcntl.flock(lock, kind)
        yield


# What has to be in them


def digest(parts):
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def section(pattern):
    """A piece of pyproject.toml: other changes there need no new environment."""
    found = re.search(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not found:
        raise SetupError(f"pyproject.toml has nothing like {pattern!r}; packaging/matrix.py looks for it there.")
    return found.group(1)


def release(major):
    return f"transformer-lens>={major},<{int(major) + 1}"


def constraints(major):
    path = ROOT / "packaging" / f"constraints-{major}.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def build_requirements():
    return re.findall(r'"([^"]+)"', section(r"^requires = \[(.*?)\]$"))


def requirements_mark(major, version):
    """Changes with whatever else than the wheel's content would be installed."""
    own = section(r"^dependencies = \[(.*?)^\]$")
    parts = [own, constraints(major), release(major), environment.CPU_TORCH, "{}.{}".format(*version)]
    return digest([*parts, *TOOLS, *build_requirements()])


def wheel_mark():
    """Changes with whatever goes into the wheel."""
    files = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    files += sorted(path for path in (ROOT / "tangent_lens").rglob("*") if path.is_file())
    kept = [path for path in files if "__pycache__" not in path.parts]
    return digest([f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in kept])


def read_stamp(venv):
    try:
        stamp = json.loads((venv / environment.STAMP).read_text(encoding="utf-8"))
        return stamp["requirements"], stamp["wheel"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def write_stamp(venv, requirements, wheel):
    """In one step, so that an interrupted run leaves none."""
    beside = venv / (environment.STAMP + ".new")
    beside.write_text(json.dumps({"requirements": requirements, "wheel": wheel}) + "\n", encoding="utf-8")
    os.replace(str(beside), str(venv / environment.STAMP))


def forget(venv):
    with contextlib.suppress(FileNotFoundError):
        (venv / environment.STAMP).unlink()


# Making them


def check(done, failure):
    """Raise where pip failed, after its own words."""
    if done.returncode == 0:
        return
    say(complaint(done.stdout))
    if UNREACHABLE.search(done.stdout) and "ResolutionImpossible" not in done.stdout:
        raise Unavailable(failure + ": the package index did not answer or did not have it; pip's words are above.")
    raise SetupError(failure + ": pip's words are above.")


def build_wheel(venv, folder):
    """Build with the environment's own hatchling: an isolated build would ask the index for it every time."""
    command = [venv_python(venv), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    check(run([*command, "-w", folder, ROOT], cwd=str(folder)), "The wheel could not be built")
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def newest_release(venv, major):
    """Install the newest release of the major version alone, so that the wheel cannot push it back to an older one."""
    check(pip_install(venv, "--no-deps", release(major)), f"{release(major)} could not be installed")
    code = "from importlib.metadata import version; print(version('transformer-lens'))"
    return run([venv_python(venv), "-c", code]).stdout.split()[-1]


def install_all(venv, major, version, python):
    environment.make_venv(venv, python, version)
    if pip_install(venv, "--upgrade", "pip").returncode != 0:
        say("pip could not be upgraded; going on with the one that is there.")
    try:
        torch = environment.install_torch(venv)
    except SetupError as error:
        # It says where to put a torch by hand, but this environment is made anew after a failure.
        raise Unavailable("torch could not be fetched; what pip and uv said is above.") from error
    pinned = "transformer-lens==" + newest_release(venv, major)
    check(pip_install(venv, *build_requirements()), "What builds the wheel could not be installed")
    say(f"Installing the wheel of tangent-lens beside {pinned}.")
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder) / "constraints.txt"
        limits.write_text(f"torch=={torch}\n{constraints(major)}", encoding="utf-8")
        done = pip_install(venv, "-c", limits, build_wheel(venv, folder), pinned, *TOOLS)
    check(done, f"The wheel of tangent-lens could not be installed beside {pinned}")
    done = run([venv_python(venv), "-m", "pip", "check", "--disable-pip-version-check"], cwd=str(venv))
    check(done, f"What was installed beside {pinned} does not fit together")


def install_wheel_again(venv):
    say(f"The wheel changed: installing it again in {venv.name}.")
    with tempfile.TemporaryDirectory() as folder:
        done = pip_install(venv, "--no-index", "--no-deps", "--force-reinstall", build_wheel(venv, folder))
    check(done, "The wheel of tangent-lens could not be installed again")


def up_to_date(venv, requirements, wheel):
    return read_stamp(venv) == (requirements, wheel) and venv_python(venv).exists()


def make(venv, major, version, python, requirements, wheel):
    """Bring an environment up to date; one that an interrupted run left half made has no stamp."""
    present = read_stamp(venv)[0] == requirements and environment.answers([venv_python(venv), "--version"])
    forget(venv)
    if present:
        install_wheel_again(venv)
    else:
        if venv.exists():
            say(f"{venv.name} is out of date or half made: making it anew.")
            shutil.rmtree(str(venv))
        install_all(venv, major, version, python)
    write_stamp(venv, requirements, wheel)


# Running the command


def variables_for(venv):
    """The environment's programs first, and neither the working directory nor PYTHONPATH among what is imported."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    variables["PATH"] = os.pathsep.join([str(venv_python(venv).parent), variables.get("PATH", os.defpath)])
    variables["VIRTUAL_ENV"] = str(venv)
    variables["PYTHONSAFEPATH"] = "1"
    return variables


def installed_versions(venv):
    """What the command will import; never the checkout."""
    done = run([venv_python(venv), "-c", WHERE], cwd=str(ROOT), env=variables_for(venv))
    if done.returncode != 0:
        say(complaint(done.stdout))
        raise SetupError(f"tangent_lens cannot be imported in {venv}; delete that folder, then run this again.")
    found = json.loads(done.stdout.splitlines()[-1])
    home = Path(found["file"]).resolve()
    if Path(found["prefix"]).resolve() not in home.parents or ROOT / "tangent_lens" in home.parents:
        raise SetupError(f"In {venv} tangent_lens comes from {home}, which is not the wheel.")
    return found["versions"], home.parent


def run_command(venv, major, command):
    variables = variables_for(venv)
    words = [word.replace("{major}", major) for word in command]
    program = shutil.which(words[0], path=variables["PATH"])
    if program is None:
        raise SetupError(f"There is no program {words[0]} in {venv} or on the PATH.")
    return subprocess.run([program, *words[1:]], cwd=str(ROOT), env=variables, stdin=subprocess.DEVNULL).returncode


def run_in(venv, major, command, started):
    """Run the command in an environment that is up to date; return its exit code and a line that tells of it."""
    versions, home = installed_versions(venv)
    ready = time.monotonic()
    found = ", ".join(f"{name} {versions[name]}" for name in versions)
    say(f"{venv.name}: {found}; ready after {ready - started:.0f} s; tangent_lens is imported from {home}.")
    status = run_command(venv, major, command)
    told = "passed" if status == 0 else f"FAILED with exit code {status}"
    spent = f"{time.monotonic() - ready:.0f} s (set-up {ready - started:.0f} s)"
    return status, f"transformer-lens {versions['transformer-lens']}: {told} after {spent}"


def run_beside(major, command, fresh):
    """Make the environment of one major version where needed, and run the command in it."""
    python, version = choose_python()
    venv = environment_folder(major, version)
    if ROOT in venv.parents:
        raise SetupError(f"{venv} lies inside this repository; set TANGENT_LENS_CACHE to a folder outside.")
    requirements, wheel = requirements_mark(major, version), wheel_mark()
    started = time.monotonic()
    if fresh:
        with held(venv, alone=True):
            forget(venv)
    while True:
        with held(venv, alone=False):
            if up_to_date(venv, requirements, wheel):
                return run_in(venv, major, command, started)
        # Between the two another run may make it as this one wants it, or change it after this one made it.
        with held(venv, alone=True):
            if not up_to_date(venv, requirements, wheel):
                make(venv, major, version, python, requirements, wheel)


def run_matrix(majors, command, fresh=False, skip_unavailable=False):
    """Run the command beside every one of them, whatever the others did; return the exit code."""
    failed, lines = False, []
    for major in majors:
        try:
            status, line = run_beside(major, command, fresh)
            failed = failed or status != 0
        except Unavailable as error:
            failed = failed or not skip_unavailable
            line = f"{release(major)}: {'skipped' if skip_unavailable else 'FAILED'}; {error}"
        except SetupError as error:
            failed, line = True, f"{release(major)}: FAILED; {error}"
        lines.append(line)
    say("\n" + "\n".join(lines))
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s [options] -- COMMAND ARGUMENTS..."
    )
    parser.add_argument("--only", default=DEFAULT, help=f"major versions, with commas between (default: {DEFAULT})")
    parser.add_argument("--fresh", action="store_true", help="make the environments anew, with today's releases")
    parser.add_argument("--skip-unavailable", action="store_true", help="go on where the package index is out of reach")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    majors = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in majors if name not in MAJORS]
    if unknown or not majors:
        parser.error(f"--only takes {', '.join(MAJORS)}, with commas between; it got {options.only!r}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("say what to run after --, such as: -- python -m pytest tests/models")
    try:
        return run_matrix(majors, command, options.fresh, options.skip_unavailable)
    except KeyboardInterrupt:
        print("Stopped; run it again to go on.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
