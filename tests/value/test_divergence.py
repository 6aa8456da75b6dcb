"""The monitor: what counts as divergence, and what never does."""

import math
import warnings

import numpy as np
import pytest

from kernrl.checks import KernrlWarning
from kernrl.value.divergence import DivergenceMonitor


def test_no_value_function_of_the_rewards_diverges():
    """max |r|/(1 − γ) is reached by a state that loops on the largest reward."""
    monitor = DivergenceMonitor(0.9, slack=1.0)
    assert not monitor.update([19.999, -20.0], rewards=[1.0, -2.0])
    assert monitor.bound_ == pytest.approx(20.0)
    assert monitor.update([20.1])
    assert monitor.update([0.0]), "what diverged once has diverged"
    assert monitor.largest_ == [20.0, 20.1, 0.0]


def test_the_largest_reward_so_far_counts():
    monitor = DivergenceMonitor(0.5, slack=1.0)
    assert not monitor.update([1e9]), "no reward yet, no bound"
    monitor = DivergenceMonitor(0.5, slack=1.0)
    monitor.update([0.0], rewards=np.array([-3.0]))
    assert not monitor.update([6.0], rewards=[1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_diverged(value):
    assert DivergenceMonitor(1.0).update([0.0, value], rewards=[1.0])


def test_without_discount_only_a_limit_bounds():
    assert not DivergenceMonitor(1.0).update([1e12], rewards=[1.0])
    assert DivergenceMonitor(1.0, limit=100.0).update([101.0], rewards=[1.0])


def test_warns_once():
    monitor = DivergenceMonitor(0.5, slack=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.warn_once("Someone")
    monitor.update([7.0], rewards=[1.0])
    text = r"^Someone: values have diverged: \|V\| reached 7.0e\+00, above 2.0e\+00\. Lower learn"
    with pytest.warns(KernrlWarning, match=text):
        monitor.warn_once("Someone")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.warn_once("Someone")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gamma": 1.5}, "DivergenceMonitor: gamma must be a finite number"),
        ({"gamma": 0.5, "slack": 0.0}, "DivergenceMonitor: slack must be"),
        ({"gamma": 0.5, "limit": -1.0}, "DivergenceMonitor: limit must be"),
    ],
)
def test_one_clear_error(arguments, text):
    with pytest.raises(ValueError, match=text):
        DivergenceMonitor(**arguments)
