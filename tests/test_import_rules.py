"""The house rules that a reader of one file cannot see: which room imports which, and what is never used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangent_lens

PACKAGE = Path(tangent_lens.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# Lower rooms know nothing of higher ones. Rooms of one number may use each other.
HEIGHT = {
    "sites": 0,
    "storage": 0,
    "progress": 0,
    "showing": 0,
    "models": 1,
    "recording": 2,
    "subspaces": 3,
    "measures": 4,
    "dynamics": 5,
    "model_view": 6,
    "token_view": 6,
    "lens": 6,
    "reports": 7,
    "cli_frequency": 8,
    "cli_geometry": 8,
    "cli_options": 8,
    "cli_running": 8,
    "cli_dynamics": 8,
    "cli_subspaces": 8,
    "cli_training": 8,
    "cli": 8,
    "__main__": 9,
    "__init__": 9,
}
MODEL_LIBRARIES = {"transformer_lens", "nnsight", "transformers", "tokenizers"}
DRAWING_LIBRARIES = {"rich", "matplotlib"}
UNSAFE_FORMATS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LONGEST = 400


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def height_of(module: str) -> int:
    """Of a module inside the package, or of the home of one of its public names; facts such as the version have none."""
    name = module.split(".")[1]
    room = tangent_lens._HOME_OF.get(name, name).split(".")[0]
    return 0 if room == "__version__" else HEIGHT[room]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """Every node that runs: all but what only type checkers read and, unless asked, what functions hold."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not inside_functions and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from statements(child, inside_functions)


def imported(path: Path, inside_functions: bool) -> set[str]:
    """Full names of all modules that a file imports; names imported from the package itself count as its modules."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively; write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def libraries(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(path, inside_functions=True)}


def calls(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Every call as written, with its keyword arguments as written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


@every_module
def test_every_room_has_its_place(path):
    assert room_of(path) in HEIGHT, f"{name_of(path)}: give its room a height here and in DESIGN.md"


@every_module
def test_imports_go_one_way(path):
    own = HEIGHT[room_of(path)]
    modules = [module for module in imported(path, False) if module.startswith("tangent_lens.")]
    above = {module for module in modules if height_of(module) > own}
    assert not above, f"{name_of(path)} imports {sorted(above)}, which stand above {room_of(path)}"


@every_module
def test_only_models_know_a_model_library(path):
    if room_of(path) != "models":
        assert not libraries(path) & MODEL_LIBRARIES


@every_module
def test_only_reports_and_the_command_line_draw(path):
    if room_of(path) != "reports" and not room_of(path).startswith("cli"):
        assert not libraries(path) & DRAWING_LIBRARIES


@every_module
def test_nothing_is_read_that_could_run_code(path):
    assert not libraries(path) & UNSAFE_FORMATS
    for function, options in calls(path):
        if function == "torch.load":
            assert options.get("weights_only") == "True", f"{name_of(path)}: torch.load without weights_only=True"
        assert options.get("allow_pickle", "False") == "False", f"{name_of(path)}: {function} with allow_pickle"
        assert options.get("trust_remote_code", "False") == "False", f"{name_of(path)}: {function} runs remote code"


@every_module
def test_no_module_is_longer_than_a_person_reads(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_the_rules_see_what_they_forbid(tmp_path):
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import rich\n"
        "import tangent_lens.lens\n"
        "class A:\n    from tangent_lens import reports\n"
        "def late():\n    import pickle\n    from transformers import utils\n    torch.load(x, weights_only=False)\n"
    )
    path = tmp_path / "some.py"
    path.write_text(source)
    assert imported(path, False) == {"typing.TYPE_CHECKING", "tangent_lens.lens", "tangent_lens.reports"}
    assert libraries(path) == {"typing", "tangent_lens", "pickle", "transformers"}
    assert ("torch.load", {"weights_only": "False"}) in calls(path)
    heights = [height_of(f"tangent_lens.{name}") for name in ("lens", "Lens", "models.protocol", "Site", "__version__")]
    assert heights == [HEIGHT["lens"], HEIGHT["lens"], HEIGHT["models"], HEIGHT["sites"], 0]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_no_heavy_library():
    heavy = {"torch", "numpy", "scipy", "pandas", *MODEL_LIBRARIES, *DRAWING_LIBRARIES}
    loaded = run_python("import sys, tangent_lens; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "tangent_lens" in loaded
    assert not heavy & set(loaded)


def test_naming_a_site_needs_no_torch():
    assert run_python("import sys, tangent_lens; print(tangent_lens.resid_post(3), 'torch' in sys.modules)") == (
        "resid_post.3 False\n"
    )


@pytest.mark.parametrize("name", tangent_lens.__all__)
def test_every_public_name_resolves(name):
    assert getattr(tangent_lens, name) is not None
    assert name in dir(tangent_lens)


@pytest.mark.parametrize("path", [path for path in MODULES if path.name not in ("__main__.py",)], ids=name_of)
def test_every_module_imports_alone(path):
    importlib.import_module(".".join(("tangent_lens", *path.relative_to(PACKAGE).with_suffix("").parts)))


def test_what_type_checkers_read_is_what_loads():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if is_type_checking(node))
    read = {(node.module, alias.name) for node in block.body for alias in node.names}
    loads = {(f"tangent_lens.{home}", name) for home, names in tangent_lens._HOMES.items() for name in names}
    assert read == loads


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tangent_lens' has no attribute 'lense'"):
        tangent_lens.lense  # noqa: B018
