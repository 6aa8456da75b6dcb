"""Importance sampling of whole episodes: returns weighted by how likely the policy makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.value.pair_rows import acted, are_probabilities, check_probabilities

Array = Any

WEIGHTED = ("is", "pdis", "wis")
NEGLIGIBLE = 1e-3  # of a reward: what lies beyond the cut of a truncated episode


def weighted_statistic(
    owner: str,
    t: Transitions,
    policy: Any,
    behaviour: Any,
    initial_states: Array,
    method: str,
    gamma: float,
) -> tuple[Callable[[np.ndarray], np.ndarray], int, str]:
    """(counts (b, episodes) ↦ values (b,), the number of episodes, what a unit is)."""
    if initial_states is not None:
        cure = "Leave it out, or use method='lstdq'."
        checks.fail(
            owner, f"{method} starts where the episodes do, not at initial_states", None, cure
        )
    if t.actions.ndim != 1 or are_continuous(t.actions):
        cure = "Use a method with a kernel."
        checks.fail(
            owner, f"{method} needs actions numbered 0, 1, 2, …", checks.shape(t.actions), cure
        )
    ratio = _ratios(owner, t, policy, behaviour)
    _warn_of_cuts(owner, t, gamma)
    value, weight = episode_sums(t, ratio, gamma, method)

    def statistic(counts: np.ndarray) -> np.ndarray:
        total = counts @ weight
        with np.errstate(invalid="ignore", divide="ignore"):  # no weight at all: no value
            return (counts @ value) / total

    return statistic, len(value), "episodes"


def episode_sums(
    t: Transitions, ratio: np.ndarray, gamma: float, method: str
) -> tuple[np.ndarray, np.ndarray]:  # -> (episodes,), (episodes,)
    """Numerators and denominators whose quotient of sums is the estimate.

    is: ρ_T G and 1; pdis: Σ γᵗρ_t r_t and 1; wis: ρ_T G and ρ_T, with ρ_t = Π_{i≤t} ratio_i.
    """
    edges = np.append(np.flatnonzero(arrays.host(t.episode_starts)), len(t))
    rewards = arrays.host(t.rewards).astype(np.float64)
    value, weight = np.empty(len(edges) - 1), np.ones(len(edges) - 1)
    for k, (a, b) in enumerate(itertools.pairwise(edges)):
        rho, discount = np.cumprod(ratio[a:b]), gamma ** np.arange(b - a)
        factor = rho if method == "pdis" else rho[-1]
        value[k] = np.sum(factor * discount * rewards[a:b])
        if method == "wis":
            weight[k] = rho[-1]
    return value, weight


def are_continuous(actions: Array) -> bool:
    """Floating actions have densities, not probabilities."""
    return bool(arrays.namespace(actions).isdtype(actions.dtype, "real floating"))


def _ratios(owner: str, t: Transitions, policy: Any, behaviour: Any) -> np.ndarray:  # -> (n,)
    """π(a_i|s_i) / b(a_i|s_i)."""
    if behaviour is None:
        cure = "Pass behaviour=probabilities of the actions taken, or a callable s ↦ (n, a)."
        checks.fail(owner, "importance sampling needs the behaviour's probabilities", "None", cure)
    if policy is None:
        checks.fail(owner, "importance sampling needs a policy", "None", "Pass a policy.")
    if callable(behaviour) or hasattr(behaviour, "predict"):
        taken = _taken(owner, t, behaviour, "the behaviour")
    else:
        taken = arrays.host(arrays.take(owner, "behaviour", behaviour)).astype(np.float64)
    if taken.shape != (len(t),):
        checks.fail(owner, f"behaviour must have shape ({len(t)},)", taken.shape)
    bad = ~((taken > 0) & (taken <= 1 + 1e-9))
    if bad.any():
        row = int(np.argmax(bad))
        rule = "the behaviour must give every action taken a probability in (0, 1]"
        checks.fail(owner, rule, f"{taken[row]} at row {row}")
    return _taken(owner, t, policy, "the policy") / taken


def _taken(owner: str, t: Transitions, policy: Any, who: str) -> np.ndarray:  # -> (n,)
    """The probability of each action of the data; 0 or 1 for a policy that names actions."""
    chosen, actions = acted(owner, policy, t.states), arrays.host(t.actions).astype(np.int64)
    if not are_probabilities(chosen, t.actions):
        named = arrays.host(arrays.columns(chosen))
        if named.shape[1] != 1:
            checks.fail(owner, f"{who} must give one action or probabilities (n, a)", named.shape)
        return (named[:, 0] == actions).astype(np.float64)
    p = arrays.host(chosen).astype(np.float64)
    check_probabilities(owner, p, who)
    if actions.min() < 0 or actions.max() >= p.shape[1]:
        rule = f"{who} must give every action of the data a probability"
        checks.fail(owner, rule, f"{p.shape[1]} columns for action {actions.max()}")
    return p[np.arange(len(p)), actions]


def _warn_of_cuts(owner: str, t: Transitions, gamma: float) -> None:
    """An episode that is cut lacks γᵀ of the value at the cut."""
    starts = np.flatnonzero(arrays.host(t.episode_starts))
    lengths = np.diff(np.append(starts, len(t)))
    ended = arrays.host(t.terminated)[starts + lengths - 1]
    if ended.all():
        return
    most = float(gamma ** lengths[~ended].min())
    if most > NEGLIGIBLE:
        checks.warn(
            owner,
            f"{np.count_nonzero(~ended)} of {len(starts)} episodes do not end in a terminal state, "
            f"and their returns lack up to γᵀ = {most:.2g} of the value beyond the cut",
            "Use a method with a kernel, which bootstraps there.",
        )
