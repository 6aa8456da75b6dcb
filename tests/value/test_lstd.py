"""KLSTD and KLSTDQ against closed forms: chains, linear-Gaussian, torus and quadratic problems."""

import numpy as np
import pytest
from reference.chains import boyan, tabular_lstd
from reference.walks import walk
from scipy.linalg import solve_discrete_are
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear, Polynomial
from kernrl.kernels.stationary import RBF, Matern, Periodic
from kernrl.value.lstd import KLSTD, KLSTDQ


def written_out(t, kernel, gamma, ridge, decay=0.0):
    """(Tᵀ(K − γK') + nλI)⁻¹ Tᵀr with the trace matrix T built entry by entry."""
    n = len(t)
    k, k_next = kernel(t.states), kernel(t.next_states, t.states) * ~t.terminated[:, None]
    trace = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            if t.episode[i] == t.episode[j]:
                trace[i, j] = (gamma * decay) ** (i - j)
    return np.linalg.solve(
        trace.T @ (k - gamma * k_next) + n * ridge * np.eye(n), trace.T @ t.rewards
    )


class TestExactForm:
    @pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    def test_is_the_system_written_out(self, gamma, decay):
        t, kernel = walk(), Matern(1.0)
        td = KLSTD(kernel, gamma, ridge=1e-3, trace_decay=decay).fit(t)
        expected = written_out(t, kernel, gamma, 1e-3, decay)
        np.testing.assert_allclose(td.weights_, expected, **tolerance("closed form"))
        query = np.random.default_rng(1).normal(size=(7, 2))
        np.testing.assert_allclose(
            td.predict(query), kernel(query, t.states) @ expected, **tolerance("closed form")
        )

    def test_boyan_chain(self):
        """C3: V(i) = −2(12 − i), undiscounted, on rows that average to the exact dynamics."""
        s, r, s2, end = boyan()
        # One row per state would be singular-free; duplicates need the feature form's truncation.
        td = KLSTD(Delta(), gamma=1.0, ridge=1e-12, features=Nystroem(n_components=13))
        td.fit(Transitions(s, r, s2, end, episode=np.arange(len(s))))
        np.testing.assert_allclose(
            td.predict(np.arange(13.0)), -2.0 * (12 - np.arange(13)), **tolerance("closed form")
        )

    @pytest.mark.parametrize("decay", [0.0, 0.6])
    def test_delta_kernel_is_tabular_lstd(self, decay):
        rng = np.random.default_rng(3)
        s = rng.integers(5, size=81)
        end = rng.random(80) < 0.1
        t = Transitions(s[:-1], rng.normal(size=80), s[1:], end)
        expected = tabular_lstd(
            s[:-1], t.rewards, s[1:], end, t.episode_starts, 5, gamma=0.9, decay=decay
        )
        features = Nystroem(n_components=5, rng=0)
        table = KLSTD(Delta(), 0.9, ridge=1e-13, features=features, trace_decay=decay).fit(t)
        np.testing.assert_allclose(
            table.predict(np.arange(5.0)), expected, **tolerance("closed form")
        )
        # The exact form sees each state many times, so it needs its ridge.
        exact = KLSTD(Delta(), 0.9, ridge=1e-5, trace_decay=decay).fit(t)
        table = table.set_params(ridge=1e-5).fit(t)
        np.testing.assert_allclose(
            exact.predict(np.arange(5.0)), table.predict(np.arange(5.0)), **tolerance("closed form")
        )

    def test_terminal_and_truncated_differ(self):
        """V of the last state: 1 where it terminates; 1/(1 − γ) where it is only cut and loops."""
        one = ([[0.0]], [1.0], [[0.0]])
        ended = KLSTD(Delta(), 0.5, ridge=0.0).fit(Transitions(*one, [True]))
        cut = KLSTD(Delta(), 0.5, ridge=0.0).fit(Transitions(*one, [False], truncated=[True]))
        both = KLSTD(Delta(), 0.5, ridge=0.0).fit(Transitions(*one, [True], truncated=[True]))
        assert [m.predict([[0.0]])[0] for m in (ended, cut, both)] == pytest.approx([1.0, 2.0, 1.0])

    def test_traces_never_cross_episodes(self):
        t = walk()
        whole = KLSTD(RBF(), 0.9, trace_decay=0.9).fit(t)
        parts = [t[21:41], t[:21], t[41:]]  # the order of episodes must not matter
        shuffled = KLSTD(RBF(), 0.9, trace_decay=0.9).fit(Transitions.concatenate(parts))
        np.testing.assert_allclose(
            shuffled.predict(t.states), whole.predict(t.states), **tolerance("closed form")
        )

    def test_does_not_square_the_condition(self):
        """The residual of the plain system is rounding; through K(K − γK') it is 1000× more."""
        x = np.linspace(0, 1, 60)[:, None]
        t = Transitions(x, np.cos(3 * x[:, 0]), x**2, np.zeros(60))
        ridge = 1e-12
        td = KLSTD(RBF(0.3), 0.9, ridge=ridge).fit(t)
        k, k_next = RBF(0.3)(x), RBF(0.3)(t.next_states, x)
        plain = k + 60 * ridge * np.eye(60) - 0.9 * k_next
        squared = np.linalg.solve(k @ plain, k @ t.rewards)
        ours, theirs = (np.abs(plain @ w - t.rewards).max() for w in (td.weights_, squared))
        assert ours < 1e-5 and theirs > 1000 * ours


