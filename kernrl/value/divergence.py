"""Whether an iteration leaves the range in which every value function lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernrl import arrays, checks

Array = Any


class DivergenceMonitor:
    """Watches max |V| of an iteration against the largest value that the rewards allow.

    No policy is worth more than max |r|/(1 − γ); an iterate above `slack` times that, or not
    finite, has left the range. With γ = 1 there is no such bound: give `limit`, or only what is not
    finite counts. Ridge regression, unlike an averager, gives no guarantee (see `contraction`).

    gamma in [0, 1]; slack above 0; limit: the largest |V| allowed, instead of the bound.
    Learnt: largest_ (a list, max |V| of each update), bound_, diverged_ (once True, it stays).

    >>> monitor = DivergenceMonitor(gamma=0.5, slack=2.0)
    >>> [monitor.update([v], rewards=[1.0]) for v in (1.5, 3.9, 4.1, 1.0)]
    [False, False, True, True]
    """

    def __init__(self, gamma: float, slack: float = 10.0, limit: float | None = None) -> None:
        owner = "DivergenceMonitor"
        self.gamma = checks.real(owner, "gamma", gamma, at_least=0.0, at_most=1.0)
        self.slack = checks.real(owner, "slack", slack, above=0.0)
        self.limit = limit if limit is None else checks.real(owner, "limit", limit, above=0.0)
        self.largest_: list[float] = []
        self.reward_, self.diverged_, self._warned = 0.0, False, False

    @property
    def bound_(self) -> float:
        """The largest |V| that does not count as divergence."""
        if self.limit is not None:
            return self.limit
        return self.slack * self.reward_ / (1.0 - self.gamma) if self.gamma < 1.0 else math.inf

    def update(self, values: Array, rewards: Array = ()) -> bool:  # (q,), (n,)
        """Look at an iterate and at the rewards it was learnt from; True once it has diverged."""
        values = np.abs(np.asarray(arrays.host(arrays.take("DivergenceMonitor", "values", values))))
        rewards = np.abs(np.asarray(arrays.host(arrays.take("DivergenceMonitor", "r", rewards))))
        self.reward_ = max(self.reward_, float(np.max(rewards, initial=0.0)))
        largest = float(np.max(values, initial=0.0))
        self.largest_.append(largest)
        # Before the first reward that is not zero, nothing is too much but the infinite.
        bound = self.bound_ if self.bound_ > 0 else math.inf
        self.diverged_ = self.diverged_ or not largest <= bound or not math.isfinite(largest)
        return self.diverged_

    def warn_once(self, owner: str) -> None:
        """One warning for `owner` if the iteration has diverged."""
        if self.diverged_ and not self._warned:
            self._warned = True
            cure = "Lower learning_rate, raise ridge, or take an averager or gradient TD."
            what = f"values have diverged: |V| reached {max(self.largest_):.1e}"
            checks.warn(owner, f"{what}, above {self.bound_:.1e}", cure)
