"""Rows of Q: pairs z = (s, a), and what a policy does at the states that follow and that begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.value.estimator import points
from kernrl.value.system import Rows

Array = Any
Weighted = tuple[Array, Array]  # ((k,) weights, (k, d + p) pairs)


def pair_rows(owner: str, policy: Any, t: Transitions) -> Rows:
    """z = (s, a), followed by (s', a') with the policy's probability unless terminated."""
    if t.actions is None:
        checks.fail(owner, "the transitions must have actions", "none")
    xp = arrays.namespace(t.states)
    states = arrays.floating(t.states)
    mask = xp.astype(~t.terminated, states.dtype)
    rewards = xp.astype(t.rewards, states.dtype)
    chosen = next_actions(owner, policy, t)
    following = tuple((mask * c, z) for c, z in _weighted(owner, t.next_states, chosen, t))
    return Rows(pairs(states, t.actions), rewards, t.episode_starts, following)


def start_pairs(
    owner: str, policy: Any, t: Transitions, initial_states: Array = None
) -> tuple[Weighted, ...]:
    """(s₀, a) with the policy's probability: at `initial_states`, or where episodes start.

    With policy=None the actions are those taken at the starts of episodes.
    """
    xp = arrays.namespace(t.states)
    if initial_states is None:
        first = arrays.like(np.flatnonzero(arrays.host(t.episode_starts)), t.states, xp.int64)
        states = xp.take(arrays.floating(t.states), first, axis=0)
        if policy is None:
            return tuple(_weighted(owner, states, xp.take(t.actions, first, axis=0), t))
        return tuple(_weighted(owner, states, acted(owner, policy, states), t))
    if policy is None:
        checks.fail(owner, "initial_states need a policy to act there", "None", "Pass a policy.")
    states = arrays.like(points(owner, initial_states), arrays.floating(t.states))
    checks.not_empty(owner, "initial_states", states)
    if states.shape[1:] != t.states.shape[1:]:
        width = int(t.states.shape[1])
        checks.fail(owner, f"initial_states must have {width} columns", int(states.shape[1]))
    return tuple(_weighted(owner, states, acted(owner, policy, states), t))


def points_of_pairs(owner: str, states: Array, actions: Array = None) -> Array:  # -> (n, d + p)
    """Pairs to predict at; without `actions`, `states` holds rows (s, a) already."""
    states = points(owner, states)
    if actions is None:
        return states
    actions = arrays.take(owner, "actions", actions)
    checks.same_length(owner, int(states.shape[0]), actions=actions)
    return pairs(states, actions)


def pairs(states: Array, actions: Array) -> Array:  # (n, d), (n,) or (n, p) -> (n, d + p)
    """Rows z = (s, a)."""
    xp = arrays.namespace(states)
    states = arrays.floating(states)
    return xp.concat((states, arrays.columns(arrays.like(actions, states))), axis=1)


def next_actions(owner: str, policy: Any, t: Transitions) -> Array:
    """What the policy does at each next state: actions, or probabilities (n, a)."""
    if policy is not None:
        return acted(owner, policy, t.next_states)
    if t.next_actions is None:
        checks.fail(
            owner,
            "policy=None takes next_actions from the transitions",
            "transitions without them",
            "Pass a policy.",
        )
    return t.next_actions


def acted(owner: str, policy: Any, states: Array) -> Array:
    """What the policy (a callable, or an object with `predict`) does at each state."""
    act: Callable[[Array], Any] = getattr(policy, "predict", policy)
    if not callable(act):
        checks.fail(owner, "policy must be callable", repr(policy), error=TypeError)
    chosen = arrays.take(owner, "the policy's actions", act(states))
    checks.finite(owner, "action of the policy", arrays.floating(chosen))
    n = int(states.shape[0])
    if chosen.ndim == 0 or chosen.shape[0] != n:
        checks.fail(owner, f"the policy must give {n} rows", checks.shape(chosen))
    return arrays.moved(chosen, states)


def are_probabilities(chosen: Array, actions: Array) -> bool:
    """Floating (n, a) rows are probabilities where the data's actions are integers."""
    xp = arrays.namespace(chosen)
    discrete = not xp.isdtype(actions.dtype, "real floating")
    return discrete and chosen.ndim == 2 and xp.isdtype(chosen.dtype, "real floating")


def check_probabilities(owner: str, p: np.ndarray, who: str = "the policy") -> None:
    """Every row of p (n, a) must be a distribution."""
    bad = (p < 0).any(axis=1) | (np.abs(p.sum(axis=1) - 1.0) > 1e-6)
    if bad.any():
        row = int(np.argmax(bad))
        checks.fail(
            owner,
            f"{who}'s probabilities must be at least 0 and sum to 1",
            f"{p[row].tolist()} at row {row}",
        )


def _weighted(owner: str, states: Array, chosen: Array, t: Transitions) -> list[Weighted]:
    """(weight, (s, a)) for each action that may be taken."""
    xp = arrays.namespace(states)
    states = arrays.floating(states)
    ones = xp.ones(states.shape[0], dtype=states.dtype, device=arrays.device(states))
    if not are_probabilities(chosen, t.actions):
        return [(ones, pairs(states, chosen))]
    check_probabilities(owner, arrays.host(chosen))
    return [
        (xp.astype(chosen[:, a], states.dtype), pairs(states, a * ones))
        for a in range(int(chosen.shape[1]))
    ]