class TestFeatureForm:
    def test_nystroem_with_all_points_is_exact(self):
        t = walk()
        exact = KLSTD(RBF(1.0), 0.9, ridge=1e-4).fit(t)
        landmarks = KLSTD(RBF(1.0), 0.9, ridge=1e-4, features=Nystroem(n_components=60)).fit(t)
        query = np.random.default_rng(1).normal(size=(9, 2))
        np.testing.assert_allclose(
            landmarks.predict(query), exact.predict(query), **tolerance("iterative")
        )

    @pytest.mark.parametrize("decay", [0.0, 0.8])
    def test_primal_is_dual_when_features_factorise_the_gram(self, decay):
        """K = ΦΦᵀ on Z ∪ Z': the (n, n) system with a linear kernel on φ equals the (m, m) one."""
        t = walk()
        phi = RandomFeatures(RBF(1.0), n_components=16, rng=0).fit(t.states)
        mapped = t.replace(states=phi.transform(t.states), next_states=phi.transform(t.next_states))
        dual = KLSTD(Linear(), 0.9, ridge=1e-3, trace_decay=decay).fit(mapped)
        primal = KLSTD(
            RBF(1.0),
            0.9,
            ridge=1e-3,
            trace_decay=decay,
            features=RandomFeatures(n_components=16, rng=0),
        ).fit(t)
        query = np.random.default_rng(1).normal(size=(9, 2))
        np.testing.assert_allclose(
            primal.predict(query), dual.predict(phi.transform(query)), **tolerance("iterative")
        )

    @pytest.mark.parametrize("features", [None, Nystroem(n_components=20, rng=0)])
    @pytest.mark.parametrize("decay", [0.0, 0.7])
    def test_chunks_and_partial_fit_are_one_fit(self, features, decay):
        t = walk()
        make = KLSTD(RBF(1.0), 0.9, features=features, trace_decay=decay)
        whole = clone(make).fit(t)
        # Cuts inside episodes, over which traces must be carried, and at their ends.
        chunked, fitted_first, by_row = (_same_features(make, whole) for _ in range(3))
        chunked.fit(t[k : k + 13] for k in range(0, 60, 13))
        fitted_first.fit(t[:5])
        for a, b in ((5, 21), (21, 30), (30, 60)):
            fitted_first.partial_fit(t[a:b])
        for k in range(0, 60, 6):
            by_row.partial_fit(t[k : k + 6])
        for other in (chunked, fitted_first, by_row):
            np.testing.assert_allclose(other.weights_, whole.weights_, **tolerance("closed form"))

    @pytest.mark.parametrize("end", ["terminated", "truncated", "elsewhere"])
    @pytest.mark.parametrize("features", [None, Nystroem(n_components=3, rng=0)])
    def test_traces_stop_between_chunks_where_an_episode_does(self, features, end):
        """The second part begins at the next state of the first, so only its flag can part them."""
        s, s2 = np.arange(4.0), np.array([1.0, 2.0, 3.0, 0.0])
        flags = {"terminated": np.zeros(4), "truncated": np.zeros(4)}
        if end == "elsewhere":
            s2[1] = 0.5
        else:
            flags[end][1] = 1
        t = Transitions(s, s + 1, s2, **flags, episode=[0, 0, 1, 1])
        make = KLSTD(RBF(), 0.9, features=features, trace_decay=0.9)
        whole = clone(make).fit(t)
        chunked = _same_features(make, whole).fit([t[:2], t[2:]])
        grown = _same_features(make, whole).fit(t[:2]).partial_fit(t[2:])
        for other in (chunked, grown):
            np.testing.assert_allclose(other.weights_, whole.weights_, **tolerance("closed form"))

    def test_traces_cross_blocks(self, monkeypatch):
        from kernrl.value import system

        t = walk()
        make = KLSTD(RBF(1.0), 0.9, features=Nystroem(n_components=20, rng=0), trace_decay=0.7)
        whole = clone(make).fit(t).weights_
        monkeypatch.setattr(system.Rows.blocks, "__defaults__", (7,))
        np.testing.assert_allclose(clone(make).fit(t).weights_, whole, **tolerance("closed form"))

    def test_float32_features_are_safe(self):
        """Plain float32 normal equations fail in Cholesky here; whitened ones keep their digits."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4001, 2)).astype(np.float32)
        t = Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], np.zeros(4000))
        fits = [
            KLSTD(RBF(2.0), 0.9, ridge=1e-5, features=Nystroem(n_components=100, rng=0)).fit(data)
            for data in (t, t.replace(states=x[:-1].astype(float), next_states=x[1:].astype(float)))
        ]
        narrow, wide = (m.predict(x[:50]) for m in fits)
        assert np.abs(narrow - wide).max() < 5e-3 * np.abs(wide).max()


def _same_features(make, whole):
    """A clone of `make` that has the fitted features of `whole`, whatever rows it meets first."""
    new = clone(make)
    return new if whole.features_ is None else new.set_params(features=_Fixed(whole.features_))


class _Fixed:
    """Features that are already fitted: what a chunked and a whole fit must share."""

    def __init__(self, fitted):
        self.fitted = fitted
        self.n_components, self.kernel = 1, fitted.kernel

    def get_params(self, deep=False):
        return {"fitted": self.fitted}

    def set_params(self, **params):
        return self

    def with_kernel(self, kernel):
        return self

    def fit(self, x):
        return self

    def transform(self, x):
        return self.fitted.transform(x)


class TestClosedForms:
    def test_linear_gaussian(self):
        """C4: x' = 0.8x + 0.5ξ, r = x²: V = 2.358491x² + 5.306604.

        ξ = ±1 has the moments that a quadratic sees, so the rows are the exact dynamics.
        """
        x = np.linspace(-2, 2, 21)
        s = np.repeat(x, 2)
        s2 = 0.8 * s + 0.5 * np.tile([1.0, -1.0], 21)
        t = Transitions(s, s**2, s2, np.zeros(42))
        td = KLSTD(Polynomial(2, 1.0), 0.9, ridge=1e-13, features=Nystroem(n_components=42)).fit(t)
        np.testing.assert_allclose(
            td.predict(x), 2.358490566 * x**2 + 5.306603774, **tolerance("iterative")
        )

    def torus(self, x):
        """Rows whose two next states have the mean cosine of x + 0.1ξ."""
        shift = np.arccos(np.exp(-2 * np.pi**2 * 0.1**2)) / (2 * np.pi)
        s = np.repeat(x, 2)
        s2 = s + shift * np.tile([1.0, -1.0], len(x))
        return Transitions(s, np.cos(2 * np.pi * s), s2 % 1.0, np.zeros(len(s)))

    def test_torus(self):
        """C5: x' = x + 0.1ξ mod 1, r = cos 2πx: V = 3.828218 cos 2πx."""
        x = np.arange(40) / 40
        td = KLSTD(Periodic(1.0, 1.0), 0.9, ridge=1e-10).fit(self.torus(x))
        query = np.linspace(0, 1, 17)
        expected = 3.828218 * np.cos(2 * np.pi * query)
        assert np.abs(td.predict(query) - expected).max() < 1e-4

    def test_torus_from_samples(self):
        rng = np.random.default_rng(0)
        x = (np.r_[0.0, 0.1 * rng.normal(size=4000)].cumsum()) % 1.0
        t = Transitions(x[:-1], np.cos(2 * np.pi * x[:-1]), x[1:], np.zeros(4000))
        features = Nystroem(n_components=40, rng=0)
        td = KLSTD(Periodic(1.0, 1.0), 0.9, ridge=1e-4, features=features).fit(t)
        query = np.linspace(0, 1, 50, endpoint=False)
        error = td.predict(query) - 3.828218 * np.cos(2 * np.pi * query)
        assert np.sqrt(np.mean(error**2)) < 0.35  # 13 % of the root mean square of V

    def test_linear_quadratic(self):
        """C6: Q* of a discounted linear-quadratic problem by the Riccati equation."""
        a, b = np.array([[1.0, 0.1], [0.0, 0.9]]), np.array([[0.0], [0.1]])
        q, rho, gamma = np.diag([1.0, 0.1]), np.array([[0.05]]), 0.95
        p = solve_discrete_are(np.sqrt(gamma) * a, np.sqrt(gamma) * b, q, rho)
        gain = np.linalg.solve(rho + gamma * b.T @ p @ b, gamma * b.T @ p @ a)
        rng = np.random.default_rng(0)
        s, u = rng.normal(size=(80, 2)), rng.normal(size=(80, 1))
        s2 = s @ a.T + u @ b.T
        cost = np.einsum("ni,ij,nj->n", s, q, s) + rho[0, 0] * u[:, 0] ** 2
        t = Transitions(s, -cost, s2, np.zeros(80), actions=u)
        td = KLSTDQ(
            Polynomial(2, 1.0),
            lambda x: -x @ gain.T,
            gamma,
            ridge=1e-13,
            features=Nystroem(n_components=80),
        ).fit(t)
        expected = -cost - gamma * np.einsum("ni,ij,nj->n", s2, p, s2)
        np.testing.assert_allclose(td.predict(s, u), expected, rtol=1e-5, atol=1e-5)


