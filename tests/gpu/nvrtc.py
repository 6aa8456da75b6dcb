"""NVRTC through ctypes: CUDA C++ text to machine code for any card, on a machine without one."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from ctypes import byref
from pathlib import Path
from typing import NamedTuple

import pytest


class Usage(NamedTuple):
    """What one compiled kernel asks of a multiprocessor."""

    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes, of a block


@functools.cache
def library() -> ctypes.CDLL:
    """libnvrtc, or a skip that says what is missing."""
    for path in _places():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    pytest.skip(
        "NVRTC is not installed (pip install nvidia-cuda-nvrtc, or set KERNRL_NVRTC to its library)"
    )


def _places() -> Iterator[str]:
    if "KERNRL_NVRTC" in os.environ:
        yield os.environ["KERNRL_NVRTC"]
    folders = [Path(p) / "nvidia" for p in sys.path if p.endswith("site-packages")]
    toolkit = os.environ.get("CUDA_PATH", os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    for folder in (*folders, Path(toolkit)):
        yield from map(str, sorted(folder.glob("**/libnvrtc.so*")))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


def usage(text: str, names: Sequence[str], architecture: str) -> dict[str, Usage]:
    """Compile the kernels `names` of a text; what each needs, by its C++ name."""
    nvrtc, program = library(), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(byref(program), text.encode(), b"kernrl.cu", 0, None, None) == 0
    for name in names:
        assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
    options = ["-std=c++17", f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    log = _log(nvrtc, program)
    assert status == 0, log
    size = ctypes.c_size_t()
    assert nvrtc.nvrtcGetCUBINSize(program, byref(size)) == 0
    assert size.value > 0
    used = dict(_used(log))
    found = {name: used[_lowered(nvrtc, program, name)] for name in names}
    nvrtc.nvrtcDestroyProgram(byref(program))
    return found


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode()


def _lowered(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    mangled = ctypes.c_char_p()
    assert nvrtc.nvrtcGetLoweredName(program, name.encode(), byref(mangled)) == 0
    assert mangled.value is not None
    return mangled.value.decode()


def _used(log: str) -> Iterator[tuple[str, Usage]]:
    """(mangled name, usage) of each kernel in what `ptxas -v` prints."""
    for part in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert name and registers and len(spills) == 2, part
        size = int(shared.group(1)) if shared else 0
        yield name.group(1), Usage(int(registers.group(1)), sum(map(int, spills)), size)
