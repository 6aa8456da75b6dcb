"""Checked linear algebra: every factor is tested, every jitter and every condition number reported.

A failed Cholesky is silent on a GPU (cuSOLVER's info is not read by default), so no result leaves
this room unverified. Every function follows the array library of its caller. The factor that
grows by one point at a time is in `approx.growing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kernrl import arrays, checks

Array = Any

# Relative to the mean of the diagonal. Beyond the cap the matrix is not a rounded Gram matrix but
# an indefinite one, and more jitter would only hide it.
JITTER_CAP = 1e-4
# Above this (or above √eps if that is less) the added jitter can be seen in predictions.
JITTER_WARNING = 1e-5
# eps·condition above which fewer than three digits of a solution are right.
DIGITS_WARNING = 1e-3
# eps·condition above which none is: LAPACK's estimate of an exactly singular matrix ends up here.
SINGULAR = 10.0


class Factor(NamedTuple):
    """A lower Cholesky factor of a + jitter·I."""

    lower: Array  # (m, m)
    jitter: float


def cholesky(a: Array, *, owner: str = "cholesky") -> Factor:
    """L with L Lᵀ = a + jitter·I, the smallest jitter of a ladder that gives a verified factor.

    The ladder is 0, then eps·√m·mean(diag) (the size of rounding in a Gram matrix of that dtype),
    then ×10 up to JITTER_CAP·mean(diag). A jitter above min(√eps, 1e-5)·mean(diag) is warned
    about. a: (m, m) symmetric. Cost: one factorisation a rung, m³/3.

    >>> cholesky(np.array([[4.0, 2.0], [2.0, 5.0]]))
    Factor(lower=array([[2., 0.],
           [1., 2.]]), jitter=0.0)
    """
    a = arrays.floating(arrays.take(owner, "the matrix", a))
    _square(owner, a)
    xp = arrays.namespace(a)
    probe = _probe(a)
    image = a @ probe
    _symmetric(owner, a, image, probe @ a)
    scale = float(xp.mean(xp.linalg.diagonal(a)))
    if scale <= 0:
        _indefinite(owner, 0.0)
    eps = arrays.epsilon(a)
    for jitter in _ladder(eps * math.sqrt(a.shape[0]), scale):
        lower = _guarded(xp.linalg.cholesky, _raised(a, jitter))
        if lower is not None and _is_factor(lower, probe, image + jitter * probe, scale):
            if jitter > scale * min(math.sqrt(eps), JITTER_WARNING):
                checks.warn(
                    owner,
                    f"jitter {jitter:.1e} was added to the diagonal (mean {scale:.1e})",
                    "Raise ridge or drop near-duplicate points.",
                    checks.ConditionWarning,
                )
            return Factor(lower, jitter)
    _indefinite(owner, JITTER_CAP * scale)


def solve_cholesky(lower: Array, b: Array) -> Array:
    """x with L Lᵀ x = b. (m, m), (m,) or (m, k) -> b's shape. O(m²k)."""
    half = arrays.solve_triangular(lower, b)
    return arrays.solve_triangular(lower, half, transposed=True)


def rank_one_update(lower: Array, x: Array, sign: int = 1) -> Array:
    """The factor of L Lᵀ + sign·x xᵀ. (m, m), (m,) -> (m, m). O(m²), no loop over rows.

    With p = L⁻¹x the new factor is L·M, M the factor of I + sign·p pᵀ, whose entries are
    Mⱼⱼ = √(tⱼ/tⱼ₋₁) and Mᵢⱼ = sign·pᵢpⱼ/√(tⱼtⱼ₋₁), with tⱼ = 1 + sign·Σ_{i≤j} pᵢ²
    (Gill, Golub, Murray & Saunders 1974, method C1). Raises if a downdate leaves no positive
    definite matrix.
    """
    owner = "rank_one_update"
    checks.require(sign in (1, -1), owner, "sign must be 1 or -1", sign)
    _square(owner, lower)
    xp = arrays.namespace(lower, x)
    if x.shape != lower.shape[:1]:
        checks.fail(owner, f"x must have shape ({lower.shape[0]},)", checks.shape(x))
    p = arrays.solve_triangular(lower, x)
    before, after = _pivots(xp, p, sign)
    ratio, cross = xp.sqrt(after / before), sign * p / xp.sqrt(before * after)
    terms = lower * p[None, :]
    # Σ_{i>j} of a row, summed from its end: exactly 0 above the diagonal, no digit lost below.
    tails = xp.flip(xp.cumulative_sum(xp.flip(terms, axis=1), axis=1), axis=1)
    tails = xp.concat((tails[:, 1:], xp.zeros_like(tails[:, :1])), axis=1)
    return lower * ratio[None, :] + tails * cross[None, :]


