"""Transitions in the hands of scikit-learn and of other array libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, train_test_split
from tolerances import tolerance
from transition_rows import columns, make

from kernrl.data.transitions import Transitions


class MeanReward(BaseEstimator):
    """Predicts the mean reward plus an offset."""

    def __init__(self, offset=0.0):
        self.offset = offset

    def fit(self, X, y=None):
        assert isinstance(X, Transitions)
        self.mean_ = float(X.rewards.mean()) + self.offset
        return self

    def score(self, X, y=None):
        return -float(np.mean((X.rewards - self.mean_) ** 2))


def test_as_x_in_scikit_learn(rng):
    t = make(30, rewards=rng.normal(size=30), terminated=[0] * 30, truncated=None)
    for train, test in KFold(5, shuffle=True, random_state=0).split(t):
        assert len(t[train]) == 24 and len(t[test]) == 6
    train, test = train_test_split(t, test_size=10, random_state=0)
    joined = np.concatenate([train.rewards, test.rewards])
    assert sorted(joined.tolist()) == sorted(t.rewards.tolist())
    scores = cross_val_score(MeanReward(), t, cv=3)
    r = t.rewards.reshape(3, 10)
    expected = [-np.mean((r[k] - np.delete(r, k, axis=0).mean()) ** 2) for k in range(3)]
    np.testing.assert_allclose(scores, expected, **tolerance("algebra"))
    search = GridSearchCV(MeanReward(), {"offset": [0.0, 5.0]}, cv=3).fit(t)
    assert search.best_params_ == {"offset": 0.0}
    assert search.best_estimator_.mean_ == pytest.approx(t.rewards.mean())


# ---------------------------------------------------------------- other libraries


def test_torch_in_torch_out():
    tensors = {k: torch.as_tensor(x) for k, x in columns().items()}
    t = Transitions(**tensors)
    assert all(isinstance(x, torch.Tensor) for x in t.columns.values() if x is not None)
    part = t[[0, 2, 3]]
    assert isinstance(part.states, torch.Tensor)
    assert part.rewards.tolist() == [0.0, 2.0, 3.0]
    assert part.episode.tolist() == [0, 1, 2]
    assert Transitions.concatenate([t, t]).episode.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert t[torch.tensor([True] + [False] * 5)].n == 1
    assert repr(t) == "Transitions(n=6, d=2, actions int64, 2 episodes)"


def test_lists_beside_torch_states_become_torch():
    t = Transitions(torch.zeros(3), [0, 1, 2], torch.zeros(3), [0, 0, 1])
    assert isinstance(t.rewards, torch.Tensor) and t.rewards.dtype == torch.float64
    assert t.terminated.dtype == torch.bool


def test_a_bad_torch_row_is_named():
    rewards = torch.zeros(6)
    rewards[4] = torch.nan
    given = {k: torch.as_tensor(x) for k, x in columns().items()}
    with pytest.raises(ValueError, match="every reward must be finite, got nan at row 4"):
        Transitions(**{**given, "rewards": rewards})


def test_any_array_library(rng):
    strict = pytest.importorskip("array_api_strict")
    t = Transitions(**{k: strict.asarray(x) for k, x in columns().items()})
    assert type(t[[0, 2]].states) is type(t.states)
    assert Transitions.concatenate([t, t]).n == 12
