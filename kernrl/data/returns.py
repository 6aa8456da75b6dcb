"""Sums of rewards along an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.signal import lfilter

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions

Array = Any


def discounted(rewards: Array, gamma: float, starts: Array = None) -> Array:  # (n,) -> (n,)
    """The return to go of every row, g_i = r_i + γ g_{i+1}, beginning anew at every start.

    `starts` (n,) is True at the first row of an episode (`Transitions.episode_starts`); None means
    one episode. The sum ends at the episode's last row, so the returns of a truncated episode lack
    the value beyond the cut. O(n).

    >>> discounted([1.0, 1.0, 1.0], 0.5).tolist()
    [1.75, 1.5, 1.0]
    """
    gamma = checks.real("discounted", "gamma", gamma, at_least=0.0, at_most=1.0)
    given = arrays.floating(arrays.take("discounted", "rewards", rewards))
    checks.ndim("discounted", "rewards", given, 1, "(n,)")
    checks.finite("discounted", "reward", given)
    values = arrays.host(given).astype(np.float64)
    for rows in _episodes(len(values), starts):
        values[rows] = lfilter([1.0], [1.0, -gamma], values[rows][::-1])[::-1]
    return arrays.like(values, given)


def episode_returns(transitions: Transitions, gamma: float = 1.0) -> np.ndarray:
    """The discounted return of every episode from its first row, in order."""
    to_go = discounted(transitions.rewards, gamma, transitions.episode_starts)
    first: np.ndarray = arrays.host(to_go)[arrays.host(transitions.episode_starts)]
    return first


def _episodes(n: int, starts: Array) -> list[slice]:
    """The rows of each episode."""
    if starts is None:
        return [slice(0, n)] if n else []
    flags = arrays.host(arrays.take("discounted", "starts", starts)).astype(bool)
    checks.ndim("discounted", "starts", flags, 1, "(n,)")
    checks.require(
        len(flags) == n, "discounted", f"starts must have {n} rows, as rewards", len(flags)
    )
    edges = np.union1d(np.flatnonzero(flags), [0, n] if n else [0])
    return [slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
