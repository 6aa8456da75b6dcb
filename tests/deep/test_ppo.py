"""PPO: one update against a plain re-implementation, what it must learn and must not see."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from contract_parts import digest
from reference import advantage_sums
from tolerances import tolerance

from kernrl.agent import Agent
from kernrl.deep.networks import FlatAdam
from kernrl.deep.ppo import PPO

FAST = {"n_steps": 32, "batch_size": 64, "learning_rate": 0.01, "hidden": (16,)}


# ---------------------------------------------------------------- worlds of a few states


class Bandit(gym.Env):
    """One step an episode; the reward is a function of the action."""

    def __init__(self, action_space: gym.Space, reward: Any) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
        self.action_space, self.reward = action_space, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.ones(2, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return np.ones(2, dtype=np.float32), float(self.reward(action)), True, False, {}


class Corridor(gym.Env):
    """Cells 0 … 5 from the left; −1 a step until the right end; left, stay or right."""

    observation_space, action_space = gym.spaces.Discrete(6), gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.cell, self.time = 0, 0
        return self.cell, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.cell, self.time = max(self.cell + int(action) - 1, 0), self.time + 1
        return self.cell, -1.0, self.cell == 5, self.time == 40, {}


class Clock(gym.Env):
    """Reward 1 a step; after five steps the episode ends, in the world or by a time limit.

    The observation shows the time, except that every value beyond a limit is shown as time 0: so
    bootstrapping there must lead on for ever.
    """

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (1,)), gym.spaces.Discrete(2)

    def __init__(self, terminates: bool) -> None:
        self.terminates = terminates

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.time += 1
        end, seen = self.time == 5, np.array([self.time % 5 / 5], dtype=np.float32)
        return seen, 1.0, end and self.terminates, end and not self.terminates, {}


class Watched(PPO):
    """PPO that remembers the rollouts it learnt from and the critic's values before it did."""

    def _prepare(self, steps, drawn):
        rollout = super()._prepare(steps, drawn)
        self.__dict__.setdefault("_seen", []).append((steps, copy.deepcopy(self.critic_), rollout))
        return rollout


# ---------------------------------------------------------------- one update, re-implemented


@pytest.mark.parametrize("entropy_bonus", [0.0, 0.02])
@pytest.mark.parametrize("value_clip", [None, 0.05])
def test_one_update_is_the_papers(entropy_bonus, value_clip):
    """Passes over one full batch, written out with torch.optim.Adam and torch.distributions."""
    agent = Watched(n_steps=40, n_epochs=5, batch_size=40, entropy_bonus=entropy_bonus,
                    value_clip=value_clip, learning_rate=0.01, clip=0.01, rng=3)  # fmt: skip
    before = {}
    original = FlatAdam.step

    def remember(adam, *arguments):
        before.setdefault("network", copy.deepcopy(agent.network_.state_dict()))
        original(adam, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatAdam, "step", remember)
        agent.fit("CartPole-v1", 40)
    (_, _, data), after = agent._seen[0], agent.network_.state_dict()
    network = agent.network_
    network.load_state_dict(before["network"])
    actor, critic = network[0], network[1]
    adam = torch.optim.Adam(network.parameters(), lr=0.01, eps=1e-5)
    for _ in range(5):
        law = torch.distributions.Categorical(logits=actor(data.inputs))
        ratio = (law.log_prob(data.actions[:, 0]) - data.logprob).exp()
        a = data.advantage
        gain = torch.min(ratio * a, ratio.clamp(0.99, 1.01) * a).mean()
        value = critic(data.inputs)[:, 0]
        error = (value - data.returns) ** 2
        if value_clip is not None:
            held = data.value + (value - data.value).clamp(-value_clip, value_clip)
            error = torch.max(error, (held - data.returns) ** 2)
        loss = -gain + 0.5 * error.mean() - entropy_bonus * law.entropy().mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        adam.step()
    gradient = torch.cat([p.grad.flatten() for p in network.parameters()])  # Adam hides its scale
    torch.testing.assert_close(agent._adam.gradient, gradient, **tolerance("float32"))
    for name, x in network.state_dict().items():
        assert not torch.equal(x, before["network"][name])
        torch.testing.assert_close(after[name], x, **tolerance("float32"))


