"""Rows to build Transitions from."""

from __future__ import annotations

import numpy as np

from kernrl.data.transitions import Transitions


def columns(n=6, **changes):
    """n rows in two episodes of n/2: the first terminated, the second truncated."""
    flags = np.zeros((2, n), dtype=bool)
    flags[0, n // 2 - 1] = flags[1, n - 1] = True
    rows = {
        "states": np.arange(2.0 * n).reshape(n, 2),
        "rewards": np.arange(n, dtype=np.float64),
        "next_states": np.arange(2.0 * n).reshape(n, 2) + 2,
        "terminated": flags[0],
        "truncated": flags[1],
        "actions": np.arange(n) % 2,
    }
    return {**rows, **changes}


def make(n=6, **changes):
    return Transitions(**columns(n, **changes))
