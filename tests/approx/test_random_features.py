"""Random features against the exact kernel, within what the central limit theorem allows."""

from __future__ import annotations

import re
import warnings

import array_api_strict
import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from tolerances import tolerance

from kernrl import arrays
from kernrl.approx.random_features import POINTS, RandomFeatures
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern, Periodic, RationalQuadratic

MANY = 40_000  # features: 20 000 frequencies
SIGMAS = 5.0  # a false alarm once in 1.7 million pairs

KERNELS = {
    "rbf": RBF,
    "matern 1/2": lambda scale: Matern(scale, 0.5),
    "matern 3/2": lambda scale: Matern(scale, 1.5),
    "matern 5/2": lambda scale: Matern(scale, 2.5),
    "laplacian": Laplacian,
    "rational quadratic 0.5": lambda scale: RationalQuadratic(scale, 0.5),
    "rational quadratic 3": lambda scale: RationalQuadratic(scale, 3.0),
}


def pairs(rng, d, length_scale):
    """Rows whose distances are spread over the kernel's own scale."""
    return rng.standard_normal((12, d)) * np.asarray(length_scale) * rng.uniform(0.2, 1.5, (12, 1))


def deviations(kernel, twice, x, phi):
    """|φ(x)ᵀφ(y) − k(x, y)| in standard deviations of the mean of cos(ωᵀ(x − y)).

    Var cos(ωᵀδ) = (1 + k(2δ))/2 − k(δ)², from cos² = (1 + cos 2·)/2: `twice` is k at 2δ.
    """
    k = kernel(x)
    variance = np.maximum((1 + twice(x)) / 2 - k**2, 1e-12)
    upper = np.triu_indices(len(x), 1)
    error = np.abs(phi @ phi.T - k)
    return (error / np.sqrt(variance / (phi.shape[1] / 2)))[upper]


@pytest.mark.parametrize("method", POINTS)
@pytest.mark.parametrize("length_scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", KERNELS)
def test_features_estimate_the_kernel_within_the_clt(rng, name, length_scale, method):
    x = pairs(rng, 3, length_scale)
    kernel, twice = KERNELS[name](length_scale), KERNELS[name](length_scale / 2)
    phi = RandomFeatures(kernel, MANY, method, rng=1).fit_transform(x)
    assert np.max(deviations(kernel, twice, x, phi)) < SIGMAS


@pytest.mark.parametrize("name", ["rbf", "matern 3/2", "laplacian"])
def test_one_length_scale_per_column(rng, name):
    scales = np.array([0.2, 1.0, 10.0])
    x = pairs(rng, 3, scales)
    phi = RandomFeatures(KERNELS[name](scales), MANY, rng=1).fit_transform(x)
    assert np.max(deviations(KERNELS[name](scales), KERNELS[name](scales / 2), x, phi)) < SIGMAS


@pytest.mark.parametrize("wrong", [2**0.5, 2**-0.5, 1.1])
@pytest.mark.parametrize("name", KERNELS)
def test_the_bound_catches_a_wrong_length_scale(rng, name, wrong):
    """The defect that a well-known library shipped for years was a factor 2 in the variance."""
    x = pairs(rng, 3, 1.0)
    phi = RandomFeatures(KERNELS[name](wrong), MANY, rng=1).fit_transform(x)
    assert np.max(deviations(KERNELS[name](1.0), KERNELS[name](0.5), x, phi)) > SIGMAS


def test_the_bound_catches_orthogonal_rows_of_equal_norm(rng):
    """Without chi-distributed norms the orthogonal features are those of a Bessel kernel."""
    x = pairs(rng, 3, 1.0)
    features = RandomFeatures(RBF(1.0), MANY, rng=1).fit(x)
    norms = np.linalg.norm(features.frequencies_, axis=0)
    assert np.max(deviations(RBF(1.0), RBF(0.5), x, features.transform(x))) < SIGMAS
    features.frequencies_ = features.frequencies_ / norms * np.sqrt(3.0)
    assert np.max(deviations(RBF(1.0), RBF(0.5), x, features.transform(x))) > SIGMAS


