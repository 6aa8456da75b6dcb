"""Why a kernel value function is wrong, and whether its system can be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.gram import gram
from kernrl.value.estimator import KernelEstimator, points, transitions
from kernrl.value.lstd import KLSTD, KLSTDQ
from kernrl.value.system import FeatureSystem, Rows, ridged, solve_exact, values

Array = Any


class BellmanErrors(NamedTuple):
    """TD errors of held-out transitions, and the two models they come from: total = sum."""

    total: np.ndarray  # (n,): r + γ m V(z') − V(z)
    reward: np.ndarray  # (n,): r − r̂(z)
    transition: np.ndarray  # (n,): γ (m V(z') − V̂'(z))

    def summary(self) -> dict[str, float]:
        """Root mean squares, and the correlation of the two parts (negative: they cancel)."""
        parts = {name: float(np.sqrt(np.mean(x**2))) for name, x in self._asdict().items()}
        spread = np.std(self.reward) * np.std(self.transition)
        moved = np.mean((self.reward - self.reward.mean()) * self.transition)
        return {**parts, "correlation": float(moved / spread) if spread > 0 else 0.0}


def bellman_errors(
    estimator: KernelEstimator, train: Transitions, held_out: Transitions | None = None
) -> BellmanErrors:
    """The Bellman error of a fitted KLSTD or KLSTDQ as reward error plus transition error.

    Kernel LSTD is ridge regression twice: r̂(z) = k(z)ᵀ(K + nλI)⁻¹r models the reward and
    V̂'(z) = k(z)ᵀ(K + nλI)⁻¹(m V(z')) the next value, and V = r̂ + γV̂'. So

        r + γ m V(z') − V(z) = [r − r̂(z)] + γ [m V(z') − V̂'(z)]

    by Taylor & Parr (2009).

    train: the rows of the fit. held_out: where errors are looked at; None for `train`, where all
    three go to 0 with λ and say little. Works for features as well; trace_decay must be 0.
    Cost: a fit.

    >>> from kernrl.kernels.stationary import RBF
    >>> x = np.linspace(0, 1, 9)
    >>> t = Transitions(x, x, x**2, np.zeros(9))
    >>> errors = bellman_errors(KLSTD(RBF(1.0), 0.5).fit(t), t)
    >>> bool(np.allclose(errors.total, errors.reward + errors.transition))
    True
    """
    owner = "bellman_errors"
    _require_lstd(owner, estimator)
    rows = estimator._rows(transitions(owner, train))
    judged = estimator._rows(transitions(owner, train if held_out is None else held_out))
    ahead = _ahead(estimator, rows)
    targets = np.stack((np.asarray(arrays.host(rows.rewards), np.float64), ahead), axis=1)
    models = _regressed(estimator, rows, arrays.like(targets, rows.points, _float64(rows)))
    fits = np.asarray(arrays.host(_at(estimator, rows, models, judged.points)))
    here = np.asarray(arrays.host(estimator._values(judged.points)), np.float64)
    gap = np.max(np.abs(fits[:, 0] + estimator.gamma * fits[:, 1] - here))
    if not gap <= 1e-3 * (1.0 + np.max(np.abs(here))):
        rule = "train must be the rows that the estimator was fitted on"
        checks.fail(owner, rule, f"values that differ by {gap:.1e}")
    reward = np.asarray(arrays.host(judged.rewards), np.float64) - fits[:, 0]
    transition = estimator.gamma * (_ahead(estimator, judged) - fits[:, 1])
    return BellmanErrors(reward + transition, reward, transition)


class RidgePath(NamedTuple):
    """Root mean squares of held-out errors along a path of ridges."""

    ridges: np.ndarray  # (k,)
    total: np.ndarray  # (k,)
    reward: np.ndarray  # (k,)
    transition: np.ndarray  # (k,)


def ridge_path(
    estimator: KernelEstimator, train: Transitions, held_out: Transitions, ridges: Iterable[float]
) -> RidgePath:
    """`bellman_errors` on held-out rows for each ridge, for choosing λ. A clone is fitted for each.

    Where the reward error rises first, λ smooths the reward away; where the transition error is
    large at small λ, the next state's model is overfitted. Errors contain the noise of held-out
    rewards and next states, the latter in proportion to V's own variation.

    >>> from kernrl.kernels.stationary import RBF
    >>> x = np.linspace(0, 1, 30)
    >>> t = Transitions(x, np.sin(6 * x), x**2, np.zeros(30))
    >>> path = ridge_path(KLSTD(RBF(0.2), 0.5), t[::2], t[1::2], [1e-6, 1e-3, 1.0])
    >>> float(path.ridges[path.total.argmin()])
    1e-06
    """
    ridges = [checks.real("ridge_path", "ridge", x, at_least=0.0) for x in ridges]
    checks.require(len(ridges) > 0, "ridge_path", "there must be at least one ridge", "none")
    rows = []
    for ridge in ridges:
        fitted = clone(estimator).set_params(ridge=ridge).fit(train)
        summary = bellman_errors(fitted, train, held_out).summary()
        rows.append([summary[name] for name in ("total", "reward", "transition")])
    return RidgePath(np.array(ridges), *np.array(rows).T)


class Contraction(NamedTuple):
    """‖α(z)‖₁ of the ridge smoother at the points where backups are evaluated."""

    norms: np.ndarray  # (q,)
    largest: float
    factor: float  # γ·largest: below 1, the fitted Bellman iteration contracts
    guaranteed: bool


def contraction(
    estimator: KernelEstimator, train: Transitions, states: Array | None = None
) -> Contraction:
    """Whether fitted value iteration, "regress the Bellman backup", would contract.

    α(z) = (K + nλI)⁻¹k(z) are the weights that kernel ridge regression gives its n targets at z, so
    the regressed backup T̂ has ‖T̂V − T̂V'‖∞ ≤ γ sup_z ‖α(z)‖₁ ‖V − V'‖∞ and γ‖α‖₁ < 1 guarantees
    convergence (to KLSTD, which needs no iteration). At small λ it fails off the data; an averager
    has ‖α‖₁ = 1 everywhere. Compare Chowdhary et al. (2014) on GP Q-learning.

    train: the rows of the fit. states: (q, d) where to look; None for the next states of `train`
    (pairs, for KLSTDQ). O(n³), with features O(n m²).

    >>> from kernrl.kernels.stationary import RBF
    >>> x = np.linspace(0, 1, 20)
    >>> t = Transitions(x, x, x + 0.1, np.zeros(20))
    >>> contraction(KLSTD(RBF(0.2), 0.5, ridge=1.0).fit(t), t).guaranteed
    True
    """
    owner = "contraction"
    _require_lstd(owner, estimator)
    rows = estimator._rows(transitions(owner, train))
    if states is None:
        xp = arrays.namespace(rows.points)
        where = xp.concat([z for _, z in rows.following], axis=0)
    else:
        where = points(owner, states)
    xp = arrays.namespace(rows.points)
    unit = xp.eye(len(rows), dtype=xp.float64, device=arrays.device(rows.points))
    alpha = _at(estimator, rows, _regressed(estimator, rows, unit), where)
    norms = np.sum(np.abs(np.asarray(arrays.host(alpha), np.float64)), axis=1)
    largest = float(np.max(norms))
    factor = estimator.gamma * largest
    return Contraction(norms, largest, factor, factor < 1.0)


class Spectrum(NamedTuple):
    """Of the matrix that a fit inverts."""

    eigenvalues: np.ndarray  # (n,) or (m,) complex, by falling magnitude
    smallest_real: float  # min Re: below 0, the system passed through singular ones as λ fell
    smallest: float  # min |λ|
    condition: float  # ‖A‖₁‖A⁻¹‖₁


def spectrum(estimator: KernelEstimator, train: Transitions) -> Spectrum:
    """Eigenvalues and condition of K + nλI − γK', or with features of Σ φ(φ − γφ')ᵀ + nλI.

    K is positive semi-definite, K − γK' need not be: where next states lie off the trajectory its
    spectrum may cross 0 as λ falls, and the value function has a pole there. O(n³), with features
    O(m³) and a pass over the rows.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [0.0]], [False, False])
    >>> spectrum(KLSTD(Delta(), 0.5, ridge=0.0).fit(t), t).eigenvalues.real
    array([1.5, 0.5])
    """
    owner = "spectrum"
    _require_lstd(owner, estimator)
    rows = estimator._rows(transitions(owner, train))
    if estimator.features_ is None:
        wide = arrays.namespace(rows.points).float64
        z = arrays.like(rows.points, rows.points, wide)
        matrix = gram(estimator.kernel_, z)
        for c, x in rows.following:
            following = gram(estimator.kernel_, arrays.like(x, z), z)
            matrix = matrix - estimator.gamma * arrays.like(c, z)[:, None] * following
    else:
        system = FeatureSystem(estimator.features_, estimator.gamma)
        system.add(rows)
        matrix = system.matrix
    matrix = np.asarray(arrays.host(ridged(matrix, len(rows) * estimator.ridge)))
    eigenvalues = np.linalg.eigvals(matrix).astype(complex)
    eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues), kind="stable")]
    return Spectrum(
        eigenvalues,
        float(eigenvalues.real.min()),
        float(np.abs(eigenvalues[-1])),
        linalg.condition_estimate(matrix),
    )


# ---------------------------------------------------------------- regressions on the same rows


def _require_lstd(owner: str, estimator: Any) -> None:
    if not isinstance(estimator, KLSTD | KLSTDQ):
        rule = "the estimator must be a KLSTD or KLSTDQ"
        checks.fail(owner, rule, type(estimator).__name__, error=TypeError)
    checks.fitted(estimator, "weights_")
    if estimator.trace_decay:
        checks.fail(owner, "trace_decay must be 0", estimator.trace_decay)


def _regressed(estimator: KernelEstimator, rows: Rows, targets: Array) -> Array:
    """Weights of ridge regressions on the rows: (K + nλI)⁻¹Y (n, k), or in features (m, k)."""
    rows = dataclasses.replace(rows, rewards=targets)
    owner = type(estimator).__name__
    if estimator.features_ is None:
        return solve_exact(estimator.kernel_, rows, 0.0, estimator.ridge, 0.0, owner=owner)
    system = FeatureSystem(estimator.features_, 0.0)
    system.add(dataclasses.replace(rows, following=()))
    return system.solve(estimator.ridge, owner=owner)


def _at(estimator: KernelEstimator, rows: Rows, weights: Array, z: Array) -> Array:
    support = rows.points if estimator.features_ is None else estimator.support_
    return values(estimator.kernel_, estimator.features_, support, weights, z)


def _ahead(estimator: KernelEstimator, rows: Rows) -> np.ndarray:  # -> (n,)
    """m V(z'), summed over the points that follow."""
    parts = [arrays.host(c) * arrays.host(estimator._values(z)) for c, z in rows.following]
    return np.asarray(sum(parts), np.float64)


def _float64(rows: Rows) -> Any:
    return arrays.namespace(rows.points).float64
