"""Replay: the latest experience, drawn from uniformly."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data.collect import Step
from kernrl.data.transitions import Transitions

Array = Any
_FIELDS = ("states", "actions", "rewards", "next_states", "terminated", "truncated")
_IN_STEP = {"states": "observations", "next_states": "next_observations"}


class Replay:
    """A ring buffer of transitions: when it is full, a new row takes the place of the oldest.

    Memory is reserved by the first rows, which fix shapes and dtypes. Lin (1992).

    >>> replay = Replay(capacity=3)
    >>> states, flags = np.arange(4.0), np.zeros(4)
    >>> replay.extend(Transitions(states, states, states, flags, actions=flags))
    >>> len(replay), set(replay.sample(99, np.random.default_rng(0)).rewards.tolist())
    (3, {1.0, 2.0, 3.0})
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = checks.integer("Replay", "capacity", capacity, at_least=1)
        self._ring: dict[str, np.ndarray] = {}
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self.capacity)

    def add(self, step: Step) -> None:
        """Keep the valid rows of a step."""
        if step.n_valid == 0:
            return
        rows = {name: getattr(step, _IN_STEP.get(name, name)) for name in _FIELDS}
        if step.n_valid < len(step.valid):
            rows = {name: x[step.valid] for name, x in rows.items()}
        self._put(rows)

    def extend(self, transitions: Transitions) -> None:
        """Keep all rows of a data set, or its latest `capacity` ones."""
        checks.require(
            transitions.actions is not None, "Replay", "the transitions must have actions", "none"
        )
        self._put({name: arrays.host(getattr(transitions, name)) for name in _FIELDS})

    def sample(self, n: int, rng: np.random.Generator) -> Transitions:
        """n rows drawn uniformly with replacement; unconnected rows, so each its own episode."""
        n = checks.integer("Replay.sample", "n", n, at_least=1)
        checks.require(len(self) > 0, "Replay.sample", "the buffer must hold rows", "none")
        slots = rng.integers(len(self), size=n)
        chosen = {name: x[slots] for name, x in self._ring.items()}
        # rows from a sampler or from Transitions were checked there
        return Transitions._trusted({**chosen, "next_actions": None, "episode": np.arange(n)})

    def _put(self, rows: dict[str, np.ndarray]) -> None:
        if not self._ring:
            self._ring = {
                k: np.empty((self.capacity, *x.shape[1:]), dtype=x.dtype) for k, x in rows.items()
            }
        for name, x in rows.items():
            if x.shape[1:] != self._ring[name].shape[1:]:
                rule = f"{name} must have columns {self._ring[name].shape[1:]} as before"
                checks.fail("Replay", rule, x.shape[1:])
        n = len(rows["rewards"])
        kept = min(n, self.capacity)  # rows that this very batch would overwrite are left out
        slots = np.arange(self._added + n - kept, self._added + n) % self.capacity
        for name, x in rows.items():
            self._ring[name][slots] = x[n - kept :]
        self._added += n
