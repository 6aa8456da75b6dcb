"""A three-step environment whose every number can be said in advance."""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Counts 0, 1, 2, 3; reward = 10 × (count reached); ends at `last` by the flags of `end`.

    The observation is (episode number, count), so that a row tells where it comes from. With
    `reuse` its buffer is written again and again: whoever does not copy sees the future.
    """

    def __init__(self, end: str = "terminated", last: int = 3, first_episode: int = 0, reuse=True):
        self.observation_space = gym.spaces.Box(0.0, 1e6, (2,), np.float64)
        self.action_space = gym.spaces.Discrete(2)
        self.end, self.last = end, last
        self.buffer = np.array([first_episode - 1.0, 0.0])
        self.reuse = reuse
        self.seeds: list[int | None] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.buffer += (1.0, 0.0)
        self.buffer[1] = 0.0
        return self._seen(), {}

    def step(self, action):
        assert self.buffer[1] < self.last, "stepped after the end"
        self.buffer[1] += 1.0
        over = self.buffer[1] >= self.last
        terminated = bool(over and self.end in ("terminated", "both"))
        truncated = bool(over and self.end in ("truncated", "both"))
        return self._seen(), 10.0 * self.buffer[1], terminated, truncated, {}

    def _seen(self):
        return self.buffer if self.reuse else self.buffer.copy()
