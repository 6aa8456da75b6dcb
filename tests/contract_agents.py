"""What every agent promises."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from contract_parts import (
    check_learnt_names,
    check_parameters,
    digest,
    disturb_global_streams,
    global_streams_untouched,
    no_pickle,
    same,
)
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.agent import Agent


def check_agent(make: Callable[[], Any], env_id: str, total_steps: int = 600) -> None:
    """Everything an agent promises, on one environment; `make` gives an unfitted, seeded agent."""
    agent = make()
    owner, env = type(agent).__name__, gym.make(env_id)
    observations = _some_observations(env)
    check_parameters(agent)
    for call in (lambda: agent.predict(observations), lambda: agent.save("never.safetensors")):
        with pytest.raises(NotFittedError, match=f"^{owner}: "):
            call()
    before, params = set(vars(agent)), agent.get_params(deep=False)
    with global_streams_untouched():
        fitted = agent.fit(env, total_steps)
        agent.predict(observations, deterministic=False)
    assert fitted is agent, "fit must return self"
    check_learnt_names(before, agent)
    assert all(getattr(agent, k) is v for k, v in params.items()), "fit changed a parameter"
    assert agent.steps_ == total_steps, f"asked for {total_steps} steps, took {agent.steps_}"
    assert agent.episode_returns_
    _check_actions(agent, env, observations)
    _check_reproducible(make, env_id, total_steps, observations)
    _check_file(agent, observations)
    _check_stopping(make, env_id, total_steps)
    _check_vector_env(make, env_id, total_steps)
    _check_complaints(agent, make, observations)
    env.close()


def _some_observations(env: Any, n: int = 20) -> np.ndarray:
    """Observations of a random walk from a fixed seed: a probe of the policy."""
    env.action_space.seed(5)
    observation, _ = env.reset(seed=5)
    seen = [observation]
    while len(seen) < n:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            observation, _ = env.reset()
        seen.append(observation)
    return np.stack(seen)


def fingerprint(agent: Any, observations: np.ndarray) -> str:
    """Everything learnt and everything that happened, to the last bit."""
    values = agent.value(observations) if hasattr(agent, "value") else None
    return digest(
        values,
        agent._state(),
        agent.episode_returns_,
        agent.log_,
        agent.steps_,
        agent.n_updates_,
        agent.predict(observations),
    )


def _check_actions(agent: Any, env: Any, observations: np.ndarray) -> None:
    actions = agent.predict(observations)
    assert len(actions) == len(observations)
    assert all(env.action_space.contains(_plain(a, env)) for a in actions)
    assert digest(agent.predict(observations)) == digest(actions), "deterministic means it"
    one = agent.predict(observations[0])
    assert np.shape(one) == env.action_space.shape
    np.testing.assert_allclose(one, actions[0], **tolerance("float32"))
    sampled = agent.predict(observations, deterministic=False)
    assert np.shape(sampled) == np.shape(actions)
    if hasattr(agent, "value"):
        values = agent.value(observations)
        assert np.shape(values) == (len(observations),)
        assert np.all(np.isfinite(values))
        assert np.shape(agent.value(observations[0])) == ()


def _plain(action: Any, env: Any) -> Any:
    return np.asarray(action, dtype=env.action_space.dtype)


def _check_reproducible(
    make: Callable[[], Any], env_id: str, total_steps: int, observations: np.ndarray
) -> None:
    """Same seed, same bits, whatever the global generators say; another seed, another run."""
    agent = make()
    prints = []
    for disturbance in (1, 2):
        disturb_global_streams(disturbance)
        prints.append(fingerprint(agent.fit(env_id, total_steps), observations))
    assert prints[0] == prints[1], "the same seed must give the same run, and fit must start afresh"
    assert fingerprint(clone(agent).fit(env_id, total_steps), observations) == prints[0]
    other = make().set_params(rng=1234)
    assert fingerprint(other.fit(env_id, total_steps), observations) != prints[0]


def _check_file(agent: Any, observations: np.ndarray) -> None:
    """One safetensors file, no pickle, and the agent that comes back is the agent that went in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.safetensors"
        with no_pickle():
            agent.save(path)
            twins = [Agent.load(path), type(agent).load(path)]
        assert [p.name for p in Path(folder).iterdir()] == [path.name], "something was left behind"
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert "__metadata__" in header
        expected, drawn = fingerprint(agent, observations), _drawn(agent, observations)
        for twin in twins:
            assert type(twin) is type(agent)
            assert fingerprint(twin, observations) == expected, "the agent came back another"
            assert _drawn(twin, observations) == drawn, "the random stream must go on where it was"
            ours = {**agent.get_params(), "rng": None}
            assert same({**twin.get_params(), "rng": None}, ours), "a parameter was lost"
            second = Path(folder) / "second.safetensors"
            twin.save(second)
            assert fingerprint(Agent.load(second), observations) == expected
        _check_broken_file(agent, path)


def _drawn(agent: Any, observations: np.ndarray) -> str:
    return digest(agent.predict(observations, deterministic=False))


def _check_broken_file(agent: Any, path: Path) -> None:
    raw = path.read_bytes()
    for name, content in (("empty", b""), ("cut", raw[: len(raw) // 2]), ("text", b"hello" * 9)):
        broken = path.with_name(name)
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"\.load: "):
            type(agent).load(broken)
    with pytest.raises(FileNotFoundError):
        type(agent).load(path.with_name("missing"))


def _check_stopping(make: Callable[[], Any], env_id: str, total_steps: int) -> None:
    """A callback that returns something true ends training; the agent is usable."""
    seen: list[int] = []

    def stop(agent: Any) -> bool:
        seen.append(agent.steps_)
        return agent.steps_ >= total_steps // 2

    agent = make().fit(env_id, total_steps, callbacks=[stop])
    assert agent.steps_ == seen[-1] == total_steps // 2
    assert seen == sorted(seen)


def _check_vector_env(make: Callable[[], Any], env_id: str, total_steps: int) -> None:
    """Three environments at once: the budget is overshot by less than a row of them."""
    envs = gym.make_vec(env_id, num_envs=3, vectorization_mode="sync")
    agent = make().fit(envs, total_steps)
    assert agent.n_envs_ == 3
    assert total_steps <= agent.steps_ < total_steps + 3
    envs.close()


def _check_complaints(agent: Any, make: Callable[[], Any], observations: np.ndarray) -> None:
    """One clear sentence for each thing a user gets wrong; a failed fit leaves no half agent."""
    owner = type(agent).__name__
    with pytest.raises(ValueError, match=f"^{owner}: observations must have shape"):
        agent.predict(np.zeros((2, observations.shape[1] + 1)))
    with pytest.raises(ValueError, match=f"^{owner}: .*nan at row 1"):
        bad = observations.astype(np.float64)
        bad[1] = np.nan
        agent.predict(bad)
    fresh = make()
    for steps in (0, -1, 1.5, None, "many"):
        with pytest.raises((ValueError, TypeError), match=f"^{owner}: total_steps must be"):
            fresh.fit("CartPole-v1", steps)
    with pytest.raises((ValueError, TypeError), match=r"supports|must be"):
        fresh.fit(DictWorld(), 10)
    with pytest.raises(NotFittedError):
        fresh.predict(observations)


class DictWorld(gym.Env):
    """An environment whose observations are dictionaries, which no agent takes."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,))})
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}
