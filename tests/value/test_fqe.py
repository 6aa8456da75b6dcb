"""Fitted Q evaluation against ridge regressions done one by one, and against its fixed point."""

import warnings

import numpy as np
import pytest
from reference.chains import Chain
from reference.occupancy import action_values, population, tabulated
from sklearn.kernel_ridge import KernelRidge
from tolerances import tolerance

from kernrl import checks
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.fqe import KernelFQE
from kernrl.value.lstd import KLSTDQ

KERNEL = StateAction(Matern(1.0), Delta())


def walk(n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.3
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[n // 2] = True, True
    return Transitions(
        x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated,
        actions=rng.integers(2, size=n),
    )  # fmt: skip


def mixed(states):
    p = 1 / (1 + np.exp(-states[:, 0]))
    return np.column_stack((1 - p, p))


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_rounds_are_ridge_regressions(rounds):
    """scikit-learn's KernelRidge on targets that are computed anew every round."""
    t, gamma, ridge = walk(), 0.9, 1e-3
    z = np.column_stack((t.states, t.actions))
    after = [np.column_stack((t.next_states, np.full(60, a))) for a in (0.0, 1.0)]
    chance = mixed(t.next_states) * ~t.terminated[:, None]
    targets = t.rewards
    for _ in range(rounds):
        model = KernelRidge(alpha=60 * ridge, kernel="precomputed").fit(KERNEL(z), targets)
        ahead = sum(chance[:, a] * model.predict(KERNEL(after[a], z)) for a in (0, 1))
        fitted, targets = model.predict(KERNEL(z)), t.rewards + gamma * ahead
    fqe = KernelFQE(KERNEL, mixed, gamma, ridge, n_iterations=rounds, tolerance=None).fit(t)
    assert fqe.n_iterations_ == rounds and not fqe.converged_
    np.testing.assert_allclose(fqe.predict(z), fitted, **tolerance("closed form"))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("features", [None, Nystroem(n_components=20, rng=0)])
def test_its_fixed_point_is_lstdq(gamma, features):
    t = walk()
    fqe = KernelFQE(KERNEL, mixed, gamma, 1e-2, features, tolerance=1e-13).fit(t)
    solved = KLSTDQ(KERNEL, mixed, gamma, 1e-2, features).fit(t)
    np.testing.assert_allclose(fqe.weights_, solved.weights_, **tolerance("closed form"))
    assert fqe.converged_ and fqe.change_ <= 1e-13 and fqe.rate_ < 1.0
    assert fqe.n_iterations_ == 2 if gamma == 0 else fqe.n_iterations_ > 20


def test_random_features():
    t, kernel = walk(), RBF(1.0)
    features = RandomFeatures(n_components=30, rng=0)
    fqe = KernelFQE(kernel, mixed, 0.9, 1e-2, features, tolerance=1e-13).fit(t)
    solved = KLSTDQ(kernel, mixed, 0.9, 1e-2, features).fit(t)
    np.testing.assert_allclose(fqe.weights_, solved.weights_, **tolerance("closed form"))


def test_delta_kernel_is_dynamic_programming():
    chain = Chain(6, [1, 6])
    policy = np.linspace(0.1, 0.9, 6)[:, None] * [1, -1] + [0, 1]
    t = population(chain, np.ones((6, 2), int))
    features = Nystroem(n_components=12)
    fqe = KernelFQE(StateAction(Delta()), tabulated(policy), 0.9, 0.0, features, tolerance=1e-13)
    fqe.fit(t)
    s, a = np.repeat(np.arange(1.0, 7), 2), np.tile([0, 1], 6)
    expected = action_values(chain, policy).ravel()
    np.testing.assert_allclose(fqe.predict(s, a), expected, **tolerance("closed form"))


class TestMonitor:
    def doubling(self):
        """s = 1 goes to s' = 2: with one linear feature a round multiplies w by 2γ."""
        return Transitions([[1.0]], [1.0], [[2.0]], [False], actions=[0], next_actions=[0])

    @pytest.mark.parametrize("features", [None, Nystroem(n_components=1)])
    def test_divergence_is_an_error_where_lstdq_has_an_answer(self, features):
        kernel = Linear().on([0])
        text = "KernelFQE: the iteration must contract, got changes that grow 1.8-fold at iteration"
        with pytest.raises(ValueError, match=text):
            KernelFQE(kernel, None, 0.9, 0.0, features).fit(self.doubling())
        solved = KLSTDQ(kernel, None, 0.9, 0.0, features).fit(self.doubling())
        assert solved.predict([[1.0, 0.0]]) == pytest.approx([1 / (1 - 1.8)])

    def test_a_ridge_can_make_it_contract(self):
        fqe = KernelFQE(Linear().on([0]), None, 0.9, 1.0).fit(self.doubling())
        assert fqe.converged_ and fqe.rate_ == pytest.approx(0.9)

    def test_too_few_rounds_are_told(self):
        text = (
            r"last of 5 iterations changed .* above the tolerance 1e-06; changes shrink by 0\.\d+"
        )
        with pytest.warns(checks.ConditionWarning, match=text):
            fqe = KernelFQE(KERNEL, mixed, 0.99, n_iterations=5).fit(walk())
        assert not fqe.converged_
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            KernelFQE(KERNEL, mixed, 0.99, n_iterations=5, tolerance=None).fit(walk())


def test_chunks_and_partial_fit_are_one_fit():
    t = walk()
    whole = KernelFQE(KERNEL, mixed, 0.9).fit(t)
    for other in (
        KernelFQE(KERNEL, mixed, 0.9).fit([t[:21], t[21:]]),
        KernelFQE(KERNEL, mixed, 0.9).partial_fit(t[:21]).partial_fit(t[21:]),
    ):
        np.testing.assert_allclose(other.weights_, whole.weights_, **tolerance("closed form"))


@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
@pytest.mark.parametrize("features", [None, Nystroem(n_components=15, rng=0)])
def test_other_libraries(library, features):
    lib = pytest.importorskip(library)
    t = walk().replace(next_actions=np.ones(60, int))
    moved = Transitions(
        **{k: None if v is None else lib.asarray(np.array(v)) for k, v in t.columns.items()}
    )
    here, there = (KernelFQE(KERNEL, None, 0.9, 1e-2, features).fit(x) for x in (t, moved))
    got = there.predict(moved.states, moved.actions)
    assert type(got) is type(moved.states)
    np.testing.assert_allclose(
        np.asarray(got), here.predict(t.states, t.actions), **tolerance("iterative")
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_iterations": 0}, "n_iterations must be an integer of at least 1, got 0"),
        ({"tolerance": 0.0}, "tolerance must be a finite number above 0.0"),
        ({"gamma": 2.0}, "gamma must be"),
        ({"policy": 3}, "policy must be callable"),
    ],
)
def test_one_clear_error(change, text):
    with pytest.raises((ValueError, TypeError), match=f"KernelFQE: {text}"):
        KernelFQE(KERNEL, mixed).set_params(**change).fit(walk())
