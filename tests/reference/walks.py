"""A random trajectory with every kind of ending."""

import numpy as np

from kernrl.data.transitions import Transitions


def walk(n=60, seed=0, d=2):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, d)).cumsum(axis=0) * 0.3
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    return Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated)
