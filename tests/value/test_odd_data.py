"""Odd data through the public face of every estimator: what is asked of all is tested on all."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from tolerances import tolerance

from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value.averagers import KernelAverager
from kernrl.value.bellman_loss import MQL
from kernrl.value.density_ratio import MWL
from kernrl.value.factorisation import StochasticFactorisation
from kernrl.value.fqe import KernelFQE
from kernrl.value.gptd import GPTD
from kernrl.value.gptd_ensemble import GPTDEnsemble
from kernrl.value.lstd import KLSTD, KLSTDQ
from kernrl.value.occupancy import SuccessorRepresentation
from kernrl.value.ope import estimate_return
from kernrl.value.recursive import RecursiveKLSTD
from kernrl.value.regularised import RegularisedLSTD, RegularisedLSTDQ
from kernrl.value.td import KernelTD


@dataclass
class Case:
    """An estimator of V; `narrow` where its features are made in float32.

    `alternating` is its V of one state that goes back to itself and ends, in turns, with reward 2
    each time: with A = Σ e(1 − γm) and b = Σ er over the two rows, b/A; or the mean of what it
    regresses on.
    """

    estimator: Any
    narrow: bool = False
    alternating: float | None = 4.0 / (0.1 + 1.0)


LANDMARK, WAVES = Nystroem(n_components=1, rng=0), RandomFeatures(n_components=200, rng=0)
RETURNS = (2 + 0.9 * 2 + 2) / 2
OF_STATES = {
    "KLSTD": Case(KLSTD(RBF(), 0.9)),
    "KLSTD traces": Case(
        KLSTD(RBF(), 0.9, trace_decay=0.7), alternating=(2 + 2 * 1.63) / (0.1 + 1.63)
    ),
    "KLSTD iterative": Case(KLSTD(RBF(), 0.9, solver="iterative")),
    "KLSTD Nystroem": Case(KLSTD(RBF(), 0.9, features=LANDMARK), narrow=True),
    "KLSTD random": Case(KLSTD(RBF(), 0.9, features=WAVES), narrow=True),
    "GPTD": Case(GPTD(RBF(), 0.9, 0.1), alternating=RETURNS),
    "GPTD white": Case(GPTD(RBF(), 0.9, 0.1, "white"), alternating=(0.1 * 2 + 2) / (0.1**2 + 1)),
    "GPTD dictionary": Case(GPTD(RBF(), 0.9, 0.1, dictionary=Dictionary()), alternating=RETURNS),
    "GPTD random": Case(GPTD(RBF(), 0.9, 0.1, features=WAVES), alternating=RETURNS),
    "KernelAverager": Case(KernelAverager(RBF(), 0.9)),
    "StochasticFactorisation": Case(StochasticFactorisation(RBF(), 0.9, 1, rng=0)),
    "SuccessorRepresentation": Case(SuccessorRepresentation(RBF(), 0.9)),
    "RecursiveKLSTD": Case(RecursiveKLSTD(RBF(), 0.9)),
    "RegularisedLSTD": Case(RegularisedLSTD(RBF(), 0.9)),
    "RegularisedLSTD Nystroem": Case(RegularisedLSTD(RBF(), 0.9, features=LANDMARK), narrow=True),
    **{
        f"KernelTD {how}": Case(KernelTD(RBF(), 0.9, 0.1, method=how), alternating=None)
        for how in ("td", "residual", "gtd2", "tdc")
    },
}
EVERY_V = pytest.mark.parametrize("case", OF_STATES.values(), ids=OF_STATES)
PAIRS = StateAction(RBF())
OF_PAIRS = {
    "KLSTDQ": lambda policy: KLSTDQ(PAIRS, policy, 0.9),
    "KLSTDQ Nystroem": lambda policy: KLSTDQ(PAIRS, policy, 0.9, features=LANDMARK),
    "KernelFQE": lambda policy: KernelFQE(PAIRS, policy, 0.9),
    "MQL": lambda policy: MQL(PAIRS, policy, 0.9),
    "MWL": lambda policy: MWL(PAIRS, policy, 0.9),
    "RegularisedLSTDQ": lambda policy: RegularisedLSTDQ(PAIRS, policy, 0.9),
}
EVERY_Q = pytest.mark.parametrize("make", OF_PAIRS.values(), ids=OF_PAIRS)


@pytest.fixture(autouse=True)
def silence():
    """None of these data is a reason to warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def walk(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.3
    actions = rng.integers(2, size=n)
    return Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], np.arange(n) % 20 == 19, actions=actions)


@EVERY_V
def test_one_row_that_ended_is_worth_a_part_of_its_reward(case):
    """A ridge or a step shrinks V(s) = r, all there is to know; gtd2's first step is 0."""
    value = clone(case.estimator).fit(Transitions([[0.5]], [2.0], [[0.7]], [True]))
    assert 0.0 <= value.predict([[0.5]])[0] <= 2.0 + 1e-9


@EVERY_V
def test_one_row_that_goes_on(case):
    value = clone(case.estimator).fit(Transitions([[0.5]], [2.0], [[0.7]], [False]))
    assert np.isfinite(value.predict([[0.5], [100.0]])).all()


@EVERY_V
def test_constant_states_are_one_state(case):
    end = np.arange(60) % 2 == 1
    t = Transitions(np.ones((60, 2)), np.full(60, 2.0), np.ones((60, 2)), end)
    value = clone(case.estimator).fit(t).predict(np.ones((3, 2)))
    assert np.ptp(value) < 1e-9 and value[0] > 0.0
    if case.alternating is not None:  # sixty steps are few
        assert value[0] == pytest.approx(case.alternating, rel=0.01)


