"""Which m of n rows stand for all: five pure selectors `select(kernel, x, m, rng) -> indices`.

None forms the n×n matrix, and none takes two equal rows. Once the chosen rows span every row
(the residual is at rounding), there is nothing left to choose: the selectors then return fewer
than m indices. Randomness is drawn on the host, so all array libraries choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram, rows
from kernrl.linalg import cholesky

Array = Any
Selector = Callable[[Kernel, Array, int, arrays.Seed], np.ndarray]

# Entries of the (n, m) partial factor; beyond, a uniform subsample of the rows stands for them.
# 64 MB in float64; at m = 1000 still 8 candidates for each landmark.
FACTOR_ENTRIES = 1 << 23
TILE = 4096  # rows of the leverage scores computed at once
ROUNDS = 10  # a round proposes m/ROUNDS rows at once: one pass over the data instead of many


def select(
    method: str, kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None, owner: str = "landmarks"
) -> np.ndarray:  # (n, d) -> (≤ m,) int64
    """Indices of at most m distinct rows of x by the named method, in the order of selection.

    >>> from kernrl.kernels.stationary import RBF
    >>> select("greedy", RBF(1.0), np.array([[0.0], [0.1], [5.0]]), 2)
    array([0, 2])
    """
    checks.choice(owner, "landmarks", method, SELECTORS)
    return SELECTORS[method](kernel, x, m, rng)


def uniform(kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None) -> np.ndarray:
    """Uniformly without replacement; a row equal to one already drawn is passed over. O(n)."""
    x, m, rng = _take(x, m, rng)
    return _distinct(x, rng.permutation(x.shape[0]), m)


def kmeans_plus_plus(kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None) -> np.ndarray:
    """D² sampling in the kernel's feature space: P(i) ∝ min_j k(xᵢ,xᵢ) + k(zⱼ,zⱼ) − 2k(xᵢ,zⱼ).

    Arthur & Vassilvitskii (2007), the seeding of k-means, without the iterations after it.
    Rejection makes rounds of it, as in `rpcholesky`. O(nmd).
    """
    x, m, rng = _take(x, m, rng)
    diagonal = _host(kernel.diagonal(x))
    floor = _floor(x, m) * diagonal
    chosen = [int(rng.integers(x.shape[0]))]
    distance = np.full(x.shape[0], np.inf)
    fresh = chosen
    while True:
        z = _rows_at(x, fresh)
        to_fresh = diagonal[:, None] + diagonal[fresh] - 2 * _host(gram(kernel, x, z))
        distance = np.minimum(distance, np.min(to_fresh, axis=1))
        distance[(distance <= floor)] = 0.0
        distance[chosen] = 0.0
        if len(chosen) == m or not np.any(distance > 0):
            return np.asarray(chosen, dtype=np.int64)
        proposed = _propose(distance, m, rng)
        block = _host(gram(kernel, _rows_at(x, proposed)))
        within = diagonal[proposed][:, None] + diagonal[proposed] - 2 * block
        fresh = _thin_distances(distance[proposed], within, floor[proposed], rng)
        fresh = [int(proposed[i]) for i in fresh[: m - len(chosen)]]
        chosen = chosen + fresh


def rpcholesky(kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None) -> np.ndarray:
    """Randomly pivoted Cholesky: each pivot with probability proportional to its residual.

    P(i) ∝ k(xᵢ,xᵢ) − k_S(xᵢ)ᵀK_SS⁻¹k_S(xᵢ) given the pivots S so far. Chen, Epperly, Tropp &
    Webber (2025). Proposals are drawn a round at a time and thinned by rejection, which leaves the
    distribution as it was: Epperly, Tropp & Webber (2024, arXiv 2410.03969), alg. 2.1. O(nm²).
    """
    x, m, rng = _take(x, m, rng)
    pool = _candidates(x.shape[0], m, rng)
    factor = _PartialCholesky(kernel, x if pool is None else _rows_at(x, pool), m)
    while factor.size < m and np.any(factor.residual > 0):
        proposed = _propose(factor.residual, m, rng)
        block = factor.block(proposed)
        factor.exhaust(proposed[np.diagonal(block) <= factor.floor[proposed]])
        accepted = _thin_residuals(block, factor.floor[proposed], rng)[: m - factor.size]
        factor.extend(proposed[accepted], block[np.ix_(accepted, accepted)])
    return factor.chosen if pool is None else pool[factor.chosen]


def greedy(kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None) -> np.ndarray:
    """Pivoted Cholesky: always the row with the largest residual, the first of equals. O(nm²).

    Fine & Scheinberg (2001). It is the order in which ALD with a falling threshold would admit
    rows. Deterministic unless n·m is so large that a random subsample stands for the rows.
    """
    x, m, rng = _take(x, m, rng)
    pool = _candidates(x.shape[0], m, rng)
    factor = _PartialCholesky(kernel, x if pool is None else _rows_at(x, pool), m)
    while factor.size < m and np.any(factor.residual > 0):
        factor.extend_greedily(m)
    return factor.chosen if pool is None else pool[factor.chosen]


def ridge_leverage(kernel: Kernel, x: Array, m: int, rng: arrays.Seed = None) -> np.ndarray:
    """Without replacement, with probabilities proportional to ridge leverage scores. O(nm²).

    The score of a row is [K(K + λI)⁻¹]ᵢᵢ. It is estimated from a weighted sample of half the rows,
    drawn by the scores that a sample of a quarter gives, and so on down to m uniform rows; at each
    level λ is such that the scores sum to m/4, which m sampled rows resolve. Musco & Musco (2017),
    alg. 3.
    """
    x, m, rng = _take(x, m, rng)
    x = arrays.namespace(x).astype(x, arrays.namespace(x).float64, copy=False)  # divided by λ
    pool = _candidates(x.shape[0], m, rng)
    pool = np.arange(x.shape[0]) if pool is None else pool
    order = rng.permutation(pool)
    levels = max(0, math.ceil(math.log2(order.size / m)))
    sample, weights = order[: math.ceil(order.size / 2**levels)], None
    for level in range(levels - 1, -1, -1):
        level_rows = order[: math.ceil(order.size / 2**level)]
        z = _rows_at(x, sample)
        weights = np.ones(sample.size) if weights is None else weights
        ridge = _resolvable_ridge(kernel, z, weights, m / 4)
        score = leverage_scores(kernel, _rows_at(x, level_rows), ridge, z, weights)
        if level == 0:
            keys = rng.exponential(size=score.size) / np.maximum(score, 1e-300)
            return _distinct(x, level_rows[np.argsort(keys)], m)
        chance = np.minimum(1.0, score * m / max(float(np.sum(score)), 1e-300))  # about m rows
        kept = rng.random(chance.size) < chance
        kept[np.argmax(chance)] = True  # never an empty sample
        sample, weights = level_rows[kept], 1 / chance[kept]
    return _distinct(x, order, m)


SELECTORS: dict[str, Selector] = {
    "uniform": uniform,
    "kmeans++": kmeans_plus_plus,
    "rpcholesky": rpcholesky,
    "leverage": ridge_leverage,
    "greedy": greedy,
}


def leverage_scores(
    kernel: Kernel,
    x: Array,
    ridge: float,
    z: Array | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:  # (n, d), (s, d), (s,) -> (n,)
    """Ridge leverage scores (1/λ)(k(x,x) − k_z(x)ᵀ(K_zz + λW⁻¹)⁻¹k_z(x)), clipped to [0, 1].

    With z = x and unit weights they are the exact [K(K + λI)⁻¹]ᵢᵢ; `ridge` is λ itself here, not
    multiplied by n. A sampled z has as weights the inverse of its sampling probabilities.
    Alaoui & Mahoney (2015), def. 1. O(ns²).
    """
    z = x if z is None else z
    inverse = ridge / (np.ones(z.shape[0]) if weights is None else weights)
    lower = cholesky(_host(gram(kernel, z)) + np.diag(inverse)).lower
    left = _host(kernel.diagonal(x)).copy()
    for start in range(0, x.shape[0], TILE):
        tile = slice(start, min(start + TILE, x.shape[0]))
        k_zx = np.ascontiguousarray(_host(gram(kernel, x[tile, :], z)).T)
        left[tile] -= np.sum(arrays.solve_triangular(lower, k_zx) ** 2, axis=0)
    return np.clip(left / ridge, 0.0, 1.0)


# ---------------------------------------------------------------- the partial factor


class _PartialCholesky:
    """F (n, k) with F Fᵀ ≈ K, exact on the chosen rows, and the residual diagonal."""

    def __init__(self, kernel: Kernel, x: Array, m: int) -> None:
        self.kernel, self.x, self.xp = kernel, x, arrays.namespace(x)
        self.residual = _host(kernel.diagonal(x)).copy()
        self.floor = _floor(x, m) * self.residual
        self.factor = self.xp.zeros((x.shape[0], m), dtype=x.dtype, device=arrays.device(x))
        self.size = 0
        self.chosen = np.zeros(0, dtype=np.int64)

    def columns(self, index: np.ndarray) -> Array:  # (b,) -> (n, b)
        """The residual's columns K_{:,S} − F F_Sᵀ."""
        out = gram(self.kernel, self.x, _rows_at(self.x, index))
        if self.size:
            past = self.factor[:, : self.size]
            out -= past @ self.xp.matrix_transpose(self._past(index))
        return out

    def block(self, index: np.ndarray) -> np.ndarray:  # (b,) -> (b, b) float64
        """The residual's rows and columns at `index`."""
        past = _host(self._past(index))
        return _host(gram(self.kernel, _rows_at(self.x, index))) - past @ past.T

    def exhaust(self, index: np.ndarray) -> None:
        """These rows turned out to be spanned, up to rounding."""
        self.residual[index] = 0.0

    def extend(self, index: np.ndarray, block: np.ndarray) -> None:
        """Make the rows at `index` pivots; `block` is the residual on them."""
        if index.size == 0:
            return
        lower = arrays.like(np.linalg.cholesky(block), self.x)
        columns = self.xp.matrix_transpose(self.columns(index))
        new = self.xp.matrix_transpose(arrays.solve_triangular(lower, columns))
        self._lower(_host(self.xp.sum(new * new, axis=1)), index)
        self._store(index, new)

    def extend_greedily(self, m: int) -> None:
        """Pivots in order of the largest residual for as long as they are among a prepared few.

        A column needs a product with all earlier pivots: made for the few rows with the largest
        residuals at once, it is a matrix product. Residuals only fall, so the next pivot is
        usually one of them; when it is not, the round ends.
        """
        few = np.argsort(-self.residual, kind="stable")[: min(32, m - self.size)]
        columns = arrays.host(self.columns(few)).T.copy()  # (b, n)
        new, pivots = np.zeros((few.size, self.residual.size)), []
        while len(pivots) < few.size:
            best = int(np.argmax(self.residual))
            where = np.flatnonzero(few == best)
            if where.size == 0 or self.residual[best] <= 0:
                break
            k, j = len(pivots), int(where[0])
            column = columns[j] - new[:k, best] @ new[:k]
            new[k] = column / math.sqrt(self.residual[best])
            pivots.append(best)
            self._lower(new[k] ** 2, np.asarray(pivots))
        self._store(np.asarray(pivots), arrays.like(new[: len(pivots)].T, self.x))

    def _past(self, index: np.ndarray) -> Array:  # (b,) -> (b, k)
        return _rows_at(self.factor, index)[:, : self.size]  # take copies a strided source whole

    def _lower(self, squares: np.ndarray, index: np.ndarray) -> None:
        self.residual -= squares
        self.residual[self.residual <= self.floor] = 0.0
        self.residual[index] = 0.0

    def _store(self, index: np.ndarray, columns: Array) -> None:
        stop = self.size + index.size
        self.factor[:, self.size : stop] = columns
        self.size, self.chosen = stop, np.concatenate((self.chosen, index))


