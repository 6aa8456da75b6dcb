"""Averaging weights: distributions wherever they are asked for; policy iteration by itself."""

import numpy as np
import pytest
from reference.chains import Chain
from tolerances import tolerance

from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.averagers import KernelAverager
from kernrl.value.averaging import averaging_weights, policy_iteration
from kernrl.value.factorisation import StochasticFactorisation


@pytest.mark.parametrize("kernel", [RBF(0.5), Matern(0.5), RBF(1e-3), Delta()])
def test_rows_are_distributions(kernel):
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(30, 2)) * 10, rng.normal(size=(7, 2))
    weights = averaging_weights(kernel, np.vstack((x, z)), z)
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, **tolerance("algebra"))


def test_is_the_quotient():
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(5, 2)), rng.normal(size=(7, 2))
    got = averaging_weights(RBF(0.7), x, z)
    for i in range(5):
        k = [np.exp(-0.5 * np.sum((x[i] - z[j]) ** 2) / 0.49) for j in range(7)]
        np.testing.assert_allclose(got[i], np.array(k) / sum(k), **tolerance("closed form"))


def test_out_of_reach_the_nearest_has_all_the_weight():
    z = np.array([[0.0], [1.0], [3.0]])
    weights = averaging_weights(RBF(0.1), np.array([[100.0], [-50.0], [2.1]]), z)
    np.testing.assert_array_equal(weights[:2], [[0, 0, 1], [1, 0, 0]])
    assert weights[2, 2] == pytest.approx(1.0)
    # The limit is continuous: where the weights are still numbers, the nearest has nearly all.
    near = averaging_weights(RBF(0.1), np.array([[6.5]]), z)
    np.testing.assert_allclose(near, [[0, 0, 1]], **tolerance("algebra"))


def test_a_negative_kernel_is_refused():
    text = r"^owner: an averaging kernel must not be negative, got -1\. Take a kernel that is pos"
    with pytest.raises(ValueError, match=text):
        averaging_weights(Linear(), np.array([[1.0]]), np.array([[-1.0]]), "owner")


@pytest.mark.parametrize(
    "make", [KernelAverager(RBF(), 1.0), StochasticFactorisation(RBF(), 1.0, 1, rng=0)]
)
def test_an_endless_sum_says_what_is_missing(make):
    """An averager has no ridge to raise: with γ = 1 a state must lead to an end."""
    t = Transitions(np.zeros((4, 1)), np.ones(4), np.zeros((4, 1)), np.zeros(4))
    with pytest.raises(ValueError, match=r"must not be singular.* Pass gamma below 1, or"):
        make.fit(t)
    assert make.set_params(gamma=0.5).fit(t).predict([[0.0]])[0] == pytest.approx(2.0)


def test_no_query_has_no_weights():
    assert averaging_weights(RBF(), np.zeros((0, 2)), np.zeros((3, 2))).shape == (0, 3)


def test_policy_iteration_is_value_iteration():
    chain = Chain(20, [1, 20])

    def backups(v):
        return chain.reward[:, None] + chain.gamma * (chain.p @ v).T

    def evaluate(policy):
        return chain.value(np.eye(2)[policy])

    v, rounds = policy_iteration(backups, evaluate, np.eye(20))
    np.testing.assert_allclose(v, chain.optimal().max(axis=1), **tolerance("closed form"))
    assert 1 < rounds < 20


def test_ties_do_not_cycle():
    """Two actions of one value: rounding decides nothing, and one round is enough."""
    p = np.full((3, 3), 1 / 3)

    def backups(v):
        q = np.array([1.0, 0.1, 0.2]) + 0.9 * (p @ v)
        return np.column_stack((q, q * (1 + 4e-16), q))

    def evaluate(policy):
        return np.linalg.solve(np.eye(3) - 0.9 * p, [1.0, 0.1, 0.2])

    assert policy_iteration(backups, evaluate, p)[1] == 1
