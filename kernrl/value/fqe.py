"""Kernel fitted Q evaluation: ridge regression on the Bellman backup, again and again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram
from kernrl.value.estimator import KernelEstimator
from kernrl.value.pair_rows import pair_rows, points_of_pairs
from kernrl.value.representers import ahead_gram, require_memory, wide
from kernrl.value.system import FeatureSystem, Rows, ridged

Array = Any

GROWTH = 1e8  # a change this many times the smallest so far is no transient


class KernelFQE(KernelEstimator):
    """Kernel fitted Q evaluation of a policy: Q_{k+1} = ridge regression of r + γ Q_k(z') on z.

    w_{k+1} = (K + nλI)⁻¹(r + γK'w_k), w_0 = 0, with K'_ij = m_i Σ_a π(a|s'_i) k((s'_i, a), z_j).
    Fitted Q iteration of Farahmand, Ghavamzadeh, Szepesvári & Mannor (2009) for a fixed policy
    (Le, Voloshin & Yue, 2019). Its fixed point is KLSTDQ's w, which one solve gives; this is for
    the iteration itself: few rounds are a horizon, and regularise.

    The regression need not contract in any norm: where γ(K + nλI)⁻¹K' has an eigenvalue beyond 1
    the iteration diverges, though KLSTDQ's system may be solvable. fit watches ‖w_{k+1} − w_k‖: it
    raises when that grows without end, and warns when `tolerance` is not met.

    kernel, policy, gamma, ridge, features, device: KLSTDQ's. n_iterations: the most rounds.
    tolerance: of ‖w_{k+1} − w_k‖ / ‖w_{k+1}‖; what is left of the error is up to rate/(1 − rate)
    times that. None: exactly n_iterations rounds, without a warning.
    One factorisation, O(n³), serves all rounds of O(n²); with features O(n m²) once, O(m²) a round.

    Learnt: weights_ (n,) or (m,), n_iterations_, change_ (the last relative change), rate_ (by
    which changes shrank at the end), converged_; support_, kernel_, features_, n_transitions_.

    >>> import numpy as np
    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0]], [1.0], [[0.0]], [False], actions=[0], next_actions=[0])
    >>> KernelFQE(Delta(), gamma=0.5, ridge=0.0, tolerance=1e-9).fit(t).predict([[0.0, 0.0]])
    array([2.])
    """

    def __init__(
        self,
        kernel: Kernel,
        policy: Any = None,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        features: Any = None,
        n_iterations: int = 5000,
        tolerance: float | None = 1e-6,
        device: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.n_iterations = n_iterations
        self.tolerance = tolerance
        self.device = device

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """Q(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        return self._values(points_of_pairs(self._owner, states, actions))

    def _rows(self, t: Transitions) -> Rows:
        return pair_rows(self._owner, self.policy, t)

    def _check(self) -> None:
        super()._check()
        checks.integer(self._owner, "n_iterations", self.n_iterations, at_least=1)
        if self.tolerance is not None:
            checks.real(self._owner, "tolerance", self.tolerance, above=0.0)

    def _solve_rows(self, rows: Rows) -> None:
        require_memory(self._owner, rows, 4)
        rows = wide(rows)
        n, k = len(rows), gram(self.kernel_, rows.points)
        factor = linalg.cholesky(ridged(k, n * self.ridge), owner=self._owner).lower
        ahead = self.gamma * ahead_gram(self.kernel_, rows)
        self._iterate(
            lambda w: linalg.solve_cholesky(factor, rows.rewards + ahead @ w), rows.rewards
        )

    def _system_of(self, features: Any) -> FeatureSystem:
        return RegressionSystem(features, self.gamma)

    def _solve_system(self, system: FeatureSystem) -> None:
        assert isinstance(system, RegressionSystem)
        self._iterate(system.backup(self.ridge, owner=self._owner), system.target)

    def _iterate(self, backup: Callable[[Array], Array], like: Array) -> None:
        """Set weights_ and the report: w ← backup(w) from 0, at most n_iterations times."""
        xp = arrays.namespace(like)
        norm = xp.linalg.vector_norm
        w, smallest, changes = xp.zeros_like(like), math.inf, [1.0, 1.0]
        for count in range(1, self.n_iterations + 1):
            before, w = w, backup(w)
            change, size = float(norm(w - before)), float(norm(w))
            changes = [changes[1], change]
            smallest = min(smallest, change) if change > 0 else smallest
            if not math.isfinite(change) or change > GROWTH * smallest:
                self._diverged(count, changes)
            if change <= (self.tolerance or 0.0) * size:
                break
        self.weights_, self.n_iterations_ = w, count
        self.change_ = change / size if size > 0 else 0.0
        self.rate_ = changes[1] / changes[0] if changes[0] > 0 else 0.0
        self.converged_ = change <= (self.tolerance or 0.0) * size
        if not self.converged_ and self.tolerance is not None:
            checks.warn(
                self._owner,
                f"the last of {count} iterations changed the weights by {self.change_:.1e}, above "
                f"the tolerance {self.tolerance:.0e}; changes shrink by {self.rate_:.4g} a round",
                "Raise n_iterations, or use KLSTDQ, which solves for the fixed point.",
                checks.ConditionWarning,
            )

    def _diverged(self, count: int, changes: list[float]) -> None:
        checks.fail(
            self._owner,
            "the iteration must contract",
            f"changes that grow {changes[1] / changes[0]:.3g}-fold at iteration {count}",
            "Raise ridge, lower gamma, or use KLSTDQ, whose system needs no contraction.",
        )


class RegressionSystem(FeatureSystem):
    """Streams rows into A = Σ φ(φ − γφ')ᵀ, C = Σ φφᵀ and b = Σ φr; O(n m²), O(m²) memory."""

    gram: Array | None = None  # (m, m)

    def _accumulate(self, phi: Array, difference: Array, rewards: Array, starts: Array) -> None:
        super()._accumulate(phi, difference, rewards, starts)
        xp = arrays.namespace(phi)
        gram = xp.astype(xp.matmul(phi.T, phi), xp.float64, copy=False)
        self.gram = gram if self.gram is None else self.gram + gram

    def backup(self, ridge: float, *, owner: str) -> Callable[[Array], Array]:
        """w ↦ (C + nλI)⁻¹(b + (C − A)w), with C − A = γ Σ φφ'ᵀ."""
        return ridge_backup(self.gram, self.matrix, self.target, self.n * ridge, owner=owner)


def ridge_backup(
    gram: Array, matrix: Array, target: Array, shift: float, *, owner: str
) -> Callable[[Array], Array]:
    """One round of fitted Q evaluation on sums: C, A (m, m), b (m,), nλ."""
    factor = linalg.cholesky(ridged(gram, shift), owner=owner).lower
    ahead = gram - matrix
    return lambda w: linalg.solve_cholesky(factor, target + ahead @ w)
