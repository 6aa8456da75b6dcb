"""Which array library, which device, which dtype; host randomness; the one triangular solve.

No other module asks what library an array comes from. NumPy in gives NumPy out, torch in gives
torch out, CuPy in gives CuPy out.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import array_api_compat
import numpy as np

from kernrl import checks

Array = Any
Namespace = Any
Seed = int | np.random.Generator | np.random.SeedSequence | None

_NUMPY = array_api_compat.array_namespace(np.zeros(0))

# Rows x columns of Gram work below which "auto" keeps NumPy data on the CPU even where a GPU is:
# at 15 ms per 1.6e7 entries on two cores, transfers and launches cost more than they save below it.
GPU_WORTHWHILE = 50_000_000


def namespace(*arrays: Array) -> Namespace:
    """The array-API namespace that all given arrays belong to; None entries are skipped.

    Raises TypeError when libraries are mixed.
    """
    given = [x for x in arrays if x is not None]
    if given and all(type(x) is np.ndarray for x in given):
        return _NUMPY  # online methods ask this dozens of times a step
    try:
        return array_api_compat.array_namespace(*given)
    except TypeError:
        kinds = ", ".join(sorted({f"{type(x).__module__}.{type(x).__name__}" for x in given}))
        checks.fail(
            "arrays",
            "all arrays must come from one library",
            kinds,
            "Convert them first, for example with numpy.asarray.",
            TypeError,
        )


def is_array(x: object) -> bool:
    """True for NumPy, torch and CuPy arrays and any other array-API object."""
    return array_api_compat.is_array_api_obj(x)


def is_numpy(xp: Namespace) -> bool:
    """True if the namespace is NumPy's: the CPU fast paths ask this."""
    return bool(array_api_compat.is_numpy_namespace(xp))


def take(owner: str, name: str, x: object, *, dtype: Any = None) -> Array:
    """`x` as a numeric array of its own library; lists, tuples and scalars become NumPy.

    Raises TypeError for text, objects and complex numbers. `dtype` is a NumPy dtype name such
    as "float64"; None keeps the dtype. Costs no copy where none is needed.
    """
    if not is_array(x):
        try:
            x = np.asarray(x)
        except ValueError:
            checks.fail(owner, f"{name} must be a rectangular array of numbers", "ragged rows")
    checks.numeric(owner, name, x)
    if dtype is not None:
        xp = namespace(x)
        x = xp.astype(x, getattr(xp, str(dtype)), copy=False)
    return x


def floating(x: Array) -> Array:
    """`x` itself if floating, otherwise as float64."""
    xp = namespace(x)
    return x if xp.isdtype(x.dtype, "real floating") else xp.astype(x, xp.float64)


def columns(x: Array) -> Array:
    """(n,) -> (n, 1); (n, d) stays; (n, ...) is flattened to (n, d), also for n = 0."""
    if x.ndim == 2:
        return x
    return namespace(x).reshape(x, (x.shape[0], math.prod(x.shape[1:])))


def host(x: Array) -> np.ndarray:
    """`x` as a NumPy array in host memory; zero-copy where it already is one.

    bfloat16, which NumPy does not have, becomes float32.
    """
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):  # torch: leave the graph, then the device
        x = x.detach().cpu()
        return np.asarray(x.float() if str(x.dtype) == "torch.bfloat16" else x)
    if hasattr(x, "get") and type(x).__module__.startswith("cupy"):
        return np.asarray(x.get())
    return np.asarray(x)


def available_bytes(x: Array) -> float:
    """Free memory where `x` lives: of the GPU with CuPy's pool counted, else of this machine."""
    xp = namespace(x)
    if array_api_compat.is_cupy_namespace(xp):
        free, _ = xp.cuda.runtime.memGetInfo()
        return float(free + xp.get_default_memory_pool().free_bytes())
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return float("inf")  # not a POSIX system: let the allocation itself decide
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:  # Linux counts reclaimable cache as not free; MemAvailable does not
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(k.split()[1]) * 1024 for k in lines if k.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    return float(free)


def moved(x: Array, reference: Array) -> Array:
    """`x` with its own dtype in `reference`'s library and on its device."""
    xp = namespace(reference)
    name = str(x.dtype).rpartition(".")[2]
    return like(x, reference, getattr(xp, name))


