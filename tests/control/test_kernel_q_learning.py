"""Kernel Q-learning: its functional gradient, its pruning, and what it learns."""

import gymnasium as gym
import numpy as np
import pytest
from reference.chains import Chain
from tolerances import tolerance

from kernrl.agent import Agent
from kernrl.approx.dictionary import Dictionary
from kernrl.control.kernel_q_learning import KernelQLearning
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF


def trained(**params):
    params = {"kernel": RBF(1.0), "warmup": 60, "batch_size": 8, "gamma": 0.9, "rng": 0, **params}
    return KernelQLearning(**params).fit("CartPole-v1", 80)


def batch(agent, n=12, seed=1):
    """Random rows near the agent's states: (states, actions, rewards, next_states, terminated)."""
    rng = np.random.default_rng(seed)
    pick = rng.integers(agent.dictionary_.size, size=(2, n))
    atoms = np.array(agent.dictionary_.atoms_)[:, :4]
    ended = rng.random(n) < 0.3
    return atoms[pick[0]], rng.integers(2, size=n), rng.normal(size=n), atoms[pick[1]], ended


class TestGradient:
    @pytest.mark.parametrize("kernel", [RBF(1.0), StateAction(RBF(1.0))])
    @pytest.mark.parametrize("gradient", ["semi", "full"])
    def test_step_is_the_functional_gradient(self, gradient, kernel):
        """In the RKHS of the atoms the direction is K⁻¹∂/∂w of ½ Σ δ²/b (targets held for semi)."""
        agent = trained(kernel=kernel, gradient=gradient, learning_rate=0.3)
        states, actions, rewards, after, ended = batch(agent)
        before = agent.weights_.copy()

        def loss(weights, frozen):
            ahead = _q(agent, after, frozen if gradient == "semi" else weights)
            best = _q(agent, after, frozen).argmax(axis=1)
            target = rewards + 0.9 * ~ended * ahead[np.arange(12), best]
            return 0.5 * np.mean((target - _q(agent, states, weights)[np.arange(12), actions]) ** 2)

        slope, h = np.zeros_like(before), 1e-6
        for index in np.ndindex(*before.shape):
            shift = np.zeros_like(before)
            shift[index] = h
            slope[index] = (loss(before + shift, before) - loss(before - shift, before)) / (2 * h)
        agent._descend(states, actions, rewards, after, ended)
        gram = agent.kernel_(np.array(agent.dictionary_.atoms_))
        np.testing.assert_allclose(
            gram @ (agent.weights_ - before), -0.3 * slope, **tolerance("finite difference")
        )

    def test_hybrid_is_semi_on_greedy_rows_and_full_on_others(self):
        def moved(gradient, rows):
            agent = trained(gradient="hybrid")
            agent.set_params(gradient=gradient)
            data = batch(agent, 40)
            greedy = data[1] == agent._q_of(data[0]).argmax(axis=1)
            chosen = greedy if rows == "greedy" else ~greedy
            assert chosen.sum() > 3
            before = agent.weights_.copy()
            agent._descend(*(x[chosen] for x in data))
            return agent.weights_ - before

        for rows, twin in (("greedy", "semi"), ("explored", "full")):
            np.testing.assert_array_equal(moved("hybrid", rows), moved(twin, rows))
        assert np.any(moved("semi", "explored") != moved("full", "explored"))

    def test_terminal_step_moves_only_towards_the_reward(self):
        agent = trained(gradient="full", learning_rate=1.0)
        state = np.array(agent.dictionary_.atoms_)[:1]
        agent.weights_[:] = 0.0
        agent._descend(state, np.array([1]), np.array([5.0]), state, np.array([True]))
        assert agent._q_of(state)[0] == pytest.approx([0.0, 5.0])  # η = 1 lands on the target

    def test_ridge_shrinks(self):
        agent = trained(ridge=0.5, learning_rate=0.4)
        agent.weights_[:] = 1.0
        states, actions, _, _, _ = batch(agent)
        rewards = agent._q_of(states)[np.arange(12), actions]
        agent._descend(states, actions, rewards, states, np.ones(12, bool))
        np.testing.assert_allclose(agent.weights_, 0.8, **tolerance("closed form"))


def _q(agent, states, weights):
    atoms = np.array(agent.dictionary_.atoms_)
    if weights.shape[1] > 1:
        return agent.kernel_(states, atoms) @ weights
    columns = [np.column_stack((states, np.full(len(states), float(a)))) for a in (0, 1)]
    return np.column_stack([agent.kernel_(z, atoms) @ weights for z in columns])


