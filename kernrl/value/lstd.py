"""Kernel least-squares temporal differences: KLSTD for V, KLSTDQ for Q."""

from __future__ import annotations

from typing import Any

from kernrl import checks
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.estimator import KernelEstimator, points
from kernrl.value.pair_rows import pair_rows, points_of_pairs
from kernrl.value.system import Rows, state_rows

Array = Any


class KLSTD(KernelEstimator):
    """Kernel LSTD(λ): V(s) = Σ_j w_j k(s, s_j), the fixed point of the projected Bellman operator.

    w = (K + nλI − γK')⁻¹ r with K'_ij = m_i k(s'_i, s_j), m_i = 0 where terminated (never where
    only truncated). Xu, Hu & Lu (2007), who have no ridge; with it, Duan, Wang & Wainwright (2024).
    With Delta() it is tabular LSTD, with Linear() linear LSTD; GPTD's mean has the same form
    (Taylor & Parr, 2009).

    kernel: on states; `length_scale="median"` is resolved on the states of the fit.
    gamma: discount factor in [0, 1]. ridge: λ ≥ 0, multiplied by n inside.
    features: None for the exact form, O(n³) work and 24n² bytes; Nystroem or RandomFeatures for
    O(n m²) work and O(m²) memory. trace_decay: λ of TD(λ); above 0, rows must be in time order.
    device: "auto", "cpu" or "cuda".
    solver: of the exact form, "auto", "direct" (LU) or "iterative" (GMRES with landmarks as its
    preconditioner: O(n²) work a step, no n×n stored, relative residual 1e-8); see value.iterative.

    Learnt: weights_ (n,) or (m,), support_ (points the weights belong to, None for random
    features), kernel_, features_, n_transitions_, solver_ (how it was solved, with the residual).

    >>> import numpy as np
    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> KLSTD(Delta(), gamma=0.5, ridge=0.0).fit(t).predict([[0.0], [1.0]])
    array([0.5, 1. ])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        features: Any = None,
        trace_decay: float = 0.0,
        device: str = "auto",
        solver: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.trace_decay = trace_decay
        self.device = device
        self.solver = solver

    def _rows(self, t: Transitions) -> Rows:
        return state_rows(t)

    def predict(self, states: Array) -> Array:  # (n, d) -> (n,)
        """V(s) for each row, in the library of `states`; O(nm), tiles only."""
        checks.fitted(self, "weights_")
        return self._values(points(self._owner, states))


class KLSTDQ(KernelEstimator):
    """Kernel LSTD-Q: Q^π(z) = Σ_j w_j k(z, z_j) on pairs z = (s, a), for a fixed policy π.

    The system of KLSTD with rows z and K'_ij = m_i Σ_a π(a|s'_i) k((s'_i, a), z_j).
    Lagoudakis & Parr (2003); Xu, Hu & Lu (2007).

    kernel: on rows (s, a), the action in the last columns; see StateAction.
    policy: None takes `next_actions` of the transitions (SARSA); a callable s' ↦ actions, or
    (discrete actions only) s' ↦ probabilities (n, a) that sum to 1; an object with `predict`.
    The other parameters are KLSTD's.
    """

    def __init__(
        self,
        kernel: Kernel,
        policy: Any = None,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        features: Any = None,
        trace_decay: float = 0.0,
        device: str = "auto",
        solver: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.trace_decay = trace_decay
        self.device = device
        self.solver = solver

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """Q(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        return self._values(points_of_pairs(self._owner, states, actions))

    def _rows(self, t: Transitions) -> Rows:
        return pair_rows(self._owner, self.policy, t)
