"""A covariance matrix that only shrinks, one rank at a time, as data come in."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import blas

Array = Any

PENDING = (
    32  # updates kept aside: one update of rank 32 costs a quarter of 32 passes over the matrix
)


class ShrinkingCovariance:
    """P (m, m), by its upper triangle: P ← P − uuᵀ, products with P, and one more dimension.

    Updates wait in a small buffer and are added together; a product takes them into account.
    Starting from the prior's identity P only shrinks, so its rounding stays absolute, some eps an
    update, and is never amplified.
    """

    def __init__(self, upper: Array) -> None:
        self._upper = np.asfortranarray(upper, dtype=np.float64)
        self._waiting = np.empty((PENDING, len(self._upper)))
        self._count = 0

    @property
    def upper(self) -> Array:
        """P with all updates added; its lower triangle is meaningless."""
        if self._count:
            self._upper = blas.dsyrk(
                -1.0, self._waiting[: self._count].T, beta=1.0, c=self._upper, overwrite_c=1
            )
            self._count = 0
        return self._upper

    def images(self, y: Array) -> Array:  # (q, m) -> (q, m)
        """PY, once for the next PENDING updates: see `image`."""
        return blas.dsymm(1.0, self.upper, y.T).T

    def image(self, y: Array, before: Array | None = None) -> Array:  # (m,) -> (m,)
        """P y. O(m²), or O(m) from `before`, what P y was when `images` was called."""
        out = blas.dsymv(1.0, self._upper, y) if before is None else before.copy()
        if self._count:
            waiting = self._waiting[: self._count]
            out -= (waiting @ y) @ waiting
        return out

    def subtract(self, u: Array) -> None:  # (m,)
        """P −= uuᵀ."""
        self._waiting[self._count] = u
        self._count += 1
        if self._count == PENDING:
            _ = self.upper

    def grow(self) -> None:
        """One more dimension, uncorrelated, of variance 1. O(m²)."""
        old = self.upper
        m = len(old)
        self._upper = np.zeros((m + 1, m + 1), order="F")
        self._upper[:m, :m], self._upper[m, m] = old, 1.0
        self._waiting = np.empty((PENDING, m + 1))

    def quadratic(self, phi: Array) -> Array:  # (q, m) -> (q,)
        """φᵀPφ of each row."""
        return np.sum(phi * self.images(phi), axis=1)

    def square_root(self) -> Array:  # (m, m)
        """F with FFᵀ = P. O(m³)."""
        values, vectors = np.linalg.eigh(self.upper.T, UPLO="L")
        return vectors * np.sqrt(np.maximum(values, 0.0))
