"""The array door: three libraries in, the same out; what must be refused is refused by text."""

from __future__ import annotations

import importlib.util
import re
import threading

import array_api_compat
import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from tolerances import tolerance

from kernrl import arrays

LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "strict": array_api_strict.asarray}


def raises(error: type[Exception], text: str):
    """The error must have exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.fixture(params=LIBRARIES)
def asarray(request):
    return LIBRARIES[request.param]


def same_library(x, y) -> bool:
    return type(x) is type(y)


# ---------------------------------------------------------------- namespaces


def test_namespace_is_the_librarys() -> None:
    assert arrays.is_numpy(arrays.namespace(np.ones(1), None))
    assert array_api_compat.is_torch_namespace(arrays.namespace(torch.ones(1)))
    assert not arrays.is_numpy(arrays.namespace(array_api_strict.ones(1)))


def test_mixed_libraries_are_refused() -> None:
    text = (
        "arrays: all arrays must come from one library, got numpy.ndarray, torch.Tensor. "
        "Convert them first, for example with numpy.asarray."
    )
    with raises(TypeError, text):
        arrays.namespace(torch.ones(1), np.ones(1))


def test_is_array(asarray) -> None:
    assert arrays.is_array(asarray([1.0]))
    assert not arrays.is_array([1.0])
    assert not arrays.is_array(1.0)


# ---------------------------------------------------------------- taking data in


def test_take_keeps_the_array_it_is_given(asarray) -> None:
    x = asarray(np.ones((2, 3)))
    assert arrays.take("A", "x", x) is x
    assert arrays.take("A", "x", x, dtype="float64") is x


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_take_converts_the_dtype(asarray, dtype) -> None:
    x = arrays.take("A", "x", asarray(np.array([1, 2], np.int32)), dtype=dtype)
    assert same_library(x, asarray(1))
    assert str(x.dtype).endswith(dtype)


@pytest.mark.parametrize("x", [[1, 2], (1.0, 2.0), 3, 3.5, True, [[1, 2], [3, 4]], range(3)])
def test_take_makes_numpy_of_plain_python(x) -> None:
    got = arrays.take("A", "x", x)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, np.asarray(x))


@pytest.mark.parametrize("x", ["abc", [None, 1.0], {1: 2}, [2**70], object()])
def test_take_refuses_what_is_no_number(x) -> None:
    dtype = np.asarray(x).dtype
    text = (
        f"A: states must be real numbers, got dtype {dtype}. Convert it to a numeric array first."
    )
    with raises(TypeError, text):
        arrays.take("A", "states", x)


def test_take_refuses_ragged_rows() -> None:
    with raises(ValueError, "A: x must be a rectangular array of numbers, got ragged rows."):
        arrays.take("A", "x", [[1, 2], [3]])


def test_floating(asarray) -> None:
    whole = arrays.floating(asarray(np.array([1, 2])))
    assert same_library(whole, asarray(1))
    assert str(whole.dtype).endswith("float64")
    single = asarray(np.ones(2, np.float32))
    assert arrays.floating(single) is single
    assert str(arrays.floating(asarray(np.array([True]))).dtype).endswith("float64")


@pytest.mark.parametrize(
    ("before", "after"),
    [((4,), (4, 1)), ((4, 3), (4, 3)), ((4, 3, 2), (4, 6)), ((0,), (0, 1)), ((0, 3, 2), (0, 6))],
)
def test_columns(asarray, before, after) -> None:
    x = asarray(np.arange(float(np.prod(before))).reshape(before))
    got = arrays.columns(x)
    assert tuple(got.shape) == after
    np.testing.assert_array_equal(arrays.host(got).ravel(), arrays.host(x).ravel())


# ---------------------------------------------------------------- host and like


def test_host_is_numpy(asarray) -> None:
    got = arrays.host(asarray(np.arange(3.0)))
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, [0.0, 1.0, 2.0])


def test_host_shares_memory_where_it_can() -> None:
    x = np.arange(3.0)
    assert arrays.host(x) is x
    assert np.shares_memory(arrays.host(torch.from_numpy(x)), x)


def test_host_leaves_the_graph() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    np.testing.assert_array_equal(arrays.host(x), [2.0, 2.0])


def test_host_widens_bfloat16() -> None:
    got = arrays.host(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [1.5, -2.0])


@pytest.mark.parametrize("source", LIBRARIES)
def test_like_follows_the_reference(asarray, source) -> None:
    x = LIBRARIES[source](np.array([1, 2]))
    got = arrays.like(x, asarray(np.ones(1, np.float32)))
    assert same_library(got, asarray(1))
    assert str(got.dtype).endswith("float32")
    np.testing.assert_array_equal(arrays.host(got), [1.0, 2.0])


def test_like_takes_python_and_an_own_dtype(asarray) -> None:
    reference = asarray(np.ones(1))
    got = arrays.like([1, 2], reference, dtype=arrays.namespace(reference).int32)
    assert str(got.dtype).endswith("int32")
    assert arrays.like(reference, reference) is reference or same_library(got, reference)


def test_like_takes_what_torch_refuses() -> None:
    reference = torch.ones(1)
    backward = arrays.like(np.arange(3.0)[::-1], reference)
    np.testing.assert_array_equal(backward.numpy(), [2.0, 1.0, 0.0])
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False
    got = arrays.like(read_only, reference)
    got += 1.0
    np.testing.assert_array_equal(read_only, 1.0)


def test_epsilon(asarray) -> None:
    assert arrays.epsilon(asarray(np.ones(1))) == np.finfo(np.float64).eps
    assert arrays.epsilon(asarray(np.ones(1, np.float32))) == np.finfo(np.float32).eps


# ---------------------------------------------------------------- randomness


def test_rng_is_reproducible_and_passes_generators_through() -> None:
    assert arrays.rng(3).integers(2**60) == arrays.rng(3).integers(2**60)
    generator = np.random.default_rng(0)
    assert arrays.rng(generator) is generator
    sequence = np.random.SeedSequence(5)
    assert arrays.rng(sequence).random() == np.random.default_rng(sequence).random()
    assert arrays.rng(None).random() != arrays.rng(None).random()


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True])
def test_rng_refuses_other_seeds(seed) -> None:
    text = (
        "rng: the seed must be a non-negative integer, a numpy Generator, a SeedSequence or None, "
        f"got {seed!r}."
    )
    with raises(ValueError, text):
        arrays.rng(seed)


def test_rng_leaves_the_global_stream_alone() -> None:
    before = np.random.get_state()[1].copy()
    arrays.fresh_seed(arrays.rng(1))
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_fresh_seed_fits_31_bits_and_moves_on() -> None:
    generator = arrays.rng(0)
    seeds = [arrays.fresh_seed(generator) for _ in range(100)]
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == 100


# ---------------------------------------------------------------- devices

CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_on_device_keeps_host_data(asarray, device) -> None:
    x = asarray(np.ones(2))
    assert arrays.on_device(x, device, work=10) is x


def test_on_device_refuses_unknown_devices() -> None:
    text = "KLSTD: device must be one of auto, cpu, cuda, got 'gpu'. Did you mean 'cpu'?"
    with raises(ValueError, text):
        arrays.on_device(np.ones(1), "gpu", owner="KLSTD")


@pytest.mark.skipif(arrays.gpu_available(), reason="CuPy and a GPU are here: nothing is refused")
def test_cuda_without_cupy_says_what_to_install() -> None:
    text = (
        "KLSTD: device='cuda' needs CuPy and a CUDA GPU, got a machine without. "
        "Install the extra gpu-cuda12 or gpu-cuda13, or use device='cpu'."
    )
    with raises(RuntimeError, text):
        arrays.on_device(np.ones(1), "cuda", owner="KLSTD")
    x = np.ones(1)
    assert arrays.on_device(x, "auto", work=10 * arrays.GPU_WORTHWHILE) is x


@pytest.mark.skipif(CUDA, reason="a GPU is here: nothing is refused")
def test_cuda_without_a_gpu_is_refused_for_torch() -> None:
    text = (
        "PPO: device='cuda' needs a CUDA GPU and a CUDA build of torch, got a machine without. "
        "Use device='cpu'."
    )
    with raises(RuntimeError, text):
        arrays.on_device(torch.ones(1), "cuda", owner="PPO")


@pytest.mark.gpu
def test_torch_moves_both_ways() -> None:
    x = arrays.on_device(torch.ones(2), "cuda")
    assert x.device.type == "cuda"
    assert arrays.on_device(x, "auto") is x
    assert arrays.on_device(x, "cpu").device.type == "cpu"
    np.testing.assert_array_equal(arrays.host(x), [1.0, 1.0])
    assert arrays.like(np.zeros(2), x).device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_in_cupy_out() -> None:
    import cupy

    x = arrays.on_device(np.eye(3), "cuda")
    assert isinstance(x, cupy.ndarray)
    assert isinstance(arrays.on_device(x, "cpu"), np.ndarray)
    assert isinstance(arrays.on_device(np.eye(3), "auto", arrays.GPU_WORTHWHILE), cupy.ndarray)
    assert isinstance(arrays.on_device(np.eye(3), "auto", 10), np.ndarray)
    lower = cupy.tril(cupy.ones((3, 3)))
    got = arrays.solve_triangular(lower, lower @ cupy.arange(3.0))
    np.testing.assert_allclose(arrays.host(got), np.arange(3.0), **tolerance("algebra"))
    with pytest.raises(ValueError, match="strides must not be negative"):
        arrays.exchange(cupy.arange(3)[::-1], "torch")


# ---------------------------------------------------------------- exchange


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool"])
def test_exchange_shares_memory(dtype) -> None:
    x = np.ones(4, dtype)
    there = arrays.exchange(x, "torch")
    back = arrays.exchange(there, "numpy")
    assert isinstance(there, torch.Tensor)
    assert np.shares_memory(back, x)
    assert arrays.exchange(x, "numpy") is x


def test_exchange_from_another_library() -> None:
    x = arrays.exchange(array_api_strict.asarray([1.0, 2.0]), "torch")
    assert torch.equal(x, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_exchange_of_a_strided_view() -> None:
    x = np.arange(12.0).reshape(3, 4)[::2, 1::2]
    np.testing.assert_array_equal(arrays.exchange(x, "torch").numpy(), x)


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, :]])
@pytest.mark.parametrize("library", ["torch", "numpy", "cupy"])
def test_exchange_refuses_a_negative_stride(view, library) -> None:
    """torch 2.13 would end the whole process here, so no test calls it to see."""
    x = np.ones((4, 3))[view]
    text = (
        f"exchange: strides must not be negative, got strides {x.strides}. "
        "Copy the array first, for example numpy.ascontiguousarray(x)."
    )
    with raises(ValueError, text):
        arrays.exchange(x, library)


def test_exchange_copies_read_only_memory() -> None:
    x = np.ones(3)
    x.flags.writeable = False
    arrays.exchange(x, "torch").add_(1.0)
    np.testing.assert_array_equal(x, 1.0)


def test_exchange_detaches_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    np.testing.assert_array_equal(arrays.exchange(x, "numpy"), [1.0, 1.0])
    assert not arrays.exchange(x, "torch").requires_grad


def test_exchange_refuses_other_things() -> None:
    with raises(ValueError, "exchange: library must be one of cupy, numpy, torch, got 'jax'."):
        arrays.exchange(np.ones(1), "jax")
    with raises(TypeError, "exchange: x must be an array, got list."):
        arrays.exchange([1.0], "torch")


# ---------------------------------------------------------------- triangular solve


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("m", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("columns", [None, 1, 3])
def test_solve_triangular(asarray, rng, lower, transposed, m, columns) -> None:
    """The triangle times x gives b back; what stands in the other triangle must be ignored."""
    full = rng.standard_normal((m, m)) + (3 + m) * np.eye(m)
    triangle = np.tril(full) if lower else np.triu(full)
    b = rng.standard_normal(m if columns is None else (m, columns))
    x = arrays.solve_triangular(asarray(full), asarray(b), lower=lower, transposed=transposed)
    assert same_library(x, asarray(b))
    assert tuple(x.shape) == b.shape
    operator = triangle.T if transposed else triangle
    np.testing.assert_allclose(operator @ arrays.host(x), b, **tolerance("algebra"))


def test_solve_triangular_keeps_single_precision(asarray) -> None:
    factor = asarray(np.eye(3, dtype=np.float32) * 2)
    x = arrays.solve_triangular(factor, asarray(np.ones(3, np.float32)))
    assert str(x.dtype).endswith("float32")
    np.testing.assert_allclose(arrays.host(x), 0.5, **tolerance("algebra", "float32"))


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_solving_twice_inverts_the_product(m: int, seed: int) -> None:
    """L Lᵀ x = b through two solves is the dense solve."""
    a = np.random.default_rng(seed).standard_normal((m, m))
    spd, b = a @ a.T + m * np.eye(m), a[0]
    lower = np.linalg.cholesky(spd)
    y = arrays.solve_triangular(lower, b)
    x = arrays.solve_triangular(lower, y, transposed=True)
    np.testing.assert_allclose(x, np.linalg.solve(spd, b), **tolerance("closed form"))


# ---------------------------------------------------------------- BLAS threads


def blas_threads() -> set[int]:
    return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}


@pytest.fixture
def two_threads():
    """A process in which BLAS uses two threads, as on a user's machine."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("this BLAS cannot be set to two threads")
        yield


def test_blas_is_held_at_one_thread(two_threads) -> None:
    with arrays.single_threaded_blas():
        assert blas_threads() == {1}
        with arrays.single_threaded_blas():
            assert blas_threads() == {1}
        assert blas_threads() == {1}
    assert blas_threads() == {2}


def test_blas_is_given_back_after_an_error(two_threads) -> None:
    with pytest.raises(KeyError), arrays.single_threaded_blas():
        raise KeyError
    assert blas_threads() == {2}


def test_blas_survives_holders_that_overlap(two_threads) -> None:
    """The first in leaves first: when the last has gone, all is as before."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with arrays.single_threaded_blas():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with arrays.single_threaded_blas():
        thread.start()
        assert inside.wait(10)
        assert blas_threads() == {1}
    leave.set()
    thread.join(10)
    assert blas_threads() == {2}
