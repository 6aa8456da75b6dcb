"""GPTD against GP regression, Engel's recursions written out, tables, and itself in other forms."""

import itertools

import numpy as np
import pytest
from gptd_cases import QUERY, assert_same, episode, walk
from reference import gp
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as PeerRBF
from tolerances import tolerance

from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.returns import discounted
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.gptd import GPTD

MODELS = pytest.mark.parametrize("model", ["returns", "white"])


class TestIsGPRegressionOnReturns:
    """T1: with noise on the returns, one terminated episode is GP regression on them."""

    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    def test_by_formulas(self, gamma):
        t, kernel = episode(), 2.0 * Matern(0.8)
        td = GPTD(kernel, gamma, noise=0.3, mean=1.5).fit(t)
        mean, covariance, likelihood = gp.gp_regression(
            t.states, discounted(t.rewards, gamma), QUERY, kernel, 0.3, mean=1.5
        )
        value, std = td.predict(QUERY, return_std=True)
        np.testing.assert_allclose(value, mean, **tolerance("closed form"))
        np.testing.assert_allclose(std**2, np.diagonal(covariance), **tolerance("closed form"))
        np.testing.assert_allclose(td.covariance(QUERY), covariance, **tolerance("closed form"))
        assert td.log_marginal_likelihood_ == pytest.approx(likelihood, rel=1e-8)

    def test_by_scikit_learn(self):
        t = episode()
        td = GPTD(RBF(0.7), 0.9, noise=0.2).fit(t)
        peer = GaussianProcessRegressor(PeerRBF(0.7), alpha=0.2, optimizer=None)
        peer.fit(t.states, discounted(t.rewards, 0.9))
        mean, covariance = peer.predict(QUERY, return_cov=True)
        np.testing.assert_allclose(td.predict(QUERY), mean, **tolerance("closed form"))
        np.testing.assert_allclose(td.covariance(QUERY), covariance, **tolerance("closed form"))
        expected = peer.log_marginal_likelihood_value_
        np.testing.assert_allclose(
            td.log_marginal_likelihood_, expected, **tolerance("closed form")
        )

    def test_white_noise_is_another_model(self):
        t = episode()
        a, b = (GPTD(RBF(0.7), 0.9, 0.2, m).fit(t).predict(QUERY) for m in ("returns", "white"))
        assert np.abs(a - b).max() > 0.05


