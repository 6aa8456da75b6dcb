"""The ring keeps the latest rows, and draws each equally often."""

from __future__ import annotations

import re

import gymnasium as gym
import numpy as np
import pytest
from counter import Counter
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from kernrl.data.collect import Sampler
from kernrl.data.replay import Replay
from kernrl.data.transitions import Transitions


def numbered(start, n, columns=2):
    """n rows whose every number says which row it is."""
    k = np.arange(start, start + n, dtype=np.float64)
    states = np.repeat(k[:, None], columns, axis=1)
    flags = k % 2 == 0
    return Transitions(states, k, states + 1, flags, actions=k.astype(int), truncated=~flags)


@given(st.integers(1, 7), st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_the_latest_rows_stay(capacity, sizes):
    replay, total = Replay(capacity), 0
    for n in sizes:
        replay.extend(numbered(total, n))
        total += n
        kept = min(total, capacity)
        assert len(replay) == kept
        drawn = replay.sample(200, np.random.default_rng(0))
        assert set(drawn.rewards.tolist()) == set(range(total - kept, total))


def test_rows_stay_whole():
    replay = Replay(5)
    replay.extend(numbered(0, 12))
    t = replay.sample(50, np.random.default_rng(1))
    assert (t.states == t.rewards[:, None]).all()
    assert (t.next_states == t.rewards[:, None] + 1).all()
    assert (t.actions == t.rewards).all()
    assert (t.terminated == (t.rewards % 2 == 0)).all()
    assert (t.truncated == ~t.terminated).all()
    assert t.episode_starts.all()  # drawn rows follow from nothing
    Transitions(**t.columns)


def test_draws_are_uniform_and_follow_the_generator():
    replay = Replay(10)
    replay.extend(numbered(0, 25))
    rewards = replay.sample(20_000, np.random.default_rng(2)).rewards
    counts = np.bincount(rewards.astype(int) - 15, minlength=10)
    assert chisquare(counts).pvalue > 0.001
    again = replay.sample(20_000, np.random.default_rng(2)).rewards
    np.testing.assert_array_equal(rewards, again)


def test_autoreset_rows_are_never_kept():
    replay = Replay(100)
    sampler = Sampler(SyncVectorEnv([lambda: Counter(last=2), lambda: Counter(last=3)]), seed=0)
    valid = 0
    for _ in range(12):
        step = sampler.step(np.zeros(2, dtype=int))
        replay.add(step)
        valid += step.n_valid
    assert valid < 24
    assert len(replay) == valid
    t = replay.sample(500, np.random.default_rng(0))
    assert (t.rewards == 10 * t.next_states[:, 1]).all()
    assert (t.next_states[:, 1] == t.states[:, 1] + 1).all()


def test_steps_of_one_environment():
    replay, sampler = Replay(4), Sampler(gym.make("FrozenLake-v1"), seed=0)
    for _ in range(6):
        replay.add(sampler.step(sampler.random_actions()))
    t = replay.sample(3, np.random.default_rng(0))
    assert len(replay) == 4
    assert t.states.dtype == np.int64


def test_a_drawn_batch_is_no_window_into_the_ring():
    replay = Replay(3)
    replay.extend(numbered(0, 3))
    t = replay.sample(3, np.random.default_rng(0))
    before = t.rewards.copy()
    replay.extend(numbered(50, 3))
    np.testing.assert_array_equal(t.rewards, before)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Replay(0), "Replay: capacity must be an integer of at least 1, got 0."),
        (
            lambda: Replay(5).sample(1, np.random.default_rng(0)),
            "Replay.sample: the buffer must hold rows, got none.",
        ),
        (
            lambda: Replay(5).extend(numbered(0, 2).replace(actions=None)),
            "Replay: the transitions must have actions, got none.",
        ),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_rows_of_another_width():
    replay = Replay(5)
    replay.extend(numbered(0, 2))
    text = "Replay: states must have columns (2,) as before, got (3,)."
    with pytest.raises(ValueError, match=re.escape(text)):
        replay.extend(numbered(0, 2, columns=3))
    assert len(replay) == 2
