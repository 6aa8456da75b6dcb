"""Nested regularised LSTD: its objective written out, its gradient, its limits, tables."""

import numpy as np
import pytest
from reference.chains import Chain, boyan
from sklearn.base import clone
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.lstd import KLSTD, KLSTDQ
from kernrl.value.regularised import RegularisedLSTD, RegularisedLSTDQ


def walk(n=30, seed=0, d=2):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, d)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    return Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated)


def objective(weights, support, kernel, t, gamma, ridge, backup_ridge):
    """The outer objective at Q = Σ w_j k(z_j, ·), its inner regression solved as least squares."""
    n = len(t)
    q = kernel(t.states, support) @ weights
    ahead = np.where(t.terminated, 0.0, kernel(t.next_states, support) @ weights)
    k = kernel(t.states)
    # min ‖K c − y‖² + nλ cᵀK c, stacked with a square root of K.
    values, vectors = np.linalg.eigh(k)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    stacked = np.vstack((k, np.sqrt(n * backup_ridge) * root))
    target = np.concatenate((t.rewards + gamma * ahead, np.zeros(n)))
    h = k @ np.linalg.lstsq(stacked, target, rcond=None)[0]
    norm = weights @ kernel(support) @ weights
    return np.mean((q - h) ** 2) + ridge * norm


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_the_gradient_of_the_nested_objective_is_zero(gamma):
    """Along 20 directions, also out of the span of the data; the objective is a quadratic."""
    t, kernel, (ridge, backup) = walk(), Matern(1.0), (1e-2, 3e-2)
    td = RegularisedLSTD(kernel, gamma, ridge, backup).fit(t)
    rng = np.random.default_rng(1)
    support = np.vstack((t.states, t.next_states, rng.normal(size=(10, 2))))
    weights = np.concatenate((td.weights_, np.zeros(10)))
    np.testing.assert_array_equal(td.support_, support[:-10])

    def at(w):
        return objective(w, support, kernel, t, gamma, ridge, backup)

    for direction in rng.normal(size=(20, len(weights))):
        slope = (at(weights + 1e-3 * direction) - at(weights - 1e-3 * direction)) / 2e-3
        curvature = at(weights + direction) + at(weights - direction) - 2 * at(weights)
        assert abs(slope) < tolerance("closed form")["rtol"] * curvature
        assert curvature > 0


def test_is_the_unsymmetric_system_of_the_joint_gram():
    """α = (FᵀF K̃ + nλ_Q I)⁻¹ Fᵀ E r, with selectors that mask terminal rows."""
    t, kernel, gamma, n = walk(), RBF(1.0), 0.9, 30
    joint = kernel(np.vstack((t.states, t.next_states)))
    here = np.hstack((np.eye(n), np.zeros((n, n))))
    ahead = np.hstack((np.zeros((n, n)), np.diag(~t.terminated * 1.0)))
    k = kernel(t.states)
    smoother = k @ np.linalg.inv(k + n * 0.02 * np.eye(n))
    f = here - gamma * smoother @ ahead
    system = f.T @ f @ joint + n * 0.01 * np.eye(2 * n)
    alpha = np.linalg.solve(system, f.T @ smoother @ t.rewards)
    td = RegularisedLSTD(kernel, gamma, 0.01, 0.02).fit(t)
    query = np.random.default_rng(1).normal(size=(9, 2))
    expected = kernel(query, np.vstack((t.states, t.next_states))) @ alpha
    np.testing.assert_allclose(td.predict(query), expected, **tolerance("closed form"))


def test_without_a_backup_ridge_it_is_bellman_residual_minimisation():
    """E = I: ridge regression of r on the representers k(s, ·) − γ m k(s', ·)."""
    t, kernel, gamma, ridge, n = walk(), Matern(1.0, nu=0.5), 0.9, 0.01, 30
    both = np.vstack((t.states, t.next_states))
    f = np.hstack((np.eye(n), -gamma * np.diag(~t.terminated * 1.0)))
    c = np.linalg.solve(f @ kernel(both) @ f.T + n * ridge * np.eye(n), t.rewards)
    td = RegularisedLSTD(kernel, gamma, ridge, backup_ridge=0.0).fit(t)
    query = np.random.default_rng(1).normal(size=(9, 2))
    expected = kernel(query, both) @ f.T @ c
    np.testing.assert_allclose(td.predict(query), expected, **tolerance("closed form"))