class TestScikitLearn:
    def test_score_is_minus_the_mean_squared_td_error(self):
        t = walk()
        td = KLSTD(RBF(1.0), 0.9).fit(t)
        ahead = np.where(t.terminated, 0.0, td.predict(t.next_states))
        delta = t.rewards + 0.9 * ahead - td.predict(t.states)
        assert td.score(t) == pytest.approx(-np.mean(delta**2))
        np.testing.assert_allclose(td.td_errors(t), delta, **tolerance("algebra"))

    def test_grid_search_and_cross_validation(self):
        t = walk(120)
        grid = GridSearchCV(
            KLSTD(RBF(1.0), 0.5, features=Nystroem(n_components=20, rng=0)),
            {"kernel__length_scale": [1e-3, 1.0], "features__n_components": [10, 20]},
            cv=KFold(3, shuffle=True, random_state=0),
        ).fit(t)
        assert grid.best_params_["kernel__length_scale"] == 1.0
        assert cross_val_score(KLSTD(RBF(1.0), 0.5), t, cv=3).shape == (3,)

    def test_fit_leaves_the_parameters_alone(self):
        kernel, features = RBF("median"), Nystroem(n_components=5)
        td = KLSTD(kernel, features=features).fit(walk())
        assert td.kernel is kernel and td.features is features and features.kernel is None
        assert kernel.length_scale == "median" and td.kernel_.is_resolved

    def test_unfitted(self):
        with pytest.raises(NotFittedError, match=r"KLSTD: it must be fitted before use. Call fit"):
            KLSTD(RBF()).predict([[0.0]])


