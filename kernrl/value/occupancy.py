"""The kernel successor representation: the inverse of the one system, kept."""

from __future__ import annotations

import dataclasses
from typing import Any

from kernrl import arrays, checks, linalg
from kernrl.kernels.base import Kernel
from kernrl.value.estimator import KernelEstimator, points
from kernrl.value.system import FeatureSystem, Rows, ridged, solve_exact, state_rows, values

Array = Any


class SuccessorRepresentation(KernelEstimator):
    """ψ(s) = k(s)ᵀ(K + nλI − γK')⁻¹: how much each transition's reward counts for V(s).

    V(s) = ψ(s)ᵀr for *any* rewards r of the same n transitions, by one product and no solve. On
    tables (Delta, λ → 0, each state once) ψ is the successor representation (I − γP)⁻¹ of Dayan
    (1993); without terminal states its rows then sum to 1/(1 − γ). With γ = 0 it is kernel ridge
    regression's smoother α(s) = k(s)ᵀ(K + nλI)⁻¹.

    The parameters are KLSTD's, without traces. Cost: KLSTD's and the n right-hand sides: O(n³) and
    n² numbers in the exact form, O(n m²) and nm numbers with features.

    Learnt: resolvent_ (n, n), or (m, n) with features; rewards_ (n,); weights_ =
    resolvent_ r, those of KLSTD; support_, kernel_, features_, n_transitions_.

    >>> from kernrl.data.transitions import Transitions
    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> SuccessorRepresentation(Delta(), gamma=0.5, ridge=0.0).fit(t).occupancy([[0.0], [1.0]])
    array([[1. , 0.5],
           [0. , 1. ]])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        features: Any = None,
        device: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.device = device

    def predict(self, states: Array) -> Array:  # (q, d) -> (q,)
        """V(s) under the rewards of the fit."""
        checks.fitted(self, "weights_")
        return self._values(points(self._owner, states))

    def occupancy(self, states: Array) -> Array:  # (q, d) -> (q, n)
        """ψ(s), a row for each state and an entry for each transition of the fit. O(qn²)."""
        checks.fitted(self, "resolvent_")
        states = points(self._owner, states)
        width = int(states.shape[1])
        if width != self.n_features_in_:
            checks.fail(self._owner, f"states must have {self.n_features_in_} columns", width)
        return values(self.kernel_, self.features_, self.support_, self.resolvent_, states)

    def reevaluate(self, rewards: Array, states: Array) -> Array:  # (n,) or (n, k) -> (q,), (q, k)
        """V(s) under other rewards for the same transitions, or under k of them: O(nk(n + q))."""
        checks.fitted(self, "resolvent_")
        rewards = arrays.floating(arrays.take(self._owner, "rewards", rewards))
        checks.ndim(self._owner, "rewards", rewards, (1, 2), "(n,) or (n, k)")
        n = self.n_transitions_
        if rewards.shape[0] != n:
            rule = f"rewards must have one row for each of the {n} transitions"
            checks.fail(self._owner, rule, checks.shape(rewards))
        checks.finite(self._owner, "reward", rewards)
        weights = self.resolvent_ @ arrays.like(rewards, self.resolvent_)
        states = points(self._owner, states)
        return values(self.kernel_, self.features_, self.support_, weights, states)

    # ---------------------------------------------------------------- the parts of a fit

    _rows = staticmethod(state_rows)

    def _forget(self) -> None:
        super()._forget()
        if hasattr(self, "resolvent_"):
            del self.resolvent_

    def _system_of(self, features: Any) -> FeatureSystem:
        return ResolventSystem(features, self.gamma)

    def _solve_rows(self, rows: Rows) -> None:
        xp = arrays.namespace(rows.points)
        unit = xp.eye(len(rows), dtype=xp.float64, device=arrays.device(rows.points))
        units = dataclasses.replace(rows, rewards=unit)  # every transition rewarded alone
        self.resolvent_ = solve_exact(
            self.kernel_, units, self.gamma, self.ridge, 0.0, owner=self._owner
        )
        self._keep(rows.rewards)

    def _solve_system(self, system: FeatureSystem) -> None:
        assert isinstance(system, ResolventSystem)
        self.resolvent_ = system.resolvent(self.ridge, owner=self._owner)
        self._keep(system.all_rewards())

    def _keep(self, rewards: Array) -> None:
        self.rewards_ = arrays.like(rewards, self.resolvent_)
        self.weights_ = self.resolvent_ @ self.rewards_


class ResolventSystem(FeatureSystem):
    """A FeatureSystem that keeps φ of every row, so as to solve (A + nλI) X = Φᵀ: O(nm) memory."""

    def __init__(self, features: Any, gamma: float) -> None:
        super().__init__(features, gamma)
        self.columns: list[Array] = []  # (m, b) each
        self.rewards: list[Array] = []

    def _accumulate(self, phi: Array, difference: Array, rewards: Array, starts: Array) -> None:
        super()._accumulate(phi, difference, rewards, starts)
        xp = arrays.namespace(phi)
        self.columns.append(xp.astype(phi.T, xp.float64, copy=False))
        self.rewards.append(rewards)

    def all_rewards(self) -> Array:  # -> (n,)
        """The rewards of every row so far."""
        return arrays.namespace(self.rewards[0]).concat(self.rewards)

    def resolvent(self, ridge: float, *, owner: str) -> Array:  # -> (m, n)
        """(A + nλI)⁻¹Φᵀ."""
        xp = arrays.namespace(self.matrix)
        right = xp.concat(self.columns, axis=1)
        return linalg.solve(ridged(self.matrix, self.n * ridge), right, owner=owner)