def like(x: object, reference: Array, dtype: Any = None) -> Array:
    """`x` as an array of `reference`'s library, device and (unless given) dtype."""
    xp = namespace(reference)
    device = array_api_compat.device(reference)
    dtype = reference.dtype if dtype is None else dtype
    if is_array(x) and namespace(x) is xp:
        return array_api_compat.to_device(xp.astype(x, dtype, copy=False), device)
    value = host(x) if is_array(x) else np.asarray(x)
    return xp.asarray(_writeable_forward(value), dtype=dtype, device=device)


def _writeable_forward(x: np.ndarray) -> np.ndarray:
    """`x`, copied if it is read-only or runs backward: torch would write through, or refuse."""
    awkward = not x.flags.writeable or any(step < 0 for step in x.strides)
    return x.copy() if awkward else x


def epsilon(x: Array) -> float:
    """Machine epsilon of a floating array's dtype."""
    return float(namespace(x).finfo(x.dtype).eps)


# ---------------------------------------------------------------- randomness and devices


def rng(seed: Seed = None) -> np.random.Generator:
    """The host generator everything random comes from; a Generator is passed through."""
    if isinstance(seed, bool | float | str) or (isinstance(seed, int) and seed < 0):
        checks.fail(
            "rng",
            "the seed must be a non-negative integer, a numpy Generator, a SeedSequence or None",
            repr(seed),
        )
    return np.random.default_rng(seed)


def fresh_seed(generator: np.random.Generator) -> int:
    """A 31-bit seed for an API that wants an int (Gymnasium's reset, torch.manual_seed)."""
    return int(generator.integers(2**31))


