"""Nyström features against pseudo-inverses, kernel ridge in closed form, and scikit-learn."""

from __future__ import annotations

import re
import warnings

import array_api_strict
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tolerances import tolerance

from kernrl import arrays
from kernrl.approx.landmarks import SELECTORS
from kernrl.approx.nystroem import Nystroem
from kernrl.kernels.dot import Linear, Polynomial
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern

KERNELS = {
    "rbf": RBF(1.0),
    "ard": RBF([0.5, 1.0, 3.0]),
    "matern": Matern(1.0, 0.5),
    "laplacian": 2.0 * Laplacian(1.0),
    "linear": Linear(1.0, 0.5),
    "polynomial": Polynomial(2, 1.0),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("landmarks", SELECTORS)
def test_with_all_points_the_features_factorise_the_gram(rng, kernel, landmarks):
    x = rng.standard_normal((40, 3))
    phi = Nystroem(kernel, 40, landmarks, rng=0).fit_transform(x)
    np.testing.assert_allclose(phi @ phi.T, kernel(x), **tolerance("closed form"))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_features_are_the_nystroem_approximation(rng, kernel):
    """ΦΦᵀ = K_nm K_mm⁺ K_mn on new rows, by NumPy's pseudo-inverse."""
    x, new = rng.standard_normal((60, 3)), rng.standard_normal((17, 3))
    features = Nystroem(kernel, 15, rng=0).fit(x)
    phi = features.transform(new)
    z = features.landmarks_
    np.testing.assert_array_equal(z, x[features.indices_])
    k = kernel(new, z)
    expected = k @ np.linalg.pinv(kernel(z), rcond=1e-12, hermitian=True) @ k.T
    np.testing.assert_allclose(phi @ phi.T, expected, **tolerance("closed form"))
    assert phi.shape == (17, features.n_features_)
    np.testing.assert_allclose(
        features.transform(z).T @ features.transform(z),
        np.diag(np.linalg.eigvalsh(kernel(z))[-features.n_features_ :]),
        **tolerance("closed form"),
    )


def test_a_ridge_on_the_features_is_the_rkhs_norm(rng):
    """A ridge on Φ is K_nm-regression with penalty wᵀK_mm w, by its normal equations."""
    x, y = rng.standard_normal((80, 2)), rng.standard_normal(80)
    features = Nystroem(RBF(0.7), 20, rng=0).fit(x)
    phi, z = features.transform(x), features.landmarks_
    w = np.linalg.solve(phi.T @ phi + 0.8 * np.eye(phi.shape[1]), phi.T @ y)
    k, k_mm = RBF(0.7)(x, z), RBF(0.7)(z)
    expected = k @ np.linalg.solve(k.T @ k + 0.8 * k_mm, k.T @ y)
    np.testing.assert_allclose(phi @ w, expected, **tolerance("closed form"))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_duplicates_and_low_rank_give_fewer_finite_features(rng, dtype):
    x = np.repeat(rng.standard_normal((7, 3)), 20, axis=0).astype(dtype)
    for kernel, rank in ((RBF(1.0), 7), (Linear(1.0, 1.0), 4)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            features = Nystroem(kernel, 50, rng=0).fit(x)
            phi = features.transform(x)
        assert phi.shape == (140, rank)
        assert phi.dtype == dtype
        expected = kernel(x.astype(np.float64))
        np.testing.assert_allclose(phi @ phi.T, expected, **tolerance("algebra", np.float32))


def test_uniform_landmarks_that_coincide_under_the_kernel_are_truncated(rng):
    """The kernel sees one column only, in which all rows take three values."""
    x = np.column_stack((rng.integers(0, 3, 60), rng.standard_normal(60)))
    features = Nystroem(RBF(0.5).on([0]), 30, "uniform", rng=0).fit(x)
    assert features.landmarks_.shape == (30, 2)
    assert features.n_features_ == 3
    phi = features.transform(x)
    np.testing.assert_allclose(phi @ phi.T, RBF(0.5).on([0])(x), **tolerance("closed form"))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("length_scale", [0.5, 2.0, 8.0])
def test_float32_features_are_right_to_float32(rng, offset, length_scale):
    """A smooth kernel's Gram has eigenvalues far below 1e-7: left out, not amplified."""
    x = (rng.standard_normal((400, 2)) + offset).astype(np.float32)
    kernel = RBF(length_scale)
    features = Nystroem(kernel, 150, "uniform", rng=0).fit(x)
    phi, z = features.transform(x), features.landmarks_.astype(np.float64)
    assert phi.dtype == np.float32
    values, vectors = np.linalg.eigh(kernel(z))
    kept = slice(len(z) - features.n_features_, None)
    exact = kernel(x.astype(np.float64), z) @ vectors[:, kept] / np.sqrt(values[kept])
    phi = phi.astype(np.float64)
    allowed = tolerance("closed form", np.float32)  # whitening divides by √λ, down to 10⁻³
    np.testing.assert_allclose(phi @ phi.T, exact @ exact.T, **allowed)
    if length_scale == 8.0:
        assert features.n_features_ < np.sum(values > 1e-10) < len(z) == 150
        np.testing.assert_allclose(
            phi @ phi.T, kernel(x.astype(np.float64)), **tolerance("float32")
        )


@pytest.mark.parametrize("asarray", [torch.asarray, array_api_strict.asarray])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_other_libraries_get_their_own_arrays_back(rng, asarray, dtype):
    x = rng.standard_normal((50, 3)).astype(dtype)
    expected = Nystroem(Matern(1.0), 12, rng=1).fit(x)
    features = Nystroem(Matern(1.0), 12, rng=1).fit(asarray(x))
    np.testing.assert_array_equal(features.indices_, expected.indices_)
    phi = features.transform(asarray(x))
    assert type(phi) is type(asarray(x))
    assert phi.dtype == asarray(x).dtype
    gram = arrays.host(phi) @ arrays.host(phi).T
    oracle = expected.transform(x)
    np.testing.assert_allclose(gram, oracle @ oracle.T, **tolerance("closed form", dtype))
    np.testing.assert_allclose(  # fitted in one library, used in another
        features.transform(x), arrays.host(phi), **tolerance("closed form", dtype)
    )


def test_dtypes_widen_and_never_narrow(rng):
    x = rng.standard_normal((30, 2))
    narrow = Nystroem(RBF(1.0), 5, rng=0).fit(x.astype(np.float32))
    assert narrow.transform(x.astype(np.float32)).dtype == np.float32
    assert narrow.transform(x).dtype == np.float64
    assert Nystroem(RBF(1.0), 5, rng=0).fit(x).transform(x.astype(np.float32)).dtype == np.float64
    assert Nystroem(RBF(1.0), 2, rng=0).fit_transform([[0, 1], [2, 3]]).dtype == np.float64


def test_the_median_is_resolved_on_the_data_and_the_own_kernel_stays(rng):
    x = rng.standard_normal((50, 2))
    features = Nystroem(2.0 * RBF("median"), 10, rng=0).fit(x)
    assert features.kernel_.is_resolved
    assert features.kernel.kernel.length_scale == "median"


def test_with_kernel_fills_an_empty_place_only(rng):
    empty = Nystroem(n_components=5, rng=0)
    filled = empty.with_kernel(RBF(2.0))
    assert filled.kernel.length_scale == 2.0
    assert filled.n_components == 5
    assert empty.kernel is None
    assert Nystroem(Matern(1.0)).with_kernel(RBF(2.0)).kernel.nu == 1.5


def test_scikit_learn_clones_pipes_and_searches(rng):
    x = rng.uniform(-3, 3, (150, 1))
    y = np.sin(4 * x[:, 0])
    features = Nystroem(RBF(1.0), 30, rng=0)
    twin = clone(features)
    assert twin is not features
    assert twin.get_params()["kernel__length_scale"] == 1.0
    pipe = make_pipeline(StandardScaler(), features, Ridge(1e-6))
    grid = {"nystroem__kernel__length_scale": [1e-3, 0.3, 1e3]}
    search = GridSearchCV(pipe, grid, cv=3).fit(x, y)
    assert search.best_params_ == {"nystroem__kernel__length_scale": 0.3}
    assert search.best_score_ > 0.99
    assert features.kernel.length_scale == 1.0
    names = search.best_estimator_[:-1].get_feature_names_out()
    assert names[0] == "nystroem0"


def test_state_action_kernels_work(rng):
    z = np.column_stack((rng.standard_normal((60, 2)), rng.integers(0, 2, 60)))
    phi = Nystroem(StateAction(RBF(1.0)), 60, rng=0).fit_transform(z)
    across = z[:, 2][:, None] != z[:, 2]
    np.testing.assert_allclose((phi @ phi.T)[across], 0.0, **tolerance("closed form"))


def test_what_is_refused(rng):
    x = rng.standard_normal((120, 2))
    text = (
        "Nystroem: n_components must be at most n, got 500 of 120. "
        "Pass n_components=120 or more data."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        Nystroem(RBF(1.0)).fit(x)
    with pytest.raises(
        ValueError, match=r"landmarks must be one of .*, got 'rpcholeski'\. Did you"
    ):
        Nystroem(RBF(1.0), 5, "rpcholeski").fit(x)
    with pytest.raises(ValueError, match="Nystroem: a kernel is needed to fit, got None"):
        Nystroem(n_components=5).fit(x)
    with pytest.raises(TypeError, match="Nystroem: kernel must be a kernel, got 'rbf'"):
        Nystroem("rbf", 5).fit(x)
    with pytest.raises(ValueError, match="n_components must be an integer of at least 1, got 0"):
        Nystroem(RBF(1.0), 0).fit(x)
    with pytest.raises(ValueError, match="Nystroem: X must have at least one row"):
        Nystroem(RBF(1.0), 5).fit(x[:0])
    with pytest.raises(ValueError, match="Nystroem: every X must be finite, got inf at row 1"):
        Nystroem(RBF(1.0), 1).fit([[0.0], [np.inf]])
    with pytest.raises(NotFittedError, match="Nystroem: it must be fitted before use"):
        Nystroem(RBF(1.0)).transform(x)
    with pytest.raises(ValueError, match="X must have the 2 columns it was fitted on, got 3"):
        Nystroem(RBF(1.0), 5, rng=0).fit(x).transform(np.ones((4, 3)))
