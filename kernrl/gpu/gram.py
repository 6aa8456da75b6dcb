"""Gram matrices of stationary kernels on CuPy arrays, by the CUDA C++ of gram.cu.

A family is a name, its inputs are already divided by their length scales: this room never sees a
kernel object. CuPy is imported when a function is called; the first call of a family and dtype
compiles it (NVRTC, a second or two; CuPy keeps the result on disk).
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

from kernrl import checks

Array = Any

# Name -> the struct of gram.cu. `parameter` is read by rational_quadratic only (its mixture). The
# periodic kernel is rbf on inputs that its caller has put on circles.
FAMILIES = {
    "rbf": "Rbf",
    "matern12": "Matern12",
    "matern32": "Matern32",
    "matern52": "Matern52",
    "rational_quadratic": "RationalQuadratic",
    "laplacian": "Laplacian",
}
TYPES = {"float32": "float", "float64": "double"}
WIDTHS = (1, 2, 4, 8)  # right-hand sides of one pass of matvec: each a compiled kernel

TILE = 64  # rows and columns of K in one block, as in gram.cu
THREADS = 256  # of a block, as in gram.cu
GRID_X = 2**31 - 1  # CUDA's limit of blocks on grid x
# Blocks wanted of matvec: some 130 multiprocessors hold up to 3 each, and a few rounds of them even
# out the last one. Derived from those counts, not measured.
BLOCKS = 1024


def gram(
    family: str, x: Array, y: Array, parameter: float = 1.0
) -> Array:  # (n, d), (m, d) -> (n, m)
    """K_ij = f(‖x_i − y_j‖²), or f(Σ_k |x_ik − y_jk|) for the Laplacian, x and y scaled by 1/ℓ.

    x and y are CuPy arrays of one floating dtype, float32 or float64. One pass: K is written once
    and nothing else is. On the current stream of x's device.
    """
    cupy = _cupy("gram")
    x, y = _inputs(cupy, "gram", family, x, y)
    n, d = x.shape
    m = y.shape[0]
    with x.device:
        out = cupy.empty((n, m), dtype=x.dtype)
        if n and m:
            blocks = _ceil(n, TILE) * _ceil(m, TILE)
            if blocks > GRID_X:
                checks.fail("gram", "K must have at most 2⁴³ entries", f"{n} × {m}", "Use matvec.")
            arguments = (x, y, out, *_longs(cupy, n, m, d), x.dtype.type(parameter))
            _kernel(_gram_name(family, x), x)((blocks,), (THREADS,), arguments)
    return out


def matvec(
    family: str, x: Array, y: Array, w: Array, parameter: float = 1.0
) -> Array:  # (n, d), (m, d), (m,) or (m, t) -> (n,) or (n, t)
    """K(x, y) w without K: O(nmd) work, no memory but the result (and its parts if n is small).

    Each 8 columns of w are one pass that makes K's entries anew. w takes x's dtype. The same call
    gives the same bits: parts are added in order, never by atomics.
    """
    cupy = _cupy("matvec")
    x, y = _inputs(cupy, "matvec", family, x, y)
    _on_device(cupy, "matvec", "w", w)
    _same_device("matvec", "w", w, x)
    checks.ndim("matvec", "w", w, (1, 2), "(m,) or (m, t)")
    if w.shape[0] != y.shape[0]:
        checks.fail("matvec", f"w must have {y.shape[0]} rows", checks.shape(w))
    with x.device:
        table = (w[:, None] if w.ndim == 1 else w).astype(x.dtype, copy=False)
        out = cupy.zeros((x.shape[0], table.shape[1]), dtype=x.dtype)
        if x.shape[0] and y.shape[0]:
            for start in range(0, table.shape[1], WIDTHS[-1]):
                some = slice(start, start + WIDTHS[-1])
                out[:, some] = _pass(cupy, family, x, y, table[:, some], parameter)
    return out[:, 0] if w.ndim == 1 else out


def _pass(
    cupy: Any, family: str, x: Array, y: Array, w: Array, parameter: float
) -> Array:  # w (m, t ≤ 8) -> (n, t)
    """One launch of matvec, its columns cut into parts where the rows alone are too few blocks."""
    w = cupy.ascontiguousarray(w)
    (n, d), (m, t) = x.shape, w.shape
    bands, across = _ceil(n, TILE), _ceil(m, TILE)
    span = _ceil(across, min(across, _ceil(BLOCKS, bands)))
    parts = _ceil(across, span)  # at most BLOCKS, far below grid y's limit of 65535
    out = cupy.empty((parts, n, t), dtype=x.dtype)
    arguments = (x, y, w, out, *_longs(cupy, n, m, d, t, span), x.dtype.type(parameter))
    _kernel(_matvec_name(family, x, t), x)((bands, parts), (THREADS,), arguments)
    return out[0] if parts == 1 else out.sum(axis=0)


# -------------------------------------------------------------------------------------- inputs


def _cupy(owner: str) -> Any:
    try:
        import cupy
    except ImportError as error:  # not there, or its CUDA libraries are not: the text says which
        cure = "Install the extra gpu-cuda12 or gpu-cuda13."
        checks.fail(owner, "CuPy must be importable", repr(str(error)), cure, ImportError)
    return cupy


def _inputs(cupy: Any, owner: str, family: str, x: Array, y: Array) -> tuple[Array, Array]:
    """x and y as the kernels read them: checked, in C order."""
    checks.choice(owner, "family", family, FAMILIES)
    for name, z in (("x", x), ("y", y)):
        _on_device(cupy, owner, name, z)
        checks.ndim(owner, name, z, 2, "(n, d)")
    checks.same_columns(owner, x, y)
    _same_device(owner, "y", y, x)
    if str(x.dtype) not in TYPES or x.dtype != y.dtype:
        checks.fail(
            owner,
            "x and y must both be float32 or both float64",
            f"x {x.dtype} and y {y.dtype}",
            "Convert one with astype.",
            TypeError,
        )
    with x.device:
        return cupy.ascontiguousarray(x), cupy.ascontiguousarray(y)


def _on_device(cupy: Any, owner: str, name: str, x: Array) -> None:
    if not isinstance(x, cupy.ndarray):
        kind = f"{type(x).__module__}.{type(x).__name__}"
        checks.fail(owner, f"{name} must be a CuPy array", kind, "Use cupy.asarray.", TypeError)


def _same_device(owner: str, name: str, z: Array, x: Array) -> None:
    if z.device.id != x.device.id:
        checks.fail(owner, f"{name} must be on x's device ({x.device.id})", z.device.id)


def _longs(cupy: Any, *values: int) -> tuple[Any, ...]:
    return tuple(cupy.int64(value) for value in values)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# ------------------------------------------------------------------------------------- kernels


def source() -> str:
    """The CUDA C++ text."""
    return importlib.resources.files("kernrl.gpu").joinpath("gram.cu").read_text(encoding="utf-8")


def expressions(family: str, dtype: str) -> tuple[str, ...]:
    """Every kernel of a family and dtype, as C++ names them."""
    struct, number = FAMILIES[family], TYPES[dtype]
    fused = (f"matvec<{struct}, {number}, {width}>" for width in WIDTHS)
    return (f"gram<{struct}, {number}>", *fused)


def _gram_name(family: str, x: Array) -> tuple[str, str, int]:
    return family, str(x.dtype), 0


def _matvec_name(family: str, x: Array, t: int) -> tuple[str, str, int]:
    return family, str(x.dtype), 1 + next(i for i, width in enumerate(WIDTHS) if width >= t)


def _kernel(name: tuple[str, str, int], x: Array) -> Any:
    return _compiled(*name, int(x.device.id))


@functools.cache
def _compiled(family: str, dtype: str, index: int, device: int) -> Any:
    """One kernel on the current device, which is `device`: a module is loaded on each apart."""
    names = expressions(family, dtype)
    return _module(family, dtype, device).get_function(names[index])


@functools.cache
def _module(family: str, dtype: str, device: int) -> Any:
    import cupy

    names = expressions(family, dtype)
    return cupy.RawModule(code=source(), options=("-std=c++17",), name_expressions=names)