@MODELS
class TestExact:
    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    def test_is_the_model_written_out(self, model, gamma):
        t, kernel = walk(), 1.5 * RBF(0.8)
        td = GPTD(kernel, gamma, 0.2, model, mean=-0.7).fit(t)
        mean, covariance, likelihood = gp.gptd(
            t, QUERY, kernel, gamma, 0.2, model == "returns", mean=-0.7
        )
        np.testing.assert_allclose(td.predict(QUERY), mean, **tolerance("closed form"))
        np.testing.assert_allclose(td.covariance(QUERY), covariance, **tolerance("closed form"))
        np.testing.assert_allclose(
            td.log_marginal_likelihood_, likelihood, **tolerance("closed form")
        )

    def test_is_engels_recursion(self, model):
        """T2: α and C, outer products and all."""
        t, kernel = walk(), RBF(0.8)
        alpha, c = gp.engel_recursion(t, kernel, 0.9, 0.2, model == "returns")
        td = GPTD(kernel, 0.9, 0.2, model)
        for i in range(len(t)):
            td.partial_fit(t[i : i + 1])
        np.testing.assert_allclose(td.weights_, alpha, **tolerance("closed form"))
        across = kernel(QUERY, td.support_)
        np.testing.assert_allclose(
            td.covariance(QUERY), kernel(QUERY) - across @ c @ across.T, **tolerance("closed form")
        )

    @pytest.mark.parametrize("sizes", [[1] * 60, [7] * 9, [20, 1, 39], [31, 29]])
    def test_recursion_is_batch(self, model, sizes):
        """T2, with cuts inside episodes, at their ends, and in blocks."""
        t = walk()
        edges = np.minimum(np.cumsum([0, *sizes]), 60)
        parts = [t[a:b] for a, b in itertools.pairwise(edges) if a < b]
        batch, online = (GPTD(RBF(0.8), 0.9, 0.2, model, mean=0.4) for _ in range(2))
        batch.fit(t)
        for part in parts:
            online.partial_fit(part)
        assert_same(online, batch, t)
        np.testing.assert_allclose(online.weights_, batch.weights_, **tolerance("closed form"))
        chunked = GPTD(RBF(0.8), 0.9, 0.2, model, mean=0.4).fit(iter(parts))
        assert_same(chunked, batch, t)
        assert len(batch.support_) == 60 + 3  # one point a row, one for each open end

    def test_an_ended_episode_is_not_continued(self, model):
        """The next episode may begin in the very state where the last one ended."""
        x = np.array([[0.0], [1.0], [2.0]])
        flags = {"terminated": [True, True], "truncated": [False, False]}
        for name, other in (("terminated", "truncated"), ("truncated", "terminated")):
            ends = {name: flags["terminated"], other: flags["truncated"]}
            t = Transitions(x[:-1], [1.0, 2.0], x[1:], **ends)
            td = GPTD(RBF(), 0.9, 0.1, model)
            for i in range(2):
                td.partial_fit(t[i : i + 1])
            assert len(td.support_) == (2 if name == "terminated" else 4)
            np.testing.assert_allclose(
                td.predict(x), gp.gptd(t, x, RBF(), 0.9, 0.1, model == "returns")[0],
                **tolerance("closed form"),
            )  # fmt: skip

    def test_mean_is_kernelised_value_function_approximation(self, model):
        """Taylor & Parr (2009): with H square, V = k(·)ᵀw with w = (HK + ΣH⁻ᵀ)⁻¹r."""
        t, kernel = episode(), RBF(0.8)
        h, points = gp.dense_h(t, 0.9)
        sigma = 0.2 * (h @ h.T if model == "returns" else np.eye(len(t)))
        w = np.linalg.solve(h @ kernel(points) + sigma @ np.linalg.inv(h).T, t.rewards)
        td = GPTD(kernel, 0.9, 0.2, model).fit(t)
        np.testing.assert_allclose(td.weights_, w, **tolerance("closed form"))

    def test_without_noise_on_a_table_it_is_the_exact_solve(self, model):
        """T3: K = I and σ → 0 give HV = r."""
        n, gamma = 12, 0.9
        rewards = np.random.default_rng(3).normal(size=n)
        t = Transitions(np.arange(n), rewards, np.arange(n) + 1, np.arange(n) == n - 1)
        td = GPTD(Delta(), gamma, 1e-12, model).fit(t)
        h, points = gp.dense_h(t, gamma)
        assert h.shape == (n, n)
        expected = np.linalg.solve(h, rewards)
        np.testing.assert_allclose(td.predict(points), expected, **tolerance("closed form"))

    def test_two_episodes_are_not_one(self, model):
        """T4: where the first ends, the link is cut; only the flag says so."""
        t = episode(20)
        ended = t.terminated.copy()
        ended[9] = True
        one, two = (
            GPTD(RBF(0.8), 0.9, 0.2, model).fit(t.replace(terminated=flags, episode=None))
            for flags in (t.terminated, ended)
        )
        assert np.abs(one.predict(QUERY) - two.predict(QUERY)).max() > 0.05
        swapped = Transitions.concatenate([t[10:], t.replace(terminated=ended, episode=None)[:10]])
        again = GPTD(RBF(0.8), 0.9, 0.2, model).fit(swapped)
        np.testing.assert_allclose(
            again.predict(QUERY), two.predict(QUERY), **tolerance("closed form")
        )

    def test_truncated_is_not_terminated(self, model):
        """One state that loops: V = r where it terminates, r/(1 − γ) where it is only cut."""
        rows = {"states": [[0.0]], "rewards": [1.0], "next_states": [[0.0]]}
        ended = GPTD(Delta(), 0.5, 1e-10, model).fit(Transitions(**rows, terminated=[True]))
        cut = Transitions(**rows, terminated=[False], truncated=[True])
        both = Transitions(**rows, terminated=[True], truncated=[True])
        values = [
            ended.predict([[0.0]])[0],
            GPTD(Delta(), 0.5, 1e-10, model).fit(cut).predict([[0.0]])[0],
            GPTD(Delta(), 0.5, 1e-10, model).fit(both).predict([[0.0]])[0],
        ]
        assert values == pytest.approx([1.0, 2.0, 1.0], rel=1e-8)

    def test_a_terminal_state_does_not_leak(self, model):
        """What follows a terminal row has no influence, however large its values."""
        t = episode(10)
        other = t.next_states.copy()
        other[-1] = [5.0, 5.0]
        a, b = (GPTD(RBF(0.8), 0.9, 0.2, model).fit(x) for x in (t, t.replace(next_states=other)))
        np.testing.assert_array_equal(a.predict(QUERY), b.predict(QUERY))

    def test_variance_stays_between_zero_and_the_prior(self, model):
        """T5, at the data, near them and far away, with hardly any noise and revisited states."""
        t = Transitions.concatenate([walk()] * 3)
        kernel = 3.0 * RBF(2.0)
        for noise in (1e-6, 1.0):
            td = GPTD(kernel, 0.99, noise, model).fit(t)
            for x in (t.states, t.states + 1e-9, QUERY, QUERY + 1e3):
                std = td.predict(x, return_std=True)[1]
                assert np.all(std >= 0) and np.all(std**2 <= kernel.diagonal(x))
            assert td.predict(QUERY + 1e3, True)[1] == pytest.approx(np.sqrt(3.0))


