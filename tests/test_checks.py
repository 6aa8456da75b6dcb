"""Every error sentence, by its text: owner, rule, what came, cure."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from kernrl import checks
from kernrl.approx.nystroem import Nystroem

LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "strict": array_api_strict.asarray}


def raises(error: type[Exception], text: str):
    """The error must have exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.fixture(params=LIBRARIES)
def asarray(request):
    return LIBRARIES[request.param]


# ---------------------------------------------------------------- the sentence


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("RBF", "x must be 2-D"), "RBF: x must be 2-D."),
        (("RBF", "x must be 2-D", (3,)), "RBF: x must be 2-D, got (3,)."),
        (("RBF", "x must be 2-D", 0, "Reshape it."), "RBF: x must be 2-D, got 0. Reshape it."),
        (("RBF", "it is late", None, "Hurry."), "RBF: it is late. Hurry."),
    ],
)
def test_sentence(parts, text) -> None:
    assert checks.sentence(*parts) == text


def test_fail_and_require_raise_the_sentence() -> None:
    with raises(ValueError, "A: rule, got 3. Cure."):
        checks.fail("A", "rule", 3, "Cure.")
    with raises(TypeError, "A: rule, got 3."):
        checks.require(False, "A", "rule", 3, error=TypeError)
    checks.require(True, "A", "rule", 3)


def test_warn_is_a_kernrl_warning_at_the_callers_line() -> None:
    def library() -> None:
        checks.warn("KLSTD", "the system is close to singular", "Raise ridge.")

    with pytest.warns(checks.KernrlWarning) as caught:
        library()
    assert str(caught[0].message) == "KLSTD: the system is close to singular. Raise ridge."
    assert caught[0].filename == __file__
    with pytest.warns(checks.ConditionWarning):
        checks.warn("A", "b", category=checks.ConditionWarning)
    assert issubclass(checks.ConditionWarning, checks.KernrlWarning)


def test_deprecated_names_the_new_thing_and_the_date() -> None:
    def old_name() -> None:
        checks.deprecated("KLSTD", "alpha", "ridge", "0.3")

    text = "KLSTD: alpha is deprecated and goes away in 0.3. Use ridge."
    with pytest.warns(DeprecationWarning, match=re.escape(text)) as caught:
        old_name()
    assert caught[0].filename == __file__


# ---------------------------------------------------------------- single values


def test_choice_lists_the_known_and_guesses() -> None:
    checks.choice("policy_loss", "kind", "clip", {"clip", "cispo"})
    known = "policy_loss: kind must be one of cispo, clip, gspo"
    with raises(ValueError, f"{known}, got 'clipp'. Did you mean 'clip'?"):
        checks.choice("policy_loss", "kind", "clipp", ["clip", "gspo", "cispo"])
    with raises(ValueError, f"{known}, got 'xyz'."):
        checks.choice("policy_loss", "kind", "xyz", ["clip", "gspo", "cispo"])
    for value in (None, 3, ["clip"], np.array(["clip", "gspo"])):
        with pytest.raises(ValueError, match="kind must be one of cispo, clip, gspo, got "):
            checks.choice("policy_loss", "kind", value, ["clip", "gspo", "cispo"])


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_real_returns_a_float(value) -> None:
    got = checks.real("A", "gamma", value, above=0, at_least=0, below=3, at_most=2)
    assert type(got) is float
    assert got == 2.0


@pytest.mark.parametrize(
    ("value", "bounds", "text"),
    [
        (0.0, {"above": 0}, "A: x must be a finite number above 0, got 0.0."),
        (-1.0, {"at_least": 0}, "A: x must be a finite number at least 0, got -1.0."),
        (1.0, {"below": 1}, "A: x must be a finite number below 1, got 1.0."),
        (1.5, {"at_most": 1}, "A: x must be a finite number at most 1, got 1.5."),
        (2, {"at_least": 0, "at_most": 1},
         "A: x must be a finite number at least 0 and at most 1, got 2."),
        (float("nan"), {}, "A: x must be a finite number, got nan."),
        (float("inf"), {"above": 0}, "A: x must be a finite number above 0, got inf."),
    ],
)  # fmt: skip
def test_real_names_its_bounds(value, bounds, text) -> None:
    with raises(ValueError, text):
        checks.real("A", "x", value, **bounds)


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1.0], np.bool_(True)])
def test_real_refuses_other_kinds(value) -> None:
    with raises(TypeError, f"A: x must be a finite number, got {value!r}."):
        checks.real("A", "x", value)


@pytest.mark.parametrize("value", [3, np.int32(3)])
def test_integer_returns_an_int(value) -> None:
    got = checks.integer("A", "n", value, at_least=3, at_most=3)
    assert type(got) is int
    assert got == 3


def test_integer_names_its_bounds() -> None:
    with raises(ValueError, "A: n must be an integer of at least 1, got 0."):
        checks.integer("A", "n", 0, at_least=1)
    with raises(ValueError, "A: n must be an integer of at least 1 and at most 5, got 6."):
        checks.integer("A", "n", 6, at_least=1, at_most=5)
    for value in (True, 2.0, "2", None):
        with raises(TypeError, f"A: n must be an integer, got {value!r}."):
            checks.integer("A", "n", value)


def test_path_takes_text_and_pathlike() -> None:
    assert checks.path("A", "file", "a/b") == checks.path("A", "file", Path("a/b")) == "a/b"
    for value in (None, 3, ["a"]):
        with raises(TypeError, f"A: file must be a path, got {value!r}."):
            checks.path("A", "file", value)


