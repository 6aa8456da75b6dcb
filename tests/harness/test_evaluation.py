from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TransformReward
from harness.toy_agents import Constant, TabularQ

from kernrl.harness import environments, evaluation, seeds
from kernrl.harness.evaluation import EpisodeScores, evaluate


def leaning(observations):
    """Push towards where the pole leans: CartPole episodes of some forty steps."""
    return (observations[:, 2] > 0).astype(int)


def _no_number(reward):
    return float("nan")


def one_by_one(policy, env_id, n, seed):
    """The plainest evaluation there is."""
    env, rows = gym.make(env_id), []
    for number in seeds.numbers(seed, n):
        observation, _ = env.reset(seed=number)
        total, length, over = 0.0, 0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy(observation[None])[0])
            total, length, over = total + reward, length + 1, terminated or truncated
        rows.append((total, length, terminated))
    return rows


class Lottery(gym.Env):
    """An episode lasts 1 or 50 steps, as its seed decides; its return is its length."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 50 if self.np_random.random() < 0.3 else 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def test_episodes_are_those_played_one_by_one():
    """More episodes than environments: the ones that are free early take the next seeds."""
    got = evaluate(leaning, "CartPole-v1", n_episodes=50, seed=3)
    expected = one_by_one(leaning, "CartPole-v1", 50, 3)
    assert list(zip(got.returns, got.lengths, got.terminated, strict=True)) == expected
    assert got.seeds.tolist() == seeds.numbers(3, 50)
    assert not got.truncated.any()


def test_short_episodes_do_not_crowd_out_long_ones():
    """Stopping after the first n to finish would see hardly any of the long ones."""
    got = evaluate(lambda x: [0] * len(x), Lottery, n_episodes=40, seed=1)
    chance = [np.random.default_rng(s).random() < 0.3 for s in seeds.numbers(1, 40)]
    assert got.returns.tolist() == [50.0 if long else 1.0 for long in chance]


def test_every_agent_plays_the_same_episodes():
    starts = []

    def watching(observations):
        starts.append(observations.copy())
        return [0] * len(observations)

    for policy in (watching, watching):
        evaluate(policy, "CartPole-v1", n_episodes=5, seed=9, max_steps=1)
    np.testing.assert_array_equal(*starts)
    assert len(np.unique(starts[0][:, 0])) == 5  # and no episode twice


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_how_many_play_at_once_changes_nothing(at_once, monkeypatch):
    monkeypatch.setattr(evaluation, "AT_ONCE", at_once)
    got = evaluate(leaning, "CartPole-v1", n_episodes=7, seed=2)
    assert got.returns.tolist() == [total for total, *_ in one_by_one(leaning, "CartPole-v1", 7, 2)]


def test_an_env_without_a_limit_gets_one(monkeypatch):
    monkeypatch.setattr(environments, "STEP_LIMIT", 30)
    got = evaluate(lambda x: [0] * len(x), "CliffWalking-v1", n_episodes=2)
    assert got.lengths.tolist() == [30, 30]
    assert got.truncated.all()
    assert not got.terminated.any()


def test_a_time_limit_is_a_truncation():
    got = evaluate(lambda x: np.zeros((len(x), 1)), "Pendulum-v1", n_episodes=2)
    assert got.lengths.tolist() == [200, 200]
    assert got.truncated.all()


def test_one_given_env_is_used_as_it_is():
    env = gym.make("CartPole-v1")
    got = evaluate(leaning, env, n_episodes=4, seed=2)
    assert got.returns.tolist() == evaluate(leaning, "CartPole-v1", 4, 2).returns.tolist()
    env.reset()  # still open


def test_random_actions_follow_from_the_seed():
    first, again = (evaluate("random", "CartPole-v1", 5, seed=4) for _ in range(2))
    assert first.returns.tolist() == again.returns.tolist()
    assert first.mode == "sampled"
    assert first.returns.tolist() != evaluate("random", "CartPole-v1", 5, seed=5).returns.tolist()


def test_the_mode_is_part_of_the_result():
    agent = TabularQ(rng=0).fit("FrozenLake-v1", 50)
    assert evaluate(agent, "FrozenLake-v1", 2).mode == "deterministic"
    assert evaluate(agent, "FrozenLake-v1", 2, deterministic=False).mode == "sampled"
    assert evaluate(leaning, "CartPole-v1", 2).mode == "as given"


def test_sampled_episodes_follow_from_the_seed_and_leave_the_agent_alone():
    agent = TabularQ(epsilon=0.9, rng=0).fit("FrozenLake-v1", 50)
    before = agent.rng_.bit_generator.state
    play = partial(evaluate, agent, "FrozenLake-v1", 30, deterministic=False)
    first = play(seed=1)
    assert agent.rng_.bit_generator.state == before
    agent.rng_.random(17)
    assert play(seed=1).lengths.tolist() == first.lengths.tolist()
    assert play(seed=2).lengths.tolist() != first.lengths.tolist()


def test_evaluating_while_training_changes_nothing():
    def watch(agent):
        evaluate(agent, "FrozenLake-v1", 3, deterministic=False)

    alone, watched = (
        TabularQ(rng=5).fit("FrozenLake-v1", 300, callbacks=callbacks)
        for callbacks in ((), (watch,))
    )
    np.testing.assert_array_equal(alone.table_, watched.table_)
    assert alone.table_.any()


def test_scores_say_what_they_are():
    scores = EpisodeScores(
        *(np.array(x) for x in ([1.0, 3.0], [5, 6], [True, True], [False, False], [8, 9])),
        env="CartPole-v1",
        mode="deterministic",
    )
    assert scores.mean == 2.0
    assert len(scores) == 2
    assert str(scores) == (
        "CartPole-v1: mean return 2 ± 1.414 (standard deviation of 2 episodes, "
        "deterministic actions)"
    )


# ---------------------------------------------------------------- errors

FAULTS = {
    "an env nearly right": (
        lambda: evaluate(leaning, "CartPole-v11"),
        "env: the id must be registered with Gymnasium, got 'CartPole-v11'. "
        "Did you mean 'CartPole-v1'?",
    ),
    "a keyword the env does not take": (
        lambda: environments.make("CartPole-v1", {"wind": 3}),
        "env: CartPole-v1 must accept its kwargs, got ",
    ),
    "no episodes": (
        lambda: evaluate(leaning, "CartPole-v1", 0),
        "evaluate: n_episodes must be an integer of at least 1, got 0.",
    ),
    "a seed that is none": (
        lambda: evaluate(leaning, "CartPole-v1", 2, seed=-1),
        "evaluate: seed must be an integer of at least 0, got -1.",
    ),
    "a reward that is no number": (
        lambda: evaluate(leaning, lambda: TransformReward(gym.make("CartPole-v1"), _no_number), 3),
        "evaluate: every return must be finite, got nan at episode 0. Repair the environment",
    ),
    "not an agent": (
        lambda: evaluate(3, "CartPole-v1"),
        "evaluate: agent must have predict(…), be a function of observations, or 'random', "
        "got int.",
    ),
    "an unknown word": (
        lambda: evaluate("rndom", "CartPole-v1"),
        "evaluate: agent must be one of random, got 'rndom'. Did you mean 'random'?",
    ),
    "not an env": (
        lambda: evaluate(leaning, 3),
        "evaluate: env must be an id, a maker or one env, got int.",
    ),
    "a vector env": (
        lambda: evaluate(leaning, gym.make_vec("CartPole-v1", 2)),
        "evaluate: env must be an id, a maker or one env, got a vector env. "
        "Pass its id: episodes are played side by side anyway.",
    ),
    "one action for all": (
        lambda: evaluate(lambda x: 1, "CartPole-v1", 3),
        "evaluate: the policy must return 3 actions, got shape (). "
        "A policy takes observations (b, …) and returns actions (b, …).",
    ),
    "not fitted": (
        lambda: evaluate(Constant(), "CartPole-v1"),
        "Constant: it must be fitted before use. Call fit(...) first.",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_errors_say_what_to_do(what):
    call, text = FAULTS[what]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value).startswith(text)
