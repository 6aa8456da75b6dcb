"""Agents as small as can be, for the tests of what every agent inherits."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from kernrl.agent import Agent


class TabularQ(Agent):
    """Watkins' Q-learning on a Discrete observation space."""

    def __init__(self, learning_rate=1.0, gamma=0.9, epsilon=1.0, extra=None, rng=None):
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.epsilon = epsilon
        self.extra = extra
        self.rng = rng

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        if not isinstance(observation_space, gym.spaces.Discrete):
            raise TypeError("TabularQ: the observation space must be Discrete")
        self.q_ = np.zeros((observation_space.n, action_space.n))

    def _actions(self, observations, deterministic):
        greedy = self.q_[observations].argmax(axis=1)
        if deterministic:
            return greedy
        explore = self.rng_.random(len(greedy)) < self.epsilon
        return np.where(explore, self.rng_.integers(self.q_.shape[1], size=len(greedy)), greedy)

    def _values(self, observations):
        return self.q_[observations].max(axis=1)

    def observe(self, step):
        self.step_ = step

    def update(self):
        s = self.step_
        ahead = np.where(s.terminated, 0.0, self._values(s.next_observations))
        for i in np.flatnonzero(s.valid):
            key = s.observations[i], s.actions[i]
            target = s.rewards[i] + self.gamma * ahead[i]
            self.q_[key] += self.learning_rate * (target - self.q_[key])
        return 1

    def _state(self):
        return {"q": self.q_}

    def _meta(self):
        return {"states": len(self.q_), "limit": np.inf}

    def _restore(self, state, meta):
        self.q_ = state["q"]
        assert meta == {"states": len(self.q_), "limit": np.inf}


class Logger(Agent):
    """Acts 0 and writes down what happens to it."""

    def __init__(self, batch=False, rng=None):
        self.batch = batch
        self.rng = rng

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        self.events_ = [("begin", n_envs, total_steps)]

    def _actions(self, observations, deterministic):
        return np.full(len(observations), 0 if deterministic else 1)

    def act(self, observations):
        self.events_.append("act")
        return self._actions(observations, False)

    def observe(self, step):
        self.events_.append("observe")
        self.valid_ = [*getattr(self, "valid_", []), step.n_valid]

    def update(self):
        self.events_.append("update")

    def _end(self):
        self.events_.append("end")


class Batch(Logger):
    """Learns from a data set too."""

    def _fit_batch(self, transitions):
        self.seen_ = transitions
        if self.batch == "broken":
            raise ValueError("Batch: no")


def frozen_lake(**options):
    return gym.make("FrozenLake-v1", is_slippery=False, **options)
