"""KLSPI: kernel least-squares policy iteration, from a batch or in rounds on an environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl import arrays, checks
from kernrl.agent import Agent
from kernrl.approx.nystroem import Nystroem
from kernrl.control import discrete
from kernrl.control.greedy import GreedyPolicy, MeanPolicy, with_action
from kernrl.control.states import StateScaler, default_kernel, is_table
from kernrl.data.collect import Step
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.state_action import StateAction
from kernrl.value.action_system import ActionBlocks, ActionPairs, ActionSystem

Columns = tuple[np.ndarray, ...]  # states, actions, rewards, next states, terminated


class KLSPI(Agent):
    """Kernel least-squares policy iteration: Q^π by kernel LSTD-Q, π greedy in it, repeated.

    On Transitions it iterates on that batch. On an environment it works in rounds: collect
    `round_steps` steps ε-greedily, then iterate on everything seen, with scaling, kernel and
    landmarks chosen anew. Discrete actions only.

    Q(s, a) = φ(s)ᵀw_a,  w = (Σ φ(s, a)(φ(s, a) − γ m φ(s', π(s')))ᵀ + nλI)⁻¹ Σ φ(s, a) r
    Xu, Hu & Lu (2007), with a ridge; with Linear() it is LSPI (Lagoudakis & Parr, 2003).
    Cost of a round with n transitions, m landmarks and a actions: O(n m²) for the features,
    O(a³m³) for each iteration; memory 16 n m bytes (8(a + 1) n m for a StateAction kernel).

    kernel: on (standardised) states, one independent block per action; or a StateAction kernel on
    rows (s, action number), which may share between actions. None: RBF with the median length
    scale, or Delta where observations are discrete.
    gamma, ridge: discount; ridge λ, multiplied by n inside.
    features: Nystroem or RandomFeatures; None makes every distinct state a landmark (exact).
    n_iterations, tolerance: stop after so many iterations, or when at most this fraction of the
    next states changes action.
    first_round, round_steps: env steps, uniformly random, before the first solve; between solves.
    epsilon, epsilon_final: exploration after the first round, falling linearly to its last value
    at the end of training.
    average: answer greedily in the mean Q of the newest `average` rounds, since policies of
    successive rounds differ more than their data do. The newest alone collects: what it visits
    and the mean would avoid is what the next round learns most from.
    window: learn from the last `window` transitions; None from all.
    standardise: scale states to mean 0, deviation 1 (fitted each round, saved).

    Learnt: policy_ (a MeanPolicy: scaler, features and weights of each of its members), plus the
    Agent's attributes.
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        gamma: float = 0.99,
        ridge: float = 1e-5,
        features: Any = Nystroem(n_components=300),  # noqa: B008  never mutated: always cloned
        n_iterations: int = 20,
        tolerance: float = 0.001,
        first_round: int = 2000,
        round_steps: int = 2000,
        epsilon: float = 0.2,
        epsilon_final: float = 0.05,
        average: int = 1,
        window: int | None = None,
        standardise: bool = True,
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.features = features
        self.n_iterations = n_iterations
        self.tolerance = tolerance
        self.first_round = first_round
        self.round_steps = round_steps
        self.epsilon = epsilon
        self.epsilon_final = epsilon_final
        self.average = average
        self.window = window
        self.standardise = standardise
        self.rng = rng

    def _check(self) -> None:
        owner = self._owner
        discrete.check(owner, self.kernel, self.action_space_)
        checks.features(owner, self.features)
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "ridge", self.ridge, at_least=0.0)
        checks.real(owner, "tolerance", self.tolerance, at_least=0.0, below=1.0)
        for name in ("n_iterations", "first_round", "round_steps", "average"):
            checks.integer(owner, name, getattr(self, name), at_least=1)
        if self.window is not None:
            checks.integer(owner, "window", self.window, at_least=1)
        for name in ("epsilon", "epsilon_final"):
            checks.real(owner, name, getattr(self, name), at_least=0.0, at_most=1.0)

    # ---------------------------------------------------------------- policy iteration on a batch

    def _fit_batch(self, transitions: Transitions) -> None:
        self._check()
        t = transitions
        columns = (t.states, t.actions, t.rewards, t.next_states, t.terminated)
        policy, _ = self._learn(tuple(arrays.host(x) for x in columns), None)
        self.policy_ = MeanPolicy([policy])

    def _learn(self, columns: Columns, before: GreedyPolicy | None) -> tuple[GreedyPolicy, int]:
        """One round: representation, then policy iteration; also the iterations made."""
        states, actions, rewards, next_states, terminated = columns
        actions = discrete.numbers(actions, self.action_space_)
        scaler = StateScaler(self.standardise and not is_table(self.observation_space_))
        z, next_z = scaler.fit(states).transform(states), scaler.transform(next_states)
        features, pairs = self._represent(z, actions)
        build = self._pair_system if pairs else self._block_system
        system = build(features, z, actions, rewards, next_z, ~terminated)
        # Without a policy yet, actions at s' are random: none is favoured before any evidence.
        start = (
            self.rng_.integers(self._n_actions, size=len(z))
            if before is None
            else before.act(next_states)
        )
        weights, iterations = self._iterate(system, start)
        return GreedyPolicy(scaler, features, weights, self._n_actions), iterations

    def _represent(self, z: np.ndarray, actions: np.ndarray) -> tuple[Any, bool]:
        """Features fitted on the data, and whether they are features of (s, a)."""
        kernel = default_kernel(self.kernel, self.observation_space_)
        pairs = isinstance(kernel, StateAction)
        rows = with_action(z, actions) if pairs else z
        kernel = kernel.resolve(rows, self.rng_)
        distinct = np.unique(rows, axis=0)
        features = self.features
        if features is None:
            features, rows = Nystroem(n_components=len(distinct), landmarks="uniform"), distinct
        features = features.with_kernel(kernel).set_params(rng=arrays.fresh_seed(self.rng_))
        if hasattr(features, "landmarks") and features.n_components > len(distinct):
            features.set_params(n_components=len(distinct))  # early rounds have few states
        return features.fit(rows), pairs

    def _block_system(
        self,
        features: Any,
        z: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_z: np.ndarray,
        mask: np.ndarray,
    ) -> ActionSystem:
        next_phi = features.transform(next_z) * mask[:, None]
        phi = features.transform(z)
        return ActionBlocks(phi, next_phi, actions, rewards, self.gamma, self._n_actions)

    def _pair_system(
        self,
        features: Any,
        z: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_z: np.ndarray,
        mask: np.ndarray,
    ) -> ActionSystem:
        every = range(self._n_actions)
        next_phi = np.stack([features.transform(with_action(next_z, a)) for a in every])
        next_phi *= mask[None, :, None]
        return ActionPairs(
            features.transform(with_action(z, actions)), next_phi, rewards, self.gamma
        )

    def _iterate(self, system: ActionSystem, policy: np.ndarray) -> tuple[np.ndarray, int]:
        """Evaluate, improve, until the policy at s' stands: weights and iterations."""
        for iteration in range(1, self.n_iterations + 1):
            changed = system.follow(policy)
            if iteration > 1 and changed <= self.tolerance * len(policy):
                break
            weights = system.solve(self.ridge, owner=self._owner)
            policy = system.greedy(weights)
        self.record("changed_fraction", changed / len(policy))
        self.record("features", weights.shape[-1])
        return weights, iteration

    # ---------------------------------------------------------------- rounds on an environment

    def _begin(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        n_envs: int,
        total_steps: int,
    ) -> None:
        self._check()
        self._total = total_steps
        self._next_round = min(self.first_round, total_steps)
        self._seen: list[Columns] = []

    def act(self, observations: np.ndarray) -> np.ndarray:
        """ε-greedy; uniformly random in the first round."""
        if not hasattr(self, "policy_"):
            return discrete.uniform(self.rng_, self.action_space_, len(observations))
        newest = self.policy_.members[-1].act
        return discrete.epsilon_greedy(
            self.rng_, self.action_space_, self._epsilon(), observations, newest
        )

    def _epsilon(self) -> float:
        progress = (self.steps_ - self.first_round) / max(1, self._total - self.first_round)
        return self.epsilon + (self.epsilon_final - self.epsilon) * min(1.0, max(0.0, progress))

    def observe(self, step: Step) -> None:
        """Keep the rows that are experience."""
        row = (step.observations, step.actions, step.rewards, step.next_observations)
        row = (*row, step.terminated)
        if step.n_valid < len(step.valid):
            row = tuple(column[step.valid] for column in row)
        self._seen.append(row)

    def update(self) -> int:
        """Iterate anew when a round is full."""
        if self.steps_ < self._next_round:
            return 0
        self._next_round = min(self.steps_ + self.round_steps, self._total)
        columns = tuple(np.concatenate(parts) for parts in zip(*self._seen, strict=True))
        if self.window is not None:
            columns = tuple(column[-self.window :] for column in columns)
        self._seen = [columns]
        members = self.policy_.members if hasattr(self, "policy_") else ()
        newest, iterations = self._learn(columns, members[-1] if members else None)
        self.policy_ = MeanPolicy((*members, newest)[-self.average :])
        return iterations

    def _end(self) -> None:
        self._seen = []

    # ---------------------------------------------------------------- using it

    @property
    def _n_actions(self) -> int:
        return int(self.action_space_.n)

    def q_values(self, observations: Any) -> np.ndarray:  # (b, …) -> (b, a)
        """Q(s, a) of every action, for one observation or a batch."""
        batch, _ = self._batch(observations)
        checks.fitted(self, "policy_")
        return self.policy_.q(batch)

    def _actions(self, observations: np.ndarray, deterministic: bool) -> np.ndarray:
        checks.fitted(self, "policy_")
        epsilon = 0.0 if deterministic else self.epsilon_final
        return discrete.answer(
            self.rng_, self.action_space_, epsilon, observations, self.policy_.act
        )

    def _values(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        checks.fitted(self, "policy_")
        return self.policy_.q(observations).max(axis=1)

    def _state(self) -> dict[str, np.ndarray]:
        checks.fitted(self, "policy_")
        return self.policy_.state()

    def _meta(self) -> dict[str, Any]:
        return self.policy_.meta()

    def _restore(self, state: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        self.policy_ = MeanPolicy.restored(state, meta, self._n_actions)
