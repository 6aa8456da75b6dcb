"""Kernel least-squares temporal differences: KLSTD for V, KLSTDQ for Q."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.system import FeatureSystem, Rows, solve_exact, state_rows, values

Array = Any


class _KernelLSTD(BaseEstimator):
    """What KLSTD and KLSTDQ share: chunks in, one system, weights out.

    A subclass says what its rows are (`_rows`).
    """

    kernel: Kernel
    gamma: float
    ridge: float
    features: Any
    trace_decay: float
    device: str

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Learn from transitions, or from an iterable of chunks of them (out of core).

        Chunks are read once and in order. Features are fitted on the first chunks that together
        hold ten times n_components rows (or on all there are). Raises ValueError for bad
        parameters, TypeError for anything that is not Transitions.
        """
        self._check()
        chunks = self._chunks(X)
        self._forget()
        first = next(chunks, None)
        if first is None:
            checks.fail(self._owner, "there must be at least one chunk of transitions", "none")
        self._prepare(first)
        for rows in itertools.chain([first], chunks):
            self._absorb(rows)
        return self._finish()

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Add transitions and solve again: the same weights as one fit on all of them.

        With features, kernel and landmarks stay those of the first call; O(n m²) for the new rows.
        The exact form keeps every row and solves anew, O(n³).
        """
        self._check()
        rows = self._rows(self._moved(_transitions(self._owner, X)))
        if not hasattr(self, "weights_"):
            self._forget()
            self._prepare(rows)
        self._absorb(rows)
        return self._finish()

    def score(self, X: Transitions, y: None = None) -> float:
        """−mean squared TD error (1/n) Σ (r + γV(z') − V(z))²: larger is better.

        It contains the variance of the transitions, so compare it on the same data only.
        """
        residual = self.td_errors(X)
        return -float(np.mean(residual**2))

    def td_errors(self, X: Transitions) -> np.ndarray:  # -> (n,)
        """δ_i = r_i + γ V(z'_i) − V(z_i), with V(z') = 0 where terminated."""
        checks.fitted(self, "weights_")
        rows = self._rows(_transitions(self._owner, X))
        ahead = sum(arrays.host(c) * arrays.host(self._values(z)) for c, z in rows.following)
        here = arrays.host(self._values(rows.points))
        return np.asarray(arrays.host(rows.rewards) + self.gamma * ahead - here)

    # ---------------------------------------------------------------- the parts of a fit

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _rows(self, t: Transitions) -> Rows:
        raise NotImplementedError

    def _check(self) -> None:
        owner = self._owner
        if not isinstance(self.kernel, Kernel):
            checks.fail(owner, "kernel must be a kernel", repr(self.kernel), error=TypeError)
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "ridge", self.ridge, at_least=0.0)
        checks.real(owner, "trace_decay", self.trace_decay, at_least=0.0, at_most=1.0)
        checks.choice(owner, "device", self.device, ("auto", "cpu", "cuda"))

    def _chunks(self, X: Any) -> Iterator[Rows]:
        """Rows chunk by chunk; the first chunks are joined until features can be fitted on them."""
        if isinstance(X, Transitions):
            yield self._rows(self._moved(X))
            return
        if not isinstance(X, Iterable):
            checks.fail(self._owner, "X must be Transitions", type(X).__name__, error=TypeError)
        source = (_transitions(self._owner, chunk) for chunk in X)
        wanted = 10 * getattr(self.features, "n_components", 0)
        head: list[Transitions] = []
        for chunk in source:
            head.append(chunk)
            if self.features is not None and sum(len(c) for c in head) >= wanted:
                break
        if head:
            yield self._rows(self._moved(Transitions.concatenate(head)))
        for chunk in source:
            yield self._rows(self._moved(chunk))

    def _moved(self, t: Transitions) -> Transitions:
        """The transitions on the device asked for; work = n × (landmarks or n) Gram entries."""
        width = len(t) if self.features is None else self.features.n_components
        states = arrays.on_device(t.states, self.device, len(t) * width, self._owner)
        if states is t.states:
            return t
        moved = {k: v if v is None else arrays.moved(v, states) for k, v in t.columns.items()}
        return Transitions(**moved)

    def _forget(self) -> None:
        for name in ("weights_", "features_", "kernel_", "support_", "_system", "_kept"):
            if hasattr(self, name):
                delattr(self, name)

    def _prepare(self, rows: Rows) -> None:
        self.n_features_in_ = int(rows.points.shape[1])
        self.kernel_ = self.kernel.resolve(rows.points)
        self._kept: list[Rows] = []
        self.n_transitions_ = 0
        if self.features is not None:
            self.features_ = self.features.with_kernel(self.features.kernel or self.kernel_)
            self.features_.fit(rows.points)
            self._system = FeatureSystem(self.features_, self.gamma, self.trace_decay)

    def _absorb(self, rows: Rows) -> None:
        width = int(rows.points.shape[1])
        if width != self.n_features_in_:
            checks.fail(self._owner, f"states must have {self.n_features_in_} columns", width)
        self.n_transitions_ += len(rows)
        if self.features is None:
            self._kept.append(rows)
        else:
            self._system.add(rows)

    def _finish(self) -> Self:
        if self.features is None:
            rows = _joined(self._kept)
            self._kept = [rows]
            self.features_ = None
            self.support_ = rows.points
            self.weights_ = solve_exact(
                self.kernel_, rows, self.gamma, self.ridge, self.trace_decay, owner=self._owner
            )
        else:
            self.support_ = getattr(self.features_, "landmarks_", None)
            self.weights_ = self._system.solve(self.ridge, owner=self._owner)
        return self

    def _values(self, z: Array) -> Array:  # (n, d) -> (n,)
        if z.shape[1] != self.n_features_in_:
            checks.fail(
                self._owner, f"states must have {self.n_features_in_} columns", int(z.shape[1])
            )
        return values(self.kernel_, self.features_, self.support_, self.weights_, z)


class KLSTD(_KernelLSTD):
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

    Learnt: weights_ (n,) or (m,), support_ (points the weights belong to, None for random
    features), kernel_, features_, n_transitions_.

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
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.trace_decay = trace_decay
        self.device = device

    def _rows(self, t: Transitions) -> Rows:
        return state_rows(t)

    def predict(self, states: Array) -> Array:  # (n, d) -> (n,)
        """V(s) for each row, in the library of `states`; O(nm), tiles only."""
        checks.fitted(self, "weights_")
        return self._values(_points(self._owner, states))


class KLSTDQ(_KernelLSTD):
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
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.trace_decay = trace_decay
        self.device = device

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """Q(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        states = _points(self._owner, states)
        if actions is None:
            return self._values(states)
        actions = arrays.take(self._owner, "actions", actions)
        checks.same_length(self._owner, int(states.shape[0]), actions=actions)
        return self._values(pairs(states, actions))

    def _rows(self, t: Transitions) -> Rows:
        if t.actions is None:
            checks.fail(self._owner, "the transitions must have actions", "none")
        xp = arrays.namespace(t.states)
        states = arrays.floating(t.states)
        mask = xp.astype(~t.terminated, states.dtype)
        rewards = xp.astype(t.rewards, states.dtype)
        following = tuple(
            (mask * weight, pairs(t.next_states, action)) for weight, action in self._next(t)
        )
        return Rows(pairs(states, t.actions), rewards, t.episode_starts, following)

    def _next(self, t: Transitions) -> list[tuple[Array, Array]]:
        """(weight, action) of each next action the policy may take."""
        xp = arrays.namespace(t.states)
        chosen = next_actions(self._owner, self.policy, t)
        discrete = not xp.isdtype(t.actions.dtype, "real floating")
        if not (discrete and chosen.ndim == 2 and xp.isdtype(chosen.dtype, "real floating")):
            return [(xp.ones_like(t.rewards), chosen)]
        _check_probabilities(self._owner, arrays.host(chosen))
        ones = xp.ones(len(t), dtype=xp.int64, device=arrays.device(t.states))
        return [(chosen[:, a], a * ones) for a in range(int(chosen.shape[1]))]


def pairs(states: Array, actions: Array) -> Array:  # (n, d), (n,) or (n, p) -> (n, d + p)
    """Rows z = (s, a)."""
    xp = arrays.namespace(states)
    states = arrays.floating(states)
    return xp.concat((states, arrays.columns(arrays.like(actions, states))), axis=1)


def next_actions(owner: str, policy: Any, t: Transitions) -> Array:
    """What the policy does at each next state: actions, or probabilities (n, a)."""
    if policy is None:
        if t.next_actions is None:
            checks.fail(
                owner,
                "policy=None takes next_actions from the transitions",
                "transitions without them",
                "Pass a policy.",
            )
        return t.next_actions
    act: Callable[[Array], Any] = getattr(policy, "predict", policy)
    if not callable(act):
        checks.fail(owner, "policy must be callable", repr(policy), error=TypeError)
    chosen = arrays.take(owner, "the policy's actions", act(t.next_states))
    checks.finite(owner, "action of the policy", arrays.floating(chosen))
    if chosen.shape[0] != len(t):
        checks.fail(owner, f"the policy must give {len(t)} rows", checks.shape(chosen))
    return arrays.moved(chosen, t.states)


def _check_probabilities(owner: str, p: np.ndarray) -> None:
    bad = (p < 0).any(axis=1) | (np.abs(p.sum(axis=1) - 1.0) > 1e-6)
    if bad.any():
        row = int(np.argmax(bad))
        checks.fail(
            owner,
            "the policy's probabilities must be at least 0 and sum to 1",
            f"{p[row].tolist()} at row {row}",
        )


def _points(owner: str, x: object) -> Array:
    x = arrays.floating(arrays.take(owner, "states", x))
    checks.ndim(owner, "states", x, (1, 2), "(n, d)")
    x = arrays.columns(x)
    checks.finite(owner, "state", x)
    return x


def _transitions(owner: str, X: object) -> Transitions:
    if not isinstance(X, Transitions):
        checks.fail(
            owner,
            "X must be Transitions",
            type(X).__name__,
            "Build one with Transitions(states, rewards, next_states, terminated).",
            TypeError,
        )
    return X


def _joined(kept: list[Rows]) -> Rows:
    if len(kept) == 1:
        return kept[0]
    xp = arrays.namespace(kept[0].points)
    return Rows(
        xp.concat([r.points for r in kept], axis=0),
        xp.concat([r.rewards for r in kept]),
        xp.concat([r.starts for r in kept]),
        tuple(
            (xp.concat([c for c, _ in parts]), xp.concat([z for _, z in parts], axis=0))
            for parts in zip(*(r.following for r in kept), strict=True)
        ),
    )