def _pivots(xp: Any, p: Array, sign: int) -> tuple[Array, Array]:
    """tⱼ₋₁ and tⱼ for every j, each summed from its small end."""
    squares = p * p
    if sign > 0:
        after = 1 + xp.cumulative_sum(squares)
        return xp.concat((xp.ones_like(p[:1]), after[:-1])), after
    left = 1 - xp.sum(squares)
    if not float(left) > arrays.epsilon(p) * p.shape[0]:
        checks.fail(
            "rank_one_update",
            "the downdated matrix must be positive definite",
            f"1 - ‖L⁻¹x‖² = {float(left):.1e}",
            "Factor the new matrix afresh, with a ridge.",
        )
    before = left + xp.flip(xp.cumulative_sum(xp.flip(squares)))
    return before, xp.concat((before[1:], xp.reshape(left, (1,))))


def append_row(lower: Array, column: Array, diagonal: float) -> Array:
    """The factor of [[L Lᵀ, c], [cᵀ, d]]. (m, m), (m,) -> (m + 1, m + 1). O(m²).

    The new pivot is √(d − ‖L⁻¹c‖²); raises if that is not a positive number. One row at a time in
    place is `approx.growing.GrowingCholesky`.
    """
    owner = "append_row"
    _square(owner, lower)
    xp = arrays.namespace(lower, column)
    if column.shape != lower.shape[:1]:
        checks.fail(owner, f"column must have shape ({lower.shape[0]},)", checks.shape(column))
    half = arrays.solve_triangular(lower, column)
    left = float(diagonal) - float(half @ half)
    if not left > arrays.epsilon(lower) * lower.shape[0] * abs(float(diagonal)):
        checks.fail(
            owner,
            "the new row must be linearly independent of the others",
            f"residual {left:.1e} at diagonal {float(diagonal):.1e}",
            "Skip the point, or add a ridge to the diagonal.",
        )
    above = xp.concat((lower, xp.zeros_like(lower[:, :1])), axis=1)
    pivot = arrays.like(np.array([math.sqrt(left)]), lower)
    return xp.concat((above, xp.concat((half, pivot))[None, :]), axis=0)


def conjugate_gradient(
    matvec: Callable[[Array], Array],
    b: Array,
    *,
    tol: float = 1e-8,
    max_iter: int | None = None,
    preconditioner: Callable[[Array], Array] | None = None,
) -> tuple[Array, float]:
    """x with A x = b for a symmetric positive definite A, and its true relative residual.

    Stops when every ‖b − Ax‖ ≤ tol·‖b‖; warns if it has not after `max_iter` (default 10·m)
    steps. `preconditioner` applies an approximation of A⁻¹. b: (m,) or (m, k), each column a
    system. Hestenes & Stiefel (1952). Cost: one matvec a step and one more for the residual.
    """
    owner = "conjugate_gradient"
    checks.finite(owner, "b", b)
    xp = arrays.namespace(b)
    norm = xp.sqrt(xp.sum(b * b, axis=0))
    norm = xp.where(norm > 0, norm, xp.ones_like(norm))
    x, r = xp.zeros_like(b), b
    z = r if preconditioner is None else preconditioner(r)
    p, rho = z, xp.sum(r * z, axis=0)
    for _ in range(10 * b.shape[0] if max_iter is None else max_iter):
        if _relative(xp, r, norm) <= tol:
            break
        image = matvec(p)
        curvature = xp.sum(p * image, axis=0)
        _positive_curvature(owner, xp, curvature, rho)
        step = rho / xp.where(rho == 0, xp.ones_like(rho), curvature)
        x, r = x + step * p, r - step * image
        z = r if preconditioner is None else preconditioner(r)
        rho, last = xp.sum(r * z, axis=0), rho
        p = z + rho / xp.where(last == 0, xp.ones_like(last), last) * p
    residual = _relative(xp, b - matvec(x), norm)
    if not residual <= max(2 * tol, 100 * arrays.epsilon(b)):
        checks.warn(
            owner,
            f"the relative residual is {residual:.1e}, above the tolerance {tol:.1e}",
            "Raise max_iter, give a preconditioner, or raise ridge.",
            checks.ConditionWarning,
        )
    return x, residual