class TestDictionary:
    def test_admission_does_not_change_q(self):
        agent = trained(dictionary=Dictionary(threshold=0.3))
        query = np.random.default_rng(0).normal(size=(20, 4))
        before, size = agent._q_of(query), agent.dictionary_.size
        agent._offer(query, np.zeros(20, int))
        assert agent.dictionary_.size > size
        np.testing.assert_allclose(agent._q_of(query), before, **tolerance("algebra"))

    def test_komp_budget_bounds_the_error(self):
        budget = 0.05
        agent = trained(dictionary=Dictionary(threshold=1e-6, prune="komp"), budget=0.0)
        old_atoms, old = np.array(agent.dictionary_.atoms_), agent.weights_.copy()
        agent.set_params(budget=budget)
        agent._prune()
        atoms, new = np.array(agent.dictionary_.atoms_), agent.weights_
        assert 0 < len(atoms) < len(old_atoms)
        both = np.vstack((old_atoms, atoms))
        difference = np.vstack((old, -new))
        norm2 = np.einsum("ia,ij,ja->", difference, agent.kernel_(both), difference)
        assert np.sqrt(max(norm2, 0.0)) <= budget * (1 + 1e-6)

    @pytest.mark.parametrize("prune", ["komp", "oldest", "leverage"])
    def test_max_size_holds_through_training(self, prune):
        agent = KernelQLearning(
            RBF(1.0),
            dictionary=Dictionary(threshold=1e-3, max_size=30, prune=prune),
            warmup=50,
            batch_size=4,
            rng=0,
        ).fit("CartPole-v1", 300)
        assert agent.dictionary_.size == agent.weights_.shape[0] <= 30
        assert agent.dictionary_.drift() < 1e-8
        assert np.isfinite(agent.weights_).all()


class Walk(gym.Env):
    """The 6-state chain as an env with Discrete observations and a time limit of 40."""

    observation_space = gym.spaces.Discrete(6)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.chain = Chain(6, [1, 6])
        self.state, self.left = int(self.np_random.integers(6)), 40
        return self.state, {}

    def step(self, action):
        reward = self.chain.reward[self.state]
        self.state = int(self.np_random.choice(6, p=self.chain.p[action, self.state]))
        self.left -= 1
        return self.state, reward, False, self.left == 0, {}


class TestLearning:
    def test_delta_kernel_finds_the_optimal_values_of_a_chain(self):
        """Tabular Q-learning with replay: within sampling error of dynamic programming."""
        agent = KernelQLearning(
            gamma=0.9,
            gradient="semi",
            learning_rate=1.0,
            learning_rate_final=0.2,
            epsilon=1.0,
            epsilon_final=1.0,
            batch_size=64,
            rng=0,
        ).fit(Walk(), 6000)
        assert isinstance(agent.kernel_, Delta) and agent.dictionary_.size == 6
        optimal = Chain(6, [1, 6]).optimal()
        np.testing.assert_allclose(agent.q_values(np.arange(6)), optimal, rtol=0.1)
        np.testing.assert_array_equal(agent.predict(np.arange(6)), optimal.argmax(axis=1))

    @pytest.mark.parametrize("batch_size", [0, 16])
    def test_improves_on_cartpole(self, batch_size):
        agent = KernelQLearning(
            RBF(2.0),
            gamma=0.98,
            gradient="semi",
            learning_rate=1.0,
            batch_size=batch_size,
            dictionary=Dictionary(threshold=0.02, max_size=100),
            exploration_fraction=0.5,
            rng=1,
        ).fit("CartPole-v1", 4000)
        assert np.mean(agent.episode_returns_[-5:]) > 1.5 * np.mean(agent.episode_returns_[:20])

    def test_vector_env_and_update_rhythm(self):
        env = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
        agent = KernelQLearning(warmup=50, train_every=6, batch_size=4, rng=0).fit(env, 200)
        assert 200 <= agent.steps_ < 203
        assert 20 <= agent.n_updates_ <= 26

    def test_budget_shorter_than_the_warmup_still_gives_an_agent(self):
        agent = KernelQLearning(warmup=500, rng=0).fit("CartPole-v1", 20)
        assert agent.predict(np.zeros(4)) in (0, 1)


def test_same_seed_same_weights_and_load_gives_the_same_bits(tmp_path):
    a, b, c = (trained(rng=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(a.weights_, b.weights_)
    assert a.weights_.shape != c.weights_.shape or np.any(a.weights_ != c.weights_)
    a.save(tmp_path / "agent")
    twin = Agent.load(tmp_path / "agent")
    states = np.random.default_rng(0).normal(size=(9, 4))
    np.testing.assert_array_equal(twin.q_values(states), a.q_values(states))
    assert twin.value(states[0]) == a.value(states[0])


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            lambda: KernelQLearning(gradient="half").fit("CartPole-v1", 9),
            "must be one of full, hyb",
        ),
        (lambda: KernelQLearning(learning_rate=2.0).fit("CartPole-v1", 9), "learning_rate must be"),
        (lambda: KernelQLearning(batch_size=-1).fit("CartPole-v1", 9), "batch_size must be an int"),
        (lambda: KernelQLearning(dictionary=7).fit("CartPole-v1", 9), "dictionary must be a Dict"),
        (
            lambda: KernelQLearning(kernel=7).fit("CartPole-v1", 9),
            "kernel must be a kernel or None",
        ),
        (lambda: KernelQLearning().fit("Pendulum-v1", 9), "the action space must be Discrete"),
        (
            lambda: KernelQLearning().fit(
                Transitions([[0.0]], [0.0], [[0.0]], [True], actions=[0])
            ),
            "KernelQLearning: it learns from an environment only",
        ),
    ],
)
def test_one_clear_error(run, text):
    with pytest.raises((ValueError, TypeError), match=text):
        run()
