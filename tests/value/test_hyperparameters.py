"""Hyper-parameters by the rewards' likelihood: gradients, optima, restarts, bounds, the curb."""

import warnings

import numpy as np
import pytest
from reference import gp
from tolerances import tolerance

from kernrl.data.returns import discounted
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Laplacian, Matern, Periodic, RationalQuadratic
from kernrl.value import hyperparameters
from kernrl.value.differences import differences
from kernrl.value.gptd import GPTD
from kernrl.value.hyperparameters import Space, maximise_likelihood
from kernrl.value.likelihood import Objective

ARD = np.array([0.6, 1.2])


def walk(n=40, seed=0):
    """Terminated, truncated and open episodes in two columns; only the first one matters."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    rewards = np.sin(2 * x[:-1, 0]) + 0.1 * rng.normal(size=n)
    return Transitions(x[:-1], rewards, x[1:], terminated, truncated=truncated)


def drawn(n=150, scale=0.5, noise=0.04, variance=2.0, seed=0, d=1):
    """One terminated episode whose values are drawn from 'variance · RBF(scale)'."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 5, size=(n, d))
    k = variance * RBF(scale)(x[:, :1]) + (noise + 1e-9) * np.eye(n)
    value = np.linalg.cholesky(k) @ rng.normal(size=n)
    rewards = np.append(value[:-1] - 0.9 * value[1:], value[-1])
    return Transitions(x, rewards, np.vstack((x[1:], x[:1])), np.arange(n) == n - 1)


class TestObjective:
    @pytest.mark.parametrize("model", ["returns", "white"])
    @pytest.mark.parametrize("curb", [False, True])
    @pytest.mark.parametrize(
        "kernel",
        [
            2.0 * RBF(ARD),
            1.5 * Matern(ARD, nu=1.5),
            Matern(0.7, nu=2.5),
            RationalQuadratic(ARD, 0.7),
            2.0 * RBF(0.5).on([0]) + Linear(0.3, 0.2),
            2.0 * Laplacian(ARD),
            Periodic(1.0, 3.0),
        ],
    )
    def test_gradient(self, kernel, curb, model):
        """Also where the curb bites: far from the data's scales."""
        rows = differences(walk(), 0.9)
        space = Space("test", kernel, 0.3, rows, ())
        objective = Objective(rows, kernel, space, model == "returns", 0.5, curb)
        begin = np.log(space._flat([p.value for p in space.parameters]))
        rng = np.random.default_rng(0)
        far = begin + 6.5 * curb  # length scales at the curb
        for theta in (begin, begin + 0.5 * rng.normal(size=len(begin)), far):
            expected = gp.finite_difference(lambda x: objective(x)[0], theta)
            np.testing.assert_allclose(
                objective(theta)[1], expected, **tolerance("finite difference"), err_msg=str(theta)
            )

    @pytest.mark.parametrize("kernel", [1.5 * Matern(ARD, nu=0.5), 0.5 * Laplacian(1.0)])
    def test_gradient_of_the_curb_on_the_noise(self, kernel):
        """At a signal-to-noise ratio where the penalty is steep, through K's diagonal as well."""
        rows = differences(walk(), 0.9)
        space = Space("test", kernel, 2e-6, rows, ())
        free, curbed = (Objective(rows, kernel, space, True, 0.0, c) for c in (False, True))
        theta = np.log(space._flat([p.value for p in space.parameters]))

        def penalty(x):
            return curbed(x)[0] - free(x)[0]

        slope = curbed(theta)[1] - free(theta)[1]
        assert slope[0] > 1 and slope[-1] < -1  # the variance pushed down, the noise up
        np.testing.assert_allclose(
            slope, gp.finite_difference(penalty, theta), **tolerance("finite difference")
        )

    @pytest.mark.parametrize("model", ["returns", "white"])
    def test_value(self, model):
        t, kernel = walk(), 2.0 * RBF(ARD)
        rows = differences(t, 0.9)
        space = Space("test", kernel, 0.3, rows, ())
        value, _ = Objective(rows, kernel, space, model == "returns", 0.5, False)(space.initial)
        *_, likelihood = gp.gptd(t, t.states[:1], kernel, 0.9, 0.3, model == "returns", mean=0.5)
        np.testing.assert_allclose(-value, likelihood, **tolerance("closed form"))

    def test_the_curb_is_flat_where_data_live_and_a_wall_beyond(self):
        rows = differences(walk(), 0.9)
        kernel = 2.0 * RBF(ARD)
        space = Space("test", kernel, 0.3, rows, ())
        free, curbed = (Objective(rows, kernel, space, True, 0.0, c) for c in (False, True))

        def penalty(theta):
            return curbed(theta)[0] - free(theta)[0]

        spread = np.log(np.std(rows.points, axis=0))
        inside = np.array([0.0, *(spread + np.log(50)), np.log(0.01)])
        assert abs(penalty(inside)) < 1e-4
        for k, outside in ((1, spread[0] + np.log(3e3)), (3, np.log(1e-7))):
            wall = inside.copy()
            wall[k] = outside
            assert penalty(wall) > 50


