"""Minimax weights against occupancies by linear algebra, and against MQL, their dual."""

import numpy as np
import pytest
from reference.chains import Chain
from reference.occupancy import occupancy, population, tabulated
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value.bellman_loss import MQL
from kernrl.value.density_ratio import MWL

TABLE = StateAction(Delta())
SMOOTH = StateAction(RBF(1.0), RBF(1.0))
POLICY = np.linspace(0.1, 0.9, 5)[:, None] * [1, -1] + [0, 1]
COUNTS = np.array([[1, 2], [3, 1], [1, 1], [2, 2], [1, 4]])
STARTS = np.array([1.0, 1.0, 2.0, 4.0])  # a multiset of states: the distribution of s₀


def ratio_of(chain):
    start = np.bincount(STARTS.astype(int) - 1, minlength=5) / len(STARTS)
    return occupancy(chain, POLICY, start), start


def walk(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.3
    terminated = np.arange(n) % 13 == 12
    actions = rng.integers(2, size=n)
    return Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, actions=actions)


def mixed(states):
    p = 1 / (1 + np.exp(-states[:, 0]))
    return np.column_stack((1 - p, p))


def all_pairs():
    return np.repeat(np.arange(1.0, 6), 2), np.tile([0, 1], 5)


class TestTabular:
    @pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
    def test_recovers_the_exact_ratio(self, gamma):
        """Population data with every probability exact: d_π / d_data and the value, to rounding."""
        chain = Chain(5, [1, 5], gamma=gamma)
        t = population(chain, COUNTS)
        fit = MWL(TABLE, tabulated(POLICY), gamma, 0.0, Nystroem(n_components=10))
        fit.fit(t, initial_states=STARTS)
        visits, start = ratio_of(chain)
        expected = visits / (COUNTS / COUNTS.sum())
        got = fit.predict(*all_pairs())
        np.testing.assert_allclose(got, expected.ravel(), **tolerance("closed form"))
        assert np.abs(got - expected.ravel()).max() < 1e-10
        value = start @ chain.value(POLICY)
        np.testing.assert_allclose(fit.value_, value, **tolerance("closed form"))
        w = fit.predict(t.states, t.actions)
        assert np.mean(w) == pytest.approx(1.0)
        np.testing.assert_allclose(
            np.mean(w * t.rewards) / (1 - gamma), value, **tolerance("closed form")
        )
        assert fit.score(t) == pytest.approx(fit.score(t[::-1])) and -fit.score(t) > 0

    def test_exact_form_with_one_row_a_pair(self):
        chain = Chain(5, [1, 5], success=1.0)
        t = population(chain, np.ones((5, 2), int), None)
        fit = MWL(TABLE, tabulated(POLICY), 0.9, 0.0).fit(t, initial_states=STARTS)
        visits, _ = ratio_of(chain)
        np.testing.assert_allclose(
            fit.predict(*all_pairs()), 10 * visits.ravel(), **tolerance("closed form")
        )

    def test_exact_form_with_many_rows_a_pair(self):
        """Duplicates make it singular, so it keeps a ridge; what that costs is below 1e-6."""
        chain = Chain(5, [1, 5])
        t = population(chain, COUNTS)
        fit = MWL(TABLE, tabulated(POLICY), 0.9, 1e-11).fit(t, initial_states=STARTS)
        expected = (ratio_of(chain)[0] / (COUNTS / COUNTS.sum())).ravel()
        assert np.abs(fit.predict(*all_pairs()) / expected - 1).max() < 1e-6

    def test_terminal_states_take_mass_away(self):
        """A ends with action 1, or pays 1 and goes to B with action 0; B pays 2 and goes to A.

        From A with π(0|A) = p: visits of A are Σ (pγ²)ᵗ, of B pγ times that.
        """
        gamma, p = 0.8, 0.6
        t = Transitions(
            [[0.0], [0.0], [1.0]], [1.0, 0.0, 2.0], [[1.0], [0.0], [0.0]], [False, True, False],
            actions=[0, 1, 0], episode=[0, 1, 2],
        )  # fmt: skip

        def policy(s):
            return np.where(s == 0.0, [[p, 1 - p]], [[1.0, 0.0]])

        fit = MWL(TABLE, policy, gamma, 0.0).fit(t, initial_states=[[0.0]])
        visits = (1 - gamma) / (1 - p * gamma**2)
        np.testing.assert_allclose(
            fit.predict(t.states, t.actions),
            3 * visits * np.array([p, 1 - p, p * gamma]),
            **tolerance("closed form"),
        )
        value = p * (1 + 2 * gamma) / (1 - p * gamma**2)
        assert fit.value_ == pytest.approx(value)
        cut = t.replace(terminated=[False] * 3, truncated=[False, True, False])
        assert MWL(TABLE, policy, gamma, 0.0).fit(cut, initial_states=[0.0]).value_ != fit.value_


