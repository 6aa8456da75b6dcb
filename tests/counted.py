"""Counting environments in vectors, and a policy that does nothing."""

from __future__ import annotations

import numpy as np
from counter import Counter
from gymnasium.vector import AutoresetMode, SyncVectorEnv

LASTS = (3, 2, 4)  # sub-environments that end at different times


def vector(mode, end="terminated", lasts=LASTS, kind=SyncVectorEnv, **options):
    """Counters whose episodes are numbered 0, 1, … in the first, 100, 101, … in the second, …"""
    # Gymnasium 1.4 hands on the final observation uncopied in SAME_STEP, so there an env that
    # reuses its buffer loses it before any caller can see it.
    reuse = mode is not AutoresetMode.SAME_STEP
    makers = [
        lambda k=k, last=last: Counter(end, last, 100 * k, reuse) for k, last in enumerate(lasts)
    ]
    return kind(makers, autoreset_mode=mode, **options)


def zeros(observations):
    return np.zeros(len(observations), dtype=np.int64)


MODES = list(AutoresetMode)


def expected_rows(first_episode, last, n):
    """The first n rows of a counter, written down from its definition."""
    rows = []
    for k in range(n):
        episode, count = first_episode + k // last, k % last
        rows.append(((episode, count), 10.0 * (count + 1), (episode, count + 1), count + 1 == last))
    return rows
