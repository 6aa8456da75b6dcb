"""`collect`: data sets out of environments."""

from __future__ import annotations

import re

import numpy as np
import pytest
from counted import MODES, expected_rows, vector, zeros
from counter import Counter

from kernrl.data.collect import collect


def test_collect_one_environment():
    t = collect(Counter(), zeros, 8, seed=0)
    assert t.n == 8
    assert t.states.tolist() == [list(row[0]) for row in expected_rows(0, 3, 8)]
    assert t.next_states.tolist() == [list(row[2]) for row in expected_rows(0, 3, 8)]
    assert t.rewards.tolist() == [10, 20, 30, 10, 20, 30, 10, 20]
    assert t.terminated.tolist() == [False, False, True] * 2 + [False, False]
    assert t.truncated.tolist() == [False] * 7 + [True]  # the collector's cut
    assert t.episode.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_data_set_that_ends_with_an_episode_has_no_cut():
    t = collect(Counter(), zeros, 6, seed=0)
    assert not t.truncated.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 40])
def test_collect_many_environments(mode, n):
    """Exactly n rows, each episode one run in the right order, a cut only where none ended."""
    t = collect(vector(mode), zeros, n, seed=0)
    assert t.n == n
    follows = (t.next_states[:-1] == t.states[1:]).all(axis=1)
    assert t.episode_starts[1:].tolist() == (~follows).tolist()
    starts = t.states[t.episode_starts]
    assert not starts[:, 1].any()
    assert len({tuple(s) for s in starts.tolist()}) == len(starts)
    assert t.rewards.tolist() == (10 * t.next_states[:, 1]).tolist()
    last = np.append(t.episode_starts[1:], True)
    assert (t.terminated | t.truncated).tolist() == last.tolist()
    assert not (t.terminated & t.truncated).any()


def test_discrete_observations_become_a_column():
    t = collect("FrozenLake-v1", "random", 20, seed=0)
    assert t.states.shape == (20, 1)
    assert t.states.dtype == np.int64


def test_continuous_actions():
    t = collect("Pendulum-v1", "random", 20, seed=0)
    assert t.actions.shape == (20, 1)
    assert len(np.unique(t.actions)) == 20


def test_a_policy_with_predict_stands_for_its_predictions():
    class Ones:
        def predict(self, observations):
            return np.ones(len(observations), dtype=np.int64)

    assert collect(Counter(), Ones(), 5, seed=0).actions.tolist() == [1] * 5


def test_torch_policies():
    import torch

    t = collect(Counter(), lambda s: torch.zeros(len(s), dtype=torch.int64), 4, seed=0)
    assert isinstance(t.actions, np.ndarray)


@pytest.mark.parametrize(
    ("policy", "n", "error", "text"),
    [
        (
            "rnadom",
            5,
            ValueError,
            "policy must be one of random, got 'rnadom'. Did you mean 'rando",
        ),
        (3, 5, TypeError, "collect: policy must be callable, an agent or 'random', got int."),
        (zeros, 0, ValueError, "collect: n_steps must be an integer of at least 1, got 0."),
        (zeros, 1.5, TypeError, "collect: n_steps must be an integer of at least 1, got 1.5."),
        (lambda s: 0, 5, ValueError, "Sampler: actions must have shape (1,), one row for each env"),
    ],
)
def test_bad_requests(policy, n, error, text):
    with pytest.raises(error, match=re.escape(text)):
        collect(Counter(), policy, n, seed=0)
