"""The house stands: imports go down, faces are light and true, heavy libraries stay in their rooms.

The checker reads source: an import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
HARD_LIMIT = 450  # lines of one file

# Room -> floor. An import goes to a lower floor or stays in its room. The longest name that fits
# a module is its room.
FLOORS = {
    "checks": 0,
    "_lazy": 0,
    "arrays": 1,
    "linalg": 2,
    "gpu": 2,
    "data": 2,
    "kernels": 3,
    "agent": 3,
    "deep_alignment.ops": 3,
    "approx": 4,
    "value": 5,
    "control": 6,
    "deep": 6,
    "harness": 6,
    "deep_alignment": 6,
    "cli": 7,
    "__main__": 8,
}

# Library -> the only places that may import it, as prefixes of the module's name inside kernrl.
HEAVY = {
    "torch": ("deep", "deep_alignment", "kernels.gpytorch_bridge", "arrays"),
    "gpytorch": ("kernels.gpytorch_bridge",),
    "cupy": ("arrays", "gpu"),
    "cupyx": ("arrays", "gpu"),
    "triton": ("deep_alignment.ops._triton",),
}
LATE_ONLY = {("arrays", "torch"), ("arrays", "cupy"), ("arrays", "cupyx")}  # never at module level


class Import(NamedTuple):
    """One imported module or name: `from a.b import c` is target "a.b", name "c"."""

    line: int
    target: str
    name: str | None
    late: bool  # inside a function


# ---------------------------------------------------------------- reading the source


def modules(package: Path) -> dict[str, Path]:
    """Dotted name inside the package -> file; the package's own face is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import statement of a file, relative ones resolved to full names."""
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None, id(node) in late)
        elif isinstance(node, ast.ImportFrom):
            target = _absolute(node, module, is_package)
            for alias in node.names:
                yield Import(node.lineno, target, alias.name, id(node) in late)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    here = f"kernrl.{module}".rstrip(".").split(".")
    base = here[: len(here) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def room(module: str) -> str | None:
    """The room a module lives in: the longest entry of FLOORS that its name starts with."""
    parts = module.split(".")
    names = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOORS), None)


# ---------------------------------------------------------------- the laws


def violations(package: Path) -> list[str]:
    """One line for every broken law in the package's source: empty when the house stands."""
    known = modules(package)
    broken = []
    for module, path in known.items():
        where = path.relative_to(package.parent)
        broken += [f"{where}{fault}" for fault in faults(module, path, path.read_text(), known)]
    return broken


def faults(module: str, path: Path, text: str, known: dict[str, Path]) -> list[str]:
    """The broken laws of one file, each as ":line: what"."""
    if module and room(module) is None:
        return [": no floor is set for it in FLOORS"]
    lines = text.count("\n")
    found = [f": {lines} lines, the limit is {HARD_LIMIT}"] if lines > HARD_LIMIT else []
    for statement in imports(ast.parse(text), module, path.name == "__init__.py"):
        complaint = _inside(module, statement, known) or _outside(module, statement)
        if complaint:
            found.append(f":{statement.line}: {complaint}")
    return found


def _inside(module: str, found: Import, known: dict[str, Path]) -> str | None:
    """Laws about imports of kernrl by kernrl."""
    if found.target != "kernrl" and not found.target.startswith("kernrl."):
        return None
    target = found.target.removeprefix("kernrl").lstrip(".")
    if found.name is not None:
        inner = f"{target}.{found.name}".lstrip(".")
        target = inner if inner in known else target  # `from kernrl import checks` names a module
    path = known.get(target)
    if path is None:
        return f"imports kernrl.{target}, which does not exist"
    if path.name == "__init__.py":
        return (
            f"imports the face kernrl{'.' * bool(target)}{target}: import from the file behind it"
        )
    mine, other = room(module), room(target)
    if mine == other or other is None:
        return None
    if not module:  # the face itself: its table holds names, its imports only the helper
        return None if other == "_lazy" else f"the face imports {other}"
    if FLOORS[other] >= FLOORS[mine]:
        how = "sideways into" if FLOORS[other] == FLOORS[mine] else "up into"
        return f"{mine} (floor {FLOORS[mine]}) imports {how} {other} (floor {FLOORS[other]})"
    return None


def _outside(module: str, found: Import) -> str | None:
    """Laws about the heavy libraries."""
    library = found.target.split(".")[0]
    if library not in HEAVY:
        return None
    place = next((p for p in HEAVY[library] if f"{module}.".startswith(f"{p}.")), None)
    if place is None:
        return f"{library} belongs only in {', '.join(HEAVY[library])}"
    if (place, library) in LATE_ONLY and not found.late:
        return f"{library} may only be imported inside a function here"
    return None


def test_the_house_stands() -> None:
    assert violations(ROOT / "kernrl") == []


# ---------------------------------------------------------------- the checker can fail


