"""The one linear system of kernel value estimation, in its exact and in its feature form.

Exact, with one weight per row:   (Tᵀ(K − γK') + nλI) w = Tᵀr,           V(z) = k(z)ᵀw
Features (landmarks or random):   (Σ e(φ − γφ')ᵀ + nλI) w = Σ e r,        V(z) = φ(z)ᵀw

K'_ij = Σ_t c_ti k(z'_ti, z_j) where c holds the terminal mask and, for Q, the policy's
probabilities; e_i = γλ_tr e_{i−1} + φ_i is the eligibility trace and T its matrix (T = I without
traces). Landmark features are whitened (ΦΦᵀ = K_nm K_mm⁺ K_mn), so the RKHS ridge w'K_mm w of the
landmark form is the identity here and both forms agree when Φ factorises the Gram matrix.
Xu, Hu & Lu (2007) without the ridge; Duan, Wang & Wainwright (2024) with it.
Neither matrix is symmetric: LU, never Cholesky.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.gram import GramOperator, matvec
from kernrl.value.landmark_sums import landmark_sums, streams

Array = Any

BLOCK_ROWS = 4096  # rows of features in memory at a time: 32 MB at 1000 features in float64


@dataclass(frozen=True)
class Rows:
    """The rows of one system: where values are asked, and the weighted points that follow."""

    points: Array  # (n, d): z_i
    rewards: Array  # (n,)
    starts: Array  # (n,) bool: first row of an episode
    following: tuple[tuple[Array, Array], ...]  # ((n,) weights, (n, d) points), summed

    def __len__(self) -> int:
        return int(self.points.shape[0])

    def blocks(self, size: int = BLOCK_ROWS) -> Iterator[Rows]:
        """The same rows in blocks."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield Rows(
                self.points[rows, :],
                self.rewards[rows],
                self.starts[rows],
                tuple((c[rows], z[rows, :]) for c, z in self.following),
            )


def state_rows(t: Transitions) -> Rows:
    """Rows of V: z = s, followed by s' unless the transition terminated."""
    xp = arrays.namespace(t.states)
    states = arrays.floating(t.states)
    mask = xp.astype(~t.terminated, states.dtype)
    rewards = xp.astype(t.rewards, states.dtype)
    return Rows(states, rewards, t.episode_starts, ((mask, arrays.floating(t.next_states)),))


class FeatureSystem:
    """Streams rows into A = Σ e(φ − γφ')ᵀ and b = Σ e r; O(m²) memory whatever n is.

    Accumulates in float64 even when features are float32. Cost: O(n m²). Many rows of Nyström
    features are summed unwhitened, see `value.landmark_sums`.
    """

    def __init__(self, features: Any, gamma: float, trace_decay: float = 0.0) -> None:
        self.features, self.gamma, self.decay = features, gamma, gamma * trace_decay
        self.matrix: Array | None = None  # (m, m)
        self.target: Array | None = None  # (m,)
        self.trace: Array | None = None  # (m,): e of the last row, for the next block
        self.n = 0

    def add(self, rows: Rows) -> None:
        """Add rows, in time order where traces are used."""
        if self._only_sums and streams(self.features, rows):
            self._increase(*landmark_sums(self.features, rows, self.gamma), len(rows))
            return
        for block in rows.blocks():
            phi = self.features.transform(block.points)
            ahead = sum(c[:, None] * self.features.transform(z) for c, z in block.following)
            self._accumulate(phi, phi - self.gamma * ahead, block.rewards, block.starts)

    @property
    def _only_sums(self) -> bool:
        """No trace and no subclass asks for φ of each row."""
        return not self.decay and type(self)._accumulate is FeatureSystem._accumulate

    def _accumulate(self, phi: Array, difference: Array, rewards: Array, starts: Array) -> None:
        xp = arrays.namespace(phi)
        if self.decay:
            phi, self.trace = eligibility(phi, starts, self.decay, self.trace)
        matrix = xp.astype(xp.matmul(phi.T, difference), xp.float64, copy=False)
        target = xp.astype(xp.matmul(phi.T, xp.astype(rewards, phi.dtype)), xp.float64, copy=False)
        self._increase(matrix, target, int(phi.shape[0]))

    def _increase(self, matrix: Array, target: Array, n: int) -> None:
        self.matrix = matrix if self.matrix is None else self.matrix + matrix
        self.target = target if self.target is None else self.target + target
        self.n += n

    def solve(self, ridge: float, *, owner: str) -> Array:  # -> (m,)
        """w = (A + nλI)⁻¹ b. Warns when the condition leaves few digits, raises when singular."""
        assert self.matrix is not None and self.target is not None, "solve before add"
        return linalg.solve(ridged(self.matrix, self.n * ridge), self.target, owner=owner)


