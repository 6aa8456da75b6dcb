"""kernrl.gpu.gram: its CUDA text run on the CPU, called by its host code, against NumPy kernels."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
from gpu import stand_in
from gpu.emulation import gram_kernels
from gpu.stand_in import asarray
from tolerances import tolerance

from kernrl.gpu import gram as host
from kernrl.kernels.base import Kernel
from kernrl.kernels.stationary import RBF, Laplacian, Matern, Periodic, RationalQuadratic

MIXTURE = 0.7
KERNELS: dict[str, Kernel] = {
    "rbf": RBF(1.0),
    "matern12": Matern(1.0, nu=0.5),
    "matern32": Matern(1.0, nu=1.5),
    "matern52": Matern(1.0, nu=2.5),
    "rational_quadratic": RationalQuadratic(1.0, mixture=MIXTURE),
    "laplacian": Laplacian(1.0),
}
# Rows, columns, inputs: one entry, odd, exactly a tile, one past it, past the depth of a tile.
SHAPES = [(1, 1, 1), (17, 33, 5), (64, 64, 16), (65, 65, 17), (3, 130, 33), (129, 2, 64)]


@pytest.fixture
def cupy(monkeypatch):
    with stand_in.installed(monkeypatch) as module:
        yield module


def rows(rng, n, d, dtype):
    # Divided by √d, so that the kernels of 64 inputs are not all 0.
    return asarray(rng.normal(size=(n, d)) / np.sqrt(d), dtype)


def entries(family, x, y):
    """The NumPy kernel in float64, on the numbers as they were rounded to the tested dtype."""
    wide = (np.asarray(z, dtype=np.float64) for z in (x, y))
    return KERNELS[family](*wide)


@pytest.mark.parametrize("dtype", host.TYPES)
@pytest.mark.parametrize("family", host.FAMILIES)
def test_gram_is_the_numpy_kernel(cupy, rng, family, dtype):
    for n, m, d in SHAPES:
        x, y = rows(rng, n, d, dtype), rows(rng, m, d, dtype)
        got = host.gram(family, x, y, MIXTURE)
        assert isinstance(got, cupy.ndarray)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, entries(family, x, y), **tolerance("algebra", dtype))


@pytest.mark.parametrize("dtype", host.TYPES)
@pytest.mark.parametrize("family", host.FAMILIES)
def test_matvec_is_the_numpy_kernel_times_w(cupy, rng, family, dtype):
    for (n, m, d), t in zip(SHAPES, (1, 2, 3, 4, 8, 5), strict=True):
        x, y = rows(rng, n, d, dtype), rows(rng, m, d, dtype)
        w = asarray(rng.normal(size=(m, t)), dtype)
        got = host.matvec(family, x, y, w, MIXTURE)
        assert got.dtype == dtype
        expected = entries(family, x, y) @ np.asarray(w, dtype=np.float64)
        np.testing.assert_allclose(got, expected, **tolerance("algebra", dtype))


@pytest.mark.parametrize("d", range(1, 65, 7))
def test_every_number_of_inputs(cupy, rng, d):
    x, y, w = (rows(rng, n, d, "float64") for n in (5, 70, 70))
    expected = entries("rbf", x, y)
    np.testing.assert_allclose(host.gram("rbf", x, y), expected, **tolerance("algebra"))
    got = host.matvec("rbf", x, y, w[:, 0])  # a strided vector, too
    np.testing.assert_allclose(got, expected @ np.asarray(w[:, 0]), **tolerance("algebra"))


@pytest.mark.parametrize("d", [3, 40])  # x's tile stays in shared memory, or is loaded anew
@pytest.mark.parametrize("blocks", [1, 2, 3, 1024])
def test_columns_cut_into_parts_give_the_same_sums(cupy, rng, monkeypatch, blocks, d):
    monkeypatch.setattr(host, "BLOCKS", blocks)
    x, y, w = rows(rng, 2, d, "float64"), rows(rng, 300, d, "float64"), rows(rng, 300, 3, "float64")
    got = host.matvec("matern32", x, y, w)
    np.testing.assert_allclose(got, entries("matern32", x, y) @ w, **tolerance("algebra"))
    parts = {1: 1, 2: 2, 3: 3, 1024: 5}[blocks]  # of 5 tiles of columns
    assert [("matvec<Matern32, double, 4>", (1, parts))] == stand_in.LAUNCHES


def test_rows_fill_grid_x_and_few_columns_of_w_take_the_narrow_kernel(cupy, rng):
    x, y = rows(rng, 130, 2, "float32"), rows(rng, 65, 2, "float32")
    host.gram("laplacian", x, y)
    for t in (1, 2, 3, 8, 17):
        host.matvec("rbf", x, y, rows(rng, 65, t, "float32"))
    widths = [1, 2, 4, 8, 8, 8, 1]  # 17 columns: 8 + 8 + 1
    fused = [(f"matvec<Rbf, float, {width}>", (3, 2)) for width in widths]
    assert [("gram<Laplacian, float>", (6,)), *fused] == stand_in.LAUNCHES


def test_wide_w_is_done_in_passes(cupy, rng):
    x, y, w = rows(rng, 9, 2, "float64"), rows(rng, 20, 2, "float64"), rows(rng, 20, 19, "float64")
    got = host.matvec("laplacian", x, y, w)
    np.testing.assert_allclose(got, entries("laplacian", x, y) @ w, **tolerance("algebra"))


def test_the_diagonal_is_exact_and_offsets_do_no_harm(cupy, rng):
    """float32 data around 1000: |x|² + |y|² − 2xy would be off by 0.3 here."""
    x = asarray(1000 + rng.normal(size=(70, 3)), "float32")
    for family in host.FAMILIES:
        got = host.gram(family, x, x, MIXTURE)
        assert np.all(np.diagonal(got) == 1)
        wide = np.asarray(x, dtype=np.float64) - 1000
        expected = entries(family, wide, wide)
        np.testing.assert_allclose(got, expected, **tolerance("float32"))


def test_the_periodic_kernel_is_rbf_on_circles(cupy, rng):
    kernel = Periodic(0.8, period=2.5)
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(7, 2))
    circles = (asarray(kernel._warp(np, z, 1 / 0.8)) for z in (x, y))
    np.testing.assert_allclose(host.gram("rbf", *circles), kernel(x, y), **tolerance("algebra"))


def test_strided_inputs_are_made_contiguous(cupy, rng):
    x, y = rows(rng, 40, 6, "float64")[::-2, ::3], asarray(rng.normal(size=(2, 9))).T
    np.testing.assert_allclose(
        host.gram("matern52", x, y), entries("matern52", x, y), **tolerance("algebra")
    )


def test_nothing_in_nothing_out(cupy, rng):
    some, none = rows(rng, 3, 2, "float32"), rows(rng, 0, 2, "float32")
    assert host.gram("rbf", none, some).shape == (0, 3)
    assert host.gram("rbf", some, none).shape == (3, 0)
    assert host.matvec("rbf", none, some, some).shape == (0, 2)
    assert np.array_equal(host.matvec("rbf", some, none, none), np.zeros((3, 2)))
    assert np.array_equal(host.matvec("rbf", some, none, none[:, 0]), np.zeros(3))
    assert host.matvec("rbf", some, some, some[:, :0]).shape == (3, 0)
    assert stand_in.LAUNCHES == []


@pytest.mark.parametrize("family", host.FAMILIES)
def test_no_inputs_at_all_are_distance_nought(cupy, family):
    x, y = (asarray(np.zeros((n, 0))) for n in (2, 70))
    assert np.array_equal(host.gram(family, x, y), np.ones((2, 70)))
    assert np.array_equal(host.matvec(family, x, y, asarray(np.ones(70))), [70, 70])


# ---------------------------------------------------------------- errors

X = asarray(np.zeros((4, 2)))
ELSEWHERE = asarray(np.zeros((4, 2)))
ELSEWHERE.where = 1
WRONG = {
    "gram: family must be one of laplacian, matern12, matern32, matern52, rational_quadratic, "
    "rbf, got 'rfb'. Did you mean 'rbf'?": lambda: host.gram("rfb", X, X),
    "gram: x must be a CuPy array, got numpy.ndarray. Use cupy.asarray.": lambda: host.gram(
        "rbf", np.zeros((4, 2)), X
    ),
    "gram: y must have shape (n, d), got (4,).": lambda: host.gram("rbf", X, X[:, 0]),
    "gram: x and y must share their last axis, got x (4, 2) and y (4, 1).": lambda: host.gram(
        "rbf", X, X[:, :1]
    ),
    "gram: x and y must both be float32 or both float64, got x float64 and y float32. Convert one "
    "with astype.": lambda: host.gram("rbf", X, X.astype("float32")),
    "gram: y must be on x's device (0), got 1.": lambda: host.gram("rbf", X, ELSEWHERE),
    "matvec: w must have 4 rows, got (3, 2).": lambda: host.matvec("rbf", X, X, X[:3]),
    "matvec: w must have shape (m,) or (m, t), got (4, 2, 1).": lambda: host.matvec(
        "rbf", X, X, X[..., None]
    ),
    "matvec: w must be on x's device (0), got 1.": lambda: host.matvec("rbf", X, X, ELSEWHERE),
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(cupy, text):
    with pytest.raises((ValueError, TypeError)) as error:
        WRONG[text]()
    assert str(error.value) == text


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # what a missing package looks like
    with pytest.raises(ImportError, match=r"gram: CuPy must be importable, got .*gpu-cuda12 or"):
        host.gram("rbf", X, X)


# ---------------------------------------------------------------- past 2³¹


def virtual(shape, dtype="float32"):
    """Zeros of any size: pages come into being only where they are written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # mmap.MAP_NORESERVE, which Python has from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).reshape(shape)


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="memory without pages behind it is Linux'"
)