@EVERY_V
def test_duplicates_are_more_of_the_same(case):
    """Every row thrice, solved without a complaint; the mean of a batch stays what it was."""
    t = walk()
    thrice = t[np.repeat(np.arange(40), 3)]
    value = clone(case.estimator).fit(thrice).predict(t.states)
    assert np.isfinite(value).all()
    if isinstance(case.estimator, KLSTD | RegularisedLSTD) and case.estimator.features is None:
        once = clone(case.estimator).fit(thrice[::3]).predict(t.states)
        if case.estimator.trace_decay == 0.0:  # a revisit carries a trace
            np.testing.assert_allclose(value, once, **tolerance("iterative"))


@EVERY_V
def test_a_giant_reward_scales_its_part_of_the_values(case):
    """Values are linear in the rewards, so a huge one leaves numbers, of its size at most 10 ×."""
    t, giant = walk(), np.zeros(40)
    giant[7] = 1e12
    value = clone(case.estimator).fit(t.replace(rewards=t.rewards + giant)).predict(t.states)
    assert np.isfinite(value).all() and np.abs(value).max() < 1e13
    unit = clone(case.estimator).fit(t.replace(rewards=giant / 1e12)).predict(t.states)
    np.testing.assert_allclose(value, 1e12 * unit, rtol=1e-6, atol=1e4)


@EVERY_V
def test_float32_states_a_thousand_away(case):
    """Positions are exact on a grid of 2⁻¹³, so the shift may cost nothing but arithmetic."""
    t = walk()
    far = [(x.astype(np.float32) + np.float32(1000)) for x in (t.states, t.next_states)]
    near = [x.astype(np.float64) - 1000 for x in far]
    expected, value = (
        clone(case.estimator).fit(t.replace(states=s, next_states=s2)).predict(s)
        for s, s2 in (near, far)
    )
    bound = 1e-5 if case.narrow else 1e-6
    assert np.abs(value - expected).max() < bound * np.abs(expected).max()


@EVERY_V
def test_a_median_of_many_rows_is_the_same_twice(case):
    """More rows than the median looks at: a subsample, which must be a seeded one."""
    t = walk(1100)
    estimator = clone(case.estimator).set_params(kernel=RBF("median"), gamma=0.5)
    if isinstance(estimator, RegularisedLSTD | SuccessorRepresentation) and not case.narrow:
        estimator.set_params(features=LANDMARK)  # for time: the kernel is found before
    if isinstance(estimator, GPTD) and not case.narrow and estimator.features is None:
        estimator.set_params(dictionary=Dictionary(threshold=0.1))
    scales = [clone(estimator).fit(t).kernel_.length_scale for _ in range(2)]
    assert scales[0] == scales[1]


@EVERY_Q
def test_an_action_that_no_row_took(make):
    """Under a block for each action nothing is known of it: Q = 0, and no number is infinite."""
    t = walk()
    always = make(lambda states: np.full(len(states), 2)).fit(t)
    at_times = make(lambda states: np.tile([0.2, 0.3, 0.5], (len(states), 1))).fit(t)
    for fit in (always, at_times):
        assert np.isfinite(fit.predict(t.states, t.actions)).all()
        unseen = fit.predict(t.states, np.full(40, 2))
        if isinstance(fit, KLSTDQ | KernelFQE | MWL):
            np.testing.assert_array_equal(unseen, 0.0)
        assert np.isfinite(unseen).all()


@EVERY_Q
def test_odd_rows_of_pairs(make):
    t = walk()
    policy = make(lambda states: np.tile([0.5, 0.5], (len(states), 1)))
    constant = t.replace(states=np.ones((40, 2)), next_states=np.ones((40, 2)))
    thrice = t[np.repeat(np.arange(40), 3)]
    giant = t.replace(rewards=np.where(np.arange(40) == 7, 1e12, t.rewards))
    for odd in (constant, thrice, giant, t[:1], t[19:20]):
        assert np.isfinite(clone(policy).fit(odd).predict(odd.states, odd.actions)).all()


def test_an_ensemble_on_one_row_and_on_one_state():
    one = Transitions([[0.5]], [2.0], [[0.7]], [True])
    same = Transitions(np.ones((20, 1)), np.ones(20), np.ones((20, 1)), np.arange(20) % 2 == 1)
    for t in (one, same):
        mean, std = GPTDEnsemble([RBF(), RBF(2.0)], 0.9).fit(t).predict(t.states, return_std=True)
        assert np.isfinite(mean).all() and np.all((std >= 0) & (std <= 1.0))


@pytest.mark.parametrize(("share", "told"), [(1.0, "100% of what"), (0.3, "30% of what")])
def test_a_return_by_actions_that_no_row_took_is_warned_about(share, told):
    """Its interval has no width where all is unseen, which looks like certainty."""
    t = walk()

    def policy(states):
        return np.tile([1 - share, 0.0, share], (len(states), 1))

    with pytest.warns(UserWarning, match=f"estimate_return: {told} the policy does is unlike all"):
        estimate_return(t, policy, gamma=0.5, level=None)


@pytest.mark.parametrize("method", ["lstdq", "fqe", "mql", "mwl"])
def test_returns_of_odd_data(method):
    t = walk()
    giant = t.replace(rewards=np.where(np.arange(40) == 7, 1e12, t.rewards))
    one = t[:1].replace(actions=[0], next_states=t.states[:1])
    for odd, policy in (
        (giant, lambda states: np.full((len(states), 2), 0.5)),
        (t[np.repeat(np.arange(40), 3)], lambda states: np.full((len(states), 2), 0.5)),
        (one, lambda states: np.zeros(len(states), dtype=int)),
    ):
        found = estimate_return(odd, policy, method=method, kernel=PAIRS, gamma=0.5, level=None)
        assert np.isfinite(found.value)
