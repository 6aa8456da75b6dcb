"""Agents that are small, and agents that misbehave, for tests of the harness."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from kernrl.agent import Agent


class TabularQ(Agent):
    """Q-learning on discrete observations, ε-greedy."""

    def __init__(self, gamma=0.95, learning_rate=0.5, epsilon=0.3, pause=0.0, rng=None):
        self.gamma = gamma
        self.learning_rate = learning_rate
        self.epsilon = epsilon
        self.pause = pause
        self.rng = rng

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        self.table_ = np.zeros((observation_space.n, action_space.n))

    def _actions(self, observations, deterministic):
        best = self.table_[observations]
        noise = 0 if deterministic else self.rng_.random(best.shape)
        random = (not deterministic) & (self.rng_.random(len(best)) < self.epsilon)
        return np.argmax(np.where(random[:, None], noise, best + 1e-9 * noise), axis=1)

    def observe(self, step):
        self.step = step

    def update(self):
        time.sleep(self.pause)
        s = self.step
        future = self.gamma * (1 - s.terminated) * self.table_[s.next_observations].max(axis=1)
        error = s.rewards + future - self.table_[s.observations, s.actions]
        self.table_[s.observations, s.actions] += self.learning_rate * error * s.valid
        return 1

    def _state(self):
        return {"table": self.table_}

    def _restore(self, state, meta):
        self.table_ = state["table"]


class Constant(Agent):
    """Always one action; learns nothing, prints, and may misbehave after some steps."""

    def __init__(self, action=0, crash_at=None, die_at=None, rng=None):
        self.action = action
        self.crash_at = crash_at
        self.die_at = die_at
        self.rng = rng

    def _actions(self, observations, deterministic):
        return np.full(len(observations), self.action)

    def update(self):
        if self.steps_ == self.crash_at:
            raise ArithmeticError("the sum is off\nand this is a second line")
        if self.steps_ == self.die_at:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        print("hello from an agent")
        print("and a complaint", file=sys.stderr)


class Plain:
    """Not an Agent at all: the least that a user's class must have."""

    def __init__(self, action=1):
        self.action = action

    def fit(self, env, total_steps, callbacks=()):
        env.reset(seed=0)
        self.fitted = total_steps
        return self

    def predict(self, observations, deterministic=True):
        return [self.action] * len(observations)
