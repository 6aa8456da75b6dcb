"""The LSTD-Q system for finitely many actions, re-solved as the policy at s' changes.

The rows of least-squares policy iteration never change, only the actions taken at the next states
do: Σ φ(s, a)φ(s, a)ᵀ is formed once, and of −γ Σ φ(s, a)φ(s', π(s'))ᵀ only the rows whose action
changed are taken out and put back.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kernrl import linalg

Array = Any


class ActionSystem(Protocol):
    """What policy iteration asks of a system."""

    def greedy(self, weights: np.ndarray) -> np.ndarray:
        """(n,) actions at s' that are greedy in `weights`, ties to the lowest number."""
        ...

    def follow(self, policy: np.ndarray) -> int:
        """Take the actions `policy` (n,) at s' from now on; returns how many changed."""
        ...

    def solve(self, ridge: float, *, owner: str) -> np.ndarray:
        """The weights of Q under the current policy."""
        ...


class ActionBlocks:
    """One block per action: Q(s, a) = φ(s)ᵀw_a, features of states only.

    phi, next_phi (n, m): features of s and s' (the latter 0 where terminated); actions (n,) in
    0 … a−1. The matrix is (a·m, a·m); block (a, a') holds −γ Σ φφ'ᵀ over rows with action a and
    next action a', and Σ φφᵀ on the diagonal. O(n m²) once, then O(changed · m²) per policy and
    O((a m)³) per solve; memory 16 n m bytes for the features.
    """

    def __init__(
        self,
        phi: np.ndarray,
        next_phi: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        gamma: float,
        n_actions: int,
    ) -> None:
        # Contiguous rows per action, so that the first sums need no gathers.
        self.order = order = np.argsort(actions, kind="stable")
        self.phi, self.next_phi = phi[order], next_phi[order]
        self.gamma, self.n_actions = gamma, n_actions
        self.edges = np.searchsorted(actions[order], np.arange(n_actions + 1))
        n, m = phi.shape
        self.n = n
        self.matrix = np.zeros((n_actions, m, n_actions, m))
        self.target = np.zeros((n_actions, m))
        rewards = rewards[order]
        for a, rows in self._rows():
            self.matrix[a, :, a] = self.phi[rows].T @ self.phi[rows]
            self.target[a] = self.phi[rows].T @ rewards[rows]
        self.policy = np.full(n, -1)

    def _rows(self) -> list[tuple[int, slice]]:
        return [(a, slice(self.edges[a], self.edges[a + 1])) for a in range(self.n_actions)]

    def greedy(self, weights: np.ndarray) -> np.ndarray:  # (a, m) -> (n,)
        """Greedy actions at s', in the order the rows were given."""
        policy = np.empty(self.n, dtype=np.int64)
        policy[self.order] = np.argmax(self.next_phi @ weights.T, axis=1)
        return policy

    def follow(self, policy: np.ndarray) -> int:  # (n,)
        """Take `policy` at s' from now on; returns how many rows changed."""
        policy = policy[self.order]
        changed = policy != self.policy
        for a, rows in self._rows():
            where = np.flatnonzero(changed[rows]) + rows.start
            for b in range(self.n_actions):
                for sign, chosen in ((-1.0, policy), (1.0, self.policy)):
                    these = where[chosen[where] == b]
                    if these.size:
                        self.matrix[a, :, b] += (sign * self.gamma) * (
                            self.phi[these].T @ self.next_phi[these]
                        )
        self.policy = policy
        return int(np.count_nonzero(changed))

    def solve(self, ridge: float, *, owner: str) -> np.ndarray:  # -> (a, m)
        """w = (A + nλI)⁻¹ b."""
        size = self.n_actions * self.phi.shape[1]
        matrix = self.matrix.reshape(size, size).copy()
        matrix[np.diag_indices(size)] += self.n * ridge
        return linalg.solve(matrix, self.target.ravel(), owner=owner).reshape(self.target.shape)


class ActionPairs:
    """Features of pairs: Q(s, a) = φ(s, a)ᵀw, for kernels that share between actions.

    phi (n, m): features of (s, a); next_phi (a, n, m): of (s', a') for every action a', 0 where
    terminated. O(n m²) once, O(changed · m²) per policy, O(m³) per solve.
    """

    def __init__(
        self, phi: np.ndarray, next_phi: np.ndarray, rewards: np.ndarray, gamma: float
    ) -> None:
        self.phi, self.next_phi, self.gamma = phi, next_phi, gamma
        self.n = phi.shape[0]
        self.matrix = phi.T @ phi
        self.target = phi.T @ rewards
        self.policy = np.full(self.n, -1)

    def greedy(self, weights: np.ndarray) -> np.ndarray:  # (m,) -> (n,)
        """Greedy actions at s'."""
        return np.argmax(self.next_phi @ weights, axis=0)

    def follow(self, policy: np.ndarray) -> int:  # (n,)
        """Take `policy` at s' from now on; returns how many rows changed."""
        changed = np.flatnonzero(policy != self.policy)
        if changed.size:
            difference = self.next_phi[policy[changed], changed]
            known = self.policy[changed] >= 0
            old = changed[known]
            difference[known] -= self.next_phi[self.policy[old], old]
            self.matrix -= self.gamma * (self.phi[changed].T @ difference)
        self.policy = policy
        return int(changed.size)

    def solve(self, ridge: float, *, owner: str) -> np.ndarray:  # -> (m,)
        """w = (A + nλI)⁻¹ b."""
        matrix = self.matrix.copy()
        matrix[np.diag_indices(matrix.shape[0])] += self.n * ridge
        return linalg.solve(matrix, self.target, owner=owner)