def test_advantages_are_those_of_the_valid_rows_alone():
    """NEXT_STEP reset rows of a vector env reach neither the rollout nor the advantages."""
    envs = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync", max_episode_steps=20)
    agent = Watched(n_steps=100, whiten_advantages=False, n_epochs=1, rng=0).fit(envs, 250)
    steps, critic, data = agent._seen[0]

    def column(name):
        return np.stack([getattr(step, name) for step in steps], axis=1)

    valid = column("valid")
    assert not valid.all(), "the rollout must hold reset rows for the test to mean anything"
    assert column("truncated").any()
    assert column("terminated").any()
    assert len(data.value) == valid.sum()
    np.testing.assert_array_equal(data.inputs.numpy(), column("observations")[valid])
    with torch.no_grad():
        values, following = (
            critic(torch.from_numpy(column(name))).squeeze(-1).numpy()
            for name in ("observations", "next_observations")
        )
    advantage, returns = advantage_sums.gae(
        column("rewards"), values, following, column("terminated"), column("truncated"),
        0.99, 0.95, valid,
    )  # fmt: skip
    np.testing.assert_allclose(data.advantage.numpy(), advantage[valid], **tolerance("float32"))
    np.testing.assert_allclose(data.returns.numpy(), returns[valid], **tolerance("float32"))


def test_a_rollout_of_reset_rows_only_is_no_update():

    def bandit():
        return Bandit(gym.spaces.Discrete(2), lambda a: a)

    envs = gym.vector.SyncVectorEnv([bandit, bandit])
    agent = PPO(n_steps=1, n_epochs=1, rng=0).fit(envs, 10)
    assert agent.steps_ == 10
    assert agent.n_updates_ == 5


# ---------------------------------------------------------------- what it must learn

BANDITS = {
    "Discrete": (gym.spaces.Discrete(4, start=3), lambda a: a == 5, 1.0),
    "MultiDiscrete": (
        gym.spaces.MultiDiscrete([3, 2]),
        lambda a: float(a[0] == 1) + (a[1] == 0),
        2.0,
    ),
    "MultiBinary": (gym.spaces.MultiBinary(2), lambda a: a[0] - a[1], 1.0),
    "Box": (gym.spaces.Box(0.0, 4.0, (1,)), lambda a: -((a[0] - 3.0) ** 2), -0.05),
}


@pytest.mark.parametrize("name", BANDITS)
def test_it_learns_a_bandit(name):
    space, reward, good = BANDITS[name]
    agent = PPO(**FAST, n_epochs=4, rng=0).fit(Bandit(space, reward), 1200)
    action = agent.predict(np.ones(2, dtype=np.float32))
    assert space.contains(action if space.shape else np.int64(action))
    assert reward(action) >= good
    assert np.mean(agent.episode_returns_[:200]) < np.mean(agent.episode_returns_[-200:])


def test_it_learns_a_corridor_from_categories():
    agent = PPO(**FAST, n_epochs=4, rng=1).fit(Corridor(), 3000)
    np.testing.assert_array_equal(agent.predict(np.arange(5)), [2, 2, 2, 2, 2])
    values = agent.value(np.arange(5))
    assert (np.diff(values) > 0).all(), "each cell nearer to the end is worth more"


@pytest.mark.parametrize(("terminates", "expected"), [(True, 4.1), (False, 10.0)])
def test_a_time_limit_is_bootstrapped_from_the_final_observation(terminates, expected):
    """γ = 0.9: five rewards of 1 are worth 4.1 if the world ends, 1/(1 − γ) = 10 if it goes on."""
    agent = PPO(**FAST, n_epochs=8, gamma=0.9, trace_decay=0.5, rng=0)
    agent.fit(Clock(terminates), 2000)
    assert abs(float(agent.value(np.zeros(1, dtype=np.float32))) - expected) < 0.3


def test_observations_of_any_scale_are_learnt_once_standardised():
    class Shifted(gym.ObservationWrapper):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))

        def observation(self, observation):
            return 1e5 + 1e3 * observation

    agent = PPO(standardise=True, n_steps=256, n_epochs=6, learning_rate=1e-3, rng=0)
    agent.fit(Shifted(gym.make("CartPole-v1")), 6000)
    assert np.mean(agent.episode_returns_[-10:]) > 80
    before = digest(agent._state())
    agent.predict(np.full((100, 4), 3e5))
    agent.value(np.full((100, 4), 3e5))
    assert digest(agent._state()) == before, "prediction moves no moments"


# ---------------------------------------------------------------- switches


def steps_taken(**parameters):
    """(learning rate, maximal norm) of every optimiser step of a short run, and the agent."""
    taken = []
    original = FlatAdam.step

    def note(adam, loss, *arguments):
        taken.append(arguments)
        original(adam, loss, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatAdam, "step", note)
        agent = PPO(n_steps=50, n_epochs=2, batch_size=25, rng=0, **parameters)
        agent.fit("CartPole-v1", 200)
    return taken, agent


def test_learning_rate_falls_linearly_with_the_steps_or_stays():
    taken, _ = steps_taken(learning_rate=0.4, anneal_learning_rate=True)
    assert [rate for rate, _ in taken[::4]] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    taken, _ = steps_taken(learning_rate=0.4, max_grad_norm=None)
    assert set(taken) == {(0.4, None)}