COMPOUND = {
    "scaled": 3.0 * RBF(1.0),
    "product": RBF(1.0) * Matern(2.0, 0.5),
    "sum": 2.0 * RBF(0.3) + 0.5 * Matern(2.0, 2.5),
    "columns": RBF(0.7).on([2, 0]),
    "last column": Laplacian(0.7).on([-1]),
    "all at once": 2.0 * (RBF(1.0).on([0]) * Matern(1.0).on([1, 2]) + RationalQuadratic(1.0, 2.0)),
    "state and action": StateAction(RBF([1.0, 0.5]), 1.5 * Laplacian(1.0)),
}


@pytest.mark.parametrize("method", POINTS)
@pytest.mark.parametrize("kernel", COMPOUND.values(), ids=COMPOUND)
def test_compound_kernels_have_compound_spectra(rng, kernel, method):
    """|cos| ≤ 1 bounds the variance by v²; no closed form for each is needed."""
    x = pairs(rng, 3, 1.0)
    phi = RandomFeatures(kernel, MANY, method, rng=2).fit_transform(x)
    variance = kernel.diagonal(x)[0]
    error = np.abs(phi @ phi.T - kernel(x))
    assert np.max(error) < SIGMAS * variance / np.sqrt(MANY / 2)
    np.testing.assert_allclose(np.sum(phi**2, axis=1), variance, **tolerance("algebra"))


def test_the_diagonal_is_exact_and_features_come_in_pairs(rng):
    x = 50 * rng.standard_normal((20, 4))
    phi = RandomFeatures(Matern(1.0), 10, rng=0).fit_transform(x)
    assert phi.shape == (20, 10)
    np.testing.assert_allclose(np.sum(phi**2, axis=1), 1.0, **tolerance("algebra"))
    np.testing.assert_allclose(phi[:, :5] ** 2 + phi[:, 5:] ** 2, 0.2, **tolerance("algebra"))


# ---------------------------------------------------------------- the three ways to draw


@pytest.mark.parametrize("method", POINTS)
@pytest.mark.parametrize("d", [1, 2, 5])
def test_every_frequency_keeps_its_distribution(method, d):
    """Each coordinate standard normal, each norm chi(d), by Kolmogorov and Smirnov."""
    features = RandomFeatures(RBF(0.5), 4000, method, rng=3).fit(np.zeros((1, d)))
    unit = features.frequencies_ * 0.5
    for column in unit:
        assert scipy.stats.kstest(column, "norm").pvalue > 1e-3
    norms = np.linalg.norm(unit, axis=0)
    assert scipy.stats.kstest(norms, scipy.stats.chi(d).cdf).pvalue > 1e-3


def test_orthogonal_rows_are_orthogonal_in_blocks():
    unit = RandomFeatures(RBF(1.0), 2 * 23, rng=0).fit(np.zeros((1, 5))).frequencies_.T
    for start in range(0, 23, 5):
        block = unit[start : start + 5]
        gram = block @ block.T
        off = gram - np.diag(np.diag(gram))
        np.testing.assert_allclose(off, 0.0, **tolerance("algebra"))


def mean_squared_error(kernel, method, d, count, seeds=30):
    x = np.random.default_rng(5).standard_normal((30, d))
    total = 0.0
    for seed in range(seeds):
        phi = RandomFeatures(kernel, count, method, rng=seed).fit_transform(x)
        total += np.mean((phi @ phi.T - kernel(x)) ** 2)
    return total / seeds


def test_orthogonal_and_sobol_err_less_than_independent():
    iid = mean_squared_error(RBF(4.0), "iid", 6, 120)
    assert mean_squared_error(RBF(4.0), "orthogonal", 6, 120) < 0.6 * iid
    iid = mean_squared_error(RBF(1.0), "iid", 2, 512)
    assert mean_squared_error(RBF(1.0), "qmc", 2, 512) < 0.2 * iid


