"""The kernel Bellman loss, its statistics, the function that minimises it, and a scorer by it.

L(V) = E[δ k(z, z̄) δ̄] over two independent transitions is 0 only where the Bellman equation holds
(for a strictly positive definite k), and needs no second sample of a next state, unlike the mean
squared TD error. Feng, Li & Liu (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import GramOperator, gram
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.pair_rows import pair_rows, points_of_pairs
from kernrl.value.representers import expanded, require_memory, residual_gram, wide
from kernrl.value.system import FeatureSystem, Rows, ridged, state_rows

Array = Any

STATISTICS = ("U", "V")


def kernel_bellman_loss(
    kernel: Kernel, points: Array, td_errors: Array, *, statistic: str = "V"
) -> float:  # (n, d), (n,)
    """How far TD errors δ at points z are from averaging to 0 everywhere, in the eyes of a kernel.

    "V": n⁻² Σ_ij δ_i k(z_i, z_j) δ_j ≥ 0, biased upward by the noise on its diagonal.
    "U": (n(n−1))⁻¹ Σ_{i≠j}, unbiased for E[δ k(z, z̄) δ̄], and negative at times.
    Feng, Li & Liu (2019). points are states for V, pairs (s, a) for Q; δ = r + γ m V(z') − V(z).
    A "median" length scale is resolved on `points`. O(n²) work in tiles, O(n) memory.

    >>> from kernrl.kernels.base import Delta
    >>> kernel_bellman_loss(Delta(), [[0.0], [0.0], [1.0]], [1.0, -1.0, 0.5])
    0.027777777777777776
    """
    owner = "kernel_bellman_loss"
    checks.choice(owner, "statistic", statistic, STATISTICS)
    points = arrays.columns(arrays.take(owner, "points", points, dtype="float64"))
    errors = arrays.take(owner, "td_errors", td_errors, dtype="float64")
    checks.ndim(owner, "td_errors", errors, 1, "(n,)")
    checks.finite(owner, "TD error", errors)
    checks.not_empty(owner, "points", points)
    n = int(points.shape[0])
    if errors.shape[0] != n:
        rule = f"td_errors must have as many rows as points ({n})"
        checks.fail(owner, rule, int(errors.shape[0]))
    kernel = kernel.resolve(points, rng=0)
    total = float(errors @ (GramOperator(kernel, points) @ errors))
    if statistic == "V":
        return total / n**2
    checks.require(n > 1, owner, "the U-statistic needs at least two rows", n)
    diagonal = float(arrays.namespace(errors).sum(errors * errors * kernel.diagonal(points)))
    return (total - diagonal) / (n * (n - 1))


def bellman_scorer(kernel: Kernel, *, statistic: str = "U") -> Callable[..., float]:
    """A scikit-learn scorer: minus the kernel Bellman loss of held-out transitions.

    Unlike −mean squared TD error it does not contain the variance of the transitions, so it ranks
    estimators by their Bellman residual. Use one kernel for all candidates, wide enough to see
    smooth residuals; a "median" length scale is resolved on each held-out set. Of a Pipeline the
    last step is judged, on the states that it sees.

    >>> from kernrl.kernels.stationary import RBF
    >>> from kernrl.value.lstd import KLSTD
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> score = bellman_scorer(RBF(1.0), statistic="V")
    >>> score(KLSTD(RBF(1.0), 0.5, ridge=1e-9).fit(t), t) > -1e-9
    True
    """
    checks.choice("bellman_scorer", "statistic", statistic, STATISTICS)

    def score(estimator: Any, X: Transitions, y: None = None) -> float:
        if isinstance(estimator, Pipeline):
            X, estimator = estimator[:-1].transform(X), estimator[-1]
        rows_of = getattr(estimator, "_rows", state_rows)  # pairs where the estimator is of Q
        points = rows_of(transitions("bellman_scorer", X)).points
        errors = estimator.td_errors(X)
        return -kernel_bellman_loss(kernel, arrays.host(points), errors, statistic=statistic)

    return score


class MQL(KernelEstimator):
    """Minimax Q-learning: the Q in the RKHS that minimises the kernel Bellman loss plus λ‖Q‖².

    min_Q n⁻² Σ_ij δ_i k(z_i, z_j) δ_j + λ‖Q‖² (V-statistic): the Q whose Bellman residual no
    function of the RKHS' unit ball can see. Uehara, Huang & Jiang (2020); Feng, Li & Liu (2019).
    By the representer theorem Q = Σ_i c_i g_i with g_i = k(z_i, ·) − γ m_i Σ_a π(a|s'_i)
    k((s'_i, a), ·), and with B_ij = ⟨g_i, g_j⟩, all of it evaluated on Z and Z',

        (K B / n² + λI) c = K r / n².

    With features, Q = φᵀw and min_w ‖(b − Aw)/n‖² + λ‖w‖² with KLSTDQ's A and b, by QR: as
    λ → 0 it is KLSTDQ. Its value at the start is that of MWL with equal kernel and ridge, exactly.

    ridge: λ ≥ 0 as it stands (no n: the loss is a mean already); it acts on squared eigenvalues,
    so expect to use KLSTDQ's ridge squared. kernel, policy, gamma, features, device: KLSTDQ's.
    Cost O(n³) and 6 n² numbers; with features O(n m²) and O(m²).

    Learnt: weights_ and support_ over Z and Z' in the exact form, weights_ (m,) with features;
    loss_, the V-statistic at the minimum, with k(z, z̄) = φ(z)ᵀφ(z̄) in the feature form; kernel_,
    features_, n_transitions_.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0]], [1.0], [[0.0]], [False], actions=[0], next_actions=[0])
    >>> MQL(Delta(), gamma=0.5, ridge=0.0).fit(t).predict([[0.0, 0.0]])
    array([2.])
    """

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

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """Q(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        return self._values(points_of_pairs(self._owner, states, actions))

    def _rows(self, t: Transitions) -> Rows:
        return pair_rows(self._owner, self.policy, t)

    def _solve_rows(self, rows: Rows) -> None:
        require_memory(self._owner, rows, 6)
        rows = wide(rows)
        n, k = len(rows), gram(self.kernel_, rows.points)
        b = residual_gram(self.kernel_, rows, self.gamma, k)
        c = linalg.solve(ridged(k @ b / n, n * self.ridge), k @ rows.rewards / n, owner=self._owner)
        residual = rows.rewards - b @ c
        self.loss_ = float(residual @ (k @ residual)) / n**2
        measure = expanded(c, rows, self.gamma)
        xp = arrays.namespace(c)
        self.weights_ = xp.concat([u for u, _ in measure])
        self.support_ = xp.concat([z for _, z in measure], axis=0)

    def _solve_system(self, system: FeatureSystem) -> None:
        matrix, target = system.matrix / system.n, system.target / system.n
        self.weights_ = damped_least_squares(matrix, target, self.ridge, owner=self._owner)
        residual = target - matrix @ self.weights_
        self.loss_ = float(residual @ residual)


def damped_least_squares(matrix: Array, target: Array, ridge: float, *, owner: str) -> Array:
    """argmin_w ‖Mw − t‖² + λ‖w‖² for a square M (m, m), by QR of [M; √λ I]; -> (m,).

    The normal equations would square the condition number.
    """
    xp = arrays.namespace(matrix)
    m = int(matrix.shape[0])
    eye = xp.eye(m, dtype=matrix.dtype, device=arrays.device(matrix))
    q, r = xp.linalg.qr(xp.concat([matrix, float(np.sqrt(ridge)) * eye], axis=0))
    return linalg.solve(r, q[:m, :].T @ target, owner=owner)
