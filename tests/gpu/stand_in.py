"""A module in CuPy's place: NumPy arrays of an own class, kernels run by the CPU emulation.

It has the names that kernrl.gpu uses, and no other: a new one fails here until it is thought of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from gpu.emulation import Emulated, gram_kernels

from kernrl.gpu import gram as host


class Device:
    """The one device; `entered` counts the `with` blocks that are open."""

    entered = 0

    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> Device:
        Device.entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        Device.entered -= 1


class Array(np.ndarray):
    """NumPy's array under another class: an ndarray is not one, as a host array is not CuPy's."""

    @property
    def device(self) -> Any:
        return Device(getattr(self, "where", 0))

    def __array_finalize__(self, source: Any) -> None:
        self.where = getattr(source, "where", 0)


class RawModule:
    """Kernels of a text by name, with CuPy's keywords."""

    def __init__(self, *, code: str, options: tuple[str, ...], name_expressions: Any) -> None:
        assert options == ("-std=c++17",)
        self.names = tuple(name_expressions)
        self.kernels: Emulated = gram_kernels()  # all of the text in one build: seconds are saved
        assert code == self.kernels.text

    def get_function(self, name: str) -> Any:
        assert name in self.names

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: Any) -> None:
            assert Device.entered, "a kernel launched outside its arrays' device"
            LAUNCHES.append((name, grid))
            self.kernels.launch(name, grid, *block, arguments)

        return launch


LAUNCHES: list[tuple[str, tuple[int, ...]]] = []


def asarray(x: Any, dtype: Any = None) -> Any:
    """`x` as an array of the stand-in."""
    return np.asarray(x, dtype=dtype).view(Array)


def _empty(shape: Any, dtype: Any) -> Any:
    out = np.empty(shape, dtype=dtype)
    out.fill(np.nan)  # memory that a kernel leaves unwritten must show
    return out.view(Array)


def module() -> ModuleType:
    """The stand-in as a module."""
    cupy = ModuleType("cupy")
    cupy.__dict__.update(
        ndarray=Array,
        RawModule=RawModule,
        int64=np.int64,
        empty=_empty,
        zeros=lambda shape, dtype: np.zeros(shape, dtype=dtype).view(Array),
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(Array),
        asarray=asarray,
    )
    return cupy


@contextmanager
def installed(monkeypatch: Any) -> Iterator[ModuleType]:
    """`import cupy` gives the stand-in; what was compiled for another is forgotten."""
    LAUNCHES.clear()
    stand_in = module()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    host._compiled.cache_clear()
    host._module.cache_clear()
    yield stand_in
    host._compiled.cache_clear()
    host._module.cache_clear()
