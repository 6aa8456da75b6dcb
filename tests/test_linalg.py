"""Linear algebra against NumPy and SciPy, on three array libraries, odd sizes and bad matrices."""

from __future__ import annotations

import math
import re
import warnings

import array_api_strict
import numpy as np
import pytest
import scipy.linalg
import torch
from tolerances import tolerance

from kernrl import arrays, checks, linalg

LIBRARIES = {"numpy": np.asarray, "torch": torch.asarray, "strict": array_api_strict.asarray}
DTYPES = ("float64", "float32")
SIZES = (1, 2, 3, 17, 64)


@pytest.fixture(params=sorted(LIBRARIES))
def library(request):
    return LIBRARIES[request.param]


def spd(rng, m, dtype="float64", ridge=0.5):
    """A well-conditioned symmetric positive definite matrix."""
    x = rng.standard_normal((m, m + 3))
    return (x @ x.T / (m + 3) + ridge * np.eye(m)).astype(dtype)


def back(x, like):
    """`x` as NumPy, after checking that it stayed in the library and dtype of `like`."""
    assert type(x) is type(like)
    assert x.dtype == like.dtype
    return arrays.host(x)


# ---------------------------------------------------------------- cholesky


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", SIZES)
def test_cholesky_is_numpys_factor_without_jitter(library, rng, m, dtype):
    a = spd(rng, m, dtype)
    lower, jitter = linalg.cholesky(library(a))
    assert jitter == 0.0
    expected = np.linalg.cholesky(a.astype(np.float64))
    np.testing.assert_allclose(back(lower, library(a)), expected, **tolerance("closed form", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_climbs_the_ladder_no_higher_than_needed(library, rng, dtype):
    x = rng.standard_normal((60, 2)).astype(dtype)
    gram = x @ x.T + 1e-3 * np.ones((60, 60), dtype)  # rank 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checks.ConditionWarning)
        lower, jitter = linalg.cholesky(library(gram))
    assert 0 < jitter <= 100 * np.finfo(dtype).eps * math.sqrt(60) * np.mean(np.diag(gram))
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(gram + jitter / 1e3 * np.eye(60, dtype=dtype))
    lower = back(lower, library(gram)).astype(np.float64)
    target = gram + jitter * np.eye(60)
    np.testing.assert_allclose(lower @ lower.T, target, **tolerance("algebra", dtype))


def test_the_ladder_follows_the_scale_of_the_matrix(rng):
    x = rng.standard_normal((40, 3))
    one, big = linalg.cholesky(x @ x.T), linalg.cholesky(1e6 * (x @ x.T))
    np.testing.assert_allclose(big.jitter, 1e6 * one.jitter, **tolerance("algebra"))


def test_visible_jitter_is_warned_about(rng):
    q, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    a = (q * np.r_[np.ones(19), -3e-6]) @ q.T
    a = (a + a.T) / 2
    with pytest.warns(checks.ConditionWarning, match=r"jitter .* was added .* Raise ridge"):
        _, jitter = linalg.cholesky(a)
    assert 3e-6 < jitter <= 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = rng.standard_normal((40, 3))
        assert linalg.cholesky(x @ x.T).jitter > 0  # rounding-sized: silent


def test_an_indefinite_matrix_is_an_error_with_a_cure(library, rng):
    a = spd(rng, 9) - 2.0 * np.eye(9)
    sentence = (
        "KLSTD: the Gram matrix is not positive definite after jitter 1e-04. "
        "Raise ridge or drop near-duplicate landmarks."
    )
    q, _ = np.linalg.qr(rng.standard_normal((9, 9)))
    a = (q * np.r_[np.ones(8), -0.5]) @ q.T
    scale = np.mean(np.diag(a))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        linalg.cholesky(library((a + a.T) / 2 / scale), owner="KLSTD")
    with pytest.raises(ValueError, match="not positive definite after jitter 0e"):
        linalg.cholesky(library(-np.eye(3)))


@pytest.mark.parametrize(
    ("a", "text"),
    [
        (np.ones((2, 3)), "cholesky: the matrix must be square, got (2, 3)."),
        (np.ones(4), "cholesky: the matrix must be square, got (4,)."),
        (np.zeros((0, 0)), "cholesky: the matrix must have at least one row, got (0, 0)."),
        (
            np.array([[1.0, np.nan], [np.nan, 1.0]]),
            "cholesky: every entry of the matrix must be finite, got nan at row 0.",
        ),
        (
            np.array([[2.0, 0.0], [np.inf, 2.0]]),
            "cholesky: every entry of the matrix must be finite, got inf at row 1.",
        ),
        (
            np.array([[2.0, 0.0], [1.0, 2.0]]),
            "cholesky: the matrix must be symmetric, got an asymmetry of 1.3e+00. "
            "Symmetrise it, or use solve.",
        ),
    ],
)
def test_what_cholesky_refuses(library, a, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        linalg.cholesky(library(a))


@pytest.mark.parametrize("spoil", ["nan", "unfactored", "negative pivot"])
def test_a_factor_that_failed_silently_is_noticed(monkeypatch, rng, spoil):
    """cuSOLVER returns garbage without an error: the result is checked, not the status."""
    a = spd(rng, 12)

    def silent(matrix):
        lower = np.linalg.cholesky(matrix).copy()
        if spoil == "nan":
            lower[8:, 8:] = np.nan
        elif spoil == "unfactored":
            lower[5:, 5:] = matrix[5:, 5:]
        else:
            lower[11, 11] *= -1
        return lower

    xp = arrays.namespace(a)
    assert linalg._is_factor(np.linalg.cholesky(a), np.ones(12), a @ np.ones(12), 1.0)
    monkeypatch.setattr(xp.linalg, "cholesky", silent)
    with pytest.raises(ValueError, match="not positive definite"):
        linalg.cholesky(a)


def test_an_error_that_is_not_about_the_matrix_is_not_swallowed(monkeypatch, rng):
    def out_of_memory(matrix):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(arrays.namespace(np.eye(2)).linalg, "cholesky", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        linalg.cholesky(np.eye(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", SIZES)
def test_solve_cholesky(library, rng, m, dtype):
    a = spd(rng, m, dtype)
    for b in (rng.standard_normal(m), rng.standard_normal((m, 3))):
        lower = linalg.cholesky(library(a)).lower
        x = linalg.solve_cholesky(lower, library(b.astype(dtype)))
        expected = scipy.linalg.solve(a.astype(np.float64), b, assume_a="pos")
        np.testing.assert_allclose(back(x, lower), expected, **tolerance("closed form", dtype))


# ---------------------------------------------------------------- changing a factor


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("m", SIZES)
def test_rank_one_update_is_the_factor_of_the_new_matrix(library, rng, m, sign):
    x = rng.standard_normal(m)
    a = spd(rng, m) + (np.outer(x, x) if sign < 0 else 0)
    lower = library(np.linalg.cholesky(a))
    new = back(linalg.rank_one_update(lower, library(x), sign), lower)
    expected = np.linalg.cholesky(a + sign * np.outer(x, x))
    np.testing.assert_allclose(new, expected, **tolerance("closed form"))
    assert np.all(np.triu(new, 1) == 0)


def test_rank_one_update_keeps_its_digits_on_bad_matrices(rng):
    """x xᵀ a million million times the matrix, and a condition number of 1e9."""
    x, scales = rng.standard_normal(30), np.logspace(0, -9, 30)
    q, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    a = (q * scales) @ q.T
    lower = np.linalg.cholesky((a + a.T) / 2)
    for size in (1e-6, 1.0, 1e6):
        new = linalg.rank_one_update(lower, size * x)
        target = lower @ lower.T + size**2 * np.outer(x, x)
        error = np.max(np.abs(new @ new.T - target))
        assert error <= 100 * np.finfo(float).eps * np.max(np.abs(target))


def test_update_then_downdate_is_where_it_began(rng):
    lower, x = np.linalg.cholesky(spd(rng, 23)), rng.standard_normal(23)
    there = linalg.rank_one_update(lower, x)
    np.testing.assert_allclose(
        linalg.rank_one_update(there, x, -1), lower, **tolerance("closed form")
    )


@pytest.mark.parametrize("length", [1.0, 1.5])
def test_a_downdate_to_an_indefinite_matrix_is_an_error(library, rng, length):
    lower = np.linalg.cholesky(spd(rng, 6))
    p = rng.standard_normal(6)
    x = lower @ (length * p / np.linalg.norm(p))
    with pytest.raises(ValueError, match="the downdated matrix must be positive definite, got 1 -"):
        linalg.rank_one_update(library(lower), library(x), -1)


def test_what_rank_one_update_refuses():
    with pytest.raises(ValueError, match=r"x must have shape \(3,\), got \(2,\)"):
        linalg.rank_one_update(np.eye(3), np.ones(2))
    with pytest.raises(ValueError, match="sign must be 1 or -1, got 2"):
        linalg.rank_one_update(np.eye(3), np.ones(3), 2)


@pytest.mark.parametrize("m", SIZES)
def test_append_row_is_the_factor_of_the_larger_matrix(library, rng, m):
    a = spd(rng, m + 1)
    lower = library(np.linalg.cholesky(a[:m, :m]))
    new = linalg.append_row(lower, library(a[:m, m].copy()), a[m, m])
    np.testing.assert_allclose(back(new, lower), np.linalg.cholesky(a), **tolerance("algebra"))


def test_append_row_refuses_a_dependent_row():
    with pytest.raises(ValueError, match="append_row: the new row must be linearly independent"):
        linalg.append_row(np.eye(2), np.array([0.6, 0.8]), 1.0)
    with pytest.raises(ValueError, match=r"column must have shape \(2,\)"):
        linalg.append_row(np.eye(2), np.ones(3), 1.0)


# ---------------------------------------------------------------- conjugate gradients


@pytest.mark.parametrize("m", SIZES)
def test_conjugate_gradient_reaches_the_solution_and_says_so(library, rng, m):
    a = spd(rng, m)
    for b in (rng.standard_normal(m), rng.standard_normal((m, 4))):
        matrix = library(a)
        x, residual = linalg.conjugate_gradient(lambda v, a=matrix: a @ v, library(b), tol=1e-12)
        assert residual <= 1e-11
        np.testing.assert_allclose(
            back(x, matrix), np.linalg.solve(a, b), **tolerance("closed form")
        )


def test_conjugate_gradient_ends_in_as_many_steps_as_there_are_eigenvalues(rng):
    q, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    a = (q * np.repeat([1.0, 4.0, 9.0], 10)) @ q.T
    calls = []
    linalg.conjugate_gradient(lambda v: calls.append(1) or a @ v, rng.standard_normal(30))
    assert len(calls) == 3 + 1  # three steps and the true residual


def test_a_good_preconditioner_saves_steps(rng):
    scales = np.logspace(0, 6, 50)
    a = np.diag(scales) + 0.01 * spd(rng, 50)
    b = rng.standard_normal(50)
    steps = {}
    for name, precondition in {"plain": None, "jacobi": lambda r: r / scales}.items():
        calls = []
        x, _ = linalg.conjugate_gradient(
            lambda v, calls=calls: calls.append(1) or a @ v,
            b,
            preconditioner=precondition,
            max_iter=1000,
        )
        steps[name] = len(calls)
        np.testing.assert_allclose(x, np.linalg.solve(a, b), **tolerance("iterative"))
    assert steps["jacobi"] < steps["plain"] / 3


def test_conjugate_gradient_of_zero_is_zero_and_columns_may_end_apart(rng):
    x, residual = linalg.conjugate_gradient(lambda v: 2 * v, np.zeros(4))
    assert residual == 0.0
    assert np.all(x == 0)
    a, b = spd(rng, 8), np.c_[np.zeros(8), rng.standard_normal(8)]
    x, _ = linalg.conjugate_gradient(lambda v: a @ v, b, tol=1e-13)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), **tolerance("closed form"))


def test_conjugate_gradient_warns_when_it_has_not_arrived(rng):
    a, b = np.diag(np.logspace(0, 8, 40)), np.ones(40)
    with pytest.warns(checks.ConditionWarning, match=r"the relative residual is .*, above"):
        x, residual = linalg.conjugate_gradient(lambda v: a @ v, b, max_iter=5)
    np.testing.assert_allclose(
        residual, np.linalg.norm(b - a @ x) / np.linalg.norm(b), **tolerance("algebra")
    )


def test_conjugate_gradient_refuses_indefinite_and_infinite(rng):
    with pytest.raises(ValueError, match="must be positive definite, got pᵀAp = -1"):
        linalg.conjugate_gradient(lambda v: np.array([1.0, -2.0]) * v, np.ones(2))
    with pytest.raises(ValueError, match="every b must be finite, got nan at row 1"):
        linalg.conjugate_gradient(lambda v: v, np.array([1.0, np.nan]))


# ---------------------------------------------------------------- condition and LU


@pytest.mark.parametrize("m", SIZES)
def test_condition_estimate_is_near_the_condition(library, rng, m):
    a = rng.standard_normal((m, m)) + 2 * np.eye(m)
    true = np.linalg.cond(a, 1)
    estimate = linalg.condition_estimate(library(a))
    assert true / 3 <= estimate <= true * (1 + 1e-6)


def test_condition_estimate_of_ill_conditioned_and_singular(library):
    hilbert = scipy.linalg.hilbert(8)
    true = np.linalg.cond(hilbert, 1)
    assert true / 3 <= linalg.condition_estimate(library(hilbert)) <= true * (1 + 1e-3)
    assert linalg.condition_estimate(library(np.diag([1.0, 0.0]))) == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", SIZES)
def test_solve_is_numpys_solution(library, rng, m, dtype):
    a = (rng.standard_normal((m, m)) / m + np.eye(m)).astype(dtype)
    for b in (rng.standard_normal(m), rng.standard_normal((m, 2))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = linalg.solve(library(a), library(b.astype(dtype)))
        expected = np.linalg.solve(a.astype(np.float64), b)
        np.testing.assert_allclose(back(x, library(a)), expected, **tolerance("closed form", dtype))


@pytest.mark.parametrize("order", ["C", "F"])
def test_solve_takes_any_memory_order_and_leaves_its_input_alone(rng, order):
    a = np.array(rng.standard_normal((5, 5)), order=order)
    b = np.array(rng.standard_normal((5, 4)), order=order)[:, ::2]
    a0, b0 = a.copy(), b.copy()
    x = linalg.solve(a, b)
    np.testing.assert_allclose(a0 @ x, b0, **tolerance("closed form"))
    np.testing.assert_array_equal(a, a0)
    np.testing.assert_array_equal(b, b0)


def test_the_refined_solution_leaves_a_residual_of_rounding_size(rng):
    """A growth factor of 2^(m−1) (Wilkinson) spoils plain LU; one refinement repairs it."""
    m = 50
    a = np.eye(m) - np.tril(np.ones((m, m)), -1)
    a[:, -1] = 1.0
    b = rng.standard_normal(m)
    plain = scipy.linalg.lu_solve(scipy.linalg.lu_factor(a), b)
    x = linalg.solve(a, b)
    assert np.max(np.abs(a @ plain - b)) > 1e-6
    assert np.max(np.abs(a @ x - b)) < 1e-12


def test_solve_warns_when_few_digits_are_left_and_raises_when_none_is(library):
    with pytest.warns(checks.ConditionWarning, match=r"KLSTD: the system is ill-conditioned"):
        linalg.solve(library(scipy.linalg.hilbert(11)), library(np.ones(11)), owner="KLSTD")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linalg.solve(library(scipy.linalg.hilbert(8)), library(np.ones(8)))
    singular = np.outer(np.arange(1.0, 5), np.arange(1.0, 5))
    text = (
        "KLSTD: the system must not be singular, got condition .* "
        "Raise ridge or drop near-duplicate landmarks."
    )
    with pytest.raises(ValueError, match=text):
        linalg.solve(library(singular), library(np.ones(4)), owner="KLSTD")
    hilbert = scipy.linalg.hilbert(20)  # no pivot is exactly zero, and no digit is right
    with pytest.raises(ValueError, match=text):
        linalg.solve(library(hilbert), library(np.ones(20)), owner="KLSTD")


def test_what_solve_refuses(library):
    eye = library(np.eye(2))
    with pytest.raises(ValueError, match=r"solve: b must have 2 rows, got \(3,\)"):
        linalg.solve(eye, library(np.ones(3)))
    with pytest.raises(ValueError, match="every entry of the right-hand side must be finite"):
        linalg.solve(eye, library(np.array([1.0, np.inf])))
    with pytest.raises(ValueError, match="every entry of the matrix must be finite, got nan"):
        linalg.solve(library(np.array([[1.0, 0.0], [np.nan, 1.0]])), library(np.ones(2)))
    with pytest.raises(ValueError, match=r"the matrix must be square, got \(2, 3\)"):
        linalg.solve(library(np.ones((2, 3))), library(np.ones(2)))
