"""KLSPI: kernel least-squares policy iteration, from a batch or in rounds on an environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl import arrays, checks
from kernrl.agent import Agent
from kernrl.approx.nystroem import Nystroem
from kernrl.control.states import StateScaler, default_kernel, is_table
from kernrl.data.collect import Step
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.kernels.state_action import StateAction
from kernrl.value.action_system import ActionBlocks, ActionPairs, ActionSystem
from kernrl.value.system import predictor


class KLSPI(Agent):
    """Kernel least-squares policy iteration: Q^π by kernel LSTD-Q, π greedy in it, repeated.

    On Transitions it iterates on that batch. On an environment it works in rounds: collect
    `round_steps` steps ε-greedily, then iterate on everything seen, with kernel, scaling and
    landmarks chosen anew. Discrete actions only.

    Q(s, a) = φ(s)ᵀw_a, w = (Σ φ(s, a)(φ(s, a) − γ m φ(s', π(s')))ᵀ + nλI)⁻¹ Σ φ(s, a) r
    Xu, Hu & Lu (2007), with a ridge; with Linear() features it is LSPI (Lagoudakis & Parr, 2003).
    Cost of a round with n transitions, m landmarks and a actions: O(n m²) for the features,
    O(a³m³) for each iteration; memory 16 n m bytes.

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
    window: keep only the last `window` transitions; None keeps all.
    standardise: scale states to mean 0, deviation 1 (fitted each round, saved).

    Learnt: weights_ (a, m) or (m,), kernel_, features_, scaler_, plus the Agent's attributes.
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
        self.window = window
        self.standardise = standardise
        self.rng = rng

    # ---------------------------------------------------------------- on a batch

    def _fit_batch(self, transitions: Transitions) -> None:
        self._check()
        self._learn(
            arrays.host(transitions.states),
            arrays.host(transitions.actions),
            arrays.host(transitions.rewards),
            arrays.host(transitions.next_states),
            arrays.host(transitions.terminated),
        )

    def _check(self) -> None:
        owner = self._owner
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "ridge", self.ridge, at_least=0.0)
        checks.integer(owner, "n_iterations", self.n_iterations, at_least=1)
        checks.real(owner, "tolerance", self.tolerance, at_least=0.0, below=1.0)
        for name in ("first_round", "round_steps"):
            checks.integer(owner, name, getattr(self, name), at_least=1)
        for name in ("epsilon", "epsilon_final"):
            checks.real(owner, name, getattr(self, name), at_least=0.0, at_most=1.0)
        if not isinstance(self.action_space_, spaces.Discrete):
            checks.fail(
                owner, "the action space must be Discrete", self.action_space_, error=TypeError
            )

    def _learn(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        terminated: np.ndarray,
    ) -> int:
        """One round: representation, then policy iteration; returns the iterations made."""
        before = self._greedy_before(next_states)
        actions = actions.reshape(-1).astype(np.int64) - int(self.action_space_.start)
        self.scaler_ = StateScaler(self.standardise and not is_table(self.observation_space_))
        z = self.scaler_.fit(states).transform(states)
        next_z = self.scaler_.transform(next_states)
        self._represent(z, actions)
        system = self._system(z, actions, rewards, next_z, ~terminated)
        return self._iterate(system, before)

    def _greedy_before(self, next_states: np.ndarray) -> np.ndarray | None:
        """What the policy of the last round does at s': the warm start of this one."""
        if not hasattr(self, "weights_"):
            return None
        return np.argmax(self._q(next_states), axis=1)

    def _represent(self, z: np.ndarray, actions: np.ndarray) -> None:
        """Resolve the kernel on the data and choose landmarks or frequencies."""
        kernel = default_kernel(self.kernel, self.observation_space_)
        self._pairs = isinstance(kernel, StateAction)
        rows = np.column_stack((z, actions)) if self._pairs else z
        kernel = kernel.resolve(rows, self.rng_)
        distinct = np.unique(rows, axis=0)
        features = self.features
        if features is None:
            features, rows = Nystroem(n_components=len(distinct), landmarks="uniform"), distinct
        features = features.with_kernel(features.kernel or kernel)
        if hasattr(features, "landmarks") and features.n_components > len(distinct):
            features.set_params(n_components=len(distinct))  # early rounds have few states
        features.set_params(rng=arrays.fresh_seed(self.rng_))
        self.kernel_ = kernel
        self.features_ = features.fit(rows)

    def _system(
        self,
        z: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_z: np.ndarray,
        mask: np.ndarray,
    ) -> ActionSystem:
        if not self._pairs:
            phi = self.features_.transform(z)
            next_phi = self.features_.transform(next_z) * mask[:, None]
            return ActionBlocks(phi, next_phi, actions, rewards, self.gamma, self._n_actions)
        phi = self.features_.transform(np.column_stack((z, actions)))
        next_phi = np.stack([self._pair_features(next_z, a) for a in range(self._n_actions)])
        return ActionPairs(phi, next_phi * mask[None, :, None], rewards, self.gamma)

    def _pair_features(self, z: np.ndarray, action: int) -> np.ndarray:
        return self.features_.transform(np.column_stack((z, np.full(len(z), float(action)))))

    def _iterate(self, system: ActionSystem, policy: np.ndarray | None) -> int:
        """Evaluate, improve, until the policy at s' stands."""
        if policy is None:  # uniformly random actions: no action is favoured before any evidence
            policy = self.rng_.integers(self._n_actions, size=system.n)
        for iteration in range(1, self.n_iterations + 1):
            changed = system.follow(policy)
            if iteration > 1 and changed <= self.tolerance * system.n:
                break
            self.weights_ = system.solve(self.ridge, owner=self._owner)
            policy = system.greedy(self.weights_)
        self.record("changed_fraction", changed / system.n)
        self.record("features", self.weights_.shape[-1])
        self._ready()
        return iteration

    # ---------------------------------------------------------------- on an environment

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
        self._seen: list[tuple[np.ndarray, ...]] = []

    def act(self, observations: np.ndarray) -> np.ndarray:
        """ε-greedy; uniformly random in the first round."""
        start = int(self.action_space_.start)
        random = self.rng_.integers(self._n_actions, size=len(observations)) + start
        if not hasattr(self, "weights_"):
            return random
        explore = self.rng_.random(len(observations)) < self._epsilon()
        if explore.all():
            return random
        return np.where(explore, random, self._actions(observations, True))

    def _epsilon(self) -> float:
        progress = (self.steps_ - self.first_round) / max(1, self._total - self.first_round)
        return self.epsilon + (self.epsilon_final - self.epsilon) * min(1.0, max(0.0, progress))

    def observe(self, step: Step) -> None:
        """Keep the rows that are experience."""
        row = (step.observations, step.actions, step.rewards, step.next_observations)
        row = (*row, step.terminated)
        self._seen.append(row if step.n_valid == len(step.valid) else _only(row, step.valid))

    def update(self) -> int:
        """Iterate when a round is full."""
        if self.steps_ < self._next_round:
            return 0
        self._next_round = min(self.steps_ + self.round_steps, max(self._total, self.steps_ + 1))
        columns = tuple(np.concatenate(parts) for parts in zip(*self._seen, strict=True))
        if self.window is not None:
            columns = tuple(column[-self.window :] for column in columns)
        self._seen = [columns]
        return self._learn(*columns)

    def _end(self) -> None:
        self._seen = []

    # ---------------------------------------------------------------- using it

    @property
    def _n_actions(self) -> int:
        return int(self.action_space_.n)

    def _q(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, a)
        z = self.scaler_.transform(observations)
        if not self._pairs:
            return self._predict_q(z)
        rows = [np.column_stack((z, np.full(len(z), float(a)))) for a in range(self._n_actions)]
        return np.concatenate([self._predict_q(row) for row in rows], axis=1)

    def _ready(self) -> None:
        """Prepare for many small calls of _q."""
        weights = self.weights_[:, None] if self._pairs else self.weights_.T
        self._predict_q = predictor(self.features_, weights)

    def q_values(self, observations: Any) -> np.ndarray:  # (b, …) -> (b, a)
        """Q(s, a) of every action, for a batch of observations."""
        checks.fitted(self, "weights_")
        return self._q(self._batch(observations)[0])

    def _actions(self, observations: np.ndarray, deterministic: bool) -> np.ndarray:
        checks.fitted(self, "weights_")
        start = int(self.action_space_.start)
        greedy = np.argmax(self._q(observations), axis=1) + start
        if deterministic:
            return greedy
        random = self.rng_.integers(self._n_actions, size=len(greedy)) + start
        return np.where(self.rng_.random(len(greedy)) < self.epsilon_final, random, greedy)

    def _values(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        return self._q(observations).max(axis=1)


def _only(row: tuple[np.ndarray, ...], valid: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(column[valid] for column in row)
