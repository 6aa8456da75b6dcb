"""How a kernel agent sees states: flat, standardised, fitted once and saved with the agent."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl.kernels.base import Delta, Kernel
from kernrl.kernels.stationary import RBF


class StateScaler:
    """z = (s − mean)/std per column; a constant column keeps its scale (std 1).

    Bounds of the observation space are of no use for this: CartPole's velocities are unbounded.
    """

    def __init__(self, standardise: bool = True) -> None:
        self.standardise = standardise

    def fit(self, states: np.ndarray) -> StateScaler:  # (n, …)
        """Take mean and scale from visited states."""
        flat = self._flat(states)
        width = flat.shape[1]
        self.mean, self.scale = np.zeros(width), np.ones(width)
        if self.standardise:
            self.mean = flat.mean(axis=0)
            deviation = flat.std(axis=0)
            # Rounding alone gives a constant column a deviation near eps·|mean|.
            constant = deviation <= 1e-12 * (1.0 + np.abs(self.mean))
            self.scale = np.where(constant, 1.0, deviation)
        return self

    def transform(self, states: np.ndarray) -> np.ndarray:  # (n, …) -> (n, d) float64
        """Flatten and standardise."""
        return (self._flat(states) - self.mean) / self.scale

    @staticmethod
    def _flat(states: np.ndarray) -> np.ndarray:
        return np.asarray(states, dtype=np.float64).reshape(len(states), -1)

    def state(self) -> dict[str, np.ndarray]:
        """The arrays to save."""
        return {"mean": self.mean, "scale": self.scale}

    def restore(self, state: dict[str, np.ndarray]) -> StateScaler:
        """Take back saved arrays."""
        self.mean, self.scale = state["mean"], state["scale"]
        return self


def is_table(space: spaces.Space[Any]) -> bool:
    """True if observations are names of states, not coordinates."""
    return isinstance(space, spaces.Discrete)


def default_kernel(kernel: Kernel | None, space: spaces.Space[Any]) -> Kernel:
    """`kernel`, or for None RBF("median"), Delta where states are only names."""
    if kernel is not None:
        return kernel
    return Delta() if is_table(space) else RBF("median")
