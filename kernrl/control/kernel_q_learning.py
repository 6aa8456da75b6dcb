"""Kernel Q-learning: functional gradient steps on the Bellman error, on an online dictionary."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl import arrays, checks
from kernrl.agent import Agent
from kernrl.approx.dictionary import Dictionary
from kernrl.control import discrete
from kernrl.control.states import StateScaler, default_kernel, is_table
from kernrl.data.collect import Step
from kernrl.data.replay import Replay
from kernrl.kernels.base import Kernel
from kernrl.kernels.state_action import StateAction

GRADIENTS = ("full", "hybrid", "semi")


class KernelQLearning(Agent):
    """Q-learning in an RKHS: Q(s, a) = Σ_j w_ja k(s, z_j) on dictionary atoms z_j.

    With δ = r + γ m max_a' Q(s', a') − Q(s, a) and a* the maximiser, a step is

        Q ← (1 − ηλ) Q + η δ k((s, a), ·)                                      semi
        Q ← (1 − ηλ) Q + η δ [k((s, a), ·) − γ m k((s', a*), ·)]                full
        full where the action taken is not the greedy one, semi where it is     hybrid

    averaged over a replayed batch; each k(z, ·) is represented by the dictionary's atoms, z itself
    among them if it was admitted. Koppel, Tolstaya et al. (arXiv 1804.07323), whose auxiliary
    average of δ is δ itself here (their β = 1). Semi is Q-learning; full descends the squared
    Bellman error, biased by the variance of s'; hybrid is what they release.
    Cost of an update with m atoms and a batch of b: O(b m (m + d)); a step without an update O(m²).

    kernel: on (standardised) states, one independent block per discrete action; or a StateAction
    kernel on rows (s, action number). None: RBF with the median length scale, or Delta.
    learning_rate: η; below 2 the averaged step cannot overshoot, since |k_D| ≤ 1 after whitening.
    learning_rate_final: η falls linearly to this; None keeps it.
    ridge: λ, the shrinkage of Q per unit step.
    dictionary: admission and size; with prune="komp" the cheapest atoms leave while the RKHS error
    of a pruning stays within `budget`, and always above max_size.
    warmup: uniformly random steps that fix state scaling and length scale before learning.
    epsilon, epsilon_final, exploration_fraction: ε falls linearly over that part of training.
    batch_size, train_every, replay_capacity: replay; batch_size=0 learns from each step once.
    standardise: scale states to mean 0, deviation 1, as seen in the warm-up.

    Learnt: weights_ (m, a) or (m, 1), dictionary_, kernel_, scaler_.
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        gamma: float = 0.99,
        learning_rate: float = 0.5,
        learning_rate_final: float | None = None,
        ridge: float = 0.0,
        gradient: str = "hybrid",
        dictionary: Dictionary = Dictionary(threshold=0.01, max_size=500),  # noqa: B008  cloned
        budget: float = 0.0,
        warmup: int = 500,
        epsilon: float = 1.0,
        epsilon_final: float = 0.05,
        exploration_fraction: float = 0.3,
        batch_size: int = 32,
        train_every: int = 1,
        replay_capacity: int = 50_000,
        standardise: bool = True,
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.learning_rate = learning_rate
        self.learning_rate_final = learning_rate_final
        self.ridge = ridge
        self.gradient = gradient
        self.dictionary = dictionary
        self.budget = budget
        self.warmup = warmup
        self.epsilon = epsilon
        self.epsilon_final = epsilon_final
        self.exploration_fraction = exploration_fraction
        self.batch_size = batch_size
        self.train_every = train_every
        self.replay_capacity = replay_capacity
        self.standardise = standardise
        self.rng = rng

    def _check(self) -> None:
        owner = self._owner
        discrete.check(owner, self.kernel, self.action_space_)
        checks.choice(owner, "gradient", self.gradient, GRADIENTS)
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "learning_rate", self.learning_rate, above=0.0, below=2.0)
        if self.learning_rate_final is not None:
            checks.real(owner, "learning_rate_final", self.learning_rate_final, at_least=0.0)
        for name in ("ridge", "budget"):
            checks.real(owner, name, getattr(self, name), at_least=0.0)
        for name in ("epsilon", "epsilon_final", "exploration_fraction"):
            checks.real(owner, name, getattr(self, name), at_least=0.0, at_most=1.0)
        for name in ("warmup", "train_every", "replay_capacity"):
            checks.integer(owner, name, getattr(self, name), at_least=1)
        checks.integer(owner, "batch_size", self.batch_size, at_least=0)
        if not isinstance(self.dictionary, Dictionary):
            rule = "dictionary must be a Dictionary"
            checks.fail(owner, rule, repr(self.dictionary), error=TypeError)

    # ---------------------------------------------------------------- learning

    def _begin(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        n_envs: int,
        total_steps: int,
    ) -> None:
        self._check()
        self._total = total_steps
        self._replay = Replay(min(self.replay_capacity, total_steps + n_envs))
        self._fresh: Step | None = None
        self._since_training = 0

    def act(self, observations: np.ndarray) -> np.ndarray:
        """ε-greedy; uniformly random in the warm-up."""
        if not hasattr(self, "weights_"):
            return discrete.uniform(self.rng_, self.action_space_, len(observations))
        return discrete.epsilon_greedy(
            self.rng_, self.action_space_, self._epsilon(), observations, self._greedy
        )

    def _epsilon(self) -> float:
        span = max(1.0, self.exploration_fraction * self._total)
        return self.epsilon + (self.epsilon_final - self.epsilon) * min(1.0, self.steps_ / span)

    def _rate(self) -> float:
        if self.learning_rate_final is None:
            return self.learning_rate
        progress = min(1.0, self.steps_ / self._total)
        return self.learning_rate + (self.learning_rate_final - self.learning_rate) * progress

    def observe(self, step: Step) -> None:
        """Keep the rows that are experience."""
        self._replay.add(step)
        self._fresh = step
        self._since_training += step.n_valid

    def update(self) -> int:
        """Grow the dictionary by the new states, then take a gradient step when one is due."""
        if not hasattr(self, "weights_"):
            if self.steps_ < min(self.warmup, self._total):
                return 0
            self._represent()
        fresh = self._fresh
        assert fresh is not None  # the loop observes before it updates
        if fresh.n_valid == 0:
            return 0
        rows = fresh.valid
        states = self.scaler_.transform(fresh.observations[rows])
        actions = self._numbers(fresh.actions[rows])
        self._offer(states, actions)
        if self._since_training < self.train_every:
            return 0
        self._since_training = 0
        if self.batch_size:
            batch = self._replay.sample(self.batch_size, self.rng_)
            states, actions = self.scaler_.transform(batch.states), self._numbers(batch.actions)
            after, rewards, ended = batch.next_states, batch.rewards, batch.terminated
        else:
            after, rewards = fresh.next_observations[rows], fresh.rewards[rows]
            ended = fresh.terminated[rows]
        self._descend(states, actions, rewards, self.scaler_.transform(after), ended)
        return 1

    def _represent(self) -> None:
        """Fix scaling, kernel and an empty dictionary on the warm-up, and admit its states."""
        warm = self._replay.sample(4 * len(self._replay), self.rng_)
        self.scaler_ = StateScaler(self.standardise and not is_table(self.observation_space_))
        states = self.scaler_.fit(warm.states).transform(warm.states)
        kernel = default_kernel(self.kernel, self.observation_space_)
        self._pairs = isinstance(kernel, StateAction)
        rows = self._rows(states, self._numbers(warm.actions))
        self.kernel_ = kernel.resolve(rows, self.rng_)
        self.dictionary_ = self.dictionary.with_kernel(self.kernel_)
        self.dictionary_.fit(rows)
        self.weights_ = np.zeros((self.dictionary_.size, 1 if self._pairs else self._n_actions))
        self._section = None

    def _offer(self, states: np.ndarray, actions: np.ndarray) -> None:
        """Admit what the atoms cannot represent, with weight 0: Q does not change by it."""
        for row in self._rows(states, actions):
            if self.dictionary_.offer(row).admitted:
                self.weights_ = np.vstack((self.weights_, np.zeros((1, self.weights_.shape[1]))))
                self._section = None

    def _descend(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        terminated: np.ndarray,
    ) -> None:
        """One averaged functional gradient step."""
        b = np.arange(len(actions))
        here, next_q = self._kernel_rows(states, actions), self._q_of(next_states)
        best = np.argmax(next_q, axis=1)
        mask = self.gamma * ~terminated
        q_here = self._q_from(here, states)
        delta = rewards + mask * next_q[b, best] - q_here[b, actions]
        rate = self._rate()
        moment = self._scatter(here, actions, delta)
        if self.gradient != "semi":
            explored = 1.0 if self.gradient == "full" else actions != np.argmax(q_here, axis=1)
            ahead = self._kernel_rows(next_states, best)
            moment -= self._scatter(ahead, best, delta * mask * explored)
        # The atoms' coefficients of Σ δ k(z, ·) are K_DD⁻¹ Σ δ k_D(z): solved once, not per row.
        gradient = self.dictionary_.factor_.solve(moment)
        self.weights_ = (1.0 - rate * self.ridge) * self.weights_ + (rate / len(b)) * gradient
        self._prune()

    def _scatter(self, kernel_rows: np.ndarray, actions: np.ndarray, delta: np.ndarray) -> Any:
        """Σ_b δ_b k_D(z_b) into the column of its action: (b, m) -> (m, a) or (m, 1)."""
        one_hot = np.zeros((len(actions), self.weights_.shape[1]))
        one_hot[np.arange(len(actions)), 0 if self._pairs else actions] = delta
        return kernel_rows.T @ one_hot

    def _prune(self) -> None:
        dictionary = self.dictionary_
        if dictionary.prune is None:
            return
        crowded = dictionary.max_size is not None and dictionary.size > dictionary.max_size
        if crowded or (dictionary.prune == "komp" and self.budget > 0):
            trimmed = dictionary.trim(self.weights_, self.budget)
            if trimmed.removed:
                self.weights_ = trimmed.weights
                self._section = None

    def _end(self) -> None:
        if hasattr(self, "weights_"):
            self.record("dictionary", self.dictionary_.size)
        self._replay, self._fresh = Replay(1), None

    # ---------------------------------------------------------------- values

    @property
    def _n_actions(self) -> int:
        return int(self.action_space_.n)

    def _numbers(self, actions: np.ndarray) -> np.ndarray:
        return discrete.numbers(actions, self.action_space_)

    def _rows(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return np.column_stack((states, actions)) if self._pairs else states

    def _kernel_rows(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:  # -> (b, m)
        """k of each row against the atoms; the section is made anew only when the atoms change."""
        if self._section is None:
            self._section = self.kernel_.section(self.dictionary_.atoms_)
        return self._section(self._rows(states, actions))

    def _q_of(self, states: np.ndarray) -> np.ndarray:  # (b, d) -> (b, a)
        if not self._pairs:
            return self._kernel_rows(states, states) @ self.weights_
        every = [np.full(len(states), a) for a in range(self._n_actions)]
        return np.column_stack([self._kernel_rows(states, a) @ self.weights_ for a in every])

    def _q_from(self, kernel_rows: np.ndarray, states: np.ndarray) -> np.ndarray:
        return self._q_of(states) if self._pairs else kernel_rows @ self.weights_

    def _q(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, a)
        return self._q_of(self.scaler_.transform(observations))

    def q_values(self, observations: Any) -> np.ndarray:  # (b, …) -> (b, a)
        """Q(s, a) of every action, for a batch of observations."""
        checks.fitted(self, "weights_")
        return self._q(self._batch(observations)[0])

    def _actions(self, observations: np.ndarray, deterministic: bool) -> np.ndarray:
        checks.fitted(self, "weights_")
        epsilon = 0.0 if deterministic else self.epsilon_final
        return discrete.answer(self.rng_, self.action_space_, epsilon, observations, self._greedy)

    def _greedy(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        return np.argmax(self._q(observations), axis=1)

    def _values(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        return self._q(observations).max(axis=1)

    # ---------------------------------------------------------------- files

    def _state(self) -> dict[str, np.ndarray]:
        checks.fitted(self, "weights_")
        scaler = {f"scaler.{name}": x for name, x in self.scaler_.state().items()}
        return {**scaler, "weights": self.weights_, "atoms": np.array(self.dictionary_.atoms_)}

    def _meta(self) -> dict[str, Any]:
        return {"dictionary": self.dictionary_}

    def _restore(self, state: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        scaler = {name: state[f"scaler.{name}"] for name in ("mean", "scale")}
        self.scaler_ = StateScaler().restore(scaler)
        self.dictionary_ = meta["dictionary"].reset(state["atoms"])
        self.kernel_ = self.dictionary_.kernel_
        self._pairs = isinstance(self.kernel_, StateAction)
        self.weights_ = state["weights"]
        self._section = None
