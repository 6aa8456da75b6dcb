"""The exact posterior of V given r = HV + N: one Cholesky factor over the rewards.

    S = H K Hᵀ + Σ,   V(x) | r ~ m + k(x)ᵀα,  α = Hᵀ S⁻¹ (r − m H1),
    cov(x, y) = k(x, y) − (L⁻¹Hk(x))ᵀ(L⁻¹Hk(y)),  S = L Lᵀ.

Σ = σ²I (white noise, Engel, Mannor & Meir 2003) or Σ = σ²HHᵀ (noise on the returns, 2005), where
S = H(K + σ²I)Hᵀ. Variances come from triangular solves; nothing is inverted. New rows extend L,
which is Engel's recursion over α and C = HᵀS⁻¹H without C, whose rounding would pile up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.linalg import lapack

from kernrl import arrays, checks, linalg
from kernrl.approx.growing import GrowingCholesky
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram, matvec
from kernrl.value.differences import Differences

Array = Any

BLOCK = 128  # columns mirrored at a time, so that both triangles stay in cache
TILE = 1024  # states whose variance is computed at once: n×1024 numbers


class ExactPosterior:
    """GPTD with every visited state. O(n³) to make, O(n²) a further row and a variance."""

    def __init__(
        self, rows: Differences, kernel: Kernel, noise: float, correlated: bool, mean: float
    ) -> None:
        self.kernel, self.noise, self.correlated, self.mean = kernel, noise, correlated, mean
        self.rows = rows
        require_memory("GPTD", rows)
        k = gram(kernel, rows.points)
        lower, _ = linalg.cholesky(reward_covariance(rows, k, noise, correlated), owner="GPTD")
        self.factor = GrowingCholesky.from_lower(lower)
        self._whitened = arrays.solve_triangular(lower, self._centred(rows))
        self._conclude()

    def extend(self, more: Differences) -> None:
        """Add rows. O(n²) each: the same factor as of all rows at once."""
        old, n, k = self.rows, len(self.rows), len(more)
        self.rows = rows = old.joined(more)
        new_points = slice(int(rows.here[n]), len(rows.points))
        values = gram(self.kernel, rows.points[new_points], rows.points)
        if self.correlated:
            values[np.arange(len(values)), np.arange(new_points.start, new_points.stop)] += (
                self.noise
            )
        across = rows.apply(more.apply(values).T)  # (n + k, k): S's new columns
        if not self.correlated:
            across[n + np.arange(k), np.arange(k)] += self.noise
        target = self._centred(more)
        self._whitened = np.concatenate((self._whitened, self._append(across, target)))
        self._conclude()

    def _append(self, across: Array, target: Array) -> Array:  # (n + k, k), (k,) -> (k,)
        """Extend L by k rows and L⁻¹r by their entries."""
        n, k = len(self._whitened), len(target)
        if k == 1:  # the packed factor grows in place
            half = self.factor.half_solve(across[:n, 0])
            own = float(across[n, 0])
            pivot = self.factor.append_half(half, own - float(half @ half), own)
            return (target - half @ self._whitened) / pivot
        self.factor.extend(across[:n], across[n:])
        new = self.factor.lower[n:]
        return arrays.solve_triangular(new[:, n:], target - new[:, :n] @ self._whitened)

    @property
    def end(self) -> Array | None:
        """The state where the last episode stands if it is open."""
        return self.rows.end

    @property
    def support(self) -> Array:
        """The points that the weights belong to."""
        return self.rows.points

    # ---------------------------------------------------------------- what it says of V

    def values(self, x: Array) -> Array:  # (q, d) -> (q,)
        """Posterior mean."""
        return self.mean + matvec(self.kernel, x, self.rows.points, self.weights)

    def variances(self, x: Array) -> Array:  # (q, d) -> (q,)
        """Posterior variance, before rounding below 0 is clipped. O(n²q)."""
        out = np.array(self.kernel.diagonal(x))
        for start in range(0, len(x), TILE):
            tile = slice(start, start + TILE)
            out[tile] -= np.sum(self._half(x[tile]) ** 2, axis=0)
        return out

    def covariance(self, x: Array) -> Array:  # (q, d) -> (q, q)
        """Posterior covariance."""
        half = self._half(x)
        return gram(self.kernel, x) - half.T @ half

    def draws(self, x: Array, n: int, rng: np.random.Generator) -> Array:  # -> (n, q)
        """Joint draws of V at x. O(n²q + q³)."""
        return self.values(x) + gaussian(self.covariance(x), n, rng)

    def _half(self, x: Array) -> Array:  # (q, d) -> (n, q)
        """L⁻¹ H k(x)."""
        across = self.rows.apply(gram(self.kernel, self.rows.points, x))
        return arrays.solve_triangular(self.factor.lower, across)

    def _centred(self, rows: Differences) -> Array:
        return rows.rewards - self.mean * (1.0 - rows.discount)

    def _conclude(self) -> None:
        half, n = self._whitened, len(self._whitened)
        self.weights = self.rows.spread(self.factor.finish_solve(half))
        determinant = float(np.sum(np.log(np.diagonal(self.factor.lower))))
        self.log_likelihood = (
            -0.5 * float(half @ half) - determinant - 0.5 * n * math.log(2.0 * math.pi)
        )


def reward_covariance(rows: Differences, k: Array, noise: float, correlated: bool) -> Array:
    """S = H K Hᵀ + Σ, (p, p) -> (n, n)."""
    s = rows.congruence(k)
    rows.add_noise(s, noise, correlated)
    return s


def require_memory(owner: str, rows: Differences) -> None:
    """Refuse before allocating: K, HK, S, the factor and its packed copy are live at once."""
    n, p = len(rows), len(rows.points)
    checks.memory(
        owner,
        f"the exact form of {n} rows",
        8.0 * (p * p + n * p + 3.0 * n * n),
        arrays.available_bytes(rows.points),
        "Pass dictionary=Dictionary(max_size=1000) or features=RandomFeatures().",
    )


def gaussian(covariance: Array, n: int, rng: np.random.Generator) -> Array:  # (q, q) -> (n, q)
    """n draws of N(0, covariance). By eigenvalues: where data are dense the matrix has rank ≪ q."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return rng.standard_normal((n, len(values))) @ root.T


def symmetric_inverse(lower: Array) -> Array:  # (n, n) -> (n, n)
    """(L Lᵀ)⁻¹, both triangles. 2n³/3."""
    inverse, info = lapack.dpotri(np.asfortranarray(lower.T), overwrite_c=0)
    assert info == 0, "a verified factor has no zero on its diagonal"
    whole: Array = inverse.T  # C order; its lower triangle is right
    for start in range(0, len(whole), BLOCK):
        rows = slice(start, start + BLOCK)
        whole[:start, rows] = whole[rows, :start].T
        corner = whole[rows, rows]
        corner[...] = np.tril(corner) + np.tril(corner, -1).T
    return whole