def test_features_are_an_instance_that_takes_a_kernel() -> None:
    checks.features("A", None)
    checks.features("A", Nystroem())
    cure = "Pass features=Nystroem(n_components=500), say."
    for value in ("nystroem", Nystroem):
        text = f"A: features must be None, Nystroem or RandomFeatures, got {value!r}. {cure}"
        with raises(TypeError, text):
            checks.features("A", value)


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int32", "uint8", "bool"])
def test_numeric_takes_numbers_and_booleans(asarray, dtype) -> None:
    checks.numeric("A", "x", asarray(np.ones(2, dtype)))


@pytest.mark.parametrize(
    "x",
    [
        np.array(["a"]),
        np.array([None]),
        np.array([1j]),
        np.array([b"a"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([1], dtype="timedelta64[s]"),
        np.array(["a"], dtype=np.dtypes.StringDType()),
        np.zeros(1, dtype=[("a", float)]),
        torch.ones(1, dtype=torch.complex64),
        array_api_strict.asarray([1j]),
    ],
    ids=lambda x: str(x.dtype),
)
def test_numeric_refuses_everything_else(x) -> None:
    text = (
        f"A: states must be real numbers, got dtype {x.dtype}. Convert it to a numeric array first."
    )
    with raises(TypeError, text):
        checks.numeric("A", "states", x)


def test_ndim(asarray) -> None:
    checks.ndim("A", "x", asarray([1.0]), 1)
    checks.ndim("A", "x", asarray([1.0]), (1, 2))
    with raises(ValueError, "A: x must have shape 2-D, got (1,)."):
        checks.ndim("A", "x", asarray([1.0]), 2)
    with raises(ValueError, "A: x must have shape 2-D or 3-D, got (1,)."):
        checks.ndim("A", "x", asarray([1.0]), (2, 3))
    with raises(ValueError, "A: x must have shape (n, d), got (1,)."):
        checks.ndim("A", "x", asarray([1.0]), 2, "(n, d)")


def test_not_empty(asarray) -> None:
    checks.not_empty("A", "x", asarray([1.0]))
    with raises(ValueError, "A: x must have at least one row, got (0, 3)."):
        checks.not_empty("A", "x", asarray(np.zeros((0, 3))))


def test_same_length(asarray) -> None:
    one, two = asarray([1.0]), asarray([1.0, 2.0])
    checks.same_length("A", 2, rewards=two, actions=None, flags=two)
    with raises(ValueError, "A: rewards must have as many rows as states (2), got 1."):
        checks.same_length("A", 2, flags=two, rewards=one)


def test_same_columns(asarray) -> None:
    checks.same_columns("RBF", asarray(np.ones((2, 3))), asarray(np.ones((5, 3))))
    text = "RBF: x and y must share their last axis, got x (2, 3) and y (4, 5)."
    with raises(ValueError, text):
        checks.same_columns("RBF", asarray(np.ones((2, 3))), asarray(np.ones((4, 5))))


# ---------------------------------------------------------------- finite


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("shape", [(20,), (20, 3), (20, 2, 2)])
def test_finite_names_the_first_bad_row(asarray, bad, shape) -> None:
    x = np.ones(shape)
    x[17, ...] = float(bad)
    x[19, ...] = float("nan")
    text = (
        f"KLSTD: every reward must be finite, got {float(bad)} at row 17. Drop or repair the row."
    )
    with raises(ValueError, text):
        checks.finite("KLSTD", "reward", asarray(x))


def test_finite_names_the_value_inside_its_row(asarray) -> None:
    x = np.arange(6.0).reshape(2, 3)
    x[1, 2] = -np.inf
    with pytest.raises(ValueError, match="got -inf at row 1"):
        checks.finite("A", "state", asarray(x))


def test_finite_words_can_be_changed(asarray) -> None:
    with raises(ValueError, "A: every logit must be finite, got nan at token 0."):
        checks.finite("A", "logit", asarray([float("nan")]), unit="token", cure="")


def test_finite_scalar(asarray) -> None:
    checks.finite("A", "x", asarray(1.0))
    with raises(ValueError, "A: x must be finite, got nan. Repair it."):
        checks.finite("A", "x", asarray(float("nan")), cure="Repair it.")


@pytest.mark.parametrize("x", [np.zeros((0, 3)), np.arange(3), np.array([True]), np.ones(())])
def test_finite_passes_what_cannot_be_wrong(asarray, x) -> None:
    checks.finite("A", "x", asarray(x))


def test_finite_is_not_fooled_by_overflow_and_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.finite("A", "x", np.full(4, 1.5e308))  # their sum is not finite
        with pytest.raises(ValueError, match="got inf at row 0"):
            checks.finite("A", "x", np.array([np.inf, -np.inf]))


# ---------------------------------------------------------------- the rest


def test_fitted_raises_scikit_learns_error() -> None:
    class Estimator:
        pass

    estimator = Estimator()
    with raises(NotFittedError, "Estimator: it must be fitted before use. Call fit(...) first."):
        checks.fitted(estimator, "weights_")
    estimator.weights_ = 1
    checks.fitted(estimator, "weights_")


def test_memory_says_the_numbers() -> None:
    checks.memory("gram", "the matrix", 2**30, 2**30, "")
    text = "gram: the matrix must fit in 1.0 GiB, got 2.5 GiB needed. Use matvec."
    with raises(MemoryError, text):
        checks.memory("gram", "the matrix", 2.5 * 2**30, 2**30, "Use matvec.")


def test_shape_is_plain_integers(asarray) -> None:
    shape = checks.shape(asarray(np.ones((2, 3))))
    assert shape == (2, 3)
    assert [type(k) for k in shape] == [int, int]