def solve_exact(
    kernel: Any, rows: Rows, gamma: float, ridge: float, trace_decay: float, *, owner: str
) -> Array:  # -> (n,)
    """w = (Tᵀ(K − γK') + nλI)⁻¹ Tᵀr, in float64. O(n³) work; memory is stated before it is taken.

    It never forms K(K − γK'), whose condition number is that of K squared.
    """
    n = len(rows)
    points = rows.points
    checks.memory(
        owner,
        f"the exact system of {n} rows",
        direct_bytes(n),
        arrays.available_bytes(points),
        "Pass features=Nystroem(n_components=1000), which needs memory for m×m only.",
    )
    xp = arrays.namespace(points)
    wide = xp.astype(points, xp.float64, copy=False)
    matrix = GramOperator(kernel, wide).dense()
    for weights, following in rows.following:
        following = xp.astype(following, xp.float64, copy=False)
        weights = xp.astype(weights, xp.float64, copy=False)
        for where, tile in GramOperator(kernel, following, wide).tiles(1024):
            matrix[where, :] -= gamma * weights[where][:, None] * tile
    target = xp.astype(rows.rewards, xp.float64, copy=False)
    if gamma * trace_decay:
        matrix = discounted_ahead(matrix, rows.starts, gamma * trace_decay)
        target = discounted_ahead(target[:, None], rows.starts, gamma * trace_decay)[:, 0]
    return linalg.solve(ridged(matrix, n * ridge), target, owner=owner)


def direct_bytes(n: int) -> float:
    """Memory of the exact system solved by LU: the matrix, its factor, and one of their size."""
    return 3.0 * 8.0 * n * n


def ridged(matrix: Array, amount: float) -> Array:  # (m, m) -> (m, m)
    """matrix + amount·I."""
    xp = arrays.namespace(matrix)
    return matrix + amount * xp.eye(
        matrix.shape[0], dtype=matrix.dtype, device=arrays.device(matrix)
    )


# ---------------------------------------------------------------- traces


def eligibility(
    phi: Array, starts: Array, decay: float, before: Array | None = None
) -> tuple[Array, Array]:  # (n, m) -> (n, m), (m,)
    """e_i = decay·e_{i−1} + φ_i, from 0 at each episode start; also returns the last e.

    `before` is e of the row before the first, used unless the first row starts an episode.
    """
    xp = arrays.namespace(phi)
    zero = xp.zeros_like(phi[0, :])
    out = []
    last = zero if before is None else arrays.like(before, phi)
    for start, stop in _runs(arrays.host(starts), int(phi.shape[0])):
        initial = zero if bool(starts[start]) else last
        out.append(_recursion(xp, phi[start:stop, :], decay, initial))
        last = out[-1][-1, :]
    return (out[0] if len(out) == 1 else xp.concat(out, axis=0)), last


def discounted_ahead(x: Array, starts: Array, decay: float) -> Array:  # (n, k) -> (n, k)
    """(Tᵀx)_i = Σ_{j≥i in the episode} decay^{j−i} x_j: the trace matrix transposed, on columns."""
    xp = arrays.namespace(x)
    parts = []
    for start, stop in _runs(arrays.host(starts), int(x.shape[0])):
        backward = _recursion(xp, xp.flip(x[start:stop, :], axis=0), decay, xp.zeros_like(x[0, :]))
        parts.append(xp.flip(backward, axis=0))
    return xp.concat(parts, axis=0)


def _runs(starts: np.ndarray, n: int) -> list[tuple[int, int]]:
    edges = np.unique(np.concatenate(([0], np.flatnonzero(starts), [n])))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _recursion(xp: Any, x: Array, decay: float, initial: Array) -> Array:  # (n, m), (m,) -> (n, m)
    """y_i = decay·y_{i−1} + x_i with y_{−1} = initial."""
    if arrays.is_numpy(xp):
        from scipy.signal import lfilter

        return lfilter([1.0], [1.0, -decay], x, axis=0, zi=decay * initial[None, :])[0]
    rows, last = [], initial
    for i in range(int(x.shape[0])):
        last = decay * last + x[i, :]
        rows.append(last)
    return xp.stack(rows, axis=0)


# ---------------------------------------------------------------- values


def values(kernel: Any, features: Any, support: Array, weights: Array, z: Array) -> Array:
    """V(z) = k(z, support)ᵀw or φ(z)ᵀw in tiles: (n, d) -> (n,), no (n, m) matrix.

    z may live in another library or on another device than the fit; the answer comes back in z's.
    """
    z = arrays.floating(z)
    where = support if features is None else weights
    local = arrays.like(z, where) if not _together(z, where) else z
    xp = arrays.namespace(local)
    if features is None:
        out = matvec(kernel, local, support, weights)
    elif hasattr(features, "landmarks_"):  # fold the whitening into the weights: one tile product
        out = matvec(features.kernel_, local, features.landmarks_, features.whitener_ @ weights)
    else:
        n = int(local.shape[0])
        parts = [
            xp.matmul(features.transform(local[i : min(i + BLOCK_ROWS, n), :]), weights)
            for i in range(0, max(1, n), BLOCK_ROWS)
        ]
        out = parts[0] if len(parts) == 1 else xp.concat(parts)
    return out if local is z else arrays.like(out, z)


def predictor(features: Any, weights: Array) -> Callable[[Array], Array]:
    """φ(z)W prepared once for many small calls, such as acting: (b, d) -> (b, k), unvalidated.

    Landmark features fold their whitening into the weights and hold the landmarks ready scaled.
    """
    if not hasattr(features, "landmarks_"):
        return lambda z: features.transform(z) @ weights
    section = features.kernel_.section(features.landmarks_)
    folded = features.whitener_ @ weights
    return lambda z: section(z) @ folded


def _together(x: Array, y: Array) -> bool:
    same_library = arrays.namespace(x) is arrays.namespace(y)
    return same_library and arrays.device(x) == arrays.device(y)