# ---------------------------------------------------------------- rounds of proposals


def _propose(weight: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    """A round of independent rows, each with probability proportional to its weight."""
    cumulated = np.cumsum(weight)
    draws = rng.random(max(8, math.ceil(m / ROUNDS))) * cumulated[-1]
    index = np.searchsorted(cumulated, draws, side="right")
    return np.minimum(index, np.flatnonzero(weight)[-1])


def _thin_residuals(
    block: np.ndarray, floor: np.ndarray, rng: np.random.Generator
) -> np.ndarray:  # (b, b) -> (≤ b,)
    """Accept each proposal with probability residual now / residual when proposed, in order."""
    block, before = block.copy(), np.diagonal(block).copy()
    luck, accepted = rng.random(before.size), []
    for i in range(before.size):
        if block[i, i] > floor[i] and luck[i] * before[i] < block[i, i]:
            accepted.append(i)
            block -= np.outer(block[i] / block[i, i], block[i])
    return np.asarray(accepted, dtype=np.int64)


def _thin_distances(
    before: np.ndarray, within: np.ndarray, floor: np.ndarray, rng: np.random.Generator
) -> list[int]:
    """Accept each proposal with probability distance now / distance when proposed, in order."""
    now, luck, accepted = before.copy(), rng.random(before.size), []
    for i in range(before.size):
        if now[i] > floor[i] and luck[i] * before[i] < now[i]:
            accepted.append(i)
            now = np.minimum(now, within[i])
    return accepted


# ---------------------------------------------------------------- small things


def _take(x: Array, m: int, rng: arrays.Seed) -> tuple[Array, int, np.random.Generator]:
    x = rows("landmarks", "x", x)
    checks.not_empty("landmarks", "x", x)
    m = checks.integer("landmarks", "m", m, at_least=1)
    checks.require(m <= x.shape[0], "landmarks", "m must be at most n", f"{m} of {x.shape[0]}")
    return x, m, arrays.rng(rng)


def _candidates(n: int, m: int, rng: np.random.Generator) -> np.ndarray | None:
    """Rows that stand for all where the (n, m) factor would be too large, or None."""
    size = max(FACTOR_ENTRIES // m, 4 * m)
    return None if n <= size else np.sort(rng.choice(n, size, replace=False))


def _rows_at(x: Array, index: Any) -> Array:
    xp = arrays.namespace(x)
    return xp.take(x, arrays.like(np.asarray(index, dtype=np.int64), x, xp.int64), axis=0)


def _host(x: Array) -> np.ndarray:
    return np.asarray(arrays.host(x), dtype=np.float64)


def _floor(x: Array, m: int) -> float:
    """The relative residual that is rounding: some eps of the kernel's, and of m subtractions."""
    return arrays.epsilon(x) * (20 + 2 * math.sqrt(m))


def _distinct(x: Array, order: np.ndarray, m: int) -> np.ndarray:
    """The first m rows in this order that differ from all rows before them."""
    size = min(order.size, m)
    while True:
        head = order[:size]
        _, first = np.unique(arrays.host(_rows_at(x, head)) + 0.0, axis=0, return_index=True)
        if first.size >= m or size == order.size:
            return head[np.sort(first)[:m]].astype(np.int64)
        size = min(order.size, 2 * size)


def _resolvable_ridge(kernel: Kernel, z: Array, weights: np.ndarray, dimension: float) -> float:
    """λ with effective dimension Σ λᵢ/(λᵢ + λ) = `dimension`, of the weighted sample's Gram."""
    root = np.sqrt(weights)
    values = np.linalg.eigvalsh(_host(gram(kernel, z)) * root[:, None] * root)
    values = np.maximum(values, 0.0)
    low, high = math.log(1e-9 * np.mean(values)), math.log(np.sum(values))
    for _ in range(40):  # halving: monotone in λ; at `low` if the sample has too few dimensions
        middle = (low + high) / 2
        large = np.sum(values / (values + math.exp(middle))) > dimension
        low, high = (middle, high) if large else (low, middle)
    return math.exp(high)
