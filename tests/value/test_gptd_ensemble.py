"""GPTDEnsemble against its parts, one predictive likelihood at a time."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.gptd import GPTD
from kernrl.value.gptd_ensemble import GPTDEnsemble

KERNELS = [RBF(0.3), 2.0 * RBF(1.0), Matern(4.0)]
QUERY = np.random.default_rng(1).normal(size=(6, 1))


def episode(n=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 1)).cumsum(axis=0) * 0.5
    return Transitions(x[:-1], np.cos(x[:-1, 0]), x[1:], np.arange(n) == n - 1)


@pytest.mark.parametrize("model", ["returns", "white"])
@pytest.mark.parametrize("features", [None, RandomFeatures(n_components=20, rng=0)])
def test_weights_are_products_of_predictive_likelihoods(model, features):
    """w_j ∝ w_j Π_t p_j(r_t | past), each factor from the posterior before its reward came."""
    t, prior = episode(), np.array([0.2, 0.5, 0.3])
    weights = prior.copy()
    models = [GPTD(k, 0.9, 0.2, model, features=features) for k in KERNELS]
    for i in range(len(t)):
        for j, td in enumerate(models):
            before = td.log_marginal_likelihood_ if i else 0.0
            now = td.partial_fit(t[i : i + 1]).log_marginal_likelihood_
            weights[j] *= np.exp(now - before)
    both = GPTDEnsemble(KERNELS, 0.9, 0.2, model, features, prior=prior).fit(t)
    np.testing.assert_allclose(both.mixture_, weights / weights.sum(), **tolerance("closed form"))
    np.testing.assert_allclose(
        both.log_marginal_likelihood_, np.log(weights.sum()), **tolerance("closed form")
    )
    assert 0.02 < both.mixture_.max() < 0.999  # a mixture, not one model


def test_one_predictive_likelihood_by_hand():
    """The first reward of a terminated one-step episode: N(0, k + σ²) under each kernel."""
    t = Transitions([[0.0]], [1.2], [[0.0]], [True])
    both = GPTDEnsemble([1.0 * RBF(), 4.0 * RBF()], 0.9, 0.5).fit(t)
    density = [np.exp(-0.5 * 1.44 / v) / np.sqrt(2 * np.pi * v) for v in (1.5, 4.5)]
    np.testing.assert_allclose(
        both.mixture_, np.array(density) / sum(density), **tolerance("closed form")
    )


def test_mixture_of_means_and_variances():
    t = episode()
    both = GPTDEnsemble(KERNELS, 0.9, 0.2).fit(t)
    means, stds = zip(*(GPTD(k, 0.9, 0.2).fit(t).predict(QUERY, True) for k in KERNELS),
                      strict=True)  # fmt: skip
    w = both.mixture_[:, None]
    mean = np.sum(w * means, axis=0)
    second = np.sum(w * (np.square(means) + np.square(stds)), axis=0)
    got = both.predict(QUERY, return_std=True)
    np.testing.assert_allclose(got[0], mean, **tolerance("closed form"))
    np.testing.assert_allclose(got[1] ** 2, second - mean**2, **tolerance("closed form"))
    np.testing.assert_array_equal(both.predict(QUERY), got[0])
    draws = both.sample(QUERY, 20_000, rng=0)
    assert draws.shape == (20_000, 6)
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5 * got[1] / np.sqrt(20_000))
    assert np.all(np.abs(draws.std(axis=0) / got[1] - 1) < 0.05)


def test_draws_of_the_models_come_mixed():
    """Far from data one model's draws are 100 times the other's; every part of them has both."""
    t = Transitions([[0.0]], [0.0], [[0.0]], [True])
    both = GPTDEnsemble([RBF(), 1e4 * RBF()], 0.9, 1e8).fit(t)
    draws = np.abs(both.sample([[50.0]], 4000, rng=0)[:, 0])
    np.testing.assert_allclose(both.mixture_, 0.5, atol=1e-3)
    large = draws > 5
    assert 0.4 < large[:2000].mean() < 0.6 and 0.4 < large[2000:].mean() < 0.6


def test_recursion_is_batch():
    t, features = episode(30), RandomFeatures(n_components=20, rng=0)
    whole = GPTDEnsemble(KERNELS, 0.9, 0.2, features=features).fit(t)
    grown = GPTDEnsemble(KERNELS, 0.9, 0.2, features=features)
    for i in range(30):
        grown.partial_fit(t[i : i + 1])
    np.testing.assert_allclose(grown.mixture_, whole.mixture_, **tolerance("closed form"))
    np.testing.assert_allclose(
        grown.predict(QUERY), whole.predict(QUERY), **tolerance("closed form")
    )
    assert grown.n_transitions_ == 30


def test_the_right_kernel_wins():
    """Rewards of a value function drawn from one kernel, against one ten times as wide."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(0, 5, size=(150, 1)), axis=0)
    value = np.linalg.cholesky(RBF(0.3)(x) + 1e-8 * np.eye(150)) @ rng.normal(size=150)
    rewards = np.append(value[:-1] - 0.9 * value[1:], value[-1])
    t = Transitions(x, rewards, np.vstack((x[1:], x[:1])), np.arange(150) == 149)
    both = GPTDEnsemble([RBF(3.0), RBF(0.3)], 0.9, 0.01).fit(t)
    assert both.mixture_[1] > 0.999


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: GPTDEnsemble([]).fit(t), r"GPTDEnsemble: kernels must be a list of kernels"),
        (lambda t: GPTDEnsemble(RBF()).fit(t), r"GPTDEnsemble: kernels must be a list of kernels"),
        (lambda t: GPTDEnsemble(["rbf"]).fit(t), "kernel must be a kernel, got 'rbf'"),
        (
            lambda t: GPTDEnsemble(KERNELS, prior=[1.0, -1.0, 1.0]).fit(t),
            "GPTDEnsemble: prior must hold 3 positive weights",
        ),
        (lambda t: GPTDEnsemble(KERNELS, prior=[1.0]).fit(t), "prior must hold 3 positive"),
        (lambda t: GPTDEnsemble(KERNELS).fit(3), "GPTDEnsemble: X must be Transitions, got int"),
        (lambda t: GPTDEnsemble(KERNELS).fit(t).sample(QUERY, 0), "n must be an integer"),
    ],
)  # fmt: skip
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(episode())


def test_unfitted():
    with pytest.raises(NotFittedError, match="GPTDEnsemble: it must be fitted before use"):
        GPTDEnsemble(KERNELS).predict(QUERY)
