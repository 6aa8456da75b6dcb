"""What agents with finitely many actions share: numbering from any start, and exploration."""

import gymnasium as gym
import numpy as np
import pytest

from kernrl.agent import Agent
from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.control import discrete
from kernrl.control.kernel_q_learning import KernelQLearning
from kernrl.control.klspi import KLSPI
from kernrl.data.transitions import Transitions
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF


class Choice(gym.Env):
    """One step: the action named by the observation, counted from 5, earns 1."""

    observation_space = gym.spaces.Box(0.0, 2.0, (1,))
    action_space = gym.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = self.np_random.integers(3)
        return np.array([self.seen], np.float32), {}

    def step(self, action):
        assert action in (5, 6, 7)
        return np.array([self.seen], np.float32), float(action == 5 + self.seen), True, False, {}


AGENTS = {
    "KLSPI": lambda: KLSPI(RBF(0.3), features=None, first_round=60, round_steps=60, rng=0),
    "KLSPI on pairs": lambda: KLSPI(
        StateAction(RBF(0.3)), features=Nystroem(n_components=9), first_round=90, rng=0
    ),
    "KernelQLearning": lambda: KernelQLearning(
        RBF(0.3), learning_rate=1.0, warmup=30, batch_size=8, standardise=False, rng=0
    ),
    "KernelQLearning on pairs": lambda: KernelQLearning(
        StateAction(RBF(0.3)), learning_rate=1.0, warmup=30, dictionary=Dictionary(), rng=0
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_actions_may_start_anywhere(name, tmp_path):
    agent = AGENTS[name]().fit(Choice(), 300)
    states = np.array([[0.0], [1.0], [2.0]])
    np.testing.assert_array_equal(agent.predict(states), [5, 6, 7])
    assert set(agent.predict(np.tile(states, (200, 1)), deterministic=False)) == {5, 6, 7}
    agent.save(tmp_path / "agent")
    np.testing.assert_array_equal(Agent.load(tmp_path / "agent").predict(states), [5, 6, 7])


def test_a_batch_numbers_actions_from_its_space():
    states, actions = np.repeat([0.0, 1.0], 20), np.tile([0, 1], 20)
    rewards = (actions == states).astype(float)
    t = Transitions(states, rewards, states, np.ones(40), actions=actions)
    agent = KLSPI(RBF(0.3), features=None, standardise=False, rng=0).fit(t)
    np.testing.assert_array_equal(agent.predict([[0.0], [1.0]]), [0, 1])


def test_numbers_undo_the_start():
    space = gym.spaces.Discrete(3, start=5)
    np.testing.assert_array_equal(discrete.numbers(np.array([[7], [5]]), space), [2, 0])


def test_exploration_has_its_rate_and_an_answer_without_it_draws_nothing():
    space, rng = gym.spaces.Discrete(4, start=-1), np.random.default_rng(0)
    states = np.zeros((20_000, 1))
    chosen = discrete.epsilon_greedy(rng, space, 0.2, states, lambda s: np.full(len(s), 3))
    assert set(chosen) == {-1, 0, 1, 2}
    assert np.mean(chosen != 2) == pytest.approx(0.2 * 3 / 4, abs=0.01)
    before = rng.bit_generator.state
    answer = discrete.answer(rng, space, 0.0, states, lambda s: np.full(len(s), 3))
    assert (answer == 2).all() and rng.bit_generator.state == before


def test_the_newest_policy_collects():
    """With ε = 0 the actions stored after a round are those of its own policy, not of the mean."""
    taken = []

    def note(agent):
        if hasattr(agent, "policy_") and len(agent._seen) > 1:
            observations, actions = agent._seen[-1][:2]
            members = agent.policy_.members
            taken.append(
                (actions[0], members[-1].act(observations)[0], agent.policy_.act(observations)[0])
            )

    KLSPI(
        gamma=0.98,
        features=Nystroem(n_components=30),
        n_iterations=2,
        first_round=150,
        round_steps=100,
        epsilon=0.0,
        epsilon_final=0.0,
        average=4,
        rng=1,
    ).fit("CartPole-v1", 650, callbacks=[note])
    acted, newest, mean = np.array(taken).T
    np.testing.assert_array_equal(acted, newest)
    assert np.any(newest != mean)