def condition_estimate(a: Array) -> float:
    """The condition number ‖A‖₁‖A⁻¹‖₁: LAPACK's gecon on NumPy, exact elsewhere; inf if singular.

    O(m³). gecon is a lower bound, in practice within a factor of three.
    """
    a = arrays.floating(a)
    _square("condition_estimate", a)
    xp = arrays.namespace(a)
    if arrays.is_numpy(xp):
        return _lu(a)[2]
    inverse = _guarded(xp.linalg.inv, a)
    if inverse is None:
        return math.inf
    condition = _norm1(xp, a) * _norm1(xp, inverse)
    return condition if math.isfinite(condition) else math.inf


def solve(
    a: Array,
    b: Array,
    *,
    owner: str = "solve",
    cure: str = "Raise ridge or drop near-duplicate landmarks.",
) -> Array:
    """x with A x = b by LU, refined once; for matrices that need not be symmetric.

    Warns (ConditionWarning) when eps·condition > 1e-3, that is when fewer than three digits of x
    can be trusted; raises when the matrix is singular to working precision (eps·condition > 10).
    (m, m), (m,) or (m, k) -> b's shape. Cost 2m³/3, on other libraries than NumPy about 4 times.
    cure: what the warning and the error advise.
    """
    a = arrays.floating(arrays.take(owner, "the matrix", a))
    _square(owner, a)
    xp = arrays.namespace(a, b)
    checks.require(
        b.shape[0] == a.shape[0], owner, f"b must have {a.shape[0]} rows", checks.shape(b)
    )
    checks.finite(owner, "entry of the matrix", a)
    checks.finite(owner, "entry of the right-hand side", b)
    b = xp.astype(b, a.dtype, copy=False)
    if arrays.is_numpy(xp):
        lu, pivots, condition = _lu(a)
        _judge(owner, condition * arrays.epsilon(a), condition, cure)
        apply = _lu_solver(lu, pivots)
    else:
        condition = condition_estimate(a)
        _judge(owner, condition * arrays.epsilon(a), condition, cure)

        def apply(rhs: Array) -> Array:
            return xp.linalg.solve(a, rhs)

    x = apply(b)
    return x + apply(b - a @ x)


# ---------------------------------------------------------------- how the checks are made


def _square(owner: str, a: Array) -> None:
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        checks.fail(owner, "the matrix must be square", checks.shape(a))
    checks.not_empty(owner, "the matrix", a)


def _probe(a: Array) -> Array:
    """A fixed vector that no structured matrix is blind to; one product with it tests a claim."""
    values = 1.0 + 0.5 * np.cos(1.0 + 2.0 * np.arange(a.shape[0]))
    return arrays.like(values, a)


def _symmetric(owner: str, a: Array, image: Array, mirrored: Array) -> None:
    """Compares A·v with Aᵀ·v: O(m²) and no copy of the matrix. NaN and inf show up here too."""
    xp = arrays.namespace(a)
    gap = float(xp.max(xp.abs(image - mirrored)))
    if not math.isfinite(gap):
        checks.finite(owner, "entry of the matrix", a, cure="Drop or repair the row.")
    scale = float(xp.max(xp.abs(image))) + float(xp.max(xp.abs(xp.linalg.diagonal(a))))
    if gap > math.sqrt(arrays.epsilon(a)) * scale:
        cure = "Symmetrise it, or use solve."
        checks.fail(owner, "the matrix must be symmetric", f"an asymmetry of {gap:.1e}", cure)


