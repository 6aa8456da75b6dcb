"""Sums over rows of Nyström features without whitening each row.

Whitened rows φ = Wᵀk cost one product as large as the sum Σ φφᵀ itself; for differences φ − γφ',
two. Summing bare k and whitening the sum is cheap but loses digits: rounding of size eps·λ₁²/m is
blown up by 1/λ_min. What does the harm is only that large and small directions of K_mm share
columns. So k is turned by a reflector H that puts the p leading eigenvectors into the first p
columns, g = Hk, at p/m of whitening's cost; then rounding in a column is relative to that column,
and Σ φ(φ − γφ')ᵀ = Tᵀ(Σ g(g − γg')ᵀ)T with T = H⁻¹W is as accurate as if every row were whitened.

float32, 600 landmarks, ridge 1e-6: values off by 8e-3 with bare k, by 1e-4 at p ≥ 8 or whitened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernrl.approx.nystroem import Nystroem, fitting_rows
from kernrl.kernels.gram import TILE_ROWS, ordered

if TYPE_CHECKING:
    from kernrl.value.system import Rows

BLOCK_ROWS = 1024  # of one product: 4 MB of float32 rows at 1000 landmarks

Maker = Callable[[np.ndarray], np.ndarray]  # (b, d) -> (b, width)


class Turn(NamedTuple):
    """g = k − (k left) right, and the way back: φ = g back."""

    left: np.ndarray  # (m, p)
    right: np.ndarray  # (p, m)
    back: np.ndarray  # (m, r) float64


def streams(features: Any, rows: Rows) -> bool:
    """True where these sums are made: NumPy rows of Nyström features, enough of them to pay."""
    if not isinstance(features, Nystroem) or len(rows) < 4 * features.n_features_:
        return False
    given = (rows.points, rows.rewards, features.whitener_, *(z for _, z in rows.following))
    return all(isinstance(x, np.ndarray) for x in given)


def landmark_sums(
    features: Nystroem, rows: Rows, gamma: float
) -> tuple[np.ndarray, np.ndarray]:  # -> (r, r), (r,) float64
    """Σ φ(φ − γ Σ_k c_k φ'_k)ᵀ and Σ φr.

    Row blocks run on the thread pool and are added in their order, so that the bits do not depend
    on the number of threads. Memory: two blocks and a sum a thread, whatever n is.
    """
    points = fitting_rows(features, rows.points)
    following = [(c, fitting_rows(features, z)) for c, z in rows.following] if gamma else []
    dtype = np.result_type(points, features.landmarks_)
    whitener = np.asarray(features.whitener_, dtype=dtype)
    turned = turn(whitener)
    make = _maker(features, turned, whitener)
    rewards = rows.rewards.astype(dtype, copy=False)

    def block(start: int) -> tuple[np.ndarray, np.ndarray]:
        where = slice(start, start + BLOCK_ROWS)
        g = make(points[where])
        moment = g.T @ rewards[where]
        if not following:
            return g.T @ g, moment  # NumPy sees the symmetry: half the work
        difference, *more = (_weighted(c[where], make(z[where]), -gamma) for c, z in following)
        for ahead in (*more, g):
            difference += ahead
        return g.T @ difference, moment

    r = whitener.shape[1] if turned is None else whitener.shape[0]
    matrix, target = np.zeros((r, r)), np.zeros(r)
    for part, moment in ordered(block, len(rows), BLOCK_ROWS):
        matrix += part
        target += moment
    if turned is None:
        return matrix, target
    return turned.back.T @ (matrix @ turned.back), turned.back.T @ target


def _weighted(weights: np.ndarray, rows: np.ndarray, factor: float) -> np.ndarray:
    """factor·weights·rows, in the memory of the rows."""
    rows *= (factor * weights.astype(rows.dtype, copy=False))[:, None]
    return rows


def turn(whitener: np.ndarray) -> Turn | None:  # (m, r)
    """The reflector for this whitener; None where whitening every row is no dearer.

    W = U S^(−½) with ascending S. H = I − Y M⁻¹Yᵀ with Y = V − EQ, M = I − QᵀV₁ takes V, the
    leading p columns of U, to the first p unit vectors E up to a rotation Q: minus the polar
    factor of V's top block V₁, by which M is symmetric with eigenvalues in [1, 2].
    """
    wide = np.asarray(whitener, dtype=np.float64)
    m, r = wide.shape
    eigenvalues = 1.0 / np.einsum("ij,ij->j", wide, wide)[::-1]
    # With ρ = λ_p rounding costs the leading directions λ₁²/ρ, the others ρ²/λ_min: equal at best.
    p = int(np.sum(eigenvalues > np.cbrt(eigenvalues[0] ** 2 * eigenvalues[-1])))
    if m * (m + 4 * p) > r * (r + 2 * m):  # work a row: sums have m columns here, r there
        return None
    leading = np.linalg.qr(wide[:, ::-1][:, :p])[0]
    a, _, b = np.linalg.svd(leading[:p])
    y = leading.copy()
    y[:p] += a @ b
    middle = np.eye(p) + (a @ b).T @ leading[:p]
    # Rounded to the rows' dtype and then inverted as rounded: a systematic error averages nothing.
    left = y.astype(whitener.dtype)
    right = np.linalg.solve(middle, y.T).astype(whitener.dtype)
    inner = np.eye(p) - right.astype(np.float64) @ left
    back = wide + left @ np.linalg.solve(inner, right @ wide)  # Woodbury's H⁻¹W
    return Turn(left, right, back)


def _maker(features: Nystroem, turned: Turn | None, whitener: np.ndarray) -> Maker:
    """Rows of g or of φ, in tiles that stay in cache between kernel and product."""
    fill = features.kernel_._filler(features.landmarks_.astype(whitener.dtype, copy=False))
    m = whitener.shape[0]

    def whitened(x: np.ndarray) -> np.ndarray:
        k = np.empty((len(x), m), dtype=whitener.dtype)
        fill(x, k)
        return k @ whitener

    def reflected(x: np.ndarray) -> np.ndarray:
        assert turned is not None
        out = np.empty((len(x), m), dtype=whitener.dtype)
        for start in range(0, len(x), TILE_ROWS):
            tile = out[start : start + TILE_ROWS]
            fill(x[start : start + TILE_ROWS], tile)
            tile -= (tile @ turned.left) @ turned.right
        return out

    return whitened if turned is None else reflected
