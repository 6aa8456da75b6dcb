"""From what an environment shows to what a network reads: flat, float32, and standardised."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

Array = Any


class Encoder:
    """(…, *shape) observations -> (…, d) float32: categories one-hot, the rest flattened.

    With `standardise`, (x − μ)/σ clipped to ±10, where μ and σ are those of all rows given to
    `update` so far (Chan et al. 1983, merged in float64). Nothing moves between updates, so a
    saved encoder predicts as it did when it was saved.
    """

    def __init__(self, space: spaces.Space[Any], standardise: bool = False) -> None:
        self.space, self.standardise = space, standardise
        if isinstance(space, spaces.Discrete):
            self._sizes, self._starts = np.array([space.n]), np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            self._sizes, self._starts = space.nvec.reshape(-1), space.start.reshape(-1)
        else:
            self._sizes = None
        self._rank = len(space.shape or ())
        self.size = int(np.prod(space.shape) if self._sizes is None else self._sizes.sum())
        self.count, self.mean, self.square = 0.0, np.zeros(self.size), np.zeros(self.size)
        self._refresh()

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        x = self._flat(observations)
        if self.standardise:
            x = np.clip((x - self._shift) * self._scale, -10.0, 10.0)
        return x.astype(np.float32, copy=False)

    def update(self, observations: np.ndarray) -> None:  # (n, *shape)
        """Take n more rows into μ and σ."""
        x = self._flat(observations).astype(np.float64, copy=False)
        n = len(x)
        if not n:
            return
        mean = x.mean(axis=0)
        gap, total = mean - self.mean, self.count + n
        self.square = self.square + ((x - mean) ** 2).sum(axis=0)
        self.square = self.square + gap**2 * (self.count * n / total)
        self.mean, self.count = self.mean + gap * (n / total), total
        self._refresh()

    def state(self) -> dict[str, np.ndarray]:
        """What `restore` takes: the row count, mean and centred sum of squares."""
        return {"count": np.array(self.count), "mean": self.mean, "square": self.square}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a saved state."""
        self.count = float(state["count"])
        self.mean, self.square = np.array(state["mean"]), np.array(state["square"])
        self._refresh()

    def _refresh(self) -> None:
        # An entry that never varies is only centred: dividing by its σ = 0 would be noise or inf.
        deviation = np.sqrt(self.square / max(self.count, 1.0))
        self._scale = 1.0 / np.where(deviation > 1e-8, deviation, 1.0)
        self._shift = self.mean

    def _flat(self, observations: np.ndarray) -> np.ndarray:
        lead = observations.shape[: observations.ndim - self._rank]
        x = observations.reshape(*lead, -1) if self._rank != 1 else observations
        if self._sizes is None:
            return x
        chosen = x - self._starts
        blocks = [np.eye(k, dtype=np.float32)[chosen[..., i]] for i, k in enumerate(self._sizes)]
        return np.concatenate(blocks, axis=-1)
