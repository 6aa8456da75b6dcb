"""Spaces survive JSON, and unsupported ones are named."""

from __future__ import annotations

import json
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs

from kernrl.data import checkpoint, spaces

SPACES = [
    gs.Box(-np.inf, np.inf, (3,), np.float32),
    gs.Box(np.array([-4.8, -np.inf]), np.array([4.8, np.inf]), dtype=np.float64),
    gs.Box(0, 255, (2, 2, 3), np.uint8),
    gs.Box(-1.0, 1.0, (), np.float32),
    gs.Discrete(4),
    gs.Discrete(3, start=-1),
    gs.MultiDiscrete([2, 3]),
    gs.MultiDiscrete([2, 3], start=[1, -1]),
    gs.MultiDiscrete([[2, 3], [4, 5]]),
    gs.MultiBinary(3),
    gs.MultiBinary([2, 3]),
    gym.make("CartPole-v1").observation_space,
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_survives_json(space):
    encoded = checkpoint.encode("save", "space", spaces.to_json("save", space))
    text = json.dumps(encoded, allow_nan=False)  # strict JSON, infinite bounds included
    back = spaces.from_json("load", checkpoint.decode("load", json.loads(text)))
    assert back == space
    assert (back.dtype, back.shape) == (space.dtype, space.shape)


def test_unsupported_spaces_are_named():
    space = gs.Dict({"x": gs.Discrete(2)})
    with pytest.raises(TypeError, match=re.escape(f"or MultiDiscrete, got {space}. Wrap the env")):
        spaces.check("PPO", "observation", space)
    with pytest.raises(
        TypeError, match=re.escape("save: a space to be saved must be Box, Discrete")
    ):
        spaces.to_json("save", space)
    with pytest.raises(
        ValueError, match=re.escape("load: the kind of space must be one of Box, Di")
    ):
        spaces.from_json("load", {"kind": "Dict"})


def test_spaces_of_a_data_set():
    assert spaces.of_actions("Agent", np.array([0, 2, 1])) == gs.Discrete(3)
    box = spaces.of_actions("Agent", np.array([[0.0, 1.0], [-1.0, 3.0]]))
    assert (box.low.tolist(), box.high.tolist()) == ([-1.0, 1.0], [0.0, 3.0])
    assert spaces.of_actions("Agent", np.array([0.5, 2.0])).shape == ()
    assert spaces.of_states((5, 3)).shape == (3,)
    with pytest.raises(ValueError, match="discrete actions must be numbered from 0, got -1"):
        spaces.of_actions("Agent", np.array([0, -1]))
