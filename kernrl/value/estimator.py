"""What every estimator on one system of rows shares: chunks in, weights out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value import iterative
from kernrl.value.episodes import goes_on, open_end, whole
from kernrl.value.system import FeatureSystem, Rows, values

Array = Any


class KernelEstimator(BaseEstimator):
    """Chunks of transitions in, the rows of one system, weights out.

    A subclass says what its rows are (`_rows`), and may solve them in its own way (`_solve_rows`,
    `_solve_system`); both are kernel LSTD here.
    """

    kernel: Kernel
    gamma: float
    ridge: float
    features: Any
    trace_decay: float = 0.0  # estimators without traces leave it
    device: str
    solver: str = "auto"
    _next: np.ndarray | None = None  # the state where the last episode stands, if open

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Learn from transitions, or from an iterable of chunks of them (out of core).

        Chunks are read once and in order; an episode goes on in the next chunk if it has not ended
        and that begins at its next state. Features are fitted on the first chunks that together
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
        The exact form keeps every row and solves anew, O(n³). The episode of the last call goes on
        if it has not ended and X begins at its next state.
        """
        self._check()
        t = transitions(self._owner, X)
        known = hasattr(self, "weights_")
        if not known:
            self._forget()
        rows = self._taken(t)
        if not known:
            self._prepare(rows)
        self._absorb(rows)
        self._next = open_end(t)
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
        rows = self._rows(transitions(self._owner, X))
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
        checks.features(owner, self.features)
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "ridge", self.ridge, at_least=0.0)
        checks.real(owner, "trace_decay", self.trace_decay, at_least=0.0, at_most=1.0)
        checks.choice(owner, "device", self.device, ("auto", "cpu", "cuda"))
        checks.choice(owner, "solver", self.solver, iterative.SOLVERS)

    def _chunks(self, X: Any) -> Iterator[Rows]:
        """Rows chunk by chunk; the first chunks are joined until features can be fitted on them."""
        for t in self._joined_chunks(X):
            rows = self._taken(t)
            self._next = open_end(t)
            yield rows

    def _joined_chunks(self, X: Any) -> Iterator[Transitions]:
        if isinstance(X, Transitions):
            yield X
            return
        if not isinstance(X, Iterable):
            transitions(self._owner, X)  # raises
        source = (transitions(self._owner, chunk) for chunk in X)
        wanted = 10 * getattr(self.features, "n_components", 0)
        head: list[Transitions] = []
        for chunk in source:
            head.append(chunk)
            if self.features is not None and sum(len(c) for c in head) >= wanted:
                break
        if head:
            yield whole(head)
        yield from source

    def _taken(self, t: Transitions) -> Rows:
        """The rows of t, the first of which may continue the episode of the rows before."""
        rows = self._rows(self._moved(t))
        return self._continued(rows) if goes_on(t, self._next) else rows

    def _continued(self, rows: Rows) -> Rows:
        """The rows, of which the first starts no episode."""
        xp = arrays.namespace(rows.starts)
        starts = xp.concat([xp.zeros_like(rows.starts[:1]), rows.starts[1:]])
        return dataclasses.replace(rows, starts=starts)

    def _moved(self, t: Transitions) -> Transitions:
        """The transitions on the device asked for; work = n × (landmarks or n) Gram entries."""
        width = len(t) if self.features is None else self.features.n_components
        states = arrays.on_device(t.states, self.device, len(t) * width, self._owner)
        if states is t.states:
            return t
        moved = {k: v if v is None else arrays.moved(v, states) for k, v in t.columns.items()}
        return Transitions(**moved)

    def _forget(self) -> None:
        for name in ("weights_", "features_", "kernel_", "support_", "solver_", "_system", "_kept"):
            if hasattr(self, name):
                delattr(self, name)
        self._next = None

    def _prepare(self, rows: Rows) -> None:
        self.n_features_in_ = int(rows.points.shape[1])
        self.kernel_ = self.kernel.resolve(rows.points, rng=0)  # the same rows, the same kernel
        self._kept: list[Rows] = []
        self.n_transitions_ = 0
        if self.features is not None:
            self.features_ = self.features.with_kernel(self.features.kernel or self.kernel_)
            self.features_.fit(rows.points)
            self._system = self._system_of(self.features_)

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
            rows = joined(self._kept)
            self._kept = [rows]
            self.features_ = None
            xp = arrays.namespace(rows.points)  # float64, as the solve: float32 tiles lose digits
            self.support_ = xp.astype(rows.points, xp.float64, copy=False)
            self._solve_rows(rows)
        else:
            self.support_ = getattr(self.features_, "landmarks_", None)
            self._solve_system(self._system)
        return self

    def _system_of(self, features: Any) -> FeatureSystem:
        """What the rows are summed into, in the feature form."""
        return FeatureSystem(features, self.gamma, self.trace_decay)

    def _solve_rows(self, rows: Rows) -> None:
        """Set weights_ (and support_, where it is not the rows' points) in the exact form."""
        self.weights_, self.solver_ = iterative.solve(
            self.kernel_,
            rows,
            self.gamma,
            self.ridge,
            self.trace_decay,
            solver=self.solver,
            owner=self._owner,
        )

    def _solve_system(self, system: FeatureSystem) -> None:
        """Set weights_ in the feature form."""
        self.weights_ = system.solve(self.ridge, owner=self._owner)
        self.solver_ = iterative.DIRECT

    def _values(self, z: Array) -> Array:  # (n, d) -> (n,)
        if z.shape[1] != self.n_features_in_:
            checks.fail(
                self._owner, f"states must have {self.n_features_in_} columns", int(z.shape[1])
            )
        return values(self.kernel_, self.features_, self.support_, self.weights_, z)


def points(owner: str, x: object) -> Array:  # (n,) or (n, d) -> (n, d)
    """States to predict at, checked."""
    x = arrays.floating(arrays.take(owner, "states", x))
    checks.ndim(owner, "states", x, (1, 2), "(n, d)")
    x = arrays.columns(x)
    checks.finite(owner, "state", x)
    return x


def transitions(owner: str, X: object) -> Transitions:
    """X itself, if it is Transitions."""
    if not isinstance(X, Transitions):
        checks.fail(
            owner,
            "X must be Transitions",
            type(X).__name__,
            "Build one with Transitions(states, rewards, next_states, terminated).",
            TypeError,
        )
    return X


def joined(kept: list[Rows]) -> Rows:
    """All rows in order."""
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
