"""Episodes that chunks or calls cut in two: one goes on where the other stands, if it is open."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kernrl import arrays
from kernrl.data.transitions import Transitions

Array = Any


def open_end(t: Transitions) -> np.ndarray | None:  # -> (d,)
    """The state where the last episode of t stands; None where it has ended."""
    ended = bool(t.terminated[-1]) or bool(t.truncated[-1])
    return None if ended else np.array(arrays.host(t.next_states[-1, :]))


def goes_on(t: Transitions, end: np.ndarray | None) -> bool:
    """Whether the first row of t continues the episode that stands at `end`."""
    return end is not None and np.array_equal(arrays.host(t.states[0, :]), end)


def whole(parts: list[Transitions]) -> Transitions:
    """The parts as one, in order, with the episodes that were cut between them healed."""
    t = Transitions.concatenate(parts)
    healed = np.zeros(len(t), dtype=np.int64)
    first = 0
    for before, part in itertools.pairwise(parts):
        first += len(before)
        healed[first] = goes_on(part, open_end(before))
    if not healed.any():
        return t
    ids = arrays.host(t.episode) - np.cumsum(healed)
    return t.replace(episode=arrays.like(ids, t.episode))