@pytest.mark.parametrize(("clip", "expected"), [
    (0.4, [(0.4, 0.4), (0.3, 0.3), (0.2, 0.2), (0.1, 0.1)]),
    ((0.2, 0.4), [(0.2, 0.4), (0.15, 0.3), (0.1, 0.2), (0.05, 0.1)]),
])  # fmt: skip
def test_clip_falls_linearly(clip, expected, monkeypatch):
    ranges = []
    original = PPO._loss
    monkeypatch.setattr(
        PPO, "_loss", lambda self, batch, pair: ranges.append(pair) or original(self, batch, pair)
    )
    steps_taken(clip=clip, anneal_clip=True)
    for got, wanted in zip(ranges[::4], expected, strict=True):
        assert got == pytest.approx(wanted)


def test_target_kl_stops_a_rollouts_passes():
    _, free = steps_taken()
    assert free.n_updates_ == 16
    _, held = steps_taken(target_kl=1e-12)
    assert held.n_updates_ == 4, "on the first minibatch KL is 0; the second has moved"


def test_the_leftover_of_the_last_rollout_is_learnt_from_if_it_fills_a_minibatch():
    settings = {"n_steps": 100, "n_epochs": 1, "batch_size": 50, "rng": 0}
    updates = [PPO(**settings).fit("CartPole-v1", n).n_updates_ for n in (30, 100, 149, 150)]
    assert updates == [1, 2, 2, 3]


def test_the_log_starts_on_policy_and_is_finite():
    agent = PPO(n_steps=64, n_epochs=1, batch_size=64, rng=0).fit("CartPole-v1", 640)
    names = {"policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance"}
    assert set(agent.log_) == names
    assert all(
        len(rows) == 10 and np.isfinite([v for _, v in rows]).all() for rows in agent.log_.values()
    )
    np.testing.assert_allclose(agent.log_["kl"][0][1], 0.0, **tolerance("float32"))
    np.testing.assert_allclose(agent.log_["entropy"][0][1], np.log(2), rtol=1e-3)


# ---------------------------------------------------------------- the same run, and files


def test_the_number_of_torch_threads_changes_no_bit():
    before, prints = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            agent = PPO(n_steps=256, n_epochs=2, batch_size=256, rng=5).fit("CartPole-v1", 512)
            prints.append(digest(agent._state(), agent.episode_returns_, agent.log_))
    finally:
        torch.set_num_threads(before)
    assert len(set(prints)) == 1


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_loaded_agent_is_the_saved_one_with_its_moments(env_id, tmp_path):
    agent = PPO(n_steps=64, standardise=True, rng=2).fit(env_id, 200)
    agent.save(tmp_path / "agent.safetensors")
    twin = Agent.load(tmp_path / "agent.safetensors")
    x = np.random.default_rng(0).normal(size=(50, *agent.observation_space_.shape))
    for call in ("predict", "value"):
        np.testing.assert_array_equal(getattr(twin, call)(x), getattr(agent, call)(x))
    assert twin.encoder_.count == agent.encoder_.count > 100
    drawn = [one.predict(x, deterministic=False) for one in (agent, twin)]
    np.testing.assert_array_equal(*drawn)


def test_a_copied_agent_predicts_on_its_own_weights():
    agent = PPO(n_steps=64, rng=2).fit("CartPole-v1", 64)
    twin = copy.deepcopy(agent)
    x = np.random.default_rng(0).normal(size=(50, 4))
    before = twin.value(x)
    with torch.no_grad():
        agent.critic_[0].weight.zero_()
    assert not np.array_equal(agent.value(x), before)
    np.testing.assert_array_equal(twin.value(x), before)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"n_steps": 0}, ValueError, "PPO: n_steps must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "PPO: batch_size must be an integer of at least 1, got"),
        ({"n_epochs": None}, TypeError, "PPO: n_epochs must be an integer of at least 1, got None"),
        ({"gamma": 1.1}, ValueError, "PPO: gamma must be a finite number at least 0.0 and at most"),
        (
            {"learning_rate": -1},
            ValueError,
            "PPO: learning_rate must be a finite number at least 0",
        ),
        ({"max_grad_norm": 0}, ValueError, "PPO: max_grad_norm must be a finite number above 0.0"),
        ({"hidden": (64, 0)}, ValueError, "PPO: every width in hidden must be an integer of at"),
        (
            {"clip": -0.1},
            ValueError,
            r"PPO: clip must be one number or \(low, high\), not negative",
        ),
        ({"clip": (1, 2, 3)}, ValueError, r"PPO: clip must be one number or \(low, high\)"),
    ],
)
def test_a_wrong_parameter_is_named_before_any_step(parameters, error, text):
    with pytest.raises(error, match=text):
        PPO(**parameters).fit("CartPole-v1", 10)


def test_it_learns_from_an_environment_only():
    from kernrl.data.collect import collect

    with pytest.raises(TypeError, match="PPO: it learns from an environment only, got Transitions"):
        PPO().fit(collect("CartPole-v1", "random", 20, seed=0))
