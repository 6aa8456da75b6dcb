"""Kernel temporal differences: TD(λ) and gradient TD, one functional step for each transition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import numpy as np

from kernrl import checks
from kernrl.approx.dictionary import Dictionary
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.divergence import DivergenceMonitor
from kernrl.value.episodes import goes_on, open_end
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.online import Online, on_host

Array = Any


class Seen(NamedTuple):
    """One transition as a method sees it; `ahead` is γ m φ(s')."""

    here: np.ndarray  # (m,): φ(s)
    ahead: np.ndarray  # (m,)
    delta: float  # δ = r + γ m V(s') − V(s)
    trace: np.ndarray  # (m,): e = γλ e + φ(s)
    helper: np.ndarray  # (m,): the auxiliary function h of gtd2 and tdc
    average: float  # the running average y of δ, of residual


# Method -> the direction in which V moves, times η.
METHODS: dict[str, Callable[[Seen], np.ndarray]] = {
    # Sutton (1988).
    "td": lambda x: x.delta * x.trace,
    # The stochastic quasi-gradient of the squared Bellman error; Koppel et al. (arXiv 1709.04221).
    "residual": lambda x: x.average * (x.here - x.ahead),
    # Gradients of the projected Bellman error; Sutton, Maei et al. (2009).
    "gtd2": lambda x: (x.here @ x.helper) * (x.here - x.ahead),
    "tdc": lambda x: x.delta * x.here - (x.here @ x.helper) * x.ahead,
}


class KernelTD(Online, KernelEstimator):
    """Kernel TD: V ← (1 − ηλ)V + η·direction, a functional step in the RKHS for each transition.

    With δ = r + γ m V(s') − V(s), m = 0 where terminated, the direction is

        td        δ e,  e ← γλ_tr e + k(s, ·)
        residual  y [k(s, ·) − γ m k(s', ·)],  y ← y + β(δ − y): −gradient of ½δ² if β = 1
        gtd2      h(s) [k(s, ·) − γ m k(s', ·)],  h ← h + β(δ − h(s)) k(s, ·)
        tdc       δ k(s, ·) − γ m h(s) k(s', ·),  the same h

    Sutton (1988); Sutton, Maei et al. (2009); in an RKHS Koppel et al. (arXiv 1709.04221). `td` may
    diverge where states are not visited as the chain does, `residual` is biased by the variance of
    s'; gtd2 and tdc are neither. The expected step of `td` is 0 at KLSTD(λ_tr) with the same ridge.
    Each k(s, ·) is its projection on a dictionary's atoms, itself where s was admitted.

    learning_rate: η > 0; a step overshoots where η k(s, s) > 2. It falls as η/(1 + t)^decay with
    learning_rate_decay in [0, 1]. auxiliary_rate: β in (0, 1], None for 1 in `residual` and for
    learning_rate in gtd2 and tdc. ridge: λ ≥ 0. trace_decay: λ_tr, of td only.
    dictionary: None for Dictionary(); with prune="komp" atoms leave after each step while V (and
    e, h) moves by at most `budget` in the RKHS norm, and always above max_size.
    n_epochs: passes of `fit` over its rows, in order.
    Cost of a row with m atoms: O(md + m²). On the host, in float64.

    Learnt: weights_ (m,) on the atoms support_ (m, d); features_ (the dictionary), kernel_,
    n_transitions_ learnt from, diverged_: see DivergenceMonitor, whose warning it gives.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> model = KernelTD(Delta(), gamma=0.5, learning_rate=0.5, n_epochs=60)
    >>> model.fit(t).predict([[0.0], [1.0]]).round(6)
    array([0.5, 1. ])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        learning_rate: float = 0.1,
        method: str = "td",
        ridge: float = 0.0,
        trace_decay: float = 0.0,
        learning_rate_decay: float = 0.0,
        auxiliary_rate: float | None = None,
        dictionary: Dictionary | None = None,
        budget: float = 0.0,
        n_epochs: int = 1,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.learning_rate = learning_rate
        self.method = method
        self.ridge = ridge
        self.trace_decay = trace_decay
        self.learning_rate_decay = learning_rate_decay
        self.auxiliary_rate = auxiliary_rate
        self.dictionary = dictionary
        self.budget = budget
        self.n_epochs = n_epochs

    features = None  # the dictionary is its feature map

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Start over and learn from transitions, or from chunks of them in order (one epoch)."""
        self._check()
        self._forget()
        single = isinstance(X, Transitions) or not isinstance(X, Iterable)
        if not single and self.n_epochs > 1:
            checks.fail(self._owner, "chunks are read once, so n_epochs must be 1", self.n_epochs)
        for _ in range(self.n_epochs):
            for chunk in [X] if single else X:
                self._learn(chunk)
            self._next = None  # the next pass begins anew
        if not hasattr(self, "weights_"):
            checks.fail(self._owner, "there must be at least one chunk of transitions", "none")
        return self

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Learn from more transitions, each once; rows one by one or together make no difference.

        The episode of the last call goes on if it has not ended and X begins at its next state.
        """
        self._check()
        self._learn(X)
        return self

    # ---------------------------------------------------------------- the parts of a fit

    def _check(self) -> None:
        super()._check()
        owner = self._owner
        checks.choice(owner, "method", self.method, METHODS)
        checks.real(owner, "learning_rate", self.learning_rate, above=0.0)
        decay = self.learning_rate_decay
        checks.real(owner, "learning_rate_decay", decay, at_least=0.0, at_most=1.0)
        if self.auxiliary_rate is not None:
            checks.real(owner, "auxiliary_rate", self.auxiliary_rate, above=0.0)
        checks.real(owner, "budget", self.budget, at_least=0.0)
        checks.integer(owner, "n_epochs", self.n_epochs, at_least=1)
        if self.dictionary is not None and not isinstance(self.dictionary, Dictionary):
            got = repr(self.dictionary)
            checks.fail(owner, "dictionary must be a Dictionary or None", got, error=TypeError)
        if self.budget and getattr(self.dictionary, "prune", None) != "komp":
            rule = "a budget needs a dictionary that prunes by it"
            checks.fail(owner, rule, self.budget, "Pass dictionary=Dictionary(prune='komp').")
        if self.trace_decay and self.method != "td":
            got = f"trace_decay={self.trace_decay} and method={self.method!r}"
            checks.fail(owner, "only method='td' has traces", got, "Pass trace_decay=0.")

    def _forget(self) -> None:
        for name in ("weights_", "features_", "kernel_", "support_"):
            if hasattr(self, name):
                delattr(self, name)

    def _begin(self, states: np.ndarray) -> None:
        self._prepare_features(Dictionary() if self.dictionary is None else self.dictionary, states)
        # Coordinates of V, e and h in the span of the atoms.
        self._value, self._trace, self._helper = np.zeros(0), np.zeros(0), np.zeros(0)
        self._average = 0.0
        self._monitor = DivergenceMonitor(self.gamma)

    def _learn(self, X: Any) -> None:
        t = on_host(transitions(self._owner, X))
        if not hasattr(self, "weights_"):
            self._begin(t.states)
        self._check_width(t.states)
        starts = np.array(t.episode_starts)
        starts[0] = not goes_on(t, self._next)
        prunes = self.features_.prune is not None
        for row in zip(t.states, t.rewards, t.next_states, t.terminated, starts, strict=True):
            self._step(*row)
            if prunes:
                self._prune()
        self._next = open_end(t)
        self._finish(t.rewards)

    def _step(
        self, state: np.ndarray, reward: float, after: np.ndarray, end: bool, start: bool
    ) -> None:
        here = self._offered(state)
        ahead = np.zeros(0) if end else self.gamma * self._offered(after)
        m = self.features_.size
        here, ahead = _grown(here, m), _grown(ahead, m)
        value, trace, helper = (_grown(x, m) for x in (self._value, self._trace, self._helper))
        trace = here if start else (self.gamma * self.trace_decay) * trace + here
        delta = float(reward) + float(ahead @ value) - float(here @ value)
        eta = self.learning_rate / (1.0 + self.n_transitions_) ** self.learning_rate_decay
        beta = self.auxiliary_rate
        self._average += (1.0 if beta is None else beta) * (delta - self._average)
        step = METHODS[self.method](Seen(here, ahead, delta, trace, helper, self._average))
        if self.method in ("gtd2", "tdc"):
            error = delta - float(here @ helper)
            helper = helper + (eta if beta is None else beta) * error * here
        self._value = (1.0 - eta * self.ridge) * value + eta * step
        self._trace, self._helper = trace, helper
        self.n_transitions_ += 1

    def _prune(self) -> None:
        """Let atoms go while V, and what else outlives a step, moves by at most the budget."""
        dictionary = self.features_
        crowded = dictionary.max_size is not None and dictionary.size > dictionary.max_size
        if not crowded and not (dictionary.prune == "komp" and self.budget > 0):
            return
        kept = [self._value]
        kept += [self._trace] * (self.trace_decay > 0) + [self._helper] * bool(self._helper.any())
        weights = np.stack([dictionary.factor_.finish_solve(x) for x in kept], axis=1)
        projection = self._trimmed(weights, self.budget if dictionary.prune == "komp" else 0.0)
        if projection is not None:
            self._value, self._trace, self._helper = (
                projection @ x for x in (self._value, self._trace, self._helper)
            )

    def _finish(self, rewards: np.ndarray) -> None:
        factor = self.features_.factor_
        self.support_ = np.array(self.features_.atoms_)
        self.weights_ = factor.finish_solve(self._value)
        self._monitor.update(factor.lower @ self._value, rewards)  # V at the atoms: K w = L θ
        self._monitor.warn_once(self._owner)
        self.diverged_ = self._monitor.diverged_


def _grown(x: np.ndarray, m: int) -> np.ndarray:
    """x with zeros behind, (m,): coordinates of atoms that came after it."""
    return x if len(x) == m else np.concatenate((x, np.zeros(m - len(x))))
