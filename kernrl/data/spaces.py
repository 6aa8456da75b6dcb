"""Which Gymnasium spaces kernrl takes, and how they are written as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kernrl import checks

SUPPORTED = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
_NAMES = "Box, Discrete, MultiBinary or MultiDiscrete"
_CURES = {
    "observation": "Wrap the env, for example in gymnasium.wrappers.FlattenObservation.",
    "action": "Wrap the env in a gymnasium.ActionWrapper that offers one of these.",
}


def check(owner: str, role: str, space: object) -> spaces.Space[Any]:
    """`space` itself if kernrl takes it as the `role` ("observation" or "action") space."""
    if isinstance(space, SUPPORTED):
        return space
    checks.fail(owner, f"the {role} space must be {_NAMES}", space, _CURES[role], TypeError)


def of_states(shape: tuple[int, ...]) -> spaces.Space[Any]:
    """The unbounded Box of the rows of states of this `shape` (n, …)."""
    return spaces.Box(-np.inf, np.inf, shape[1:], np.float64)


def of_actions(owner: str, actions: np.ndarray) -> spaces.Space[Any]:
    """Discrete for whole numbers (n,), up to the largest seen; otherwise the Box of their range."""
    if actions.ndim == 1 and actions.dtype.kind in "iub":
        low = int(actions.min())
        checks.require(low >= 0, owner, "discrete actions must be numbered from 0", low)
        return spaces.Discrete(int(actions.max()) + 1)
    table = actions.astype(np.float64)
    return spaces.Box(table.min(axis=0), table.max(axis=0), table.shape[1:], np.float64)


# ---------------------------------------------------------------- as JSON


def to_json(owner: str, space: object) -> dict[str, Any]:
    """`space` as a dict of plain values and arrays, for `checkpoint.encode`."""
    if isinstance(space, spaces.Box):
        return {"kind": "Box", "low": space.low, "high": space.high}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n}
    checks.fail(owner, f"a space to be saved must be {_NAMES}", space, "", TypeError)


def from_json(owner: str, text: dict[str, Any]) -> spaces.Space[Any]:
    """The space that `to_json` described."""
    values = dict(text)
    kind = values.pop("kind", None)
    checks.choice(owner, "the kind of space", kind, _READERS)
    space: spaces.Space[Any] = _READERS[str(kind)](**values)
    return space


def _box(low: np.ndarray, high: np.ndarray) -> spaces.Space[Any]:
    return spaces.Box(low, high, dtype=low.dtype.type)


_READERS: dict[str, Any] = {
    "Box": _box,
    "Discrete": spaces.Discrete,
    "MultiBinary": spaces.MultiBinary,
    "MultiDiscrete": spaces.MultiDiscrete,
}
