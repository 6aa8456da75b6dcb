"""Squared Euclidean and city-block distances of tiles against fixed columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernrl import arrays, checks

Array = Any
Distance = Callable[..., Array]  # (b, d)[, memory (b, m)] -> (b, m), in that memory if it can

MEDIAN_ROWS = 1000  # distances of a subsample: n² pairs of a million rows would be terabytes


def expanded(xp: Any, z: Array) -> Distance:
    """‖x − z‖² = |x|² − 2xᵀz + |z|² as one product, (−2x, 1, |x|²)·(z, |z|², 1).

    Clamped at 0. Expects centred rows: the cancellation error is eps·(|x|² + |z|²). Folding the
    norms into the product saves two passes over the (b, m) tile.
    """
    product = _folded(xp, z, 1.0)
    return lambda x, out=None: arrays.clip_below_in_place(product(x, out), 0.0)


def gaussian(xp: Any, z: Array) -> Distance:
    """exp(−½‖x − z‖²): `expanded` with −½ inside the product, so that exp is the only other pass.

    The exponent is clamped at 0 from above. Expects centred rows.
    """
    product = _folded(xp, z, -0.5)

    def values(x: Array, out: Array = None) -> Array:
        return arrays.exp_in_place(arrays.clip_above_in_place(product(x, out), 0.0))

    return values


def _folded(xp: Any, z: Array, factor: float) -> Distance:
    """factor·(|x|² − 2xᵀz + |z|²) as one product."""
    norms = factor * xp.sum(z * z, axis=1, keepdims=True)
    right = xp.concat((z, norms, xp.ones_like(norms)), axis=1).T

    def product(x: Array, out: Array = None) -> Array:
        norms = factor * xp.sum(x * x, axis=1, keepdims=True)
        left = xp.concat((-2.0 * factor * x, xp.ones_like(norms), norms), axis=1)
        return xp.matmul(left, right) if out is None else np.matmul(left, right, out=out)

    return product


def direct(xp: Any, z: Array) -> Distance:
    """‖x − z‖² = Σ_k (x_k − z_k)², exact near 0; d passes over the tile (cdist on NumPy)."""
    if arrays.is_numpy(xp):
        return _cdist(z, "sqeuclidean")

    def distance(x: Array, out: Array = None) -> Array:
        total = xp.zeros((x.shape[0], z.shape[0]), dtype=z.dtype, device=arrays.device(z))
        for k in range(z.shape[1]):
            total = total + (x[:, k, None] - z[None, :, k]) ** 2
        return total

    return distance


def manhattan(xp: Any, z: Array) -> Distance:
    """Σ_k |x_k − z_k|."""
    if arrays.is_numpy(xp):
        return _cdist(z, "cityblock")

    def distance(x: Array) -> Array:
        total = xp.zeros((x.shape[0], z.shape[0]), dtype=z.dtype, device=arrays.device(z))
        for k in range(z.shape[1]):
            total = total + xp.abs(x[:, k, None] - z[None, :, k])
        return total

    return distance


def _cdist(z: np.ndarray, metric: str) -> Distance:
    from scipy.spatial.distance import cdist

    return lambda x, out=None: cdist(x, z, metric).astype(z.dtype, copy=False)


def median_distance(
    owner: str,
    pairwise: Callable[[np.ndarray], np.ndarray],
    x: Array,
    rng: np.random.Generator,
) -> float:
    """Median distance between distinct rows, on at most MEDIAN_ROWS rows; zero distances excluded.

    Zeros (revisited states) would drag the median to 0. Constant data give 1.0 and a warning.
    """
    rows = arrays.host(arrays.floating(x))
    if rows.shape[0] > MEDIAN_ROWS:
        rows = rows[rng.choice(rows.shape[0], MEDIAN_ROWS, replace=False)]
    rows = rows.astype(np.float64, copy=False)
    distances = pairwise(rows)[np.triu_indices(rows.shape[0], k=1)] if rows.shape[0] else rows
    positive = distances[distances > 0]
    if positive.size == 0:
        checks.warn(
            owner,
            "length_scale='median' found no two distinct rows, so 1.0 is used",
            "Pass a number.",
        )
        return 1.0
    return float(np.median(positive))
