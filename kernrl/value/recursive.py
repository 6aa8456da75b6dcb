"""Recursive kernel LSTD: one row at a time, with forgetting or on a sliding window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from kernrl import checks
from kernrl.approx.dictionary import Dictionary
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.episodes import goes_on, open_end
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.online import Online, on_host
from kernrl.value.running import Block, StaleInverse, Sums, WindowSums, padded
from kernrl.value.system import ridged

Array = Any

PRUNE_EVERY = 32  # rows between two prunings: each needs the weights, O(m³) at worst


class RecursiveKLSTD(Online, KernelEstimator):
    """Kernel LSTD(λ) that learns row by row: (A_t + n_t λI) θ = b_t, with a forgetting factor β

        A_t = βA_{t−1} + e_t (φ_t − γφ'_t)ᵀ,   b_t = βb_{t−1} + e_t r_t,   n_t = βn_{t−1} + 1.

    φ(s) = L⁻¹k_D(s) on a dictionary D that grows as states arrive (L Lᵀ = K_DD), or a fixed feature
    map; V(s) = φ(s)ᵀθ. A state keeps the φ of its arrival: a new atom adds a coordinate in which
    the past is 0 (Engel, Mannor & Meir, 2004), so rows may come in any chunks with one result.
    Bradtke & Barto (1996), recursive LSTD; Xu, Hu & Lu (2007), its kernel form, without ridge.

    With every state admitted (Dictionary(admit="all")) it is KLSTD's exact form on the same rows.
    forgetting: β in (0, 1]; the ridge fades as the rows do.
    window: the number of last rows that count, n_t of them; equal to a batch fit on these rows.
    One of the two at a time. trace_decay: λ of the traces e; a call of `partial_fit` continues the
    episode of the last one if that has not ended and the new rows begin at its next state.
    features: None for Dictionary(); a Dictionary (cloned), or Nystroem or RandomFeatures, which are
    fitted on the rows of the first call.

    Cost of a row with m features: O(m²), and of a call on a window O(window·m); a value asked in
    between needs the solution: refined from the last inverse in O(m²) a round, afresh in O(m³)
    where that is too far away. Memory O(m²), and O(window·m). On the host, in float64.

    Learnt: weights_ (m,) on the atoms support_ (m, d), or on the features; features_, kernel_,
    n_transitions_ seen so far, n_effective_ = n_t.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> RecursiveKLSTD(Delta(), gamma=0.5, ridge=0.0).fit(t).predict([[0.0], [1.0]])
    array([0.5, 1. ])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        features: Any = None,
        forgetting: float = 1.0,
        window: int | None = None,
        trace_decay: float = 0.0,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.forgetting = forgetting
        self.window = window
        self.trace_decay = trace_decay

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Start over and learn from transitions, or from chunks of them in order."""
        self._check()
        self._forget()
        if isinstance(X, Transitions) or not isinstance(X, Iterable):
            X = [X]
        for chunk in X:
            self._learn(chunk)
        if not hasattr(self, "_sums"):
            checks.fail(self._owner, "there must be at least one chunk of transitions", "none")
        self._finish()
        _ = self.weights_  # a singular system is an error of fit
        return self

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Learn from more transitions; the weights are solved for when they are next needed."""
        self._check()
        self._learn(X)
        return self._finish()

    @property
    def weights_(self) -> np.ndarray:  # (m,)
        """The weights, solved for if rows came since they were last asked."""
        if not hasattr(self, "_sums"):
            raise AttributeError("weights_")  # what hasattr, and so NotFittedError, goes by
        if self._solution is None:
            self._solution = self._solve()
        return self._solution

    # ---------------------------------------------------------------- the parts of a fit

    def _check(self) -> None:
        super()._check()
        checks.real(self._owner, "forgetting", self.forgetting, above=0.0, at_most=1.0)
        if self.window is None:
            return
        checks.integer(self._owner, "window", self.window, at_least=1)
        if self.forgetting != 1.0:
            got = f"forgetting={self.forgetting} and window={self.window}"
            checks.fail(self._owner, "rows must fade by forgetting or leave a window", got)

    def _forget(self) -> None:
        for name in ("_sums", "_solution", "_solver", "features_", "kernel_"):
            if hasattr(self, name):
                delattr(self, name)

    def _prepare_on(self, states: np.ndarray) -> None:
        self._prepare_features(Dictionary() if self.features is None else self.features, states)
        decay = self.gamma * self.trace_decay
        kind = Sums if self.window is None else WindowSums
        self._sums = kind(decay, self.forgetting if self.window is None else self.window)
        self._solver, self._solution = StaleInverse(), None

    def _learn(self, X: Any) -> None:
        t = on_host(transitions(self._owner, X))
        if not hasattr(self, "_sums"):
            self._prepare_on(t.states)
        self._check_width(t.states)
        prunes = self._grows and self.features_.prune is not None
        size = PRUNE_EVERY if prunes else max(len(t), 1)
        for start in range(0, len(t), size):
            continues = goes_on(t, self._next) if start == 0 else not t.episode_starts[start]
            self._learn_block(t[start : start + size], continues)
            if prunes:
                self._prune()
        self.n_transitions_ += len(t)

    def _learn_block(self, t: Transitions, continues: bool) -> None:
        starts = np.array(t.episode_starts)
        starts[0] = not continues
        phi, ahead = self._features_of(t)
        ahead = np.where(t.terminated[:, None], 0.0, ahead)
        self._sums.add(Block(phi, phi - self.gamma * ahead, t.rewards, starts))
        self._next = open_end(t)
        self._solution = None

    def _finish(self) -> Self:
        self.support_ = getattr(self.features_, "landmarks_", None)
        if self._grows:
            self.support_ = np.array(self.features_.atoms_)
        self.n_effective_ = self._sums.n
        return self

    def _features_of(self, t: Transitions) -> tuple[np.ndarray, np.ndarray]:  # -> 2 × (n, m)
        """φ of the states and of the next states; atoms that join later are coordinates 0."""
        if not self._grows:
            return self.features_.transform(t.states), self.features_.transform(t.next_states)
        here, ahead, none = [], [], np.zeros(0)
        for state, following, end in zip(t.states, t.next_states, t.terminated, strict=True):
            here.append(self._offered(state))
            ahead.append(none if end else self._offered(following))
        return padded(here, self.features_.size), padded(ahead, self.features_.size)

    def _prune(self) -> None:
        """Bring the dictionary back to its size; every row is projected on what is left."""
        dictionary = self.features_
        if dictionary.max_size is None or dictionary.size <= dictionary.max_size:
            return
        by_weight = dictionary.prune == "komp"
        projection = self._trimmed(self.weights_ if by_weight else np.zeros(dictionary.size))
        self._sums.project(projection)
        self._solver, self._solution = StaleInverse(), None

    def _solve(self) -> np.ndarray:  # -> (m,)
        """θ, and from it w = L⁻ᵀθ on a dictionary: V(s) = k_D(s)ᵀw needs no solve."""
        if not len(self._sums.target):  # every state so far had k(s, s) = 0
            return np.zeros(0)
        matrix = ridged(self._sums.matrix, self._sums.n * self.ridge)
        theta = self._solver.solve(matrix, self._sums.target, owner=self._owner)
        return self.features_.factor_.finish_solve(theta) if self._grows else theta
