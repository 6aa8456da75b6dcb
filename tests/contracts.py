"""What every kernel, feature map, estimator and agent promises, as functions that raise if it lies.

A new class is covered by one entry in tests/test_contracts.py; a user can call these on his own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import pytest
import torch
from contract_agents import check_agent
from contract_parts import (
    check_learnt_names,
    check_parameters,
    digest,
    disturb_global_streams,
    global_streams_untouched,
    same,
)
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl import arrays
from kernrl.data.transitions import Transitions

__all__ = ["check_agent", "check_estimator", "check_feature_map", "check_kernel"]

LIBRARIES = (np.asarray, torch.as_tensor, array_api_strict.asarray)


# ---------------------------------------------------------------- kernels


def check_kernel(kernel: Any, x: np.ndarray | None = None) -> None:
    """A kernel is an immutable value; its matrix is symmetric, positive semi-definite, and one.

    `x` (at least 8 rows) are the points it is tried on; default: 12 points in three dimensions.
    """
    if x is None:
        x = np.random.default_rng(7).standard_normal((12, 3))
    check_parameters(kernel)
    _check_is_a_value(kernel)
    if not kernel.is_resolved:
        with pytest.raises(ValueError, match="must be resolved"):
            kernel(x)
    resolved = kernel.resolve(x, rng=3)
    assert resolved.is_resolved
    assert same(resolved, kernel.resolve(x, rng=3)), "resolve must be reproducible"
    assert type(resolved) is type(kernel)
    _check_matrix(resolved, x)
    _check_shapes(resolved, x)
    _check_libraries(resolved, x)
    _check_algebra(resolved, x)


def _check_is_a_value(kernel: Any) -> None:
    assert dataclasses.is_dataclass(kernel)
    for field in dataclasses.fields(kernel):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kernel, field.name, 1.0)
    assert type(kernel).__doc__
    assert repr(kernel).startswith(type(kernel).__name__)


def _check_matrix(kernel: Any, x: np.ndarray) -> None:
    """K = Kᵀ ⪰ 0; the diagonal, a block of rows and the prepared section are the same numbers."""
    kept = x.copy()
    k = kernel(x)
    np.testing.assert_array_equal(x, kept, err_msg="the data were changed")
    np.testing.assert_allclose(k, k.T, **tolerance("algebra"))
    np.testing.assert_allclose(np.diagonal(k), kernel.diagonal(x), **tolerance("algebra"))
    np.testing.assert_allclose(kernel(x, x), k, **tolerance("closed form"))
    np.testing.assert_allclose(kernel(x[2:5], x[1:8]), k[2:5, 1:8], **tolerance("closed form"))
    prepared = kernel.section(x[1:8])
    np.testing.assert_allclose(prepared(x[2:5]), k[2:5, 1:8], **tolerance("closed form"))
    np.testing.assert_allclose(kernel.row(x[2], x), k[2], **tolerance("closed form"))
    lowest, highest = np.linalg.eigvalsh(k)[[0, -1]]
    assert lowest > -tolerance("closed form")["rtol"] * highest, "not positive semi-definite"


def _check_shapes(kernel: Any, x: np.ndarray) -> None:
    d = x.shape[1]
    assert kernel(x[:0], x).shape == (0, len(x))
    assert kernel(x, x[:0]).shape == (len(x), 0)
    assert kernel(x[:1]).shape == (1, 1)
    assert kernel.diagonal(x[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"must share their last axis, got x \(.*\) and y \("):
        kernel(x, np.ones((2, d + 1)))


def _check_libraries(kernel: Any, x: np.ndarray) -> None:
    """The library and dtype that come in go out, with the same numbers."""
    expected = kernel(x, x[:5])
    for asarray in LIBRARIES:
        for dtype, name in ((np.float64, "closed form"), (np.float32, "closed form")):
            y = asarray(x.astype(dtype))
            got = kernel(y, y[:5, ...])
            assert type(got) is type(y)
            assert got.dtype == y.dtype
            allowed = tolerance(name, dtype)
            np.testing.assert_allclose(arrays.host(got), expected, **allowed)
            np.testing.assert_allclose(
                arrays.host(kernel.diagonal(y)), kernel.diagonal(x), **allowed
            )


def _check_algebra(kernel: Any, x: np.ndarray) -> None:
    k = kernel(x)
    np.testing.assert_allclose((kernel + kernel)(x), 2 * k, **tolerance("algebra"))
    np.testing.assert_allclose((kernel * kernel)(x), k * k, **tolerance("algebra"))
    np.testing.assert_allclose((3 * kernel)(x), 3 * k, **tolerance("algebra"))
    wide = np.column_stack((np.ones(len(x)), x))
    shifted = kernel.on(range(1, wide.shape[1]))
    np.testing.assert_allclose(shifted(wide), k, **tolerance("algebra"))


# ---------------------------------------------------------------- feature maps


def check_feature_map(features: Any, x: np.ndarray | None = None) -> None:
    """A scikit-learn transformer with a kernel: fit(X), transform(X) -> (n, r), from one rng."""
    if x is None:
        x = np.random.default_rng(8).standard_normal((60, 3))
    owner = type(features).__name__
    check_parameters(features)
    with pytest.raises(NotFittedError, match=f"^{owner}: "):
        features.transform(x)
    before, params, kept = set(vars(features)), features.get_params(deep=False), x.copy()
    with global_streams_untouched():
        fitted = features.fit(x)
        phi = features.transform(x)
    assert fitted is features, "fit must return self"
    check_learnt_names(before, features)
    assert all(getattr(features, k) is v for k, v in params.items()), "fit changed a parameter"
    np.testing.assert_array_equal(x, kept, err_msg="the data were changed")
    _check_features(features, x, phi)
    _check_bad_rows(owner, features.fit, x)
    _check_bad_rows(owner, features.transform, x)
    with pytest.raises(ValueError, match=f"^{owner}: .*columns"):
        features.transform(np.ones((2, x.shape[1] + 1)))
    disturb_global_streams(99)
    again = clone(features).fit(x).transform(x)
    assert digest(again) == digest(phi), "the same rng must give the same features"
    other = features.with_kernel(2.0 * features.kernel_)
    assert type(other) is type(features)
    with pytest.raises(NotFittedError):
        other.transform(x)


def _check_features(features: Any, x: np.ndarray, phi: np.ndarray) -> None:
    assert phi.ndim == 2
    assert phi.shape[0] == len(x)
    assert phi.shape[1] <= features.n_components
    assert np.all(np.isfinite(phi))
    np.testing.assert_allclose(features.transform(x[3:7]), phi[3:7], **tolerance("closed form"))
    np.testing.assert_allclose(
        clone(features).fit_transform(x), phi, **tolerance("closed form"),
        err_msg="fit_transform must be fit, then transform",
    )  # fmt: skip
    assert features.transform(x[:1]).shape == (1, phi.shape[1])


def _check_bad_rows(owner: str, call: Callable[[Any], Any], x: np.ndarray) -> None:
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[5, 0] = value
        with pytest.raises(ValueError, match=f"^{owner}: .*{value} at row 5"):
            call(bad)
    with pytest.raises(TypeError, match=f"^{owner}: .*real numbers"):
        call(x.astype(str))


# ---------------------------------------------------------------- estimators


def check_estimator(
    estimator: Any,
    transitions: Transitions,
    inputs: Callable[[Transitions], tuple[Any, ...]] = lambda t: (t.states,),
) -> None:
    """fit(transitions) → predict(states): scikit-learn's rules, on transitions.

    `inputs` makes predict's arguments, (states,) unless the estimator wants actions as well.
    """
    owner = type(estimator).__name__
    check_parameters(estimator)
    with pytest.raises(NotFittedError, match=f"^{owner}: "):
        estimator.predict(*inputs(transitions))
    with pytest.raises(NotFittedError, match=f"^{owner}: "):
        estimator.score(transitions)
    before, params = set(vars(estimator)), estimator.get_params(deep=False)
    kept = digest({k: v for k, v in transitions.columns.items() if v is not None})
    with global_streams_untouched():
        fitted = estimator.fit(transitions)
    assert fitted is estimator, "fit must return self"
    check_learnt_names(before, estimator)
    assert all(getattr(estimator, k) is v for k, v in params.items()), "fit changed a parameter"
    now = digest({k: v for k, v in transitions.columns.items() if v is not None})
    assert now == kept, "fit changed the transitions"
    _check_predictions(estimator, transitions, inputs)
    _check_refit(estimator, transitions, inputs)
    with pytest.raises(TypeError, match=f"^{owner}: .*Transitions"):
        estimator.fit(3)


def _check_predictions(estimator: Any, t: Transitions, inputs: Callable[..., Any]) -> None:
    owner, values = type(estimator).__name__, estimator.predict(*inputs(t))
    assert values.shape == (len(t),)
    assert np.all(np.isfinite(values))
    some = estimator.predict(*(x[3:6] for x in inputs(t)))
    np.testing.assert_allclose(some, values[3:6], **tolerance("closed form"))
    assert isinstance(estimator.score(t), float)
    states, *rest = inputs(t)
    with pytest.raises(ValueError, match=f"^{owner}: .*columns"):
        estimator.predict(np.hstack((states, states)), *rest)
    bad = states.copy()
    bad[2, 0] = np.nan
    with pytest.raises(ValueError, match=f"^{owner}: .*nan at row 2"):
        estimator.predict(bad, *rest)


def _check_refit(estimator: Any, t: Transitions, inputs: Callable[..., Any]) -> None:
    """A second fit forgets the first, and the global generators do not matter."""
    values = digest(estimator.predict(*inputs(t)))
    estimator.fit(t[: len(t) // 2])
    assert digest(estimator.predict(*inputs(t))) != values
    disturb_global_streams(98)
    assert digest(estimator.fit(t).predict(*inputs(t))) == values
    assert digest(clone(estimator).fit(t).predict(*inputs(t))) == values
