"""Episodes and queries on which every form of GPTD is tried."""

import numpy as np
from tolerances import tolerance

from kernrl.data.transitions import Transitions

QUERY = np.random.default_rng(1).normal(size=(9, 2))


def walk(n=60, seed=0, d=2):
    """Four episodes: terminated, truncated, broken off by a jump, and open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, d)).cumsum(axis=0) * 0.3
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 4], truncated[n // 2] = True, True
    after = x[1:].copy()
    after[3 * n // 4] += 1.0
    return Transitions(x[:-1], np.sin(x[:-1, 0]), after, terminated, truncated=truncated)


def episode(n=40, seed=2):
    """One terminated episode."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    return Transitions(x[:-1], rng.normal(size=n), x[1:], np.arange(n) == n - 1)


def assert_same(a, b, t, name="closed form"):
    """Two fits say the same of V and of the rewards."""
    for x, y in zip(a.predict(QUERY, return_std=True), b.predict(QUERY, return_std=True),
                    strict=True):  # fmt: skip
        np.testing.assert_allclose(x, y, **tolerance(name))
    np.testing.assert_allclose(
        a.log_marginal_likelihood_, b.log_marginal_likelihood_, **tolerance(name)
    )
    assert a.n_transitions_ == b.n_transitions_ == len(t)
