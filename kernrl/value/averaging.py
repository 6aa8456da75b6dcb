"""Kernel averagers: every value is a weighted mean of backups, so value iteration contracts.

κ(s, z_j) = k(s, z_j) / Σ_l k(s, z_l) ≥ 0, and Σ_j κ(s, z_j) = 1. A function whose values are such
means never exceeds what it averages (Gordon, 1995): with γ < 1 the approximate Bellman operator is
a γ-contraction in the maximum norm whatever the data, where ridge regression gives no guarantee.
Where every k(s, z_j) underflows to 0, the nearest z_j has all the weight: the limit of a Gaussian's
weights far from the data, so that the weights sum to one everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.distances import direct
from kernrl.kernels.gram import gram
from kernrl.value.estimator import points, transitions
from kernrl.value.system import state_rows

Array = Any

TILE = 1024  # rows whose weights are in memory at once
# Of a singular system: with γ = 1 the values of states that never lead to an end are not finite.
ENDLESS = "Pass gamma below 1, or transitions of which every state leads to a terminal one."
MAX_ROUNDS = 1000  # of policy iteration: policies only improve, and it ends in a handful


def averaging_weights(kernel: Kernel, x: Array, z: Array, owner: str = "averager") -> Array:
    """κ(x_i, z_j), rows at least 0 that sum to one: (q, d), (m, d) -> (q, m).

    Raises ValueError for a kernel that is negative anywhere on the points.
    """
    tile = require_positive(gram(kernel, x, z), owner)
    xp = arrays.namespace(tile)
    total = xp.sum(tile, axis=1)
    # Below the normal numbers a quotient has lost its digits, so "0" starts there.
    empty = total < xp.finfo(total.dtype).smallest_normal
    if bool(xp.any(empty)):
        tile = xp.where(empty[:, None], _nearest(x, z, tile.dtype), tile)
        total = xp.where(empty, xp.ones_like(total), total)
    return tile / total[:, None]


def require_positive(weights: Array, owner: str) -> Array:
    """The same weights, if none is negative."""
    xp = arrays.namespace(weights)
    if weights.shape[0] and (lowest := float(xp.min(weights))) < 0:
        cure = "Take a kernel that is positive everywhere, such as RBF or Matern."
        checks.fail(owner, "an averaging kernel must not be negative", f"{lowest:.3g}", cure)
    return weights


def wide(x: Array) -> Array:
    """x in float64: an averager's systems are solved in it whatever the data came in."""
    xp = arrays.namespace(x)
    return xp.astype(x, xp.float64, copy=False)


def _nearest(x: Array, z: Array, dtype: Any) -> Array:  # (b, d), (m, d) -> (b, m)
    """1 at the z_j nearest to x_i, 0 elsewhere."""
    xp = arrays.namespace(x)
    index = xp.argmin(direct(xp, z)(x), axis=1)
    numbers = xp.arange(z.shape[0], device=arrays.device(z))
    return xp.astype(numbers[None, :] == index[:, None], dtype)


