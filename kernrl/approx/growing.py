"""The Cholesky factor of a Gram matrix whose points come and go one at a time.

It lives in NumPy on the host, in float64: at a few hundred points a step takes microseconds there,
less than one kernel launch on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.linalg import blas, lapack

from kernrl import checks
from kernrl.linalg import cholesky, rank_one_update

Array = Any
Vector = np.ndarray[Any, np.dtype[np.float64]]


class GrowingCholesky:
    """The Cholesky factor of a Gram matrix whose points come and go one at a time.

    append, solve and remove cost O(m²); nothing is inverted and nothing is allocated per step
    beyond vectors. The rows of L are packed one behind the other (BLAS "tp" layout): a new row is
    one contiguous write, and a triangular solve reads m²/2 numbers, half of a square layout.

    >>> factor = GrowingCholesky()
    >>> [round(factor.append(c, d), 6) for c, d in [([], 4.0), ([2.0], 5.0)]]
    [2.0, 2.0]
    >>> factor.solve(np.array([8.0, 9.0]))
    array([1.375, 1.25 ])
    """

    def __init__(self, gram: Array | None = None) -> None:
        self._size = 0
        self._packed: Vector = np.zeros(_triangle(32))
        self._square: Vector | None = None
        self._inverse_diagonal: Vector | None = None
        if gram is not None:
            self.refactor(gram)

    @classmethod
    def from_lower(cls, lower: Array) -> GrowingCholesky:
        """The factor L (m, m) itself, already computed; it is copied."""
        made = cls()
        made._adopt(np.asarray(lower, dtype=np.float64))
        return made

    @property
    def size(self) -> int:
        """The number of points m."""
        return self._size

    @property
    def lower(self) -> Vector:
        """L, (m, m), as a fresh array; kept until the next change."""
        if self._square is None:
            if self._size == 0:
                self._square = np.zeros((0, 0))
            else:
                upper, _ = lapack.dtpttr(self._size, self._packed[: _triangle(self._size)])
                self._square = np.tril(upper.T)
        return self._square

    def refactor(self, gram: Array) -> float:
        """Start over from a Gram matrix (m, m); returns the jitter that was needed. O(m³)."""
        gram = np.asarray(gram, dtype=np.float64)
        if gram.size == 0:
            self._adopt(np.zeros((0, 0)))
            return 0.0
        lower, jitter = cholesky(gram, owner="GrowingCholesky")
        self._adopt(lower)
        return jitter

    def half_solve(self, b: Vector) -> Vector:
        """L⁻¹ b for b (m,); δ = k(x, x) − ‖L⁻¹ k(x)‖² is the ALD residual of a new point x."""
        if self._size == 0:
            return np.zeros(0)
        half: Vector = blas.dtpsv(self._size, self._packed, b, trans=1)
        return half

    def finish_solve(self, half: Vector) -> Vector:
        """L⁻ᵀ half for half (m,): the second half of `solve`."""
        if self._size == 0:
            return np.zeros(0)
        x: Vector = blas.dtpsv(self._size, self._packed, half)
        return x

    def lower_solve(self, b: Array) -> Vector:
        """L⁻¹ b for b (m, k), all columns at once."""
        half: Vector = blas.dtrsm(1.0, self.lower.T, b, trans_a=1)
        return half

    def solve(self, b: Array) -> Vector:
        """K⁻¹ b. (m,) or (m, k) -> b's shape. O(m²k)."""
        b = np.asarray(b, dtype=np.float64)
        if b.shape[:1] != (self._size,):
            checks.fail("GrowingCholesky", f"b must have {self._size} rows", checks.shape(b))
        if b.ndim == 1:
            return self.finish_solve(self.half_solve(b))
        if self._size == 0:
            return np.zeros(b.shape)
        half = blas.dtrsm(1.0, self.lower.T, b, trans_a=1)
        return np.ascontiguousarray(blas.dtrsm(1.0, self.lower.T, half))

    def append(self, column: Array, diagonal: float) -> float:
        """Add a point with k(Z, x) = column (m,) and k(x, x) = diagonal; returns the pivot √δ."""
        half = self.half_solve(self._column(column))
        return self.append_half(half, float(diagonal) - float(half @ half), float(diagonal))

    def append_half(self, half: Vector, residual: float, diagonal: float) -> float:
        """`append` where L⁻¹k(x) and δ are already known. O(m) while there is room."""
        m = self._size
        if not residual > np.finfo(np.float64).eps * (m + 1) * abs(diagonal):
            checks.fail(
                "GrowingCholesky",
                "a new point must be linearly independent of the others",
                f"residual {residual:.1e} at k(x, x) = {diagonal:.1e}",
                "Skip the point, or add a ridge to the diagonal.",
            )
        start, stop = _triangle(m), _triangle(m + 1)
        if stop > self._packed.size:
            self._packed = np.concatenate((self._packed, np.zeros(3 * stop)))  # 2x the points
        if self._inverse_diagonal is not None:
            a = self.finish_solve(half)
            kept = self._inverse_diagonal + a * a / residual
            self._inverse_diagonal = np.append(kept, 1 / residual)
        pivot = math.sqrt(residual)
        self._packed[start : stop - 1] = half
        self._packed[stop - 1] = pivot
        self._size, self._square = m + 1, None
        return pivot

    def extend(self, columns: Array, block: Array) -> float:
        """Add k points at once: columns k(Z, X) (m, k), block k(X, X) (k, k). O(m²k + k³).

        Returns the jitter that the block needed on its diagonal, 0 for independent points.
        """
        columns, block = np.asarray(columns, np.float64), np.asarray(block, np.float64)
        m, k = self._size, block.shape[0]
        if columns.shape != (m, k) or block.shape != (k, k):
            got = f"{checks.shape(columns)} and {checks.shape(block)}"
            checks.fail("GrowingCholesky", f"columns and block must be ({m}, k) and (k, k)", got)
        if k == 0:
            return 0.0
        lower = np.zeros((m + k, m + k))
        lower[:m, :m] = self.lower
        if m:
            lower[m:, :m] = blas.dtrsm(1.0, self.lower.T, columns, trans_a=1).T
        rest = block - lower[m:, :m] @ lower[m:, :m].T
        lower[m:, m:], jitter = cholesky(rest, owner="GrowingCholesky")
        self._adopt(lower)
        return jitter

    def remove(self, i: int) -> None:
        """Take point i out: the block behind it gets a rank-one update. O((m − i)² + m²)."""
        i = self._index(i)
        keep = np.delete(np.arange(self._size), i)
        diagonal = self._diagonal_without(i, keep)
        old, lower = self.lower, np.zeros((self._size - 1, self._size - 1))
        lower[:i, :i], lower[i:, :i] = old[:i, :i], old[i + 1 :, :i]
        if i < self._size - 1:
            lower[i:, i:] = rank_one_update(old[i + 1 :, i + 1 :], old[i + 1 :, i])
        self._adopt(lower)
        self._inverse_diagonal = diagonal

    def inverse_diagonal(self) -> Vector:
        """The diagonal of K⁻¹, (m,): O(m³) the first time, then carried along in O(m²) a change."""
        if self._inverse_diagonal is None:
            identity = np.eye(self._size)
            half = blas.dtrsm(1.0, self.lower.T, identity, trans_a=1) if self._size else identity
            self._inverse_diagonal = np.sum(half * half, axis=0)
        return self._inverse_diagonal

    def drift(self, gram: Array) -> float:
        """max |L Lᵀ − K| / mean(diag K): how far the factor has wandered from its matrix. O(m³)."""
        gram = np.asarray(gram, dtype=np.float64)
        if self._size == 0:
            return 0.0
        difference = np.max(np.abs(self.lower @ self.lower.T - gram))
        return float(difference / np.mean(np.diagonal(gram)))

    def _adopt(self, lower: Vector) -> None:
        """Take `lower` as the factor; capacity is kept where it suffices."""
        self._size = lower.shape[0]
        packed = lapack.dtrttp(lower.T)[0] if self._size else np.zeros(0)
        if packed.size > self._packed.size:
            self._packed = np.zeros(2 * packed.size)
        self._packed[: packed.size] = packed
        self._square = self._inverse_diagonal = None

    def _diagonal_without(self, i: int, keep: np.ndarray[Any, Any]) -> Vector | None:
        """diag of the inverse with point i gone, or None where cancellation would spoil it."""
        if self._inverse_diagonal is None:
            return None
        unit = np.zeros(self._size)
        unit[i] = 1.0
        column = self.solve(unit)
        old = self._inverse_diagonal[keep]
        new = old - column[keep] ** 2 / column[i]
        return new if np.all(new > 1e-4 * old) else None

    def _column(self, column: Array) -> Vector:
        vector: Vector = np.asarray(column, dtype=np.float64)
        if vector.shape != (self._size,):
            rule = f"column must have shape ({self._size},)"
            checks.fail("GrowingCholesky", rule, checks.shape(vector))
        return vector

    def _index(self, i: int) -> int:
        rule = f"a point must be within 0 … {self._size - 1}" if self._size else "it holds no point"
        checks.require(0 <= i < self._size, "GrowingCholesky", rule, i)
        return int(i)


def _triangle(m: int) -> int:
    return m * (m + 1) // 2