class TestSamples:
    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"features": RandomFeatures(n_components=30, rng=0)},
            {"dictionary": Dictionary(threshold=0.1)},
        ],
        ids=["exact", "random features", "dictionary"],
    )
    @pytest.mark.parametrize("online", [False, True])
    def test_moments(self, given, online):
        t = walk()
        td = GPTD(RBF(0.8), 0.9, 0.2, **given)
        td = td.partial_fit(t) if online else td.fit(t)
        x = np.concatenate((QUERY[:4], QUERY[:1]))  # the same state twice: the same value
        draws = td.sample(x, 20_000, rng=0)
        assert draws.shape == (20_000, 5)
        gap = np.abs(draws[:, 0] - draws[:, 4]).max()
        assert gap < 1e-6  # the root of rounding
        covariance = td.covariance(x)
        deviation = np.sqrt(np.diagonal(covariance))
        assert np.all(np.abs(draws.mean(axis=0) - td.predict(x)) < 5 * deviation / np.sqrt(20_000))
        error = np.abs(np.cov(draws.T) - covariance) / np.outer(deviation, deviation)
        assert error.max() < 0.06  # a correlation's standard error is at most 0.01 here
        np.testing.assert_array_equal(td.sample(x, 3, rng=7), td.sample(x, 3, rng=7))
        assert td.sample(x).shape == (1, 5)


