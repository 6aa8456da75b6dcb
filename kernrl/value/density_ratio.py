"""Minimax weight learning: how much more often a policy would be where the data are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram
from kernrl.value.bellman_loss import damped_least_squares
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.pair_rows import Weighted, pair_rows, points_of_pairs, start_pairs
from kernrl.value.representers import (
    expanded,
    require_memory,
    residual_gram,
    residual_values,
    squared_norm,
    wide,
)
from kernrl.value.system import FeatureSystem, Rows, ridged

Array = Any


@dataclass(frozen=True)
class StartedRows(Rows):
    """Rows that know the pairs (s₀, π(s₀)) their episodes start from."""

    initial: tuple[Weighted, ...] = ()


class MWL(KernelEstimator):
    """Minimax weight learning: the density ratio w(z) = d_π(z) / d_data(z) of a policy's visits.

    d_π = (1 − γ) Σ_t γᵗ P_π(z_t = z) is the discounted occupancy from the initial states. For every
    Q, E_data[w(z)(Q(z) − γ m Q(z', π))] = (1 − γ) E[Q(s₀, π)]; with both w and Q in the RKHS of
    one kernel, g_i = k(z_i, ·) − γ m_i Σ_a π(a|s'_i) k((s'_i, a), ·) and μ₀ the embedding of
    (s₀, π), the worst violation over the unit ball plus a ridge is

        min_w ‖n⁻¹ Σ_i w(z_i) g_i − (1 − γ)μ₀‖² + λ‖w‖²,    w = Σ_j c_j k(z_j, ·),
        (B K / n² + λI) c = (1 − γ) h / n,    B_ij = ⟨g_i, g_j⟩, h_i = ⟨g_i, μ₀⟩.

    Uehara, Huang & Jiang (2020). With Delta() it is the tabular ratio. With features, w = φᵀc and
    Q in their span: min ‖Aᵀc/n − (1 − γ)φ₀‖² + λ‖c‖² with KLSTDQ's A, by QR.
    The value is that of MQL with equal kernel and ridge, exactly.

    The ratio is not forced to be positive. Past a terminal state d_π has no mass, so its mean over
    the data is below 1 where episodes terminate.

    ridge: λ ≥ 0 as it stands (no n), on squared eigenvalues: about KLSTDQ's squared.
    gamma in [0, 1). kernel, policy, features, device: KLSTDQ's; with policy=None the initial
    actions are those taken at the starts of episodes.
    Cost O(n³) and 6 n² numbers; with features O(n m²) and O(m²).

    Learnt: weights_ (n,) or (m,), value_ = (1 − γ)⁻¹ n⁻¹ Σ w(z_i) r_i (the policy's discounted
    return from the initial states); support_, kernel_, features_, n_transitions_.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0]], [1.0], [[0.0]], [False], actions=[0], next_actions=[0])
    >>> ratio = MWL(Delta(), gamma=0.5, ridge=0.0).fit(t)
    >>> ratio.predict([[0.0, 0.0]]), ratio.value_
    (array([1.]), 2.0)
    """

    _given: Array = None  # the initial states that fit was given

    def __init__(
        self,
        kernel: Kernel,
        policy: Any = None,
        gamma: float = 0.99,
        ridge: float = 1e-6,
        features: Any = None,
        device: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.device = device

    def fit(self, X: Any, y: None = None, initial_states: Array = None) -> Self:
        """Learn from transitions, or chunks of them; states the policy starts from, (k, d).

        initial_states=None takes the first state of every episode of X, whatever chunk it is in;
        a shuffled subset of rows has other first states, so give them there.
        """
        self._given = initial_states
        return super().fit(X)

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """w(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        return self._values(points_of_pairs(self._owner, states, actions))

    def score(self, X: Transitions, y: None = None) -> float:
        """−‖n⁻¹ Σ_i w(z_i) g_i − (1 − γ)μ₀‖² on X: the violation of the equation of the occupancy.

        O(n²) work in tiles.
        """
        checks.fitted(self, "weights_")
        rows = self._rows(transitions(self._owner, X))
        kernel = self.kernel_ if self.features_ is None else self.features_.kernel_
        double = wide(rows)
        ratio = arrays.like(self._values(rows.points), double.rewards)
        flow = expanded(ratio / len(rows), double, self.gamma)
        start = [((self.gamma - 1) * u, z) for u, z in _averaged([rows.initial])]
        return -squared_norm(kernel, [*flow, *start])

    def td_errors(self, X: Transitions) -> Any:
        """Refused: a density ratio is no value function."""
        checks.fail(self._owner, "a density ratio has no TD errors", cure="Use MQL or KLSTDQ.")

    # ---------------------------------------------------------------- the parts of a fit

    def _check(self) -> None:
        super()._check()
        checks.real(self._owner, "gamma", self.gamma, at_least=0.0, below=1.0)

    def _rows(self, t: Transitions) -> StartedRows:
        rows = pair_rows(self._owner, self.policy, t)
        initial = start_pairs(self._owner, self.policy, t, self._given)
        return StartedRows(rows.points, rows.rewards, rows.starts, rows.following, initial)

    def _continued(self, rows: Rows) -> Rows:
        rows = super()._continued(rows)
        assert isinstance(rows, StartedRows)
        if self._given is not None:
            return rows
        initial = tuple((u[1:], z[1:, :]) for u, z in rows.initial)  # the first is no s₀
        return dataclasses.replace(rows, initial=initial)

    def _prepare(self, rows: Rows) -> None:
        self._initial: list[tuple[Weighted, ...]] = []
        super()._prepare(rows)

    def _absorb(self, rows: Rows) -> None:
        assert isinstance(rows, StartedRows)
        super()._absorb(rows)
        if self._given is None or not self._initial:  # given states are the same in every chunk
            self._initial.append(rows.initial)

    def _solve_rows(self, rows: Rows) -> None:
        require_memory(self._owner, rows, 6)
        rows = wide(rows)
        n, k = len(rows), gram(self.kernel_, rows.points)
        b = residual_gram(self.kernel_, rows, self.gamma, k)
        start = residual_values(self.kernel_, rows, self.gamma, _averaged(self._initial))
        target = (1 - self.gamma) * start
        self.weights_ = linalg.solve(ridged(b @ k / n, n * self.ridge), target, owner=self._owner)
        self.support_ = rows.points
        self.value_ = float(rows.rewards @ (k @ self.weights_)) / n / (1 - self.gamma)

    def _solve_system(self, system: FeatureSystem) -> None:
        n, gamma = system.n, self.gamma
        start = sum(
            u @ arrays.like(self.features_.transform(z), system.matrix)
            for u, z in _averaged(self._initial)
        )
        self.weights_ = damped_least_squares(
            system.matrix.T / n, (1 - gamma) * start, self.ridge, owner=self._owner
        )
        self.value_ = float(system.target @ self.weights_) / n / (1 - gamma)


def _averaged(parts: list[tuple[Weighted, ...]]) -> list[Weighted]:
    """One measure of total mass 1 from the pairs that episodes start with, in float64."""
    measure = [pair for part in parts for pair in part]
    xp = arrays.namespace(measure[0][0])
    measure = [(xp.astype(u, xp.float64), xp.astype(z, xp.float64)) for u, z in measure]
    total = sum(float(xp.sum(u)) for u, _ in measure)
    return [(u / total, z) for u, z in measure]