def _ladder(start: float, scale: float) -> list[float]:
    rungs = [0.0]
    while start < JITTER_CAP:
        rungs.append(start * scale)
        start *= 10
    return [*rungs, JITTER_CAP * scale]


def _guarded(function: Callable[[Array], Array], a: Array) -> Array | None:
    """The result, or None where the library says "singular" or "not positive definite"."""
    try:
        return function(a)
    except (np.linalg.LinAlgError, RuntimeError) as error:
        if "LinAlgError" not in type(error).__name__:  # torch raises its own LinAlgError
            raise
        return None


def _raised(a: Array, jitter: float) -> Array:
    """a + jitter·I."""
    return a + arrays.like(jitter * np.eye(a.shape[0]), a) if jitter else a


def _is_factor(lower: Array, probe: Array, image: Array, scale: float) -> bool:
    """Positive finite pivots and L(Lᵀv) = Av: a factor that failed silently passes neither."""
    xp = arrays.namespace(lower)
    pivots = xp.linalg.diagonal(lower)
    if not bool(xp.all(xp.isfinite(pivots) & (pivots > 0))):
        return False
    gap = float(xp.max(xp.abs(lower @ (xp.matrix_transpose(lower) @ probe) - image)))
    size = float(xp.max(xp.abs(image))) + scale
    return gap <= math.sqrt(arrays.epsilon(lower)) * size


def _indefinite(owner: str, jitter: float) -> NoReturn:
    checks.fail(
        owner,
        f"the Gram matrix is not positive definite after jitter {jitter:.0e}",
        cure="Raise ridge or drop near-duplicate landmarks.",
    )


def _relative(xp: Any, r: Array, norm: Array) -> float:
    return float(xp.max(xp.sqrt(xp.sum(r * r, axis=0)) / norm))


def _positive_curvature(owner: str, xp: Any, curvature: Array, rho: Array) -> None:
    """pᵀAp > 0 for every column still running."""
    if not bool(xp.all((curvature > 0) | (rho == 0))):
        worst = float(xp.min(curvature))
        cure = "Raise ridge, or use solve."
        checks.fail(owner, "the matrix must be positive definite", f"pᵀAp = {worst:.1e}", cure)


def _norm1(xp: Any, a: Array) -> float:
    return float(xp.max(xp.sum(xp.abs(a), axis=0)))


def _lu(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """LU with pivots and the 1-norm condition; inf if a pivot is exactly zero."""
    from scipy.linalg import get_lapack_funcs

    factor, condition = get_lapack_funcs(("getrf", "gecon"), (a,))
    lu, pivots, info = factor(a)
    if info > 0:
        return lu, pivots, math.inf
    reciprocal, _ = condition(lu, float(np.max(np.sum(np.abs(a), axis=0))))
    return lu, pivots, 1 / float(reciprocal) if reciprocal > 0 else math.inf


def _lu_solver(lu: np.ndarray, pivots: np.ndarray) -> Callable[[Array], Array]:
    from scipy.linalg import get_lapack_funcs

    (back,) = get_lapack_funcs(("getrs",), (lu,))

    def apply(rhs: Array) -> Array:
        return np.ascontiguousarray(back(lu, pivots, rhs)[0])

    return apply


def _judge(owner: str, lost: float, condition: float, cure: str) -> None:
    """Warn or raise by eps·condition."""
    if not lost <= SINGULAR:
        checks.fail(owner, "the system must not be singular", f"condition {condition:.1e}", cure)
    if lost > DIGITS_WARNING:
        checks.warn(
            owner,
            f"the system is ill-conditioned ({condition:.1e})",
            cure,
            checks.ConditionWarning,
        )