class Averager:
    """What KernelAverager and StochasticFactorisation share: actions, greedy values, residuals."""

    greedy: bool
    gamma: float
    ridge = 0.0  # an averager has none
    features = None
    _owner: str

    def _check(self) -> None:
        super()._check()
        if not isinstance(self.greedy, bool | np.bool_):
            rule = "greedy must be True or False"
            checks.fail(self._owner, rule, repr(self.greedy), error=TypeError)

    _rows = staticmethod(state_rows)

    def _whole(self, X: Any) -> Transitions:
        """All rows, from Transitions or from chunks of them."""
        if isinstance(X, Transitions):
            return X
        if not isinstance(X, Iterable):
            return transitions(self._owner, X)
        chunks = [transitions(self._owner, chunk) for chunk in X]
        if not chunks:
            checks.fail(self._owner, "there must be at least one chunk of transitions", "none")
        return Transitions.concatenate(chunks)

    def _labels(self, t: Transitions) -> np.ndarray:  # -> (n,)
        """The action of each row; one and the same unless the estimator is greedy."""
        if not self.greedy:
            return np.zeros(len(t), dtype=np.int64)
        if t.actions is None:
            checks.fail(self._owner, "greedy=True needs transitions with actions", "none")
        actions = arrays.host(t.actions)
        actions = actions[:, 0] if actions.ndim == 2 and actions.shape[1] == 1 else actions
        if actions.ndim != 1 or actions.dtype.kind not in "iub":
            got = f"{actions.dtype} {checks.shape(actions)}"
            checks.fail(self._owner, "greedy=True needs integer actions (n,)", got, error=TypeError)
        return actions.astype(np.int64)

    def _width(self, x: Array) -> Array:
        width = int(x.shape[1])
        if width != self.n_features_in_:
            checks.fail(self._owner, f"states must have {self.n_features_in_} columns", width)
        return x

    def predict(self, states: Array) -> Array:  # (q, d) -> (q,)
        """V(s) for each row, in the library of `states`; with greedy=True max_a Q(s, a)."""
        checks.fitted(self, "weights_")
        return self._values(points(self._owner, states))

    def action_values(self, states: Array) -> Array:  # (q, d) -> (q, a)
        """Q(s, a) for each of `actions_`, one column each; a single column unless greedy."""
        checks.fitted(self, "weights_")
        return self._action_values(points(self._owner, states))

    def _values(self, z: Array) -> Array:
        return arrays.namespace(z).max(self._action_values(z), axis=1)

    def _action_values(self, z: Array) -> Array:
        local = arrays.like(self._width(z), self.support_)
        xp = arrays.namespace(local)
        none = xp.zeros((0, len(self.actions_)), dtype=local.dtype, device=arrays.device(local))
        out = xp.concat([none, *self._averages(local)], axis=0)
        return arrays.like(out, z)

    def td_errors(self, X: Transitions) -> np.ndarray:  # -> (n,)
        """δ_i = r_i + γ V(s'_i) − V(s_i), with V(s') = 0 where terminated.

        With greedy=True r_i + γ max_a Q(s'_i, a) − Q(s_i, a_i); rows must have known actions.
        """
        if not self.greedy:
            return super().td_errors(X)
        q = arrays.host(self.action_values(transitions(self._owner, X).states))
        labels = self._labels(X)
        known = np.searchsorted(self.actions_, labels).clip(max=len(self.actions_) - 1)
        if np.any(self.actions_[known] != labels):
            strange = int(labels[np.argmax(self.actions_[known] != labels)])
            checks.fail(self._owner, f"actions must be among {self.actions_.tolist()}", strange)
        ahead = arrays.host(self.predict(X.next_states)) * ~arrays.host(X.terminated)
        here = q[np.arange(len(labels)), known]
        return np.asarray(arrays.host(X.rewards) + self.gamma * ahead - here)


def policy_iteration(
    backups: Callable[[Array], Array], evaluate: Callable[[Array], Array], like: Array
) -> tuple[Array, int]:
    """v with v = max_a backups(v), and the number of policies evaluated.

    An action is exchanged only for one that is better by more than rounding, so that ties cannot
    make it cycle (Howard, 1960).
    """
    xp = arrays.namespace(like)
    policy = xp.argmax(backups(xp.zeros_like(like[:, 0])), axis=1)
    for rounds in range(1, MAX_ROUNDS + 1):
        v = evaluate(policy)
        q = backups(v)
        best = xp.max(q, axis=1)
        slack = 1e3 * arrays.epsilon(v) * (1.0 + float(xp.max(xp.abs(v))))
        better = best > v + slack
        if not bool(xp.any(better)):
            return v, rounds
        policy = xp.where(better, xp.argmax(q, axis=1), policy)
    raise AssertionError("policy iteration did not end")