def gpu_available() -> bool:
    """True if CuPy is installed and sees a CUDA device."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def on_device(x: Array, device: str, work: int = 0, owner: str = "device") -> Array:
    """`x` where `device` says: "cpu", "cuda", or "auto".

    "auto" moves nothing but NumPy data, and those only when a GPU is there and `work` (Gram
    entries to be computed) is above GPU_WORTHWHILE. The library changes only between NumPy and
    CuPy; torch tensors stay torch.
    """
    checks.choice(owner, "device", device, ("auto", "cpu", "cuda"))
    if array_api_compat.is_torch_array(x):
        return x if device == "auto" else _torch_on(x, device, owner)
    if device == "cpu":
        return host(x) if array_api_compat.is_cupy_array(x) else x
    if not isinstance(x, np.ndarray):
        return x
    if device == "auto" and (work < GPU_WORTHWHILE or not gpu_available()):
        return x
    if not gpu_available():
        _no_gpu(owner, "CuPy and a CUDA GPU", "Install the extra gpu-cuda12 or gpu-cuda13, or use")
    import cupy

    return cupy.asarray(x)


def _torch_on(x: Array, device: str, owner: str) -> Array:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        _no_gpu(owner, "a CUDA GPU and a CUDA build of torch", "Use")
    return x.to(device)


def _no_gpu(owner: str, needs: str, cure: str) -> NoReturn:
    rule = f"device='cuda' needs {needs}"
    checks.fail(owner, rule, "a machine without", f"{cure} device='cpu'.", RuntimeError)


def exchange(x: Array, library: str) -> Array:
    """`x` as an array of `library` ("numpy", "torch" or "cupy"), zero-copy through DLPack.

    A negative stride is refused here: torch 2.13 aborts the whole process on one
    (pytorch #188023). Gradients are detached, since DLPack cannot carry them.
    """
    checks.choice("exchange", "library", library, ("cupy", "numpy", "torch"))
    if not is_array(x):
        checks.fail("exchange", "x must be an array", type(x).__name__, error=TypeError)
    strides = getattr(x, "strides", None)
    if isinstance(strides, tuple) and any(step < 0 for step in strides):
        checks.fail(
            "exchange",
            "strides must not be negative",
            f"strides {strides}",
            "Copy the array first, for example numpy.ascontiguousarray(x).",
        )
    if getattr(x, "requires_grad", False):
        x = x.detach()
    if library == "numpy":
        return np.from_dlpack(x) if not isinstance(x, np.ndarray) else x
    if library == "torch":
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(_writeable_forward(x) if isinstance(x, np.ndarray) else x)
    import cupy

    return cupy.from_dlpack(x)


# ---------------------------------------------------------------- what the array API leaves out


def solve_triangular(
    factor: Array, b: Array, *, lower: bool = True, transposed: bool = False
) -> Array:
    """x with L x = b, or Lᵀ x = b if `transposed`. (m, m), (m,) or (m, k) -> b's shape. O(m²k)."""
    xp = namespace(factor, b)
    if is_numpy(xp):
        from scipy.linalg import solve_triangular as solve

        return solve(factor, b, lower=lower, trans=1 if transposed else 0, check_finite=False)
    rhs = b[:, None] if b.ndim == 1 else b
    if array_api_compat.is_torch_namespace(xp):
        matrix = factor.mT if transposed else factor
        out = xp.linalg.solve_triangular(matrix, rhs, upper=lower == transposed)
    elif array_api_compat.is_cupy_namespace(xp):
        from cupyx.scipy.linalg import solve_triangular as solve  # late: needs libcublasLt

        out = solve(factor, rhs, lower=lower, trans=1 if transposed else 0)
    else:  # another array-API library: correct, at LU cost
        triangle = xp.tril(factor) if lower else xp.triu(factor)
        out = xp.linalg.solve(xp.matrix_transpose(triangle) if transposed else triangle, rhs)
    return out[:, 0] if b.ndim == 1 else out


@functools.lru_cache(maxsize=1)
def _blas_controller(loaded: int) -> Any:
    """The BLAS libraries of this process; `loaded` names which of scipy and torch have come."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold BLAS at one thread: own row tiles on own threads beat its spinning pool 3 to 1."""
    # Scanning loaded libraries takes milliseconds, so it is redone only when scipy or torch came.
    loaded = ("scipy.linalg" in sys.modules) + 2 * ("torch" in sys.modules)
    with _blas_controller(loaded).limit(limits=1, user_api="blas"):
        yield


def device(x: Array) -> Any:
    """The device of `x`, as its library names it."""
    return array_api_compat.device(x)


def exp_in_place(x: Array) -> Array:
    """exp(x), in x's memory where its library can and no gradient is recorded."""
    xp = namespace(x)
    if is_numpy(xp) or array_api_compat.is_cupy_namespace(xp):
        return xp.exp(x, out=x)
    if array_api_compat.is_torch_namespace(xp) and not x.requires_grad:
        return x.exp_()
    return xp.exp(x)


def clip_below_in_place(x: Array, floor: float) -> Array:
    """max(x, floor), in x's memory where its library can and no gradient is recorded."""
    xp = namespace(x)
    if is_numpy(xp) or array_api_compat.is_cupy_namespace(xp):
        return xp.maximum(x, x.dtype.type(floor), out=x)
    if array_api_compat.is_torch_namespace(xp):
        return x.clamp(min=floor) if x.requires_grad else x.clamp_(min=floor)
    return xp.clip(x, min=floor)


def clip_above_in_place(x: Array, ceiling: float) -> Array:
    """min(x, ceiling), in x's memory where its library can and no gradient is recorded."""
    xp = namespace(x)
    if is_numpy(xp) or array_api_compat.is_cupy_namespace(xp):
        return xp.minimum(x, x.dtype.type(ceiling), out=x)
    if array_api_compat.is_torch_namespace(xp):
        return x.clamp(max=ceiling) if x.requires_grad else x.clamp_(max=ceiling)
    return xp.clip(x, max=ceiling)


def with_diagonal(x: Array, values: Array, offset: int = 0) -> Array:
    """x with x[i, offset + i] = values[i] for i < len(values); in x's memory where possible."""
    xp = namespace(x)
    rows = xp.arange(values.shape[0], device=device(x))
    if is_numpy(xp) or array_api_compat.is_cupy_namespace(xp) or array_api_compat.is_torch_array(x):
        x[rows, rows + offset] = values
        return x
    columns = xp.arange(x.shape[1], device=device(x))  # the bare standard cannot assign pairs
    return xp.where(columns[None, :] == rows[:, None] + offset, values[:, None], x)
