"""Returns against the definition, summed term by term."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import tolerance

from kernrl.data.returns import discounted, episode_returns
from kernrl.data.transitions import Transitions


def by_definition(rewards, gamma, starts):
    """g_i = Σ_k γᵏ r_{i+k} up to the end of the episode."""
    out = []
    for i in range(len(rewards)):
        end = next((j for j in range(i + 1, len(rewards)) if starts[j]), len(rewards))
        out.append(sum(gamma ** (j - i) * rewards[j] for j in range(i, end)))
    return out


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.3, 0.99, 1.0]),
)
def test_the_definition(rows, gamma):
    rewards, starts = map(list, zip(*rows, strict=True))
    got = discounted(rewards, gamma, starts)
    np.testing.assert_allclose(got, by_definition(rewards, gamma, starts), **tolerance("algebra"))


def test_one_episode_and_none():
    assert discounted([1, 2, 3], 1.0).tolist() == [6.0, 5.0, 3.0]
    assert discounted(np.zeros(0), 0.9).tolist() == []


def test_torch_in_torch_out():
    got = discounted(torch.tensor([1.0, 1.0]), 0.5, torch.tensor([True, True]))
    assert got.dtype == torch.float32
    assert got.tolist() == [1.0, 1.0]


def test_episode_returns():
    t = Transitions(np.zeros(5), [1, 2, 3, 4, 5], np.zeros(5), [0, 1, 0, 0, 0])
    assert episode_returns(t).tolist() == [3.0, 12.0]
    assert episode_returns(t, 0.5).tolist() == [2.0, 3 + 2 + 1.25]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], 1.5), "discounted: gamma must be a finite number at least 0.0 and at most 1.0"),
        (([[1.0]], 0.5), "discounted: rewards must have shape (n,), got (1, 1)."),
        (([np.nan], 0.5), "discounted: every reward must be finite, got nan at row 0."),
        (([1.0], 0.5, [True, False]), "discounted: starts must have 1 rows, as rewards, got 2."),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        discounted(*arguments)
