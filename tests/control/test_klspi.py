"""KLSPI against dynamic programming, and on environments."""

import gymnasium as gym
import numpy as np
import pytest
from counter import Counter
from gymnasium import spaces
from reference.chains import Chain
from tolerances import tolerance

from kernrl.agent import Agent
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.control.klspi import KLSPI
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Matern


def chain_data(chain, n=5000, seed=0):
    states, actions, rewards, next_states = chain.random_walk(n, seed)
    return Transitions(states, rewards, next_states, np.zeros(n), actions=actions)


class TestChains:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_fifty_states(self, seed):
        """C1: every action right except at the ties 10 and 41, from 5 000 random steps."""
        chain = Chain(50, [10, 41])
        agent = KLSPI(RBF(2.0), 0.9, ridge=1e-6, features=None, standardise=False, rng=seed)
        agent.fit(chain_data(chain, seed=seed))
        states = np.arange(1.0, 51.0)[:, None]
        untied = np.setdiff1d(np.arange(50), [9, 40])
        wrong = agent.predict(states) != chain.optimal().argmax(axis=1)
        assert np.flatnonzero(wrong[untied]).size == 0, untied[wrong[untied]] + 1

    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("features", [None, Nystroem(n_components=20)])
    def test_twenty_states(self, seed, features):
        """C2."""
        chain = Chain(20, [1, 20])
        agent = KLSPI(RBF(2.0), 0.9, ridge=1e-6, features=features, standardise=False, rng=seed)
        agent.fit(chain_data(chain, seed=seed))
        states = np.arange(1.0, 21.0)[:, None]
        np.testing.assert_array_equal(agent.predict(states), chain.optimal().argmax(axis=1))

    def test_delta_kernel_is_policy_iteration_on_the_empirical_chain(self):
        """Q of the final policy = the tabular fixed point from counts, to rounding."""
        chain = Chain(6, [1, 6])
        t = chain_data(chain, 3000)
        agent = KLSPI(Delta(), 0.9, ridge=1e-12, features=None, tolerance=0.0, rng=0).fit(t)
        q = agent.q_values(np.arange(1.0, 7.0)[:, None])
        counts = np.zeros((2, 6, 6))
        s, s2 = t.states[:, 0].astype(int) - 1, t.next_states[:, 0].astype(int) - 1
        np.add.at(counts, (t.actions.ravel(), s, s2), 1.0)
        p = counts / counts.sum(axis=2, keepdims=True)
        table = np.zeros((6, 2))
        for _ in range(500):
            table = chain.reward[:, None] + 0.9 * (p @ table.max(axis=1)).T
        np.testing.assert_allclose(q, table, **tolerance("iterative"))

    def test_state_action_kernel_that_shares_between_actions(self):
        chain = Chain(20, [1, 20])
        kernel = StateAction(RBF(2.0), 0.5 * Delta() + 0.5 * RBF(10.0))
        agent = KLSPI(
            kernel, 0.9, ridge=1e-6, features=Nystroem(n_components=40), rng=0, standardise=False
        )
        agent.fit(chain_data(chain))
        states = np.arange(1.0, 21.0)[:, None]
        np.testing.assert_array_equal(agent.predict(states), chain.optimal().argmax(axis=1))


