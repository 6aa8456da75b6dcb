"""The growing factor against NumPy's factor of the matrix that the same points make."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tolerances import tolerance

from kernrl.approx.growing import GrowingCholesky


def gram(rng, m, width=0.7, ridge=0.0):
    x = rng.standard_normal((m, 3))
    sq = np.sum((x[:, None] - x[None]) ** 2, axis=-1)
    return np.exp(-0.5 * sq / width**2) + ridge * np.eye(m)


def without(matrix, i):
    return np.delete(np.delete(matrix, i, 0), i, 1)


def assert_holds(factor, matrix, rng):
    """Factor, solves of both shapes and the inverse's diagonal all belong to `matrix`."""
    m = len(matrix)
    assert factor.size == m
    np.testing.assert_allclose(factor.lower, np.linalg.cholesky(matrix), **tolerance("closed form"))
    for b in (rng.standard_normal(m), rng.standard_normal((m, 3)), rng.standard_normal((m, 0))):
        expected = np.linalg.solve(matrix, b)
        np.testing.assert_allclose(factor.solve(b), expected, **tolerance("closed form"))
    expected = np.diag(np.linalg.inv(matrix))
    np.testing.assert_allclose(factor.inverse_diagonal(), expected, **tolerance("closed form"))


@pytest.mark.parametrize("m", [1, 2, 3, 31, 32, 33, 70])
def test_points_appended_one_by_one_make_numpys_factor(rng, m):
    matrix, factor = gram(rng, m), GrowingCholesky()
    for i in range(m):
        pivot = factor.append(matrix[i, :i], matrix[i, i])
        np.testing.assert_allclose(pivot, factor.lower[i, i], **tolerance("exact"))
    assert_holds(factor, matrix, rng)
    assert factor.drift(matrix) < 1e-14


@pytest.mark.parametrize(("m", "k"), [(0, 4), (1, 1), (20, 1), (20, 33), (5, 0)])
def test_a_block_of_points_is_the_points_one_by_one(rng, m, k):
    matrix = gram(rng, m + k)
    factor = GrowingCholesky(matrix[:m, :m])
    factor.extend(matrix[:m, m:], matrix[m:, m:])
    assert_holds(factor, matrix, rng)


def test_a_given_factor_is_copied_and_grows(rng):
    matrix = gram(rng, 9)
    lower = np.linalg.cholesky(matrix[:8, :8])
    factor = GrowingCholesky.from_lower(lower)
    lower[:] = 0.0
    factor.append(matrix[8, :8], matrix[8, 8])
    assert_holds(factor, matrix, rng)
    assert GrowingCholesky.from_lower(np.zeros((0, 0))).append([], 4.0) == 2.0


@pytest.mark.parametrize("m", [1, 2, 9, 40])
def test_any_point_can_be_removed(rng, m):
    matrix = gram(rng, m)
    for i in {0, m // 2, m - 1}:
        factor = GrowingCholesky(matrix)
        factor.remove(i)
        assert_holds(factor, without(matrix, i), rng)


def test_the_inverse_diagonal_is_carried_through_changes(rng):
    """Once asked for, it follows append and remove without another inversion."""
    points = gram(rng, 60, width=0.5)
    order, factor = list(range(40)), GrowingCholesky(points[:40, :40])
    factor.inverse_diagonal()
    for new in range(40, 60):
        factor.append(points[new, order], points[new, new])
        order.append(new)
        i = int(rng.integers(len(order)))
        factor.remove(i)
        del order[i]
        assert factor._inverse_diagonal is not None
    matrix = points[np.ix_(order, order)]
    assert_holds(factor, matrix, rng)


def test_the_inverse_diagonal_is_made_afresh_where_subtraction_would_spoil_it(rng):
    """A twin at distance 1e-6 makes entries of 1e12; without the twin they are of size 1."""
    x = np.r_[np.arange(5.0), 2.0 + 1e-6]
    matrix = np.exp(-0.5 * (x[:, None] - x[None]) ** 2)
    factor = GrowingCholesky()
    for i in range(6):
        factor.append(matrix[i, :i], matrix[i, i])
    assert factor.inverse_diagonal()[2] > 1e11
    factor.remove(5)
    assert factor._inverse_diagonal is None
    assert_holds(factor, matrix[:5, :5], rng)


def test_a_long_life_does_not_wander(rng):
    """Two thousand changes at a fixed size: the drift stays at rounding."""
    points = gram(rng, 300, width=0.5, ridge=1e-3)
    order = list(range(30))
    factor = GrowingCholesky(points[:30, :30])
    for _ in range(1000):
        i = int(rng.integers(len(order)))
        factor.remove(i)
        del order[i]
        new = int(rng.choice(np.setdiff1d(np.arange(300), order)))
        factor.append(points[new, order], points[new, new])
        order.append(new)
    matrix = points[np.ix_(order, order)]
    assert factor.drift(matrix) < 1e-12
    assert factor.refactor(matrix) == 0.0
    assert_holds(factor, matrix, rng)


def test_drift_sees_a_factor_of_another_matrix(rng):
    matrix = gram(rng, 8)
    factor = GrowingCholesky(matrix)
    np.testing.assert_allclose(
        factor.drift(matrix + 0.5 * np.eye(8)), 0.5 / 1.5, **tolerance("algebra")
    )


def test_refactor_reports_the_jitter_it_needed(rng):
    x = rng.standard_normal((20, 2))
    assert GrowingCholesky(gram(rng, 5)).refactor(x @ x.T) > 0
    assert GrowingCholesky().refactor(np.zeros((0, 0))) == 0.0


def test_an_empty_factor_answers(rng):
    factor = GrowingCholesky()
    assert factor.lower.shape == (0, 0)
    assert factor.solve(np.zeros(0)).shape == (0,)
    assert factor.solve(np.zeros((0, 3))).shape == (0, 3)
    assert factor.inverse_diagonal().shape == (0,)
    assert factor.drift(np.zeros((0, 0))) == 0.0


def test_what_it_refuses(rng):
    factor = GrowingCholesky(gram(rng, 3))
    twin = factor.lower @ factor.lower.T
    text = "GrowingCholesky: a new point must be linearly independent of the others, got residual"
    with pytest.raises(ValueError, match=re.escape(text)):
        factor.append(twin[1], 1.0)
    with pytest.raises(ValueError, match="linearly independent"):
        factor.append(twin[1], np.nan)
    assert factor.size == 3
    with pytest.raises(ValueError, match=r"column must have shape \(3,\), got \(2,\)"):
        factor.append(np.ones(2), 1.0)
    with pytest.raises(ValueError, match=r"b must have 3 rows, got \(4,\)"):
        factor.solve(np.ones(4))
    with pytest.raises(ValueError, match=r"a point must be within 0 … 2, got 3"):
        factor.remove(3)
    with pytest.raises(ValueError, match=r"it holds no point, got 0"):
        GrowingCholesky().remove(0)
    with pytest.raises(ValueError, match=r"columns and block must be \(3, k\) and \(k, k\)"):
        factor.extend(np.ones((2, 2)), np.eye(2))
