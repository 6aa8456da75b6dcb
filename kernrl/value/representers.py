"""The functions behind a Bellman residual: g_i = k(z_i, ·) − γ Σ_t c_ti k(z'_ti, ·), c masked.

For V in the RKHS of k, ⟨g_i, V⟩ = V(z_i) − γ m_i V(z'_i): what is linear in V about the residual.
Everything here is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernrl import arrays, checks
from kernrl.kernels.gram import GramOperator, gram, matvec
from kernrl.value.system import Rows

Array = Any
Weighted = Sequence[tuple[Array, Array]]  # ((k,) weights, (k, d) points), one measure together


def wide(rows: Rows) -> Rows:
    """The same rows in float64."""
    following = tuple((_wide(c), _wide(z)) for c, z in rows.following)
    return Rows(_wide(rows.points), _wide(rows.rewards), rows.starts, following)


def ahead_gram(kernel: Any, rows: Rows) -> Array:  # -> (n, n)
    """K'_ij = Σ_t c_ti k(z'_ti, z_j)."""
    return sum(c[:, None] * gram(kernel, z, rows.points) for c, z in rows.following)


def residual_gram(kernel: Any, rows: Rows, gamma: float, k: Array) -> Array:  # -> (n, n)
    """B_ij = ⟨g_i, g_j⟩ = (K − γK' − γK'ᵀ + γ²K'')_ij, given K."""
    ahead = ahead_gram(kernel, rows)
    out = k - gamma * (ahead + arrays.namespace(k).matrix_transpose(ahead))
    for c, z in rows.following:
        for b, y in rows.following:
            out = out + gamma**2 * c[:, None] * gram(kernel, z, y) * b[None, :]
    return out


def residual_values(kernel: Any, rows: Rows, gamma: float, measure: Weighted) -> Array:  # -> (n,)
    """⟨g_i, μ⟩ for the function μ = Σ_j u_j k(x_j, ·) of a weighted set of points; tiles only."""
    out = embedding_values(kernel, measure, rows.points)
    for c, z in rows.following:
        out = out - gamma * c * embedding_values(kernel, measure, z)
    return out


def embedding_values(kernel: Any, measure: Weighted, z: Array) -> Array:  # (n, d) -> (n,)
    """μ(z) = Σ_j u_j k(x_j, z)."""
    return sum(matvec(kernel, z, x, u) for u, x in measure)


def squared_norm(kernel: Any, measure: Weighted) -> float:
    """‖Σ_j u_j k(x_j, ·)‖² = Σ_ij u_i u_j k(x_i, x_j), in tiles: nothing of size k×k is stored."""
    xp = arrays.namespace(measure[0][0])
    weights = xp.concat([_wide(u) for u, _ in measure])
    points = xp.concat([_wide(x) for _, x in measure], axis=0)
    return float(weights @ (GramOperator(kernel, points) @ weights))


def expanded(weights: Array, rows: Rows, gamma: float) -> list[tuple[Array, Array]]:
    """Σ_i w_i g_i as a measure on z and on every z'_t."""
    ahead = [(-gamma * c * weights, z) for c, z in rows.following]
    return [(weights, rows.points), *ahead]


def require_memory(owner: str, rows: Rows, matrices: int) -> None:
    """Refuse `matrices` matrices (n, n) in float64 that do not fit."""
    n = len(rows)
    checks.memory(
        owner,
        f"the exact system of {n} rows",
        8.0 * matrices * n * n,
        arrays.available_bytes(rows.points),
        "Pass features=Nystroem(n_components=1000), which needs memory for m×m only.",
    )


def _wide(x: Array) -> Array:
    xp = arrays.namespace(x)
    return xp.astype(x, xp.float64, copy=False)