@pytest.mark.parametrize("backup_ridge", [0.0, 1e-14, 1e-11, 1e-9, 1e-7, 1e-5])
def test_equal_states_are_averaged_however_small_the_backup_ridge(backup_ridge):
    """A singular K: V of the empirical table, from each state seen many times."""
    s, _, r, s2 = Chain(6, [1, 6]).random_walk(200, seed=0)
    counts = np.zeros((6, 6))
    np.add.at(counts, (s.astype(int) - 1, s2.astype(int) - 1), 1.0)
    p = counts / counts.sum(axis=1, keepdims=True)
    v = np.linalg.solve(np.eye(6) - 0.9 * p, np.eye(6)[0] + np.eye(6)[5])
    t = Transitions(s, r, s2, np.zeros(200))
    td = RegularisedLSTD(Delta(), 0.9, 1e-9, backup_ridge).fit(t)
    error = np.abs(td.predict(np.arange(1.0, 7.0)) - v).max()
    # Each state is shrunk by nλ over its count, ten times that at the horizon; V is below 10.
    assert error < 1e-5 + 1e3 * backup_ridge


class TestFeatureForm:
    def test_is_the_exact_form_when_features_factorise_the_gram(self):
        t = walk()
        phi = RandomFeatures(RBF(1.0), n_components=16, rng=0).fit(t.states)
        mapped = t.replace(states=phi.transform(t.states), next_states=phi.transform(t.next_states))
        exact = RegularisedLSTD(Linear(), 0.9, 1e-3, 1e-2).fit(mapped)
        features = RandomFeatures(n_components=16, rng=0)
        primal = RegularisedLSTD(RBF(1.0), 0.9, 1e-3, 1e-2, features).fit(t)
        query = np.random.default_rng(1).normal(size=(9, 2))
        np.testing.assert_allclose(
            primal.predict(query), exact.predict(phi.transform(query)), **tolerance("iterative")
        )

    def test_without_an_outer_ridge_it_is_klstd(self):
        t = walk()
        features = Nystroem(n_components=12, rng=0)
        nested = RegularisedLSTD(RBF(1.0), 0.9, 0.0, 1e-2, features).fit(t)
        plain = KLSTD(RBF(1.0), 0.9, 1e-2, Nystroem(n_components=12, rng=0)).fit(t)
        np.testing.assert_allclose(
            nested.predict(t.states), plain.predict(t.states), **tolerance("iterative")
        )

    def test_chunks_and_partial_fit_are_one_fit(self):
        t = walk(60)
        make = RegularisedLSTD(RBF(1.0), 0.9, 1e-3, None, Nystroem(n_components=2, rng=0))
        whole = clone(make).fit(t[:20]).partial_fit(t[20:])
        chunked = clone(make).fit(t[k : k + 10] for k in range(0, 60, 10))
        assert chunked.n_transitions_ == 60
        np.testing.assert_allclose(
            chunked.predict(t.states), whole.predict(t.states), **tolerance("closed form")
        )

    def test_partial_fit_of_the_exact_form(self):
        t = walk()
        whole = RegularisedLSTD(RBF(1.0), 0.9).fit(t)
        grown = RegularisedLSTD(RBF(1.0), 0.9).partial_fit(t[:11]).partial_fit(t[11:])
        np.testing.assert_allclose(grown.weights_, whole.weights_, **tolerance("closed form"))


