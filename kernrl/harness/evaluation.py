"""How good is a policy? Whole episodes with fixed seeds, the same ones for every policy.

The same weights gave 352, 345 and 268 in three calls of a well-known library's evaluation, because
its episodes were never seeded, and 289 or 72 by whether actions were sampled. So here the episode
seeds follow from one seed, and the mode is part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from kernrl import checks
from kernrl.harness import environments, seeds

Array = Any
Policy = Callable[[Array], Any]
AT_ONCE = 20  # environments stepped side by side, so that a policy is asked in batches
OWNER = "evaluate"


@dataclass(frozen=True)
class EpisodeScores:
    """Episodes in the order of their seeds: undiscounted returns, lengths, how each one ended."""

    returns: Array  # (n,)
    lengths: Array  # (n,)
    terminated: Array  # (n,) bool
    truncated: Array  # (n,) bool
    seeds: Array  # (n,) what each episode's reset was given
    env: str
    mode: str  # "deterministic", "sampled" or "as given" for a plain function

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    def __len__(self) -> int:
        return len(self.returns)

    def __str__(self) -> str:
        spread = float(np.std(self.returns, ddof=1)) if len(self) > 1 else 0.0
        return (
            f"{self.env}: mean return {self.mean:.6g} ± {spread:.4g} (standard deviation of "
            f"{len(self)} episodes, {self.mode} actions)"
        )


def evaluate(
    agent: Any,
    env: Any,
    n_episodes: int = 20,
    seed: int | np.random.SeedSequence = 0,
    *,
    deterministic: bool = True,
    max_steps: int | None = None,
) -> EpisodeScores:
    """Play `n_episodes` whole episodes and return their scores.

    `agent` has `predict(observations, deterministic=…)`, or is a function of a batch of
    observations (b, …) that returns actions (b, …), or is "random". `env` is an id, a function that
    makes an env, or one env, which is then reset: never the one that is being trained on.

    Episode i is reset with the i-th of the distinct seeds that follow from `seed`, whatever the
    agent. All episodes are played to their end, so fast failures do not crowd out long ones.
    One stops as truncated at `max_steps`, by default the environment's own limit or 10 000.
    An agent's generator `rng_` is put back afterwards: to evaluate never changes training.

    >>> scores = evaluate(lambda observations: [1] * len(observations), "CartPole-v1", n_episodes=3)
    >>> scores.returns.tolist(), scores.terminated.tolist()
    ([9.0, 10.0, 9.0], [True, True, True])
    """
    checks.integer(OWNER, "n_episodes", n_episodes, at_least=1)
    if not isinstance(seed, np.random.SeedSequence):
        checks.integer(OWNER, "seed", seed, at_least=0)
    numbers = seeds.numbers(seed, n_episodes)
    with _environments(env, min(n_episodes, AT_ONCE)) as envs:
        limit = environments.step_limit(envs[0]) if max_steps is None else max_steps
        checks.integer(OWNER, "max_steps", limit, at_least=1)
        policy, mode = _policy(agent, deterministic, envs[0], numbers[0])
        with _undisturbed(agent, numbers[0]):
            rows = _play(policy, envs, numbers, limit)
        name = envs[0].spec.id if envs[0].spec is not None else type(envs[0].unwrapped).__name__
    returns, lengths, terminated = (np.array(column) for column in zip(*rows, strict=True))
    cure = "Repair the environment or wrap it."
    checks.finite(OWNER, "return", returns, unit="episode", cure=cure)
    return EpisodeScores(returns, lengths, terminated, ~terminated, np.array(numbers), name, mode)


def _play(
    policy: Policy, envs: list[gymnasium.Env], numbers: list[int], limit: int
) -> list[tuple[float, int, bool]]:
    """(return, length, terminated) of each episode; an env takes the next one when it is free."""
    results: list[tuple[float, int, bool]] = [(0.0, 0, False)] * len(numbers)
    waiting = iter(enumerate(numbers))
    playing = [_Episode(env, *next(waiting)) for env in envs]
    while playing:
        batch = np.stack([episode.observation for episode in playing])
        actions = _checked(policy(batch), len(playing))
        for episode, action in zip(playing, actions, strict=True):
            episode.step(action, limit)
        for k in range(len(playing) - 1, -1, -1):
            episode = playing[k]
            if not episode.over:
                continue
            results[episode.index] = (episode.total, episode.length, episode.terminated)
            following = next(waiting, None)
            if following is None:
                del playing[k]
            else:
                playing[k] = _Episode(episode.env, *following)
    return results


class _Episode:
    """One episode under way."""

    def __init__(self, env: gymnasium.Env, index: int, seed: int) -> None:
        self.env, self.index = env, index
        self.observation, _ = env.reset(seed=seed)
        self.total, self.length = 0.0, 0
        self.terminated = self.over = False

    def step(self, action: Any, limit: int) -> None:
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        self.total += float(reward)
        self.length += 1
        self.terminated = bool(terminated)
        self.over = self.terminated or bool(truncated) or self.length >= limit


def _checked(actions: Any, b: int) -> Array:
    actions = np.asarray(actions)
    if actions.ndim == 0 or len(actions) != b:
        cure = "A policy takes observations (b, …) and returns actions (b, …)."
        checks.fail(OWNER, f"the policy must return {b} actions", f"shape {actions.shape}", cure)
    return actions


# ---------------------------------------------------------------- who plays, and where


def _policy(agent: Any, deterministic: bool, env: Any, seed: int) -> tuple[Policy, str]:
    """A function of a batch of observations, and what to call its mode."""
    if isinstance(agent, str):
        checks.choice(OWNER, "agent", agent, ("random",))
        env.action_space.seed(seed)
        return lambda batch: [env.action_space.sample() for _ in batch], "sampled"
    if hasattr(agent, "predict"):
        mode = "deterministic" if deterministic else "sampled"
        return lambda batch: agent.predict(batch, deterministic=deterministic), mode
    if callable(agent):
        return agent, "as given"
    checks.fail(
        OWNER,
        "agent must have predict(…), be a function of observations, or 'random'",
        type(agent).__name__,
        error=TypeError,
    )


@contextmanager
def _environments(env: Any, n: int) -> Iterator[list[gymnasium.Env]]:
    """n environments from an id or a maker, closed afterwards; a given env is used as it is."""
    if isinstance(env, VectorEnv):
        cure = "Pass its id: episodes are played side by side anyway."
        checks.fail(OWNER, "env must be an id, a maker or one env", "a vector env", cure, TypeError)
    if isinstance(env, gymnasium.Env):
        yield [env]
        return
    if not isinstance(env, str) and not callable(env):
        rule = "env must be an id, a maker or one env"
        checks.fail(OWNER, rule, type(env).__name__, error=TypeError)
    envs = [environments.make(env) if isinstance(env, str) else env() for _ in range(n)]
    try:
        yield envs
    finally:
        for one in envs:
            one.close()


@contextmanager
def _undisturbed(agent: Any, seed: int) -> Iterator[None]:
    """Sampled actions follow from the seed, and the agent's generators are put back afterwards."""
    generator = getattr(agent, "rng_", None)
    if not isinstance(generator, np.random.Generator):
        yield
        return
    before = generator.bit_generator.state
    generator.bit_generator.state = type(generator.bit_generator)(seed).state
    try:
        yield
    finally:
        generator.bit_generator.state = before