@pytest.mark.parametrize("count", [2, 6, 100, 1000, 1024])
def test_sobol_takes_any_number_of_points_in_silence(count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features = RandomFeatures(Matern(1.0), count, "qmc", rng=0).fit(np.zeros((1, 2)))
    assert features.frequencies_.shape == (2, count // 2)
    assert np.all(np.isfinite(features.frequencies_))


@pytest.mark.parametrize("method", POINTS)
def test_a_seed_is_a_stream(method):
    x = np.zeros((1, 3))

    def frequencies(seed):
        return RandomFeatures(RBF(1.0), 20, method, rng=seed).fit(x).frequencies_

    np.testing.assert_array_equal(frequencies(4), frequencies(4))
    np.testing.assert_array_equal(frequencies(np.random.default_rng(4)), frequencies(4))
    assert np.any(frequencies(5) != frequencies(4))


# ---------------------------------------------------------------- arrays and scikit-learn


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_float32_features_are_right_to_float32(rng, offset):
    x = (rng.standard_normal((40, 3)) + offset).astype(np.float32)
    wide = RandomFeatures(RBF(0.5), 500, rng=0).fit_transform(x.astype(np.float64))
    phi = RandomFeatures(RBF(0.5), 500, rng=0).fit_transform(x)
    assert phi.dtype == np.float32
    phi = phi.astype(np.float64)
    np.testing.assert_allclose(phi @ phi.T, wide @ wide.T, **tolerance("float32"))


@pytest.mark.parametrize("asarray", [torch.asarray, array_api_strict.asarray])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_other_libraries_get_their_own_arrays_back(rng, asarray, dtype):
    x = rng.standard_normal((40, 3)).astype(dtype)
    features = RandomFeatures(Matern(1.0), 60, rng=1).fit(asarray(x))
    phi = features.transform(asarray(x))
    assert type(phi) is type(asarray(x))
    assert phi.dtype == asarray(x).dtype
    expected = RandomFeatures(Matern(1.0), 60, rng=1).fit_transform(x)
    np.testing.assert_allclose(arrays.host(phi), expected, **tolerance("closed form", dtype))
    np.testing.assert_allclose(  # fitted in one library, used in another
        features.transform(x), expected, **tolerance("closed form", dtype)
    )


def test_many_rows_in_tiles_are_the_same_rows(rng):
    x = rng.standard_normal((1500, 2))
    features = RandomFeatures(RBF(1.0), 64, rng=0).fit(x)
    parts = [features.transform(x[i : i + 7]) for i in range(0, 1500, 7)]
    np.testing.assert_allclose(features.transform(x), np.concatenate(parts), **tolerance("algebra"))
    assert features.transform(x[:0]).shape == (0, 64)


def test_scikit_learn_clones_pipes_and_searches(rng):
    x = rng.uniform(-3, 3, (150, 1))
    y = np.sin(4 * x[:, 0])
    features = RandomFeatures(RBF("median"), 100, rng=0)
    assert clone(features).get_params()["kernel__length_scale"] == "median"
    pipe = make_pipeline(features, Ridge(1e-6))
    grid = {"randomfeatures__kernel__length_scale": [1e-3, 0.5, 1e3]}
    search = GridSearchCV(pipe, grid, cv=3).fit(x, y)
    assert search.best_params_ == {"randomfeatures__kernel__length_scale": 0.5}
    assert search.best_score_ > 0.99


def test_with_kernel_fills_an_empty_place_only():
    assert RandomFeatures().with_kernel(RBF(2.0)).kernel.length_scale == 2.0
    assert RandomFeatures(Matern(1.0)).with_kernel(RBF(2.0)).kernel.nu == 1.5


def test_what_is_refused(rng):
    x = rng.standard_normal((20, 2))
    text = (
        "n_components must be even, got 7. Pass n_components=8: features come as cosine and sine."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        RandomFeatures(RBF(1.0), 7).fit(x)
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'sobol'"):
        RandomFeatures(RBF(1.0), 8, "sobol").fit(x)
    for kernel in (Linear(), Delta(), RBF(1.0) + Linear(), StateAction(RBF(1.0))):
        with pytest.raises(TypeError, match=r"kernel must be shift-invariant .* Use Nystroem"):
            RandomFeatures(kernel, 8).fit(x)
    with pytest.raises(TypeError, match="Use Nystroem for this kernel"):
        RandomFeatures(Periodic(1.0, 1.0), 8).fit(x)
    with pytest.raises(ValueError, match="RandomFeatures: a kernel is needed to fit"):
        RandomFeatures().fit(x)
    with pytest.raises(
        ValueError, match="RandomFeatures: every X must be finite, got nan at row 0"
    ):
        RandomFeatures(RBF(1.0), 8).fit([[np.nan]])
    with pytest.raises(NotFittedError, match="RandomFeatures: it must be fitted before use"):
        RandomFeatures(RBF(1.0)).transform(x)
    with pytest.raises(ValueError, match="X must have the 2 columns it was fitted on, got 3"):
        RandomFeatures(RBF(1.0), 8).fit(x).transform(np.ones((4, 3)))
