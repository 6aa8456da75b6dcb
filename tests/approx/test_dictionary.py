"""The dictionary against brute force: residuals, projections, costs, budgets."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.approx import dictionary as module
from kernrl.approx.dictionary import Dictionary
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern

KERNELS = {
    "rbf": RBF(0.6),
    "ard": 10.0 * RBF([0.5, 2.0]),
    "matern": Matern(1.0, 0.5),
    "laplacian": Laplacian(0.8),
    "linear": Linear(1.0, 1.0),
}


def filled(rng, kernel=KERNELS["rbf"], n=60, d=2, **options):
    """A dictionary that has seen n points, and those points."""
    x = rng.standard_normal((n, d))
    dictionary = Dictionary(kernel, **options)
    for point in x:
        dictionary.offer(point)
    return dictionary, x


def distance(kernel, atoms, weights, other_atoms, other_weights):
    """‖Σ wᵢ k(zᵢ, ·) − Σ vⱼ k(yⱼ, ·)‖ in the RKHS, by the joint Gram matrix."""
    z, w = np.concatenate((atoms, other_atoms)), np.concatenate((weights, -other_weights))
    return np.sqrt(max(np.sum(w * (kernel(z) @ w)), 0.0))


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_whitened_offers_admit_alike_and_are_features(rng, kernel):
    """`offer_whitened` makes the same dictionary as `offer`, and gives L⁻¹k_D(x) each time."""
    plain, whitened = (Dictionary(kernel, threshold=0.05, max_size=25) for _ in range(2))
    for x in rng.standard_normal((60, 2)):
        phi, admission = whitened.offer_whitened(x), plain.offer(x)
        assert whitened.size == plain.size == len(phi)
        np.testing.assert_allclose(
            phi, whitened.factor_.lower.T @ admission.coefficients, **tolerance("closed form")
        )
    np.testing.assert_array_equal(whitened.atoms_, plain.atoms_)
    known = np.concatenate((plain.atoms_[:3], plain.atoms_[-1:] + 1e-4))
    np.testing.assert_allclose(
        plain.settled(known), plain.transform(known), **tolerance("closed form")
    )
    assert Dictionary(kernel).reset(np.zeros((0, 2))).settled(known) is None
    stranger = np.concatenate((known, [[9.0, -9.0]]))
    closed = plain.settled(stranger) is not None
    assert closed == (plain.size == 25 or kernel is KERNELS["linear"])
    assert plain.size == 25 or kernel is KERNELS["linear"]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_offer_is_approximate_linear_dependence(rng, kernel):
    """Residual, coefficients and decision of each of 80 points, by solving with the whole Gram."""
    dictionary = Dictionary(kernel, threshold=0.05)
    points = rng.standard_normal((80, 2))
    points[60:] = points[:20] + 1e-3
    for x in points:
        atoms = dictionary.atoms_.copy() if dictionary.size else np.zeros((0, 2))
        own, column = kernel.diagonal(x[None])[0], kernel(atoms, x[None])[:, 0]
        a = np.linalg.solve(kernel(atoms), column)
        residual = own - column @ a
        got = dictionary.offer(x)
        np.testing.assert_allclose(got.residual, max(residual, 0), **tolerance("closed form"))
        assert got.admitted == (residual > 0.05 * own)
        if got.admitted:
            assert got.index == len(atoms) == dictionary.size - 1
            np.testing.assert_array_equal(dictionary.atoms_[-1], x)
            np.testing.assert_array_equal(got.coefficients, np.eye(dictionary.size)[-1])
        else:
            assert got.index is None
            assert dictionary.size == len(atoms)
            np.testing.assert_allclose(got.coefficients, a, **tolerance("closed form"))
    assert 3 <= dictionary.size < 80


def test_the_residual_is_the_squared_last_pivot(rng):
    dictionary = Dictionary(RBF(0.6), threshold=0.0)
    for x in rng.standard_normal((20, 2)):
        admission = dictionary.offer(x)
        pivot = np.linalg.cholesky(RBF(0.6)(dictionary.atoms_))[-1, -1]
        np.testing.assert_allclose(admission.residual, pivot**2, **tolerance("closed form"))
        last = dictionary.factor_.lower[-1, -1]
        np.testing.assert_allclose(admission.residual, last**2, **tolerance("algebra"))


def test_what_is_left_out_is_within_the_threshold(rng):
    """Every point seen is within √(threshold·k(x, x)) of the span."""
    dictionary, x = filled(rng, 4.0 * RBF(0.6), n=300, threshold=0.01)
    k = (4.0 * RBF(0.6))(x, dictionary.atoms_)
    residual = 4.0 - np.sum(k * dictionary.represent(x), axis=1)
    assert np.max(residual) <= 0.01 * 4.0 + 1e-9


def test_the_threshold_is_relative_to_the_prior_variance(rng):
    small, _ = filled(np.random.default_rng(1), RBF(0.6), threshold=0.1)
    large, _ = filled(np.random.default_rng(1), 100.0 * RBF(0.6), threshold=0.1)
    np.testing.assert_array_equal(small.atoms_, large.atoms_)


def test_revisited_points_are_represented_and_never_admitted(rng):
    dictionary, _ = filled(rng, n=20, admit="all")
    for j in (0, 7, dictionary.size - 1):
        again = dictionary.offer(dictionary.atoms_[j])
        assert not again.admitted
        expected = np.eye(dictionary.size)[j]
        np.testing.assert_allclose(again.coefficients, expected, **tolerance("iterative"))


def test_all_admits_whatever_is_independent(rng):
    dictionary, x = filled(rng, Matern(1.0, 0.5), n=50, admit="all")
    np.testing.assert_array_equal(dictionary.atoms_, x)
    low_rank, _ = filled(rng, Linear(1.0, 1.0), n=50, admit="all")
    assert low_rank.size == 3


def test_states_with_actions(rng):
    """The Delta kernel on actions: another action is another point."""
    dictionary = Dictionary(StateAction(RBF(1.0)), threshold=0.1)
    assert [dictionary.offer([0.0, a]).admitted for a in (0, 1, 0, 1, 2)] == [1, 1, 0, 0, 1]
    assert Dictionary(Delta()).fit(np.arange(5)[[0, 1, 1, 4, 0]][:, None]).size == 3


def test_a_full_dictionary_without_a_rule_is_closed(rng):
    dictionary, _ = filled(rng, n=50, threshold=0.0, max_size=7)
    assert dictionary.size == 7
    late = dictionary.offer(np.array([9.0, 9.0]))
    assert not late.admitted
    assert late.coefficients.shape == (7,)
    assert late.residual > 0.9


# ---------------------------------------------------------------- all rows at once


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("block", [1, 7, 512])
def test_fit_is_offering_the_rows_in_order(monkeypatch, rng, kernel, block):
    monkeypatch.setattr(module, "BLOCK", block)
    online, x = filled(rng, kernel, n=150, threshold=0.02, max_size=25)
    batch = Dictionary(kernel, threshold=0.02, max_size=25).fit(x)
    np.testing.assert_array_equal(batch.atoms_, online.atoms_)
    np.testing.assert_allclose(
        batch.factor_.lower, online.factor_.lower, **tolerance("closed form")
    )


def test_features_and_coefficients_are_the_projection_on_the_atoms(rng):
    dictionary, x = filled(rng, n=80, threshold=0.05)
    k, k_dd = RBF(0.6)(x, dictionary.atoms_), RBF(0.6)(dictionary.atoms_)
    phi = dictionary.transform(x)
    expected = k @ np.linalg.solve(k_dd, k.T)
    np.testing.assert_allclose(phi @ phi.T, expected, **tolerance("closed form"))
    a = dictionary.represent(x)
    np.testing.assert_allclose(a, np.linalg.solve(k_dd, k.T).T, **tolerance("closed form"))
    np.testing.assert_allclose(a @ k_dd @ a.T, expected, **tolerance("closed form"))
    phi32 = dictionary.transform(x.astype(np.float32))
    assert phi32.dtype == np.float32
    np.testing.assert_allclose(phi32, phi, **tolerance("closed form", np.float32))


def test_features_follow_the_atoms(rng):
    """The whitening is kept between calls, and made anew when the atoms change."""
    dictionary, x = filled(rng, n=30, threshold=0.05)
    before = dictionary.transform(x)
    dictionary.remove(0)
    assert dictionary.transform(x).shape == (30, before.shape[1] - 1)
    dictionary.offer([8.0, 8.0])
    k = RBF(0.6)(x, dictionary.atoms_)
    expected = k @ np.linalg.solve(RBF(0.6)(dictionary.atoms_), k.T)
    phi = dictionary.transform(x)
    np.testing.assert_allclose(phi @ phi.T, expected, **tolerance("closed form"))


def test_fit_resolves_the_median_and_starts_over(rng):
    dictionary = Dictionary(2.0 * RBF("median"), threshold=0.1)
    x = rng.standard_normal((40, 3))
    first = dictionary.fit(x).atoms_.copy()
    np.testing.assert_array_equal(dictionary.fit(x).atoms_, first)
    assert dictionary.fit(x[:, :1]).atoms_.shape[1] == 1
    assert dictionary.n_features_ == dictionary.size == dictionary.n_components


# ---------------------------------------------------------------- removal and pruning


@pytest.mark.parametrize("columns", [None, 3])
def test_removal_cost_and_projection_against_brute_force(rng, columns):
    """wⱼ²/[K⁻¹]ⱼⱼ and K_YY⁻¹K_YD w, by solving in each smaller dictionary."""
    dictionary, _ = filled(rng, n=40, threshold=0.05)
    m, atoms = dictionary.size, dictionary.atoms_.copy()
    w = rng.standard_normal(m if columns is None else (m, columns))
    costs, gram = dictionary.removal_costs(w), RBF(0.6)(atoms)
    for j in range(m):
        keep = np.delete(np.arange(m), j)
        projected = np.linalg.solve(gram[np.ix_(keep, keep)], gram[keep] @ w)
        full = np.insert(projected, j, 0.0, axis=0)
        change = np.sum((w - full) * (gram @ (w - full)))
        np.testing.assert_allclose(costs[j], change, **tolerance("closed form"))
        smaller = copy.deepcopy(dictionary)
        np.testing.assert_allclose(smaller.remove(j, w), projected, **tolerance("closed form"))
        np.testing.assert_array_equal(smaller.atoms_, atoms[keep])
        assert smaller.drift() < 1e-12
        own = dictionary.representation(j)
        expected = np.linalg.solve(gram[np.ix_(keep, keep)], gram[keep, j])
        np.testing.assert_allclose(own, expected, **tolerance("closed form"))


@pytest.mark.parametrize("budget", [1e-3, 0.05, 0.3])
def test_komp_stays_within_its_budget_and_reports_the_true_error(rng, budget):
    dictionary, _ = filled(rng, n=40, admit="all", prune="komp")
    atoms, w = dictionary.atoms_.copy(), 0.1 * rng.standard_normal(dictionary.size)
    trimmed = dictionary.trim(w, budget)
    assert dictionary.size > 0
    assert 0 < len(trimmed.removed) == len(atoms) - dictionary.size
    true = distance(RBF(0.6), atoms, w, dictionary.atoms_, trimmed.weights)
    np.testing.assert_allclose(trimmed.error, true, **tolerance("iterative"))
    assert trimmed.error <= budget
    cheapest = np.min(dictionary.removal_costs(trimmed.weights))
    assert trimmed.error**2 + cheapest > budget**2  # it stopped because it had to


def test_komp_takes_the_cheapest_first(rng):
    dictionary, _ = filled(rng, n=15, threshold=0.05, prune="komp")
    w = rng.standard_normal(dictionary.size)
    step = copy.deepcopy(dictionary)
    for j in dictionary.trim(w, 0.8).removed:
        assert j == int(np.argmin(step.removal_costs(w)))
        w = step.remove(j, w)


def test_komp_without_a_budget_leaves_the_function_as_it_is(rng):
    dictionary, x = filled(rng, n=30, threshold=0.05, prune="komp")
    w = rng.standard_normal(dictionary.size)
    atoms = dictionary.atoms_.copy()
    trimmed = dictionary.trim(w, 0.0)
    assert trimmed.removed == []
    assert trimmed.error == 0.0
    np.testing.assert_array_equal(trimmed.weights, w)
    np.testing.assert_array_equal(dictionary.atoms_, atoms)
    w[4] = 0.0  # an atom without weight says nothing
    before = RBF(0.6)(x, atoms) @ w
    trimmed = dictionary.trim(w, 0.0)
    assert trimmed.removed == [4]
    after = RBF(0.6)(x, dictionary.atoms_) @ trimmed.weights
    np.testing.assert_allclose(after, before, **tolerance("closed form"))


def test_the_oldest_leave_first(rng):
    dictionary = Dictionary(RBF(0.3), threshold=0.0, prune="oldest", max_size=5)
    x, w = rng.standard_normal((12, 2)), np.zeros(0)
    for i, point in enumerate(x):
        assert dictionary.offer(point).admitted
        w = dictionary.trim(np.append(w, 1.0)).weights
        np.testing.assert_array_equal(dictionary.atoms_, x[max(0, i - 4) : i + 1])
        assert w.shape == (dictionary.size,)


def test_the_best_represented_leaves_first(rng):
    dictionary, _ = filled(rng, n=12, threshold=0.0, prune="leverage", max_size=9)
    atoms, gram = dictionary.atoms_.copy(), RBF(0.6)(dictionary.atoms_)
    removed = dictionary.trim(np.ones(12)).removed
    assert len(removed) == 3
    for j in removed:
        others = [
            gram[i, i] - gram[i, k] @ np.linalg.solve(gram[np.ix_(k, k)], gram[k, i])
            for i in range(len(gram))
            for k in [np.delete(np.arange(len(gram)), i)]
        ]
        assert j == int(np.argmin(others))
        gram = np.delete(np.delete(gram, j, 0), j, 1)
        atoms = np.delete(atoms, j, 0)
    np.testing.assert_array_equal(dictionary.atoms_, atoms)


def test_komp_respects_the_size_beyond_its_budget(rng):
    dictionary, _ = filled(rng, n=30, admit="all", prune="komp", max_size=10)
    w = rng.standard_normal(dictionary.size)
    trimmed = dictionary.trim(w, 0.0)
    assert dictionary.size == 10 == len(trimmed.weights)
    assert trimmed.error > 0


def test_without_a_rule_nothing_is_trimmed(rng):
    dictionary, _ = filled(rng, n=30, threshold=0.05)
    trimmed = dictionary.trim(np.zeros(dictionary.size), 10.0)
    assert trimmed.removed == []


def test_the_last_atom_may_go_and_others_may_come(rng):
    dictionary = Dictionary(RBF(1.0), prune="komp")
    dictionary.offer([0.0])
    assert dictionary.trim([0.1], 1.0).weights.shape == (0,)
    assert dictionary.size == 0
    assert dictionary.offer([2.0]).admitted
    np.testing.assert_array_equal(dictionary.atoms_, [[2.0]])


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(0, 3))
def test_any_history_leaves_a_factor_of_the_atoms(moves, seed):
    """Offers and removals in any order: the factor is that of the atoms that are there."""
    rng = np.random.default_rng(seed)
    dictionary = Dictionary(RBF(0.5), threshold=1e-3)
    dictionary.offer(rng.standard_normal(2))
    dictionary.removal_costs(np.ones(1))  # from here on diag K⁻¹ is carried along
    for move in moves:
        if move % 3 == 0 and dictionary.size > 1:
            dictionary.remove(move % dictionary.size)
        else:
            dictionary.offer(rng.standard_normal(2))
    gram = RBF(0.5)(dictionary.atoms_)
    assert dictionary.drift() < 1e-11
    inverse = np.diag(np.linalg.inv(gram))
    np.testing.assert_allclose(
        dictionary.factor_.inverse_diagonal(), inverse, **tolerance("iterative")
    )


def test_the_factor_is_made_afresh_now_and_then(monkeypatch, rng):
    monkeypatch.setattr(module, "REFACTOR_EVERY", 3)
    dictionary, _ = filled(rng, n=30, threshold=0.05)
    dictionary.factor_._packed[0] *= 1.01  # as if it had drifted
    assert dictionary.drift() > 1e-3
    for _ in range(3):
        dictionary.remove(dictionary.size - 1)
    assert dictionary.drift() < 1e-14


# ---------------------------------------------------------------- as an object


def test_reset_starts_over_with_given_atoms(rng):
    dictionary, x = filled(rng, n=30, threshold=0.05)
    again = Dictionary(RBF(0.6), threshold=0.05).reset(dictionary.atoms_)
    np.testing.assert_array_equal(again.atoms_, dictionary.atoms_)
    np.testing.assert_allclose(
        again.transform(x), dictionary.transform(x), **tolerance("iterative")
    )
    given = rng.standard_normal((3, 2))
    kept = given.copy()
    again.reset(given).offer([9.0, 9.0])
    np.testing.assert_array_equal(given, kept)


def test_it_is_cloned_copied_and_pickled(rng):
    dictionary, x = filled(rng, n=30, threshold=0.05, prune="komp", max_size=50)
    assert clone(dictionary).get_params()["kernel__length_scale"] == 0.6
    assert not hasattr(clone(dictionary), "atoms_")
    twin = copy.deepcopy(dictionary)
    twin.remove(0)
    assert dictionary.size == twin.size + 1
    back = pickle.loads(pickle.dumps(dictionary))
    np.testing.assert_array_equal(back.transform(x), dictionary.transform(x))
    empty = Dictionary(threshold=0.2).with_kernel(RBF(2.0))
    assert empty.kernel.length_scale == 2.0
    assert empty.threshold == 0.2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"admit": "adl"}, "Dictionary: admit must be one of ald, all, got 'adl'"),
        ({"prune": "kompt"}, "prune must be one of komp, leverage, oldest, got 'kompt'"),
        (
            {"threshold": 1.0},
            "threshold must be a finite number at least 0.0 and below 1.0, got 1.0",
        ),
        ({"threshold": -0.1}, "threshold must be a finite number at least 0.0"),
        ({"max_size": 0}, "max_size must be an integer of at least 1, got 0"),
    ],
)
def test_what_its_parameters_must_be(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Dictionary(RBF(1.0), **options).offer([0.0])


def test_what_is_refused(rng):
    dictionary, _ = filled(rng, n=10)
    with pytest.raises(ValueError, match=r"Dictionary: x must have shape \(2,\), got \(3,\)"):
        dictionary.offer([1.0, 2.0, 3.0])
    for bad in (np.nan, np.inf):
        size = dictionary.size
        with pytest.raises(ValueError, match=f"every x must be finite, got {bad} at column 1"):
            dictionary.offer([1.0, bad])
        assert dictionary.size == size
    with pytest.raises(ValueError, match="every x must be finite, got nan at column 0"):
        Dictionary(RBF(1.0)).offer([np.nan])
    with pytest.raises(ValueError, match=r"weights must have one row for each of the \d+ atoms"):
        dictionary.trim(np.ones(3))
    with pytest.raises(ValueError, match=r"an atom must be within 0 … \d+, got -1"):
        dictionary.remove(-1)
    with pytest.raises(ValueError, match="it has no atom"):
        Dictionary(RBF(1.0)).reset(np.zeros((0, 2))).remove(0)
    with pytest.raises(ValueError, match="budget must be a finite number at least 0"):
        dictionary.trim(np.ones(dictionary.size), -1.0)
    with pytest.raises(ValueError, match="length_scale='median' must be resolved"):
        Dictionary(RBF("median")).offer([0.0])
    with pytest.raises(ValueError, match="Dictionary: a kernel is needed to fit"):
        Dictionary().offer([0.0])
    with pytest.raises(NotFittedError, match="Dictionary: it must be fitted before use"):
        Dictionary(RBF(1.0)).transform([[0.0]])
    with pytest.raises(ValueError, match="Dictionary: X must have the 2 columns"):
        dictionary.transform(np.ones((2, 3)))
