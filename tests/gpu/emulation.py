"""CUDA C++ text built with g++ and launched on the CPU through tests/gpu/emulation.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kernrl.gpu.gram import FAMILIES, TYPES, expressions, source

HEADER = Path(__file__).with_name("emulation.h")
FLAGS = ("-std=c++20", "-pthread", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas")
GLUE = """
extern "C" void signature_{i}(char* text) {{ emulation::signature(&{name}, text); }}
extern "C" void launch_{i}(const unsigned* grid, unsigned threads, long long first, long long last,
                           void** arguments) {{
    emulation::launch(&{name}, grid, threads, first, last, arguments);
}}
"""
OFFSET = """
extern "C" long long offset_of(long long row, long long width, long long column) {
    return offset(row, width, column);
}
"""
LETTERS = {"l": np.int64, "f": np.float32, "d": np.float64}
Argument = np.ndarray | np.generic


class Emulated:
    """The kernels `names` of a CUDA C++ text, as functions of this machine's CPU."""

    def __init__(self, text: str, names: Sequence[str], flags: Sequence[str] = ("-O1",)) -> None:
        self.text, self.names = text, tuple(names)
        self.library = ctypes.CDLL(str(_built(text, self.names, (*FLAGS, *flags))))

    def signature(self, name: str) -> str:
        """One letter per argument: p pointer, l int64, f float, d double."""
        text = ctypes.create_string_buffer(64)
        self.library[f"signature_{self.names.index(name)}"](text)
        return text.value.decode()

    def offset(self, row: int, width: int, column: int) -> int:
        """What gram.cu's `offset` says."""
        self.library.offset_of.restype = ctypes.c_longlong
        return int(self.library.offset_of(*(ctypes.c_longlong(k) for k in (row, width, column))))

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        arguments: Sequence[Argument],
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Run the blocks of a grid, or only blocks[0] … blocks[1] − 1, in turn."""
        x, y = (*grid, 1)[:2]
        # A CUDA device refuses these; the CPU would not notice.
        assert 0 < x < 2**31, grid
        assert 0 < y < 65536, grid
        assert 0 < threads <= 1024
        first, last = blocks or (0, x * y)
        cells = _cells(self.signature(name), arguments)
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        function = self.library[f"launch_{self.names.index(name)}"]
        long = ctypes.c_longlong
        function((ctypes.c_uint * 2)(x, y), threads, long(first), long(last), pointers)


def _cells(signature: str, arguments: Sequence[Argument]) -> list[np.ndarray]:
    """Each argument's value in memory, after the checks a real launch silently leaves out."""
    assert len(arguments) == len(signature), f"{len(arguments)} arguments for {signature}"
    cells = []
    for letter, value in zip(signature, arguments, strict=True):
        if letter == "p":
            assert isinstance(value, np.ndarray), f"a pointer argument is {type(value)}"
            assert value.flags.c_contiguous
            cells.append(np.array([value.ctypes.data], dtype=np.uint64))
        else:
            assert type(value) is LETTERS[letter], f"{letter} got {type(value)}"
            cells.append(np.array([value]))
    return cells


def _built(text: str, names: Sequence[str], flags: Sequence[str]) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine, so the CUDA text cannot run on its CPU")
    glue = "".join(GLUE.format(i=i, name=name) for i, name in enumerate(names))
    program = f'#include "{HEADER}"\n{text}\n{glue}\n{OFFSET if "Index offset(" in text else ""}'
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(
        b"\0".join((program.encode(), HEADER.read_bytes(), version, " ".join(flags).encode()))
    ).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"kernrl-emulation-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            (Path(scratch) / "text.cpp").write_text(program)
            command = [compiler, *flags, "-o", "built.so", "text.cpp"]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(Path(scratch) / "built.so", library)  # whole or not there, also with xdist
    return library


@functools.cache
def gram_kernels() -> Emulated:
    """Every kernel of gram.cu."""
    names = [name for family in FAMILIES for dtype in TYPES for name in expressions(family, dtype)]
    return Emulated(source(), names)
