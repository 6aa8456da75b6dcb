"""Which array library, which device, which dtype; host randomness; the one triangular solve.

No other module asks what library an array comes from. NumPy in gives NumPy out, torch in gives
torch out, CuPy in gives CuPy out.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import array_api_compat
import numpy as np

from kernrl import checks

Array = Any
Namespace = Any
Seed = int | np.random.Generator | np.random.SeedSequence | None

# Rows x columns of Gram work below which "auto" keeps NumPy data on the CPU even where a GPU is:
# at 15 ms per 1.6e7 entries on two cores, transfers and launches cost more than they save below it.
GPU_WORTHWHILE = 50_000_000


def namespace(*arrays: Array) -> Namespace:
    """The array-API namespace that all given arrays belong to; None entries are skipped.

    Raises TypeError when libraries are mixed.
    """
    given = [x for x in arrays if x is not None]
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
    """(n,) -> (n, 1); (n, d) stays; (n, ...) is flattened to (n, d)."""
    xp = namespace(x)
    if x.ndim == 2:
        return x
    return xp.reshape(x, (x.shape[0], -1)) if x.shape[0] else xp.reshape(x, (0, 1))


def host(x: Array) -> np.ndarray:
    """`x` as a NumPy array in host memory; zero-copy where it already is one."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):  # torch: leave the graph, then the device
        return np.asarray(x.detach().cpu())
    if hasattr(x, "get") and type(x).__module__.startswith("cupy"):
        return np.asarray(x.get())
    return np.asarray(x)


def like(x: object, reference: Array, dtype: Any = None) -> Array:
    """`x` as an array of `reference`'s library, device and (unless given) dtype."""
    xp = namespace(reference)
    device = array_api_compat.device(reference)
    dtype = reference.dtype if dtype is None else dtype
    if is_array(x) and namespace(x) is xp:
        return array_api_compat.to_device(xp.astype(x, dtype, copy=False), device)
    value = host(x) if is_array(x) else np.asarray(x)
    return xp.asarray(value, dtype=dtype, device=device)


def epsilon(x: Array) -> float:
    """Machine epsilon of a floating array's dtype."""
    return float(namespace(x).finfo(x.dtype).eps)


# ---------------------------------------------------------------- randomness and devices


def rng(seed: Seed = None) -> np.random.Generator:
    """The host generator everything random comes from; a Generator is passed through."""
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
    entries to be computed) is above GPU_WORTHWHILE.
    """
    checks.choice(owner, "device", device, ("auto", "cpu", "cuda"))
    if device == "cpu" or not isinstance(x, np.ndarray):
        if device == "cuda" and array_api_compat.is_torch_array(x):
            return x.to("cuda")
        return host(x) if device == "cpu" and not array_api_compat.is_torch_array(x) else x
    if device == "auto" and (work < GPU_WORTHWHILE or not gpu_available()):
        return x
    if not gpu_available():
        checks.fail(
            owner,
            "device='cuda' needs CuPy and a CUDA GPU",
            "neither or only one of them",
            "Install the extra gpu-cuda12 or gpu-cuda13, or use device='cpu'.",
            RuntimeError,
        )
    import cupy

    return cupy.asarray(x)


def exchange(x: Array, library: str) -> Array:
    """`x` as an array of `library` ("numpy", "torch" or "cupy"), zero-copy through DLPack.

    A negative stride is refused here: torch 2.13 aborts the whole process on one
    (pytorch #188023). Gradients are detached, since DLPack cannot carry them.
    """
    checks.choice("exchange", "library", library, ("cupy", "numpy", "torch"))
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

        if isinstance(x, np.ndarray) and not x.flags.writeable:
            return from_dlpack(x.copy())  # torch would write through a read-only array
        return from_dlpack(x)
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
def _blas_controller(n_modules: int) -> Any:
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


def with_diagonal(x: Array, values: Array, offset: int = 0) -> Array:
    """x with x[i, offset + i] = values[i] for i < len(values); in x's memory where possible."""
    xp = namespace(x)
    rows = xp.arange(values.shape[0], device=device(x))
    if is_numpy(xp) or array_api_compat.is_cupy_namespace(xp) or array_api_compat.is_torch_array(x):
        x[rows, rows + offset] = values
        return x
    columns = xp.arange(x.shape[1], device=device(x))  # the bare standard cannot assign pairs
    return xp.where(columns[None, :] == rows[:, None] + offset, values[:, None], x)