def test_a_climb_planted_in_a_copy_is_found(tmp_path: Path) -> None:
    package = tmp_path / "kernrl"
    shutil.copytree(ROOT / "kernrl", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = violations(package)
    with (package / "arrays.py").open("a") as source:
        source.write("\ndef climb():\n    from kernrl.data.transitions import Transitions\n")
    new = [fault for fault in violations(package) if fault not in before]
    assert len(new) == 1
    assert "arrays (floor 1) imports up into data (floor 2)" in new[0]


ROOMS = ("approx", "value", "control", "deep", "harness", "kernels", "deep_alignment")
KNOWN = {
    "": Path("__init__.py"),
    **{name: Path(name, "__init__.py") for name in (*ROOMS, "deep_alignment.ops")},
    **{f"{name}.file": Path(name, "file.py") for name in (*ROOMS, "deep_alignment.ops")},
    **{name: Path(f"{name}.py") for name in ("checks", "arrays", "linalg", "agent", "cli")},
}

# What is planted -> (module, its source, what the checker must say).
PLANTED = {
    "a climb": ("linalg", "from kernrl.kernels.file import Kernel", "imports up into kernels"),
    "in a function": ("arrays", "def f():\n    import kernrl.cli", "imports up into cli"),
    "for types only": (
        "approx.new",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kernrl.value import file",
        "imports up into value",
    ),
    "relative": ("approx.new", "from ..value import file", "imports up into value"),
    "relative in a face": ("approx.__init__", "from ..value.file import x", "up into value"),
    "sideways": ("control.new", "from kernrl.harness.file import x", "sideways into harness"),
    "deep to control": ("deep.new", "import kernrl.control.file", "sideways into control"),
    "deep to generation": ("deep.new", "from kernrl.deep_alignment.file import x", "sideways"),
    "ops to generation": ("deep_alignment.ops.new", "from ..file import x", "imports up into"),
    "the face": ("control.new", "from kernrl import KLSTD", "imports the face kernrl:"),
    "the whole face": ("control.new", "import kernrl", "imports the face kernrl:"),
    "a room's face": ("value.new", "from kernrl.approx import Nystroem", "face kernrl.approx:"),
    "its own face": ("value.new", "from . import KLSTD", "imports the face kernrl.value:"),
    "work in the face": ("__init__", "from kernrl.control.file import x", "the face imports"),
    "nothing there": ("value.new", "import kernrl.atlantis", "which does not exist"),
    "torch upstairs": ("value.new", "import torch.nn", "torch belongs only in"),
    "torch early": ("arrays", "import torch", "only be imported inside a function"),
    "cupy": ("kernels.new", "def f():\n    import cupy", "cupy belongs only in"),
    "triton": ("deep_alignment.ops.new", "from triton import jit", "triton belongs only in"),
    "a long file": ("value.new", "\n" * 451, "451 lines, the limit is 450"),
    "an unknown room": ("attic.new", "", "no floor is set"),
}
ALLOWED = {
    "down": ("value.new", "from kernrl.approx.file import x"),
    "in its room": ("value.new", "from .file import x"),
    "modules by their package": ("value.new", "from kernrl import checks, arrays"),
    "deep to the ops": ("deep.new", "from kernrl.deep_alignment.ops.file import x"),
    "generation to the ops": ("deep_alignment.new", "from .ops import file"),
    "torch where it lives": ("deep.new", "import torch"),
    "torch late in arrays": ("arrays", "def late():\n    import torch"),
}


def plant(module: str, source: str) -> list[str]:
    path = Path(*module.split(".")).with_suffix(".py")
    return faults(module.removesuffix("__init__").rstrip("."), path, source, KNOWN)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found(what: str) -> None:
    module, source, expected = PLANTED[what]
    found = plant(module, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize("what", ALLOWED)
def test_what_is_allowed_stays_allowed(what: str) -> None:
    assert plant(*ALLOWED[what]) == []


# ---------------------------------------------------------------- faces


def faces() -> list[str]:
    """Every package of kernrl, as an importable name."""
    inside = modules(ROOT / "kernrl")
    return [f"kernrl.{m}".rstrip(".") for m, p in inside.items() if p.name == "__init__.py"]


@pytest.mark.parametrize("face", faces())
def test_every_public_name_is_there(face: str) -> None:
    package = importlib.import_module(face)
    assert package.__doc__, f"{face} has no docstring"
    names = getattr(package, "__all__", [])
    assert list(names) == sorted(set(names))
    for name in names:
        thing = getattr(package, name)  # raises if the table points at nothing
        assert not isinstance(thing, ModuleType), f"{face}.{name}: a file of that name hides it"
        assert getattr(thing, "__name__", name) == name, f"{face}.{name} is {thing!r}"
        assert name in dir(package)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kernrl

    with pytest.raises(AttributeError, match="module 'kernrl' has no attribute 'KLSTDD'"):
        _ = kernrl.KLSTDD


# ---------------------------------------------------------------- light

PROBE = """
import sys, time
start = time.perf_counter()
import kernrl
seconds = time.perf_counter() - start
dir(kernrl), kernrl.__version__
print(seconds, *sorted({"torch", "cupy", "triton"} & set(sys.modules)))
"""


def test_import_is_light() -> None:
    """`import kernrl` takes under 0.3 s (best of three) and loads none of torch, cupy, triton."""
    runs = [_probe() for _ in range(3)]
    assert [heavy for _, heavy in runs] == [[], [], []]
    assert min(seconds for seconds, _ in runs) < 0.3


def _probe() -> tuple[float, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, *heavy = done.stdout.split()
    return float(seconds), heavy


def test_version_is_a_release_number() -> None:
    import kernrl

    assert re.fullmatch(r"\d+\.\d+\.\d+", kernrl.__version__)


def test_no_test_file_is_longer_than_the_house_allows() -> None:
    root = Path(__file__).parent
    long = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > HARD_LIMIT
    }
    assert not long, f"find the second thought in each: {long}"
