"""Kernel-based stochastic factorisation: the averager on m representatives, one batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from kernrl import arrays, checks, linalg
from kernrl.approx.landmarks import select
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.distances import direct
from kernrl.kernels.gram import gram
from kernrl.value.averaging import (
    ENDLESS,
    TILE,
    Averager,
    averaging_weights,
    policy_iteration,
    require_positive,
    wide,
)
from kernrl.value.estimator import KernelEstimator, transitions
from kernrl.value.system import state_rows

Array = Any


class StochasticFactorisation(Averager, KernelEstimator):
    """Kernel-based stochastic factorisation: a Markov process on m representatives s̄_j.

    P̄_a = Ḱ_a D_a and r̄_a = Ḱ_a r_a, with Ḱ_a = κ_a(s̄_i, s_k) (m, n_a) over the rows of action a
    and D_a = m_k κ̄(s'_k, s̄_j) (n_a, m); V(s) = max_a Σ_j κ̄(s, s̄_j) Q̄(j, a). All weights sum to one,
    so P̄_a is a transition matrix and γP̄_a a contraction. Barreto, Precup & Pineau (2011; 2016).
    KernelAverager on all states is the case s̄ = s with κ = Delta, or s̄ = s' with κ̄ = Delta.

    `partial_fit` merges a batch into the un-normalised sums Σ_k k(s̄_i, s_k)(·) and equals one fit
    on all rows (their incremental form, with the representatives of the first call).

    kernel: of κ, nowhere negative. representative_kernel: of κ̄; None for the same.
    n_components, landmarks: as in Nystroem, chosen among the states of the first call; `landmarks`
    may also be the representatives themselves, (m, d).
    greedy=False: the value of the behaviour that made the rows. greedy=True: the best value over
    the actions seen. gamma: in [0, 1]. rng: of the choice of representatives.
    Cost: O(n m²) time, O(a m²) memory; O(m³) for each policy.

    Learnt: landmarks_ (m, d); transition_matrices_ (a, m, m); mean_rewards_ (a, m);
    weights_ (m, a): Q̄; actions_ (a,); n_rounds_ of policy iteration.

    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> StochasticFactorisation(Delta(), 0.5, n_components=2).fit(t).predict([[0.0], [1.0]])
    array([0.5, 1. ])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        n_components: int = 100,
        landmarks: Any = "kmeans++",
        representative_kernel: Kernel | None = None,
        greedy: bool = False,
        device: str = "auto",
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.n_components = n_components
        self.landmarks = landmarks
        self.representative_kernel = representative_kernel
        self.greedy = greedy
        self.device = device
        self.rng = rng

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Learn from transitions, or from chunks of them; representatives come from the first."""
        self._check()
        chunks = iter([X]) if isinstance(X, Transitions) else self._iterated(X)
        self._forget()
        first = next(chunks, None)
        if first is None:
            checks.fail(self._owner, "there must be at least one chunk of transitions", "none")
        self._begin(self._moved(transitions(self._owner, first)))
        self._absorb_chunk(first)
        for chunk in chunks:
            self._absorb_chunk(chunk)
        return self._solve()

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Merge a batch into the sums and solve again: the same as one fit on all rows. O(n m²)."""
        if not hasattr(self, "weights_"):
            return self.fit(transitions(self._owner, X))
        self._check()
        self._absorb_chunk(X)
        return self._solve()

    # ---------------------------------------------------------------- the parts of a fit

    def _check(self) -> None:
        super()._check()
        checks.integer(self._owner, "n_components", self.n_components, at_least=1)
        other = self.representative_kernel
        if other is not None and not isinstance(other, Kernel):
            rule = "representative_kernel must be a kernel or None"
            checks.fail(self._owner, rule, repr(other), error=TypeError)

    def _iterated(self, X: Any) -> Iterator[Any]:
        return iter(X) if isinstance(X, Iterable) else iter([transitions(self._owner, X)])

    def _begin(self, t: Transitions) -> None:
        states = wide(state_rows(t).points)
        labels = self._labels(t)
        generator = arrays.rng(self.rng)
        kernel = self.kernel.resolve(states, generator)
        other = self.representative_kernel
        self.n_features_in_ = int(states.shape[1])
        representatives = self._chosen(kernel, states, generator)
        self.kernel_ = kernel
        self.representative_kernel_ = kernel if other is None else other.resolve(states, generator)
        self.landmarks_ = self.support_ = representatives
        self.n_transitions_ = 0
        self._sums = {int(a): _Sums(representatives) for a in np.unique(labels)}

    def _chosen(self, kernel: Kernel, states: Array, generator: np.random.Generator) -> Array:
        if isinstance(self.landmarks, str):
            n, m = int(states.shape[0]), self.n_components
            if m > n:
                cure = f"Pass n_components={n} or more data."
                checks.fail(self._owner, "n_components must be at most n", f"{m} of {n}", cure)
            index = select(self.landmarks, kernel, states, m, generator, self._owner)
            xp = arrays.namespace(states)
            return xp.take(states, arrays.like(index, states, xp.int64), axis=0)
        given = arrays.columns(
            arrays.floating(arrays.take(self._owner, "landmarks", self.landmarks))
        )
        checks.not_empty(self._owner, "landmarks", given)
        checks.finite(self._owner, "landmark", given)
        return arrays.like(self._width(given), states)

    def _absorb_chunk(self, chunk: Any) -> None:
        t = self._moved(transitions(self._owner, chunk))
        labels, rows = self._labels(t), state_rows(t)
        states = self._width(wide(rows.points))
        ((mask, following),) = rows.following
        mask, following, rewards = wide(mask), wide(following), wide(rows.rewards)
        xp = arrays.namespace(states)
        for action in np.unique(labels):
            sums = self._sums.setdefault(int(action), _Sums(self.landmarks_))
            mine = np.flatnonzero(labels == action)
            for start in range(0, len(mine), TILE):
                index = arrays.like(mine[start : start + TILE], states, xp.int64)
                after = self._towards(xp.take(following, index, axis=0))
                after = xp.take(mask, index, axis=0)[:, None] * after
                sums.add(self.kernel_, xp.take(states, index, axis=0),
                         xp.take(rewards, index, axis=0), after, self._owner)  # fmt: skip
        self.n_transitions_ += len(t)

    def _towards(self, x: Array) -> Array:  # (b, d) -> (b, m)
        """κ̄(x, s̄_j)."""
        return averaging_weights(self.representative_kernel_, x, self.landmarks_, self._owner)

    def _solve(self) -> Self:
        xp = arrays.namespace(self.landmarks_)
        self.actions_ = np.asarray(sorted(self._sums), dtype=np.int64)
        models = [self._sums[int(a)].model() for a in self.actions_]
        self.transition_matrices_ = xp.stack([p for p, _ in models], axis=0)
        self.mean_rewards_ = xp.stack([r for _, r in models], axis=0)
        p, r, gamma = self.transition_matrices_, self.mean_rewards_, self.gamma
        unit = xp.eye(p.shape[1], dtype=p.dtype, device=arrays.device(p))

        def backups(v: Array) -> Array:  # (m,) -> (m, a)
            return (r + gamma * (p @ v)).T

        def evaluate(policy: Array) -> Array:  # (m,) -> (m,)
            ones = [xp.astype(policy == a, p.dtype) for a in range(p.shape[0])]
            followed = sum(c[:, None] * p[a, ...] for a, c in enumerate(ones))
            rewards = sum(c * r[a, ...] for a, c in enumerate(ones))
            system = unit - gamma * followed
            return linalg.solve(system, rewards, owner=self._owner, cure=ENDLESS)

        v, self.n_rounds_ = policy_iteration(backups, evaluate, p[0, ...])
        self.weights_ = backups(v)
        return self

    def _averages(self, x: Array) -> Iterator[Array]:
        """Q(x, a) = Σ_j κ̄(x, s̄_j) Q̄(j, a), tile by tile."""
        for start in range(0, int(x.shape[0]), TILE):
            yield self._towards(x[start : start + TILE, :]) @ self.weights_


class _Sums:
    """Σ_k k(s̄_i, s_k)·(1, r_k, D_k) over the rows of one action, not yet normalised.

    For a representative that no row reaches (every weight underflows) the nearest row stands in,
    so its reward and its row of D are kept as well.
    """

    def __init__(self, landmarks: Array) -> None:
        xp = arrays.namespace(landmarks)
        self.landmarks = landmarks
        zero = xp.zeros_like(landmarks[:, 0])
        square = xp.zeros((zero.shape[0],) * 2, dtype=zero.dtype, device=arrays.device(zero))
        self.mass, self.reward, self.transition = zero, zero, square
        self.distance, self.near_reward, self.near_transition = zero + xp.inf, zero, square

    def add(self, kernel: Kernel, x: Array, rewards: Array, after: Array, owner: str) -> None:
        """Add rows x (b, d) with rewards (b,) and D (b, m). O(b m²)."""
        xp = arrays.namespace(x)
        weights = require_positive(gram(kernel, self.landmarks, x), owner)
        self.mass = self.mass + xp.sum(weights, axis=1)
        self.reward = self.reward + weights @ rewards
        self.transition = self.transition + weights @ after
        if bool(xp.any(self._unreached())):
            distance = direct(xp, x)(self.landmarks)
            index, least = xp.argmin(distance, axis=1), xp.min(distance, axis=1)
            nearer = least < self.distance
            self.distance = xp.where(nearer, least, self.distance)
            near = xp.take(rewards, index, axis=0)
            self.near_reward = xp.where(nearer, near, self.near_reward)
            near = xp.take(after, index, axis=0)
            self.near_transition = xp.where(nearer[:, None], near, self.near_transition)

    def _unreached(self) -> Array:  # -> (m,) bool
        return self.mass < arrays.namespace(self.mass).finfo(self.mass.dtype).smallest_normal

    def model(self) -> tuple[Array, Array]:
        """P̄ (m, m) and r̄ (m,)."""
        xp, empty = arrays.namespace(self.mass), self._unreached()
        mass = xp.where(empty, xp.ones_like(self.mass), self.mass)
        transition = xp.where(empty[:, None], self.near_transition, self.transition / mass[:, None])
        return transition, xp.where(empty, self.near_reward, self.reward / mass)