class TestEnvironment:
    def test_counter_env_keeps_terminal_reward_and_bootstraps_truncation(self):
        """V of the last state is the terminal reward, not a bootstrap over the reset."""
        agent = KLSPI(
            RBF(0.5),
            0.5,
            ridge=1e-9,
            features=None,
            first_round=40,
            round_steps=40,
            standardise=False,
            rng=0,
        )
        agent.fit(counted(), 40)
        last, middle, first = agent.value(np.array([[2.0], [1.0], [0.0]]))
        reference = counter_values(0.5)
        np.testing.assert_allclose([first, middle, last], reference, rtol=1e-4)

    @pytest.mark.parametrize("n_envs", [1, 3])
    def test_budget_and_rounds(self, n_envs):
        env = gym.make_vec("CartPole-v1", n_envs, vectorization_mode="sync")
        agent = KLSPI(features=Nystroem(n_components=30), first_round=200, round_steps=150, rng=0)
        agent.fit(env, 500)
        assert 500 <= agent.steps_ < 500 + n_envs
        assert len(agent.log_["features"]) == 3
        assert agent.policy_.members[0].weights.shape[0] == 2

    def test_learns_cartpole_a_little(self):
        agent = KLSPI(
            gamma=0.98,
            ridge=1e-3,
            features=Nystroem(n_components=80),
            n_iterations=5,
            first_round=500,
            round_steps=500,
            rng=0,
        )
        agent.fit("CartPole-v1", 3000)
        assert np.mean(agent.episode_returns_[-5:]) > 2 * np.mean(agent.episode_returns_[:15])

    def test_answer_is_greedy_in_the_mean_of_the_newest_rounds(self):
        seen = []
        agent = KLSPI(
            gamma=0.98,
            features=Nystroem(n_components=30),
            n_iterations=3,
            first_round=200,
            round_steps=100,
            average=3,
            rng=3,
        ).fit("CartPole-v1", 700, callbacks=[lambda a: seen.append(getattr(a, "policy_", None))])
        rounds = list(dict.fromkeys(p.members[-1] for p in seen if p is not None))
        assert len(rounds) == 6 and agent.policy_.members == tuple(rounds[-3:])
        states = np.random.default_rng(0).normal(size=(5, 4))
        mean = np.mean([p.q(states) for p in rounds[-3:]], axis=0)
        np.testing.assert_allclose(agent.q_values(states), mean, **tolerance("algebra"))
        np.testing.assert_array_equal(agent.predict(states), mean.argmax(axis=1))

    def test_discrete_observations_get_the_tabular_kernel(self):
        agent = KLSPI(gamma=0.95, first_round=2000, features=None, rng=0)
        agent.fit(gym.make("FrozenLake-v1", is_slippery=False), 2000)
        assert isinstance(agent.policy_.members[0].features.kernel_, Delta)
        assert agent.policy_.members[0].weights.shape[1] <= 16
        path, env = 0.0, gym.make("FrozenLake-v1", is_slippery=False)
        state, _ = env.reset(seed=0)
        for _ in range(20):
            state, reward, ended, cut, _ = env.step(int(agent.predict(state)))
            path += reward
            if ended or cut:
                break
        assert path == 1.0


@pytest.mark.parametrize(
    "features", [Nystroem(n_components=25), RandomFeatures(n_components=40), None]
)
@pytest.mark.parametrize("kernel", [None, StateAction(Matern("median"), RBF(0.5))])
def test_save_and_load(tmp_path, features, kernel):
    t = chain_data(Chain(6, [1, 6]), 300)
    agent = KLSPI(kernel, features=features, gamma=0.9, rng=0).fit(t)
    agent.save(tmp_path / "agent")
    twin = Agent.load(tmp_path / "agent")
    states = np.linspace(0, 7, 15)[:, None]
    np.testing.assert_array_equal(twin.q_values(states), agent.q_values(states))
    np.testing.assert_array_equal(twin.predict(states), agent.predict(states))


def test_same_seed_same_policy():
    runs = [
        KLSPI(features=Nystroem(n_components=30), first_round=300, round_steps=200, rng=s)
        .fit("CartPole-v1", 700)
        .policy_.members[0]
        .weights
        for s in (0, 0, 1)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0].shape != runs[2].shape or np.any(runs[0] != runs[2])


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: KLSPI().fit("Pendulum-v1", 100), "KLSPI: the action space must be Disc"),
        (lambda: KLSPI(kernel="rbf").fit("CartPole-v1", 9), "KLSPI: kernel must be a kernel"),
        (lambda: KLSPI(features="rff").fit("CartPole-v1", 9), "KLSPI: features must be None, N"),
        (lambda: KLSPI(average=0).fit("CartPole-v1", 9), "KLSPI: average must be an integer"),
        (lambda: KLSPI(epsilon=2.0).fit("CartPole-v1", 9), "KLSPI: epsilon must be a finite"),
        (lambda: KLSPI(first_round=0).fit("CartPole-v1", 9), "KLSPI: first_round must be an int"),
        (lambda: KLSPI(window=0).fit("CartPole-v1", 9), "KLSPI: window must be an integer"),
        (lambda: KLSPI().fit("CartPole-v1"), "KLSPI: total_steps must be an integer"),
        (lambda: KLSPI().fit(Transitions([[0.0]], [0.0], [[0.0]], [False])), "must have actions"),
    ],
)  # fmt: skip
def test_one_clear_error(run, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run()


def counted():
    """The three-step env, its count as the only observation."""
    box = spaces.Box(0.0, 3.0, (1,), np.float64)
    return gym.wrappers.TransformObservation(Counter(), lambda o: o[1:].copy(), box)


def counter_values(gamma):
    """V(0), V(1), V(2) of the three-step env: its rewards discounted to the terminal step."""
    env = counted()
    env.reset()
    rewards = []
    while True:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        rewards.append(reward)
        if terminated or truncated:
            break
    assert terminated and len(rewards) == 3
    values, ahead = [], 0.0
    for reward in rewards[::-1]:
        ahead = reward + gamma * ahead
        values.append(ahead)
    return values[::-1]