class TestRKHS:
    @pytest.mark.parametrize("features", [None, Nystroem(n_components=10, rng=0)])
    @pytest.mark.parametrize("ridge", [1e-2, 1e-6])
    def test_its_value_is_that_of_the_minimax_q(self, features, ridge):
        """The dual solves: μ₀ᵀ(KB + n²λ)⁻¹Kr is rᵀK(BK + n²λ)⁻¹h."""
        t = walk()
        weight, q = (f(SMOOTH, mixed, 0.9, ridge, features).fit(t) for f in (MWL, MQL))
        first = t.states[t.episode_starts]
        expected = sum(
            np.mean(mixed(first)[:, a] * q.predict(first, np.full(len(first), a))) for a in (0, 1)
        )
        np.testing.assert_allclose(weight.value_, expected, **tolerance("iterative"))

    def test_no_direction_goes_down(self):
        """The objective written out, with w on the rows; a quadratic's central difference."""
        t, gamma, ridge = walk(), 0.9, 1e-3
        n, fit = len(t), MWL(SMOOTH, mixed, gamma, ridge).fit(t)
        z = np.column_stack((t.states, t.actions))
        after = [np.column_stack((t.next_states, np.full(n, a))) for a in (0.0, 1.0)]
        chance = mixed(t.next_states) * ~t.terminated[:, None]
        first = t.states[t.episode_starts]
        k0 = len(first)
        begin = [np.column_stack((first, np.full(k0, a))) for a in (0.0, 1.0)]
        points = np.vstack((z, *after, *begin))

        def objective(c):
            w = SMOOTH(z) @ c
            mass = np.concatenate(
                (
                    w / n,
                    *(-gamma * chance[:, a] * w / n for a in (0, 1)),
                    *(-(1 - gamma) * mixed(first)[:, a] / k0 for a in (0, 1)),
                )
            )
            return mass @ SMOOTH(points) @ mass + ridge * c @ SMOOTH(z) @ c

        here = objective(fit.weights_)
        rng = np.random.default_rng(0)
        for step in rng.normal(size=(3, n)):
            up, down = objective(fit.weights_ + step), objective(fit.weights_ - step)
            assert abs(up - down) < 1e-6 * (up + down - 2 * here)
        w = SMOOTH(z) @ fit.weights_
        assert -fit.score(t) == pytest.approx(here - ridge * fit.weights_ @ w)

    def test_chunks_and_partial_fit_are_one_fit(self):
        t = walk()
        whole = MWL(SMOOTH, mixed, 0.9).fit(t)
        chunked = MWL(SMOOTH, mixed, 0.9).fit([t[:13], t[13:26], t[26:]])
        grown = MWL(SMOOTH, mixed, 0.9).partial_fit(t[:13]).partial_fit(t[13:])
        cut = MWL(SMOOTH, mixed, 0.9).fit([t[:5], t[5:20], t[20:]])  # amid episodes
        parts = MWL(SMOOTH, mixed, 0.9).fit(t[:5]).partial_fit(t[5:20]).partial_fit(t[20:])
        features = Nystroem(n_components=3, rng=0)  # fitted on the first thirty rows
        form = MWL(SMOOTH, mixed, 0.9, features=features).fit([t[:30], t[30:35], t[35:]])
        one = MWL(SMOOTH, mixed, 0.9, features=features).fit([t[:30], t[30:]])
        np.testing.assert_allclose(form.value_, one.value_, **tolerance("closed form"))
        for other in (chunked, grown, cut, parts):
            np.testing.assert_allclose(other.value_, whole.value_, **tolerance("closed form"))
        given = MWL(SMOOTH, mixed, 0.9).fit([t[:13], t[13:]], initial_states=t.states[:3])
        expected = MWL(SMOOTH, mixed, 0.9).fit(t, initial_states=t.states[:3]).value_
        np.testing.assert_allclose(given.value_, expected, **tolerance("closed form"))

    def test_without_a_policy_the_first_actions_are_the_data_s(self):
        t = walk()
        t = t.replace(next_actions=np.r_[t.actions[1:], 0])
        first = np.zeros((len(t), 2))
        first[np.arange(len(t)), t.next_actions] = 1.0
        taken = {tuple(s): a for s, a in zip(t.states.tolist(), t.actions, strict=True)}
        after = {tuple(s): a for s, a in zip(t.next_states.tolist(), t.next_actions, strict=True)}

        def policy(states):
            return np.array([{**after, **taken}[tuple(s)] for s in states.tolist()])

        ours = MWL(SMOOTH, None, 0.9).fit(t).value_
        np.testing.assert_allclose(ours, MWL(SMOOTH, policy, 0.9).fit(t).value_)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: MWL(SMOOTH, mixed, gamma=1.0).fit(t), "gamma must be .* below 1.0"),
        (
            lambda t: MWL(SMOOTH, mixed).fit(t, initial_states=[[0.0]]),
            "initial_states must have 2 columns, got 1",
        ),
        (
            lambda t: MWL(SMOOTH, mixed).fit(t, initial_states=np.empty((0, 2))),
            "initial_states must have at least one row",
        ),
        (
            lambda t: MWL(SMOOTH).fit(t.replace(next_actions=t.actions), initial_states=[[0, 0]]),
            "initial_states need a policy",
        ),
        (lambda t: MWL(SMOOTH, mixed).fit(t).td_errors(t), "a density ratio has no TD errors"),
    ],
)  # fmt: skip
def test_one_clear_error(call, text):
    with pytest.raises(ValueError, match=f"MWL: {text}"):
        call(walk())
