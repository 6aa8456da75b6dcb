"""Kernel-based value estimation on all rows: the averager of Ormoneit & Sen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.averaging import (
    ENDLESS,
    TILE,
    Averager,
    averaging_weights,
    policy_iteration,
    wide,
)
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.system import state_rows

Array = Any


class KernelAverager(Averager, KernelEstimator):
    """Kernel-based value estimation: V(s) = Σ_k κ(s, s_k) [r_k + γ m_k V(s'_k)], m = 0 at an end.

    Ormoneit & Sen (2002). Solved for the values at the n next states, one linear system
    (I − γ κ(S', S) M) v = κ(S', S) r, whose matrix is strictly diagonally dominant for γ < 1.
    greedy=False: the value of the behaviour that made the rows. greedy=True: the best value, with
    κ_a over the rows of action a only and V = max_a Q, by policy iteration on the n next states.
    With Delta() on visited states both are dynamic programming on the empirical table.

    kernel: nowhere negative; its length scale is the bandwidth. gamma: in [0, 1].
    Cost: O(n³) for each policy, 3 n² numbers; predict O(nd) a state.

    Learnt: next_values_ (n,): V(s'_k); weights_ (n,): the averaged backups r_k + γ m_k V(s'_k);
    actions_ (a,); support_ (n, d); n_rounds_ of policy iteration.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> KernelAverager(Delta(), gamma=0.5).fit(t).predict([[0.0], [1.0]])
    array([0.5, 1. ])
    """

    def __init__(
        self, kernel: Kernel, gamma: float = 0.99, greedy: bool = False, device: str = "auto"
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.greedy = greedy
        self.device = device

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Learn from transitions, or from chunks of them, which are joined."""
        self._check()
        t = self._moved(self._whole(X))
        self._labels(t)
        self._forget()
        self.n_features_in_ = int(t.states.shape[1])
        self.kernel_ = self.kernel.resolve(state_rows(t).points, rng=0)
        self._seen = t
        return self._finish()

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Add transitions and solve again, O(n³) for all n: the same as one fit on all of them."""
        if not hasattr(self, "weights_"):
            return self.fit(transitions(self._owner, X))
        self._check()
        new = self._moved(transitions(self._owner, X))
        self._width(new.states)
        self._seen = Transitions.concatenate([self._seen, new])
        return self._finish()

    def _finish(self) -> Self:
        t, labels = self._seen, self._labels(self._seen)
        rows, self.n_transitions_ = state_rows(t), len(t)
        self.support_ = wide(rows.points)
        free, cure = arrays.available_bytes(t.states), "Use StochasticFactorisation: m×m only."
        checks.memory(self._owner, f"the weights of {len(t)} rows", 24.0 * len(t) ** 2, free, cure)
        self.actions_ = np.unique(labels)
        self._members = [np.flatnonzero(labels == a) for a in self.actions_]
        ((mask, following),) = rows.following
        weights = self._all_weights(wide(following))
        numbers = np.searchsorted(self.actions_, labels)
        return self._solve(weights, numbers, wide(rows.rewards), wide(mask))

    def _all_weights(self, x: Array) -> Array:  # (q, d) -> (q, n)
        """κ_a(x, s_k) with a = a_k: each row sums to one over the columns of every action."""
        xp = arrays.namespace(x)
        if len(self._members) == 1:
            return averaging_weights(self.kernel_, x, self.support_, self._owner)
        order = np.argsort(np.concatenate(self._members))
        parts = [
            averaging_weights(self.kernel_, x, self._points_of(rows), self._owner)
            for rows in self._members
        ]
        return xp.take(xp.concat(parts, axis=1), arrays.like(order, x, xp.int64), axis=1)

    def _points_of(self, rows: np.ndarray) -> Array:
        xp = arrays.namespace(self.support_)
        return xp.take(self.support_, arrays.like(rows, self.support_, xp.int64), axis=0)

    def _solve(self, weights: Array, numbers: np.ndarray, rewards: Array, mask: Array) -> Self:
        xp = arrays.namespace(weights)
        unit = xp.eye(weights.shape[0], dtype=weights.dtype, device=arrays.device(weights))
        columns = [
            arrays.like((numbers == a).astype(float), weights) for a in range(len(self.actions_))
        ]

        def backups(v: Array) -> Array:  # (n,) -> (n, a)
            target = rewards + self.gamma * mask * v
            return xp.stack([weights @ (c * target) for c in columns], axis=1)

        def evaluate(policy: Array) -> Array:  # (n,) -> (n,)
            followed = arrays.like(numbers, policy)[None, :] == policy[:, None]
            chosen = xp.where(followed, weights, xp.zeros_like(weights))
            system = unit - self.gamma * chosen * mask[None, :]
            return linalg.solve(system, chosen @ rewards, owner=self._owner, cure=ENDLESS)

        self.next_values_, self.n_rounds_ = policy_iteration(backups, evaluate, weights)
        self.weights_ = rewards + self.gamma * mask * self.next_values_
        return self

    def _averages(self, x: Array) -> Iterator[Array]:
        """Q(x, a) = Σ_k κ_a(x, s_k) (r_k + γ m_k V(s'_k)), tile by tile."""
        xp = arrays.namespace(x)
        for start in range(0, int(x.shape[0]), TILE):
            tile = x[start : start + TILE, :]
            yield xp.stack([self._average(tile, rows) for rows in self._members], axis=1)

    def _average(self, x: Array, rows: np.ndarray) -> Array:
        weights = averaging_weights(self.kernel_, x, self._points_of(rows), self._owner)
        xp = arrays.namespace(x)
        return weights @ xp.take(self.weights_, arrays.like(rows, x, xp.int64), axis=0)