class TestOptimum:
    def test_finds_the_kernel_the_values_were_drawn_from(self):
        best = maximise_likelihood(GPTD(1.0 * RBF(1.0), 0.9, 0.5), drawn(300))
        assert best.kernel.kernel.length_scale == pytest.approx(0.5, rel=0.15)
        assert best.noise == pytest.approx(0.04, rel=0.25)
        assert best.kernel.factor == pytest.approx(2.0, rel=0.8)

    def test_is_what_a_gptd_with_it_says(self):
        t = drawn(60)
        start = GPTD(1.0 * RBF(1.0), 0.9, 0.5, mean=0.2)
        best = maximise_likelihood(start, t)
        refit = GPTD(best.kernel, 0.9, best.noise, mean=0.2).fit(t)
        np.testing.assert_allclose(
            best.log_marginal_likelihood, refit.log_marginal_likelihood_, **tolerance("closed form")
        )
        assert best.log_marginal_likelihood > start.fit(t).log_marginal_likelihood_ + 10
        assert start.kernel.factor == 1.0 and start.noise == 0.5  # nothing was written into it

    def test_is_that_of_scikit_learn(self):
        """One terminated episode: the same optimum as GP regression on the returns."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process import kernels as peers

        t = drawn(80, d=2)
        peer = GaussianProcessRegressor(
            peers.ConstantKernel(1.0, (1e-5, 1e5)) * peers.RBF([1.0, 1.0], (1e-5, 1e3))
            + peers.WhiteKernel(0.5, (1e-8, 1e5)),
            alpha=0.0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its second length scale runs to the bound
            peer.fit(t.states, discounted(t.rewards, 0.9))
        start = GPTD(1.0 * RBF(1.0), 0.9, 0.5)
        best = maximise_likelihood(start, t, ard=True)
        assert best.log_marginal_likelihood == pytest.approx(
            peer.log_marginal_likelihood_value_, abs=0.2
        )
        scale = best.kernel.kernel.length_scale
        assert scale.shape == (2,) and scale[0] == pytest.approx(
            peer.kernel_.k1.k2.length_scale[0], rel=0.01
        )
        assert 10 * scale[0] < scale[1] < 2e3  # the useless column is told, and curbed
        refit = GPTD(best.kernel, 0.9, best.noise).fit(t).log_marginal_likelihood_
        np.testing.assert_allclose(best.log_marginal_likelihood, refit, **tolerance("closed form"))
        assert best.starts[0] < refit - 1e-4  # the curb is in the search, not in the result

    def test_autograd_and_formula_find_the_same(self, monkeypatch):
        from kernrl.kernels import gradients

        t, start = drawn(60), GPTD(1.0 * Matern(1.0), 0.9, 0.5)
        by_formula = maximise_likelihood(start, t)
        monkeypatch.setattr(gradients, "has_formula", lambda kernel: False)
        by_autograd = maximise_likelihood(start, t)
        assert by_autograd.log_marginal_likelihood == pytest.approx(
            by_formula.log_marginal_likelihood, abs=1e-5
        )

    def test_fixed_parameters_stay(self):
        t, start = drawn(60), GPTD(1.0 * RBF(1.0), 0.9, 0.5)
        best = maximise_likelihood(start, t, fixed=("noise", "factor"))
        assert best.noise == 0.5 and best.kernel.factor == 1.0
        assert best.kernel.kernel.length_scale != 1.0

    def test_median_is_a_start(self):
        best = maximise_likelihood(GPTD(1.0 * RBF("median"), 0.9, 0.5), drawn(60))
        assert isinstance(best.kernel.kernel.length_scale, float)

    def test_all_zero_rewards(self):
        t = drawn(30).replace(rewards=np.zeros(30))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            best = maximise_likelihood(GPTD(1.0 * RBF(1.0), 0.9, 0.5), t)
        assert np.isfinite(best.log_marginal_likelihood)


class TestRestarts:
    def test_the_best_start_is_kept(self):
        """A start in a poor optimum, then others: what comes back is the best of all, re-evaluated.

        A public implementation kept live parameters and so returned its last start.
        """
        t = drawn(60)
        stuck = GPTD(1.0 * RBF(40.0), 0.9, 3.0)
        runs = [maximise_likelihood(stuck, t, n_restarts=k, rng=3) for k in range(5)]
        for k, run in enumerate(runs):
            assert len(run.starts) == k + 1
            np.testing.assert_allclose(run.starts, runs[-1].starts[: k + 1], rtol=1e-9)
            refit = GPTD(run.kernel, 0.9, run.noise).fit(t).log_marginal_likelihood_
            assert refit == pytest.approx(max(run.starts), abs=1e-3)
        assert np.all(np.diff([r.log_marginal_likelihood for r in runs]) >= -1e-9)

    def test_the_last_start_need_not_be_the_best(self, monkeypatch):
        """Starts of falling quality: the first one must come back."""
        t, good = drawn(60), GPTD(1.0 * RBF(0.5), 0.9, 0.04)
        poor = np.log([1e-4, 1e3, 50.0])
        monkeypatch.setattr(
            Space, "draw", lambda self, rng: np.clip(poor, *np.transpose(self.bounds))
        )
        best = maximise_likelihood(good, t, n_restarts=2, max_iter=3)
        assert best.starts[0] > best.starts[1] + 5
        refit = GPTD(best.kernel, 0.9, best.noise).fit(t).log_marginal_likelihood_
        assert refit == pytest.approx(best.starts[0], abs=1e-3)

    def test_seeded(self):
        t, start = drawn(40), GPTD(1.0 * RBF(1.0), 0.9, 0.5)
        a, b, c = (
            maximise_likelihood(start, t, n_restarts=2, rng=s, max_iter=2) for s in (1, 1, 2)
        )
        assert a.starts == b.starts and a.starts != c.starts


class TestWarningsAndErrors:
    def test_a_bound_is_warned_about(self, monkeypatch):
        monkeypatch.setattr(hyperparameters, "NOISE_BOX", (0.5, 1e3))
        with pytest.warns(UserWarning, match="maximise_likelihood: noise ended at the edge"):
            best = maximise_likelihood(GPTD(1.0 * RBF(0.5), 0.9, 5.0), drawn(60))
        assert best.at_bound == ("noise",)

    def test_no_warning_inside(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert maximise_likelihood(GPTD(1.0 * RBF(1.0), 0.9, 0.5), drawn(60)).at_bound == ()

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (
                lambda t: maximise_likelihood(GPTD(RBF()), t.states),
                "maximise_likelihood: X must be Transitions, got ndarray",
            ),
            (
                lambda t: maximise_likelihood(GPTD(RBF()), t, fixed=("lengthscale",)),
                "a fixed parameter must be one of length_scale, noise, got 'lengthscale'",
            ),
            (
                lambda t: maximise_likelihood(GPTD(Delta()), t, fixed=("noise",)),
                "at least one parameter must be free",
            ),
        ],
    )
    def test_one_clear_error(self, make, text):
        with pytest.raises((ValueError, TypeError), match=text):
            make(drawn(20))
