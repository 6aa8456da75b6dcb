"""The sums of least-squares TD as rows come, fade and leave, and their solution kept up to date."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernrl import linalg
from kernrl.value.system import discounted_ahead, eligibility

ROUNDS = 20  # of refinement with a stale inverse, O(m²) each, before a fresh one is made, O(m³)
REFINED = 1e-14  # backward error at which refinement stops


class Block(NamedTuple):
    """Rows in features."""

    phi: np.ndarray  # (n, m)
    difference: np.ndarray  # (n, m): φ − γφ'
    rewards: np.ndarray  # (n,)
    starts: np.ndarray  # (n,) bool: first row of an episode


@dataclass
class Sums:
    """A = Σ β^(t−i) e_i d_iᵀ, b = Σ β^(t−i) e_i r_i, n = Σ β^(t−i), in as many features as came."""

    decay: float
    forgetting: float
    matrix: np.ndarray = None  # (m, m)
    target: np.ndarray = None  # (m,)
    trace: np.ndarray = None  # (m,): e of the last row
    n: float = 0.0

    def add(self, block: Block) -> None:
        """Add rows that follow those before. O(n m²)."""
        self._grow(block.phi.shape[1])
        k, traces = len(block.rewards), block.phi
        if self.decay:
            traces, self.trace = eligibility(traces, block.starts, self.decay, self.trace)
        if self.forgetting != 1.0:
            faded = self.forgetting**k
            weights = self.forgetting ** np.arange(k - 1, -1, -1.0)
            self.matrix, self.target, self.n = (
                faded * self.matrix,
                faded * self.target,
                faded * self.n,
            )
            traces, gained = weights[:, None] * traces, float(np.sum(weights))
        else:
            gained = float(k)
        self.matrix = self.matrix + traces.T @ block.difference
        self.target = self.target + traces.T @ block.rewards
        self.n += gained

    def _grow(self, m: int) -> None:
        """Room for m features; those that are new were 0 so far."""
        if self.matrix is None:
            self.matrix, self.target, self.trace = np.zeros((m, m)), np.zeros(m), np.zeros(m)
        more = m - len(self.target)
        if more:
            self.matrix = np.pad(self.matrix, (0, more))
            self.target, self.trace = np.pad(self.target, (0, more)), np.pad(self.trace, (0, more))

    def project(self, projection: np.ndarray) -> None:  # (m', m)
        """φ becomes projection·φ in every row."""
        self.matrix = projection @ self.matrix @ projection.T
        self.target, self.trace = projection @ self.target, projection @ self.trace


class WindowSums:
    """The same sums over the last `window` rows, which are kept: rows that leave are subtracted.

    With traces a row j that leaves takes φ_j (Σ_{i≥j} decay^(i−j) d_i)ᵀ with it, all i of its
    episode. After as many departures as the window holds the sums are made afresh, so rounding
    does not gather.
    """

    def __init__(self, decay: float, window: int) -> None:
        self.sums, self.window, self.left = Sums(decay, 1.0), window, 0
        self.rows: Block | None = None

    matrix = property(lambda self: self.sums.matrix)
    target = property(lambda self: self.sums.target)
    n = property(lambda self: self.sums.n)

    def add(self, block: Block) -> None:
        """Add rows, then let the oldest go. O(n m²), with traces O(window·m) more."""
        self.sums.add(block)
        self.rows = block if self.rows is None else _appended(self.rows, block)
        leaving = len(self.rows.rewards) - self.window
        if leaving <= 0:
            return
        self.left += leaving
        gone, self.rows = self._split(leaving)
        if self.left >= self.window:
            self._afresh()
            return
        self.sums.matrix = self.sums.matrix - gone.phi.T @ gone.difference
        self.sums.target = self.sums.target - gone.phi.T @ gone.rewards
        self.sums.n -= leaving
        if self.sums.decay:
            rows = self.rows
            _, self.sums.trace = eligibility(rows.phi, rows.starts, self.sums.decay)

    def _split(self, k: int) -> tuple[Block, Block]:
        """The first k rows, with all that their traces reach, and the others."""
        rows, decay = self.rows, self.sums.decay
        difference, rewards = rows.difference, rows.rewards
        if decay:
            difference = discounted_ahead(difference, rows.starts, decay)
            rewards = discounted_ahead(rewards[:, None], rows.starts, decay)[:, 0]
        gone = Block(rows.phi[:k], difference[:k], rewards[:k], rows.starts[:k])
        return gone, Block(*(x[k:] for x in rows))

    def _afresh(self) -> None:
        self.sums, self.left = Sums(self.sums.decay, 1.0), 0
        self.sums.add(self.rows)

    def project(self, projection: np.ndarray) -> None:  # (m', m)
        """φ becomes projection·φ in every row."""
        self.sums.project(projection)
        phi, difference, *others = self.rows
        self.rows = Block(phi @ projection.T, difference @ projection.T, *others)


def _appended(rows: Block, more: Block) -> Block:
    phi, difference = (padded(x, more.phi.shape[1]) for x in rows[:2])
    joined = zip((phi, difference, *rows[2:]), more, strict=True)
    return Block(*(np.concatenate(pair) for pair in joined))


def padded(rows: Any, m: int) -> np.ndarray:  # (n, ≤ m) or list -> (n, m)
    """Rows with zeros behind: features that came after them."""
    if isinstance(rows, np.ndarray) and rows.shape[1] == m:
        return rows
    out = np.zeros((len(rows), m))
    if isinstance(rows, np.ndarray):
        out[:, : rows.shape[1]] = rows
        return out
    for row, values_of_row in zip(out, rows, strict=True):
        row[: len(values_of_row)] = values_of_row
    return out


class StaleInverse:
    """Solves systems that change a little at a time, by an inverse of an earlier one.

    x ← x + B(b − Ax) until the backward error is rounding, O(m²) a round; where B ≈ A⁻¹ no longer
    brings that about, B is made afresh, O(m³). New coordinates border B (Schur complement).
    """

    def __init__(self) -> None:
        self.inverse: np.ndarray | None = None
        self.x: np.ndarray | None = None

    def solve(self, matrix: np.ndarray, target: np.ndarray, *, owner: str) -> np.ndarray:
        """x with matrix·x = target. Warns and raises as linalg.solve does, when B is made."""
        if self.inverse is not None:
            self._border(matrix)
            x = self._refined(matrix, target)
            if x is not None:
                self.x = x
                return x
        self.inverse = linalg.solve(matrix, np.eye(len(target)), owner=owner)
        x = self.inverse @ target
        self.x = x + self.inverse @ (target - matrix @ x)
        return self.x

    def _border(self, matrix: np.ndarray) -> None:
        """The inverse of [[A, C], [R, D]] from that of A, C, R and D being those of `matrix`."""
        m, k = len(self.inverse), len(matrix) - len(self.inverse)
        if k == 0:
            return
        left, above = -matrix[m:, :m] @ self.inverse, -self.inverse @ matrix[:m, m:]
        corner = matrix[m:, m:] + left @ matrix[:m, m:]
        try:
            corner = np.linalg.inv(corner)
        except np.linalg.LinAlgError:  # the fresh inverse will say whether the whole is singular
            corner = np.zeros((k, k))
        self.inverse = np.block(
            [[self.inverse + above @ corner @ left, above @ corner], [corner @ left, corner]]
        )
        self.x = np.concatenate((self.x, np.zeros(k)))

    def _refined(self, matrix: np.ndarray, target: np.ndarray) -> np.ndarray | None:
        x, scale, last = self.x, np.linalg.norm(matrix), np.inf
        for _ in range(ROUNDS):
            residual = target - matrix @ x
            error = np.linalg.norm(residual)
            if error <= REFINED * (scale * np.linalg.norm(x) + np.linalg.norm(target)):
                return x
            if not error < 0.5 * last:
                return None
            x, last = x + self.inverse @ residual, error
        return None
