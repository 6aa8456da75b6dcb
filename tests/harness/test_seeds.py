from __future__ import annotations

import itertools

import numpy as np
import pytest

from kernrl.harness import seeds

PINNED = [574125869, 2027309285, 728879352]


def episodes(root=0, name="report", env="CartPole-v1", seed=0, n=100):
    return set(seeds.numbers(seeds.stream(root, name, env, seed), n))


def test_streams_environments_seeds_and_roots_share_nothing():
    """seed + i would share nearly all of them."""
    every = [
        episodes(*key)
        for key in itertools.product((0, 1), seeds.STREAMS, ("CartPole-v1", "Acrobot-v1"), range(5))
    ]
    assert len(set().union(*every)) == 100 * len(every)


def test_a_stream_depends_on_nothing_else():
    """The numbers themselves are written down: they may never move between versions."""
    assert seeds.numbers(seeds.stream(0, "report", "CartPole-v1", 0), 3) == PINNED


def test_longer_lists_start_with_shorter_ones_and_are_distinct():
    short, long = seeds.numbers(7, 5), seeds.numbers(7, 1000)
    assert long[:5] == short
    assert len(set(long)) == 1000
    assert all(0 <= x < 2**31 for x in long)


def test_a_number_is_what_numpy_makes_of_the_sequence():
    sequence = np.random.SeedSequence(3, spawn_key=(1, 2))
    assert seeds.number(sequence) == int(sequence.generate_state(1)[0]) // 2


def test_repeats_are_drawn_again(monkeypatch):
    class Repeating(np.random.SeedSequence):
        def generate_state(self, n, dtype=None):
            return np.arange(n, dtype=np.uint32)  # halved: 0, 0, 1, 1, 2, …

    assert seeds.numbers(Repeating(0), 4) == [0, 1, 2, 3]


def test_an_unknown_stream_is_an_error():
    with pytest.raises(ValueError, match="seeds: stream must be one of report, select, train"):
        seeds.stream(0, "test", "CartPole-v1", 0)