class TestAgainstDynamicProgramming:
    def test_boyan_chain(self):
        """C3: V(i) = −2(12 − i): on tables the backup's regression averages the two next states."""
        s, r, s2, end = boyan()
        t = Transitions(s, r, s2, end, episode=np.arange(len(s)))
        td = RegularisedLSTD(Delta(), 1.0, 1e-12, 1e-12, Nystroem(n_components=13)).fit(t)
        np.testing.assert_allclose(
            td.predict(np.arange(13.0)), -2.0 * (12 - np.arange(13)), **tolerance("iterative")
        )
        exact = RegularisedLSTD(Delta(), 1.0, 1e-8, 1e-8).fit(t)
        assert np.abs(exact.predict(np.arange(13.0)) + 2.0 * (12 - np.arange(13))).max() < 1e-2

    def test_chain_of_pairs(self):
        """Q^π of the empirical chain, π uniform, from counts."""
        chain, n = Chain(6, [1, 6]), 2000
        s, a, r, s2 = chain.random_walk(n, seed=0)
        t = Transitions(s, r, s2, np.zeros(n), actions=a)
        counts = np.zeros((2, 6, 6))
        np.add.at(counts, (a, s.astype(int) - 1, s2.astype(int) - 1), 1.0)
        p = counts / counts.sum(axis=2, keepdims=True)
        system = np.eye(12) - 0.45 * np.tile(p.reshape(12, 6), (1, 2))
        q = np.linalg.solve(system, np.tile(chain.reward, 2)).reshape(2, 6)
        td = RegularisedLSTDQ(
            StateAction(Delta()),
            lambda x: np.full((len(x), 2), 0.5),
            0.9,
            1e-12,
            features=Nystroem(n_components=12),
        ).fit(t)
        states = np.arange(1.0, 7.0)
        for action in (0, 1):
            got = td.predict(states, np.full(6, action))
            np.testing.assert_allclose(got, q[action], **tolerance("iterative"))

    def test_exact_form_of_pairs_mixes_over_actions(self):
        """Probabilities (1, 0) are the action 0; (½, ½) lies between, and matches KLSTDQ's rows."""
        chain = Chain(6, [1, 6])
        s, a, r, s2 = chain.random_walk(300, seed=0)
        t = Transitions(s, r, s2, np.zeros(300), actions=a)
        kernel = StateAction(RBF(1.0))

        def fit(policy, kind=RegularisedLSTDQ, ridge=1e-3):
            return kind(kernel, policy, 0.9, ridge).fit(t).predict(s, a)

        always = fit(lambda x: np.zeros(len(x), int))
        surely = fit(lambda x: np.tile([1.0, 0.0], (len(x), 1)))
        np.testing.assert_allclose(surely, always, **tolerance("closed form"))
        uniform = fit(lambda x: np.full((len(x), 2), 0.5), ridge=1e-9)
        other = fit(lambda x: np.full((len(x), 2), 0.5), KLSTDQ, 1e-9)
        # On few states visited often both solve the same projected equation as λ → 0.
        assert np.abs(uniform - other).max() < 1e-3 * np.abs(other).max()

    def test_terminated_and_truncated_differ(self):
        one = ([[0.0]], [1.0], [[0.0]])
        make = RegularisedLSTD(Delta(), 0.5, 1e-12)
        values = [
            clone(make).fit(Transitions(*one, [end], truncated=[cut])).predict([[0.0]])[0]
            for end, cut in ((True, False), (False, True), (True, True))
        ]
        assert values == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
@pytest.mark.parametrize("features", [None, Nystroem(n_components=10, rng=0)])
def test_same_numbers_in_every_library(library, features):
    lib = pytest.importorskip(library)
    t = walk()
    columns = {k: None if v is None else lib.asarray(np.array(v)) for k, v in t.columns.items()}
    make = RegularisedLSTD(RBF(1.0), 0.9, features=features)
    here, there = clone(make).fit(t), clone(make).fit(Transitions(**columns))
    out = there.predict(lib.asarray(np.array(t.states[:5])))
    assert type(out) is type(columns["states"])
    np.testing.assert_allclose(
        np.asarray(out), here.predict(t.states[:5]), **tolerance("iterative")
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: RegularisedLSTD(RBF(), backup_ridge=-1.0).fit(t), "backup_ridge must be a fin"),
        (lambda t: RegularisedLSTD(RBF(), ridge=-1.0).fit(t), "RegularisedLSTD: ridge must be"),
        (lambda t: RegularisedLSTD(RBF(), gamma=2.0).fit(t), "RegularisedLSTD: gamma must be"),
        (lambda t: RegularisedLSTD("rbf").fit(t), "RegularisedLSTD: kernel must be a kernel"),
        (lambda t: RegularisedLSTDQ(RBF()).fit(t), "RegularisedLSTDQ: the transitions must have"),
    ],
)
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(walk())


def test_too_much_memory_says_the_number(monkeypatch):
    from kernrl import arrays

    monkeypatch.setattr(arrays, "available_bytes", lambda x: 1000.0)
    with pytest.raises(MemoryError, match=r"nested system of 30 rows.*Pass features=Nystroem"):
        RegularisedLSTD(RBF()).fit(walk())
