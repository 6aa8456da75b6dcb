"""The kernel Bellman loss by double sums and enumeration; its minimiser by gradients and chains."""

import itertools
import tracemalloc

import numpy as np
import pytest
from reference.chains import Chain
from reference.occupancy import action_values, population, tabulated
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Polynomial
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value.bellman_loss import MQL, bellman_scorer, kernel_bellman_loss
from kernrl.value.lstd import KLSTD, KLSTDQ

PAIRS = StateAction(RBF(1.0), RBF(1.0))


def walk(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.3
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[n // 2] = True, True
    return Transitions(
        x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated,
        actions=rng.integers(2, size=n),
    )  # fmt: skip


def mixed(states):
    """π(1|s) = 1/(1 + exp(−s₁))."""
    p = 1 / (1 + np.exp(-states[:, 0]))
    return np.column_stack((1 - p, p))


class TestStatistics:
    def test_are_the_double_sums(self, rng):
        z, delta = rng.normal(size=(9, 2)), rng.normal(size=9)
        k = np.exp(-0.5 * ((z[:, None] - z[None]) ** 2).sum(-1))
        terms = delta[:, None] * k * delta[None]
        off = terms.sum() - np.trace(terms)
        v = kernel_bellman_loss(RBF(1.0), z, delta)
        u = kernel_bellman_loss(RBF(1.0), z, delta, statistic="U")
        np.testing.assert_allclose([v, u], [terms.sum() / 81, off / 72], **tolerance("algebra"))

    def test_u_is_unbiased_and_v_is_not(self):
        """All samples of three rows from five, weighted by their probabilities.

        The loss itself is made from expected Bellman residuals: R(z) k(z, z̄) R(z̄).
        """
        z = np.array([0.0, 0.0, 1.0, 1.0, 2.0])  # two outcomes in states 0 and 1
        delta = np.array([1.0, -0.5, 0.3, 2.0, -1.0])
        p = np.array([0.1, 0.3, 0.2, 0.15, 0.25])
        states = np.array([0.0, 1.0, 2.0])
        mass = np.array([p[z == s].sum() for s in states])
        expected = np.array([(p * delta)[z == s].sum() for s in states]) / mass
        k = RBF(1.0)(states)
        loss = (mass * expected) @ k @ (mass * expected)
        mean = dict.fromkeys("UV", 0.0)
        for sample in itertools.product(range(5), repeat=3):
            chosen = list(sample)
            for kind in mean:
                value = kernel_bellman_loss(RBF(1.0), z[chosen], delta[chosen], statistic=kind)
                mean[kind] += p[chosen].prod() * value
        np.testing.assert_allclose(mean["U"], loss, **tolerance("algebra"))
        assert mean["V"] > loss + 0.1

    def test_never_holds_the_matrix(self, rng):
        n = 2000
        x, errors = rng.normal(size=(n, 2)), rng.normal(size=n)
        tracemalloc.start()
        kernel_bellman_loss(RBF(1.0), x, errors)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * n * n / 2

    @pytest.mark.parametrize(
        ("args", "kind", "text"),
        [
            (([[0.0]], [1.0]), "U", "the U-statistic needs at least two rows, got 1"),
            (([[0.0]], [1.0, 2.0]), "V", r"td_errors must have as many rows as points.*, got 2"),
            (([[0.0]], [np.nan]), "V", "every TD error must be finite, got nan at row 0"),
            (([[0.0]], [[1.0]]), "V", r"td_errors must have shape \(n,\)"),
            (([[0.0]], [1.0]), "W", "statistic must be one of U, V, got 'W'"),
            ((np.empty((0, 1)), np.empty(0)), "V", "points must have at least one row"),
        ],
    )  # fmt: skip
    def test_one_clear_error(self, args, kind, text):
        with pytest.raises(ValueError, match=f"kernel_bellman_loss: {text}"):
            kernel_bellman_loss(RBF(1.0), *args, statistic=kind)


class TestScorer:
    def test_is_minus_the_loss_of_the_held_out_rows(self):
        t = walk()
        td = KLSTD(RBF(1.0), 0.9).fit(t[:20])
        rest = t[20:]
        expected = -kernel_bellman_loss(RBF(2.0), rest.states, td.td_errors(rest), statistic="U")
        assert bellman_scorer(RBF(2.0))(td, rest) == expected

    def test_pairs_are_scored_on_pairs(self):
        t = walk()
        q = KLSTDQ(PAIRS, mixed, 0.9).fit(t)
        z = np.column_stack((t.states, t.actions))
        expected = -kernel_bellman_loss(PAIRS, z, q.td_errors(t), statistic="V")
        assert bellman_scorer(PAIRS, statistic="V")(q, t) == pytest.approx(expected)

    def test_drives_a_grid_search(self):
        t = walk(90)
        grid = GridSearchCV(
            KLSTD(RBF(1.0), 0.5),
            {"kernel__length_scale": [1e-3, 1.0]},
            scoring=bellman_scorer(RBF(1.0)),
            cv=KFold(3, shuffle=True, random_state=0),
        ).fit(t)
        assert grid.best_params_["kernel__length_scale"] == 1.0
        scores = cross_val_score(KLSTD(RBF(1.0)), t, cv=3, scoring=bellman_scorer(RBF("median")))
        assert scores.shape == (3,) and np.all(np.isfinite(scores))


class TestMQL:
    @pytest.mark.parametrize("ridge", [1e-2, 1e-5])
    def test_no_direction_of_the_space_goes_down(self, ridge):
        """The objective written out; central differences of a quadratic are its gradient."""
        t, gamma = walk(), 0.9
        fit = MQL(PAIRS, mixed, gamma, ridge).fit(t)
        z = np.column_stack((t.states, t.actions))
        after = [np.column_stack((t.next_states, np.full(len(t), a))) for a in (0.0, 1.0)]
        chance, k = mixed(t.next_states) * ~t.terminated[:, None], PAIRS(z)

        def objective(points, weights):
            def q(x):
                return PAIRS(x, points) @ weights

            ahead = sum(chance[:, a] * q(after[a]) for a in (0, 1))
            delta = t.rewards + gamma * ahead - q(z)
            return delta @ k @ delta / len(t) ** 2 + ridge * weights @ PAIRS(points) @ weights

        here = objective(fit.support_, fit.weights_)
        rng = np.random.default_rng(1)
        for where in (z[:5], after[1][:5], rng.normal(size=(5, 3))):
            points = np.vstack((fit.support_, where))
            step = np.concatenate((np.zeros(len(fit.weights_)), 1e-3 * rng.normal(size=5)))
            full = np.concatenate((fit.weights_, np.zeros(5)))
            up, down = objective(points, full + step), objective(points, full - step)
            assert abs(up - down) < 1e-3 * (up + down - 2 * here)
            assert up > here and down > here

    def test_loss_at_the_minimum(self):
        t = walk()
        fit = MQL(PAIRS, mixed, 0.9, 1e-3).fit(t)
        z = np.column_stack((t.states, t.actions))
        np.testing.assert_allclose(
            fit.loss_, kernel_bellman_loss(PAIRS, z, fit.td_errors(t)), **tolerance("closed form")
        )

    def test_smaller_loss_than_lstd(self):
        t = walk()
        z = np.column_stack((t.states, t.actions))
        fits = (MQL(PAIRS, mixed, 0.9, 1e-9).fit(t), KLSTDQ(PAIRS, mixed, 0.9, 1e-3).fit(t))
        ours, theirs = (kernel_bellman_loss(PAIRS, z, f.td_errors(t)) for f in fits)
        assert ours < theirs

    @pytest.mark.parametrize("features", [None, Nystroem(n_components=12)])
    def test_delta_kernel_is_dynamic_programming(self, features):
        chain = Chain(6, [1, 6], success=0.9 if features else 1.0)
        policy = np.linspace(0.1, 0.9, 6)[:, None] * [1, -1] + [0, 1]
        t = population(
            chain, np.ones((6, 2), int) + np.eye(6, 2, dtype=int), 9 if features else None
        )
        if features is None:  # one row a pair, since the exact form sees duplicates as singular
            t = population(chain, np.ones((6, 2), int), None)
        q = MQL(StateAction(Delta()), tabulated(policy), 0.9, 0.0, features).fit(t)
        s, a = np.repeat(np.arange(1.0, 7), 2), np.tile([0, 1], 6)
        expected = action_values(chain, policy).ravel()
        np.testing.assert_allclose(q.predict(s, a), expected, **tolerance("closed form"))

    def test_forms_agree_where_the_features_span_the_space(self):
        t, kernel = walk(), Polynomial(2, 1.0)
        exact = MQL(kernel, mixed, 0.9, 1e-4).fit(t)
        spanned = MQL(kernel, mixed, 0.9, 1e-4, Nystroem(n_components=40)).fit(t)
        np.testing.assert_allclose(
            spanned.predict(t.states, t.actions),
            exact.predict(t.states, t.actions),
            **tolerance("iterative"),
        )
        assert spanned.loss_ == pytest.approx(exact.loss_, rel=1e-5)

    def test_without_a_ridge_it_is_lstd_on_features(self):
        t, features = walk(), Nystroem(n_components=8, rng=0)
        fits = (f(PAIRS, mixed, 0.9, 0.0, features).fit(t) for f in (MQL, KLSTDQ))
        np.testing.assert_allclose(*(f.weights_ for f in fits), **tolerance("closed form"))

    def test_terminal_and_truncated_differ(self):
        one = dict(actions=[0], next_actions=[0])
        rows = ([[0.0]], [1.0], [[0.0]])
        ended = MQL(Delta(), None, 0.5, 0.0).fit(Transitions(*rows, [True], **one))
        cut = MQL(Delta(), None, 0.5, 0.0).fit(Transitions(*rows, [False], truncated=[True], **one))
        assert [m.predict([[0.0, 0.0]])[0] for m in (ended, cut)] == pytest.approx([1.0, 2.0])

    def test_memory_is_stated(self, monkeypatch):
        from kernrl import arrays

        monkeypatch.setattr(arrays, "available_bytes", lambda x: 1000.0)
        with pytest.raises(MemoryError, match="MQL: the exact system of 40 rows must fit"):
            MQL(PAIRS, mixed).fit(walk())
