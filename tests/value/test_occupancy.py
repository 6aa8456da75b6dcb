"""The successor representation: tables, its inverse, and values of rewards it never saw."""

import numpy as np
import pytest
from reference.chains import Chain
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.stationary import RBF
from kernrl.value.lstd import KLSTD
from kernrl.value.occupancy import SuccessorRepresentation

FORMS = {
    "exact": None,
    "Nystroem": Nystroem(n_components=12, rng=0),
    "random features": RandomFeatures(n_components=20, rng=0),
}


def walk(n=40, seed=0):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    return Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated)


@pytest.mark.parametrize("form", FORMS)
def test_values_any_rewards_as_klstd_does(form):
    """One product against a KLSTD fitted anew on the other rewards."""
    t = walk()
    sr = SuccessorRepresentation(RBF(1.0), 0.9, 1e-3, FORMS[form]).fit(t)
    rng = np.random.default_rng(1)
    query, others = rng.normal(size=(9, 2)), rng.normal(size=(40, 3))
    for k in range(3):
        td = KLSTD(RBF(1.0), 0.9, 1e-3, FORMS[form]).fit(t.replace(rewards=others[:, k]))
        expected = td.predict(query)
        got = sr.reevaluate(others[:, k], query)
        np.testing.assert_allclose(got, expected, **tolerance("closed form"))
        got = sr.occupancy(query) @ others[:, k]
        np.testing.assert_allclose(got, expected, **tolerance("closed form"))
        got = sr.reevaluate(others, query)[:, k]
        np.testing.assert_allclose(got, expected, **tolerance("closed form"))
    own = KLSTD(RBF(1.0), 0.9, 1e-3, FORMS[form]).fit(t)
    np.testing.assert_allclose(sr.predict(query), own.predict(query), **tolerance("closed form"))
    np.testing.assert_allclose(sr.td_errors(t), own.td_errors(t), **tolerance("closed form"))


def test_is_the_inverse_of_the_system():
    t = walk()
    k, ahead = RBF(1.0)(t.states), RBF(1.0)(t.next_states, t.states) * ~t.terminated[:, None]
    sr = SuccessorRepresentation(RBF(1.0), 0.9, 1e-3).fit(t)
    system = k + 40 * 1e-3 * np.eye(40) - 0.9 * ahead
    np.testing.assert_allclose(sr.resolvent_ @ system, np.eye(40), **tolerance("closed form"))


def test_on_a_cycle_it_is_the_table():
    """(I − γP)⁻¹ of a deterministic cycle; nothing ends, so its rows sum to 1/(1 − γ)."""
    s = np.arange(7.0)
    t = Transitions(s, np.zeros(7), (s + 1) % 7, np.zeros(7))
    sr = SuccessorRepresentation(Delta(), 0.9, 0.0).fit(t)
    table = np.linalg.inv(np.eye(7) - 0.9 * np.roll(np.eye(7), 1, axis=1))
    np.testing.assert_allclose(sr.occupancy(s), table, **tolerance("closed form"))
    np.testing.assert_allclose(sr.occupancy(s).sum(axis=1), 10.0, **tolerance("closed form"))


def test_on_a_chain_it_is_the_table_summed_over_visits():
    """Occupancy of a state: the sum over transitions that left it. Empirical P from counts."""
    s, _, _, s2 = Chain(6, [1]).random_walk(500, seed=0)
    t = Transitions(s, np.zeros(500), s2, np.zeros(500))
    counts = np.zeros((6, 6))
    np.add.at(counts, (s.astype(int) - 1, s2.astype(int) - 1), 1.0)
    table = np.linalg.inv(np.eye(6) - 0.9 * counts / counts.sum(axis=1, keepdims=True))
    sr = SuccessorRepresentation(Delta(), 0.9, 1e-13, Nystroem(n_components=6)).fit(t)
    psi = sr.occupancy(np.arange(1.0, 7.0))
    grouped = np.column_stack([psi[:, s == k].sum(axis=1) for k in range(1, 7)])
    np.testing.assert_allclose(grouped, table, **tolerance("iterative"))


def test_terminated_stops_and_truncated_does_not():
    s = np.arange(3.0)
    ends = np.array([False, True, False])

    def table(**flags):
        t = Transitions(s, np.zeros(3), (s + 1) % 3, flags.pop("terminated", np.zeros(3)), **flags)
        return SuccessorRepresentation(Delta(), 0.5, 0.0).fit(t).occupancy(s)

    whole = table()
    np.testing.assert_allclose(table(truncated=ends), whole, **tolerance("algebra"))
    stopped = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.5, 0.25, 1.0]])
    np.testing.assert_allclose(table(terminated=ends), stopped, **tolerance("algebra"))


def test_without_discount_it_is_the_ridge_smoother():
    t = walk()
    alpha = SuccessorRepresentation(RBF(1.0), 0.0, 1e-2).fit(t).occupancy(t.states)
    k = RBF(1.0)(t.states)
    expected = k @ np.linalg.inv(k + 0.4 * np.eye(40))
    np.testing.assert_allclose(alpha, expected, **tolerance("closed form"))


@pytest.mark.parametrize("form", FORMS)
def test_partial_fit_is_one_fit(form):
    t = walk()
    features = FORMS[form] and clone(FORMS[form]).set_params(n_components=6)
    make = SuccessorRepresentation(RBF(1.0), 0.9, 1e-3, features)
    grown = clone(make).partial_fit(t[:20]).partial_fit(t[20:])
    chunked = clone(make).fit([t[:20], t[20:]]) if features is None else grown
    assert grown.occupancy(t.states[:3]).shape == (3, 40)
    np.testing.assert_array_equal(grown.rewards_, t.rewards)
    np.testing.assert_allclose(
        grown.occupancy(t.states), chunked.occupancy(t.states), **tolerance("closed form")
    )
    if features is not None:  # the features of the first call, on all rows
        phi = grown.features_.transform(t.states)
        ahead = grown.features_.transform(t.next_states) * ~t.terminated[:, None]
        system = phi.T @ (phi - 0.9 * ahead) + 40 * 1e-3 * np.eye(phi.shape[1])
        expected = phi @ np.linalg.solve(system, phi.T)
        np.testing.assert_allclose(grown.occupancy(t.states), expected, **tolerance("closed form"))


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    for features in FORMS.values():
        there = SuccessorRepresentation(RBF(1.0), 0.9, features=features)
        there.fit(Transitions(**columns))
        here = SuccessorRepresentation(RBF(1.0), 0.9, features=features).fit(t)
        psi = there.occupancy(columns["states"][:4])
        assert isinstance(psi, torch.Tensor)
        np.testing.assert_allclose(
            psi.numpy(), here.occupancy(t.states[:4]), **tolerance("iterative")
        )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, t: m.fit(t).reevaluate(np.ones(3), t.states), "one row for each of the 40 tran"),
        (lambda m, t: m.fit(t).reevaluate(np.full(40, np.nan), t.states), "every reward must be"),
        (lambda m, t: m.fit(t).occupancy(np.ones((2, 3))), "must have 2 columns, got 3"),
        (lambda m, t: m.occupancy(t.states), "SuccessorRepresentation: it must be fitted"),
        (lambda m, t: m.set_params(ridge=-1.0).fit(t), "ridge must be a finite number"),
    ],
)
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, NotFittedError), match=text):
        make(SuccessorRepresentation(RBF(1.0), 0.9), walk())