def test_offsets_are_64_bits_wide():
    offset = gram_kernels().offset
    for row, width, column in [(2**31, 2**31, 7), (46341, 46341, 0), (3 * 10**9, 3, 2)]:
        assert offset(row, width, column) == row * width + column


def longs(*values):
    return tuple(np.int64(value) for value in values)


@linux
def test_the_last_tile_of_a_gram_past_2_to_the_31(rng):
    n = m = 50_001  # 2.5e9 entries
    x, y = (rng.normal(size=(n, 1)).astype("float32") for _ in range(2))
    out = virtual((n, m))
    across = -(-n // host.TILE)
    last = across * across
    arguments = (x, y, out, *longs(n, m, 1), np.float32(1))
    name = "gram<Rbf, float>"
    gram_kernels().launch(name, (last,), host.THREADS, arguments, (last - 1, last))
    corner = slice((across - 1) * host.TILE, None)
    np.testing.assert_allclose(
        out[corner, corner], entries("rbf", x[corner], y[corner]), **tolerance("float32")
    )


@linux
def test_the_last_rows_of_inputs_past_2_to_the_31(rng):
    n, d = 2**28 + 3, 8
    x, y, w = virtual((n, d)), rng.normal(size=(5, d)).astype("float32"), np.ones((5, 1), "float32")
    x[-3:] = rng.normal(size=(3, d))
    out = virtual((1, n, 1))
    blocks = -(-n // host.TILE)
    arguments = (x, y, w, out, *longs(n, 5, d, 1, 1), np.float32(1))
    name = "matvec<Rbf, float, 1>"
    gram_kernels().launch(name, (blocks, 1), host.THREADS, arguments, (blocks - 1, blocks))
    expected = entries("rbf", x[-3:], y).sum(axis=1)
    np.testing.assert_allclose(out[0, -3:, 0], expected, **tolerance("float32"))


@linux
def test_the_last_columns_and_weights_past_2_to_the_31(rng):
    m, d, t = 2**28 + 3, 8, 8
    x, y, w = rng.normal(size=(2, d)).astype("float32"), virtual((m, d)), virtual((m, t))
    y[-3:], w[-3:] = rng.normal(size=(3, d)), rng.normal(size=(3, t))
    span = 2**21  # tiles of a part: the third part has one
    out = np.full((3, 2, t), np.nan, "float32")
    arguments = (x, y, w, out, *longs(2, m, d, t, span), np.float32(1))
    gram_kernels().launch("matvec<Rbf, float, 8>", (1, 3), host.THREADS, arguments, (2, 3))
    np.testing.assert_allclose(out[2], entries("rbf", x, y[-3:]) @ w[-3:], **tolerance("float32"))
    assert np.all(np.isnan(out[:2]))