class TestBackends:
    @pytest.mark.parametrize("library", ["torch", "array_api_strict"])
    @pytest.mark.parametrize("features", [None, Nystroem(n_components=15, rng=0)])
    @pytest.mark.parametrize("decay", [0.0, 0.5])
    def test_same_numbers(self, library, features, decay):
        lib = pytest.importorskip(library)
        t = walk()
        moved = Transitions(
            **{k: None if v is None else lib.asarray(np.array(v)) for k, v in t.columns.items()}
        )
        make = KLSTD(RBF(1.0), 0.9, features=features, trace_decay=decay)
        here, there = clone(make).fit(t), clone(make).fit(moved)
        query = lib.asarray(np.array(t.states[:5]))
        out = there.predict(query)
        assert type(out) is type(query)
        np.testing.assert_allclose(
            np.asarray(out), here.predict(t.states[:5]), **tolerance("iterative")
        )

    def test_query_of_another_library_comes_back_in_it(self):
        torch = pytest.importorskip("torch")
        td = KLSTD(RBF(1.0), 0.9).fit(walk())
        out = td.predict(torch.zeros(3, 2))
        assert isinstance(out, torch.Tensor) and out.dtype == torch.float32

    def test_cuda_without_a_gpu_says_so(self):
        from kernrl import arrays

        if arrays.gpu_available():
            pytest.skip("this machine has a GPU")
        with pytest.raises(RuntimeError, match="device='cuda' needs CuPy and a CUDA GPU"):
            KLSTD(RBF(), device="cuda").fit(walk())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: KLSTD("rbf").fit(t), "KLSTD: kernel must be a kernel, got 'rbf'"),
        (lambda t: KLSTD(RBF(), gamma=1.1).fit(t), "KLSTD: gamma must be a finite number"),
        (lambda t: KLSTD(RBF(), ridge=-1.0).fit(t), "KLSTD: ridge must be a finite number"),
        (lambda t: KLSTD(RBF(), trace_decay=2.0).fit(t), "KLSTD: trace_decay must be"),
        (lambda t: KLSTD(RBF(), device="gpu").fit(t), "KLSTD: device must be one of auto"),
        (
            lambda t: KLSTD(RBF(), features="nystroem").fit(t),
            "KLSTD: features must be None, Nystroem or RandomFeatures, got 'nystroem'. Pass feat",
        ),
        (lambda t: KLSTD(RBF(), features=Nystroem).fit(t), "KLSTD: features must be None, Nyst"),
        (lambda t: KLSTD(RBF()).fit(t.states), "KLSTD: X must be Transitions, got ndarray"),
        (lambda t: KLSTD(RBF()).fit(7), "KLSTD: X must be Transitions, got int"),
        (lambda t: KLSTD(RBF()).fit([]), "KLSTD: there must be at least one chunk"),
        (lambda t: KLSTD(RBF()).fit(t).predict(np.ones((2, 3))), "must have 2 columns, got 3"),
        (lambda t: KLSTD(RBF()).fit(t).predict([[np.nan, 0]]), "every state must be finite"),
        (lambda t: KLSTD(RBF()).fit(t).predict([["a", "b"]]), "states must be real numbers"),
        (lambda t: KLSTD(RBF()).fit(t).partial_fit(walk(d=3)), "must have 2 columns, got 3"),
        (
            lambda t: KLSTD(RBF(), features=Nystroem(n_components=500)).fit(t),
            "Nystroem: n_components must be at most n, got 500 of 60",
        ),
    ],
)  # fmt: skip
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(walk())


def test_too_much_memory_says_the_number(monkeypatch):
    from kernrl import arrays

    monkeypatch.setattr(arrays, "available_bytes", lambda x: 1000.0)
    with pytest.raises(
        MemoryError, match=r"exact system of 60 rows must fit.*Pass features=Nystroem"
    ):
        KLSTD(RBF()).fit(walk())


def test_singular_system_is_an_error():
    t = Transitions([[0.0], [0.0]], [1.0, 2.0], [[0.0], [0.0]], [True, True])
    with pytest.raises(ValueError, match=r"KLSTD: .*singular"):
        KLSTD(Delta(), ridge=0.0).fit(t)


def test_the_median_of_many_rows_is_the_same_twice():
    """More rows than the median looks at are subsampled, by a fixed seed."""
    t = walk(1300)
    fits = [KLSTD(RBF("median"), features=Nystroem(n_components=10, rng=0)) for _ in range(2)]
    one, two = (td.fit(t).kernel_.length_scale for td in fits)
    assert one == two
