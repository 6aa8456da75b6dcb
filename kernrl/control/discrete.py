"""What agents with finitely many actions share: what they accept, and how they explore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl import checks
from kernrl.kernels.base import Kernel


def check(owner: str, kernel: object, space: spaces.Space[Any]) -> None:
    """A kernel or None, and a Discrete action space."""
    if kernel is not None and not isinstance(kernel, Kernel):
        checks.fail(owner, "kernel must be a kernel or None", repr(kernel), error=TypeError)
    if not isinstance(space, spaces.Discrete):
        checks.fail(owner, "the action space must be Discrete", space, error=TypeError)


def uniform(rng: np.random.Generator, space: Any, b: int) -> np.ndarray:  # -> (b,)
    """b uniformly random actions of a Discrete space, from the host generator."""
    return rng.integers(int(space.n), size=b) + int(space.start)


def epsilon_greedy(
    rng: np.random.Generator,
    space: Any,
    epsilon: float,
    observations: np.ndarray,
    greedy: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:  # (b, …) -> (b,)
    """A uniform action with probability ε, else the greedy one; `greedy` gives numbers from 0.

    `greedy` is asked only if one of the b environments needs it.
    """
    random = uniform(rng, space, len(observations))
    explore = rng.random(len(observations)) < epsilon
    if explore.all():
        return random
    return np.where(explore, random, greedy(observations) + int(space.start))


def answer(
    rng: np.random.Generator,
    space: Any,
    epsilon: float,
    observations: np.ndarray,
    greedy: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:  # (b, …) -> (b,)
    """What `predict` gives: greedy for ε = 0, and then nothing is drawn from the generator."""
    if epsilon == 0.0:
        return greedy(observations) + int(space.start)
    return epsilon_greedy(rng, space, epsilon, observations, greedy)


def numbers(actions: np.ndarray, space: Any) -> np.ndarray:  # (n,) or (n, 1) -> (n,)
    """Actions of a Discrete space as numbers from 0."""
    return np.asarray(actions).reshape(-1).astype(np.int64) - int(space.start)