class TestEdges:
    @MODELS
    def test_one_row(self, model):
        t = Transitions([[0.5]], [2.0], [[0.7]], [True])
        td = GPTD(RBF(), 0.9, 0.5, model).fit(t)
        value, std = td.predict([[0.5]], return_std=True)
        assert value[0] == pytest.approx(2.0 / 1.5) and std[0] ** 2 == pytest.approx(0.5 / 1.5)

    @MODELS
    def test_constant_states(self, model):
        """A state that loops: data about one number, V = r/(1 − γ), ever surer."""
        n = 200
        zeros = np.zeros((n, 1))
        t = Transitions(zeros, np.ones(n), zeros, np.zeros(n))
        for given in ({}, {"dictionary": Dictionary()}, {"features": Nystroem(n_components=1)}):
            td = GPTD(100.0 * RBF(), 0.5, 0.1, model, **given).fit(t)
            value, std = td.predict([[0.0]], return_std=True)
            assert value[0] == pytest.approx(2.0, abs=5 * std[0]) and std[0] < 0.15

    def test_a_giant_reward_moves_its_neighbourhood_only(self):
        t = walk()
        rewards = t.rewards.copy()
        rewards[5] = 1e12
        td = GPTD(RBF(0.5), 0.9, 0.1).fit(t.replace(rewards=rewards))
        assert np.all(np.isfinite(td.predict(QUERY)))
        assert abs(td.predict(t.states[5:6])[0]) > 1e10
        assert abs(td.predict(t.states[5:6] + 100.0)[0]) < 1.0

    def test_a_linear_kernel_at_the_origin_has_no_features_yet(self):
        t = Transitions([[0.0], [0.0]], [1.0, 1.0], [[0.0], [0.0]], [True, True])
        td = GPTD(Linear(), 0.9, 0.1, dictionary=Dictionary()).partial_fit(t)
        assert td.predict([[0.0]])[0] == 0.0
        more = Transitions([[1.0]], [1.0], [[0.0]], [True])
        assert td.partial_fit(more).predict([[1.0]])[0] == pytest.approx(1 / 1.1)

    def test_offset_data_in_float32(self):
        """States far from the origin, in float32: solved in float64, answered in float32."""
        t, shift = walk(), np.float32(1024.0)
        far = t.replace(
            states=t.states.astype(np.float32) + shift,
            next_states=t.next_states.astype(np.float32) + shift,
        )
        near = t.replace(  # exact: both are multiples of 2⁻¹³
            states=far.states.astype(np.float64) - 1024.0,
            next_states=far.next_states.astype(np.float64) - 1024.0,
        )
        value = GPTD(RBF(0.8), 0.9, 0.1).fit(far).predict(far.states)
        assert value.dtype == np.float32
        expected = GPTD(RBF(0.8), 0.9, 0.1).fit(near).predict(near.states)
        np.testing.assert_allclose(value, expected, **tolerance("iterative"))

    @pytest.mark.parametrize("library", ["torch", "array_api_strict"])
    def test_other_libraries(self, library):
        lib = pytest.importorskip(library)
        t = walk()
        moved = Transitions(
            **{k: None if v is None else lib.asarray(np.array(v)) for k, v in t.columns.items()}
        )
        td, here = GPTD(RBF(0.8), 0.9).fit(moved), GPTD(RBF(0.8), 0.9).fit(t)
        query = lib.asarray(QUERY)
        for got, expected in zip(td.predict(query, True), here.predict(QUERY, True), strict=True):
            assert type(got) is type(query)
            np.testing.assert_allclose(np.asarray(got), expected, **tolerance("algebra"))
        assert type(td.sample(query, 2, rng=0)) is type(query)

    def test_score_and_errors(self):
        t = walk()
        td = GPTD(RBF(0.8), 0.9).fit(t)
        ahead = np.where(t.terminated, 0.0, td.predict(t.next_states))
        expected = t.rewards + 0.9 * ahead - td.predict(t.states)
        np.testing.assert_allclose(td.td_errors(t), expected, **tolerance("closed form"))
        assert td.score(t) == pytest.approx(-np.mean(expected**2))

    def test_median_is_resolved_at_fit(self):
        kernel = RBF("median")
        td = GPTD(kernel, 0.9).fit(walk())
        assert td.kernel_.is_resolved and kernel.length_scale == "median"

    def test_optimise(self):
        t = walk()
        plain = GPTD(1.0 * RBF(0.2), 0.9, 0.5).fit(t)
        tuned = GPTD(1.0 * RBF(0.2), 0.9, 0.5, optimise=True).fit(t)
        assert tuned.log_marginal_likelihood_ > plain.log_marginal_likelihood_ + 5
        assert tuned.noise == 0.5 and tuned.kernel.kernel.length_scale == 0.2
        assert tuned.noise_ != 0.5 and tuned.kernel_.kernel.length_scale != 0.2

    def test_negative_variances_are_counted(self, monkeypatch):
        td = GPTD(RBF(0.8), 0.9).fit(walk())
        monkeypatch.setattr(td._posterior, "variances", lambda x: np.r_[-1e-3, np.ones(8)])
        with pytest.warns(UserWarning, match=r"GPTD: 1 of 9 variances were below 0 .*-1.0e-03"):
            std = td.predict(QUERY, return_std=True)[1]
        assert std[0] == 0.0
        monkeypatch.setattr(td._posterior, "variances", lambda x: np.full(9, -1e-12))
        assert np.all(td.predict(QUERY, return_std=True)[1] == 0.0)  # rounding: no warning


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: GPTD("rbf").fit(t), "GPTD: kernel must be a kernel, got 'rbf'"),
        (lambda t: GPTD(RBF(), gamma=1.1).fit(t), "GPTD: gamma must be a finite number"),
        (lambda t: GPTD(RBF(), noise=0.0).fit(t), "GPTD: noise must be a finite number above 0.0"),
        (lambda t: GPTD(RBF(), mean=np.inf).fit(t), "GPTD: mean must be a finite number"),
        (
            lambda t: GPTD(RBF(), noise_model="return").fit(t),
            "GPTD: noise_model must be one of returns, white, got 'return'. Did you mean 'returns'",
        ),
        (lambda t: GPTD(RBF(), n_restarts=-1).fit(t), "GPTD: n_restarts must be an integer"),
        (lambda t: GPTD(RBF(), dictionary=7).fit(t), "GPTD: dictionary must be a Dictionary"),
        (
            lambda t: GPTD(RBF(), dictionary=Dictionary(), features=Nystroem()).fit(t),
            "GPTD: pass a dictionary or features, not both",
        ),
        (
            lambda t: GPTD(RBF(), dictionary=Dictionary(prune="komp")).fit(t),
            "GPTD: the dictionary must not prune.*got prune='komp'. Pass prune=None",
        ),
        (lambda t: GPTD(RBF()).fit(t.states), "GPTD: X must be Transitions, got ndarray"),
        (lambda t: GPTD(RBF()).fit(7), "GPTD: X must be Transitions, got int"),
        (lambda t: GPTD(RBF()).fit([]), "GPTD: there must be at least one chunk"),
        (lambda t: GPTD(RBF()).fit([t, walk(d=3)]), "GPTD: states must have 2 columns, got 3"),
        (lambda t: GPTD(RBF()).partial_fit(7), "GPTD: X must be Transitions, got int"),
        (lambda t: GPTD(RBF()).fit(t).partial_fit(walk(d=3)), "must have 2 columns, got 3"),
        (lambda t: GPTD(RBF()).fit(t).score(walk(d=3)), "must have 2 columns, got 3"),
        (lambda t: GPTD(RBF()).fit(t).predict(np.ones((2, 3))), "must have 2 columns, got 3"),
        (lambda t: GPTD(RBF()).fit(t).predict([[np.nan, 0]]), "every state must be finite"),
        (lambda t: GPTD(RBF()).fit(t).sample(QUERY, 0), "GPTD: n must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(walk())


def test_unfitted():
    for use in (GPTD.predict, GPTD.sample, GPTD.covariance, GPTD.score):
        with pytest.raises(NotFittedError, match=r"GPTD: it must be fitted before use. Call fit"):
            use(GPTD(RBF()), QUERY)


def test_too_much_memory_says_the_number(monkeypatch):
    from kernrl import arrays

    monkeypatch.setattr(arrays, "available_bytes", lambda x: 1000.0)
    for given in ({}, {"optimise": True}):
        with pytest.raises(
            MemoryError, match=r"GPTD: the exact form of 60 rows must fit.*Pass dictionary="
        ):
            GPTD(RBF(), **given).fit(walk())
    GPTD(RBF(), dictionary=Dictionary(threshold=0.1)).fit(walk())  # needs none of it
