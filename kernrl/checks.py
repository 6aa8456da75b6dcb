"""Every error sentence of the library: `Owner: what must hold, got what. What to do.`

Floor 0: it knows no array library by name, so that `arrays` itself can raise through it.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from array_api_compat import array_namespace

Array = Any


class KernrlWarning(UserWarning):
    """Base of every warning kernrl gives about data or numerics."""


class ConditionWarning(KernrlWarning):
    """A linear system is so badly conditioned that its solution has few correct digits."""


def sentence(owner: str, rule: str, got: object = None, cure: str = "") -> str:
    """One error sentence in the house form."""
    text = f"{owner}: {rule}"
    if got is not None:
        text += f", got {got}"
    text += "."
    if cure:
        text += f" {cure}"
    return text


def fail(
    owner: str,
    rule: str,
    got: object = None,
    cure: str = "",
    error: type[Exception] = ValueError,
) -> NoReturn:
    """Raise `error` with the house sentence."""
    raise error(sentence(owner, rule, got, cure))


def require(
    condition: bool,
    owner: str,
    rule: str,
    got: object = None,
    cure: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise unless `condition`. For cheap `got`; build costly texts behind an `if`."""
    if not condition:
        fail(owner, rule, got, cure, error)


def warn(owner: str, what: str, cure: str = "", category: type[Warning] = KernrlWarning) -> None:
    """Warn at the user's line: `Owner: what happened. What to do.`"""
    warnings.warn(sentence(owner, what, None, cure), category, stacklevel=3)


def choice(owner: str, name: str, value: object, known: Iterable[str]) -> None:
    """`value` must be one of `known`; the error lists them and guesses what was meant."""
    names = sorted(known)
    if isinstance(value, str) and value in names:
        return
    guess = difflib.get_close_matches(str(value), names, n=1)
    cure = f"Did you mean {guess[0]!r}?" if guess else ""
    fail(owner, f"{name} must be one of {', '.join(names)}", repr(value), cure)


def real(
    owner: str,
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """A finite real number within the stated bounds, returned as float."""
    bounds = [
        text
        for limit, text in (
            (above, f"above {above}"),
            (at_least, f"at least {at_least}"),
            (below, f"below {below}"),
            (at_most, f"at most {at_most}"),
        )
        if limit is not None
    ]
    rule = f"{name} must be a finite number" + (f" {' and '.join(bounds)}" if bounds else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(owner, rule, repr(value), error=TypeError)
    number = float(value)
    inside = (
        math.isfinite(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    require(inside, owner, rule, value)
    return number


def integer(
    owner: str, name: str, value: object, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """An integer (not a bool) within the stated bounds, returned as int."""
    rule = f"{name} must be an integer"
    if at_least is not None:
        rule += f" of at least {at_least}"
    if at_most is not None:
        rule += f" and at most {at_most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        fail(owner, rule, repr(value), error=TypeError)
    number = int(value)
    inside = (at_least is None or number >= at_least) and (at_most is None or number <= at_most)
    require(inside, owner, rule, value)
    return number


def path(owner: str, name: str, value: object) -> str:
    """A file or folder name (text or PathLike), returned as text."""
    if not isinstance(value, str | os.PathLike):
        fail(owner, f"{name} must be a path", repr(value), error=TypeError)
    return os.fsdecode(value)


def features(owner: str, value: object) -> None:
    """None, or an instance that makes features with the kernel of its estimator."""
    if value is None or (hasattr(value, "with_kernel") and not isinstance(value, type)):
        return
    cure = "Pass features=Nystroem(n_components=500), say."
    fail(owner, "features must be None, Nystroem or RandomFeatures", repr(value), cure, TypeError)


def numeric(owner: str, name: str, x: Array) -> None:
    """`x` must hold numbers or booleans; complex numbers, strings and objects are refused."""
    xp = array_namespace(x)
    dtype = x.dtype
    kind = getattr(dtype, "kind", None)
    bad = (
        kind not in "biuf"
        if kind is not None
        else not xp.isdtype(dtype, ("real floating", "integral", "bool"))
    )
    if bad:
        fail(
            owner,
            f"{name} must be real numbers",
            f"dtype {dtype}",
            "Convert it to a numeric array first.",
            TypeError,
        )


def ndim(owner: str, name: str, x: Array, dims: int | Sequence[int], letters: str = "") -> None:
    """`x` must have `dims` axes (or one of them); `letters` names them, such as "(n, d)"."""
    allowed = (dims,) if isinstance(dims, int) else tuple(dims)
    if x.ndim not in allowed:
        wanted = letters or " or ".join(f"{k}-D" for k in allowed)
        fail(owner, f"{name} must have shape {wanted}", shape(x))


def not_empty(owner: str, name: str, x: Array) -> None:
    """`x` must have at least one row."""
    require(x.shape[0] > 0, owner, f"{name} must have at least one row", shape(x))


def same_length(owner: str, n: int, **arrays: Array) -> None:
    """Every named array that is not None must have n rows."""
    for name, x in arrays.items():
        if x is not None and x.shape[0] != n:
            fail(owner, f"{name} must have as many rows as states ({n})", x.shape[0])


def same_columns(owner: str, x: Array, y: Array) -> None:
    """Two matrices must share their last axis."""
    if x.shape[-1] != y.shape[-1]:
        fail(owner, "x and y must share their last axis", f"x {shape(x)} and y {shape(y)}")


def finite(
    owner: str, name: str, x: Array, *, unit: str = "row", cure: str = "Drop or repair the row."
) -> None:
    """No NaN or infinity; the error names the first offending row. Cost: one pass over x."""
    xp = array_namespace(x)
    if not xp.isdtype(x.dtype, "real floating"):
        return
    bad = ~xp.isfinite(x)  # not isfinite(sum(x)): that warns on ∞ − ∞ and overflows on fine data
    if not bool(xp.any(bad)):
        return
    if x.ndim == 0:
        fail(owner, f"{name} must be finite", float(x), cure)
    rows = bad if x.ndim == 1 else xp.any(xp.reshape(bad, (x.shape[0], -1)), axis=1)
    row = int(xp.argmax(xp.astype(rows, xp.int32)))
    values = xp.reshape(x[row, ...], (-1,))
    value = float(values[int(xp.argmax(xp.astype(~xp.isfinite(values), xp.int32)))])
    fail(owner, f"every {name} must be finite", f"{value} at {unit} {row}", cure)


def fitted(estimator: object, attribute: str) -> None:
    """Raise scikit-learn's NotFittedError unless `estimator` has learnt `attribute`."""
    if hasattr(estimator, attribute):
        return
    from sklearn.exceptions import NotFittedError

    owner = type(estimator).__name__
    raise NotFittedError(
        sentence(owner, "it must be fitted before use", None, "Call fit(...) first.")
    )


def memory(owner: str, what: str, n_bytes: float, limit_bytes: float, cure: str) -> None:
    """Refuse an allocation above a limit before it is tried; the error says the number."""
    if n_bytes > limit_bytes:
        fail(
            owner,
            f"{what} must fit in {limit_bytes / 2**30:.1f} GiB",
            f"{n_bytes / 2**30:.1f} GiB needed",
            cure,
            MemoryError,
        )


def deprecated(owner: str, old: str, new: str, removed_in: str) -> None:
    """Warn that `old` is now `new` and when `old` goes away."""
    warnings.warn(
        f"{owner}: {old} is deprecated and goes away in {removed_in}. Use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )


def shape(x: Array) -> tuple[int, ...]:
    """The shape of an array as a plain tuple of ints, for error texts."""
    return tuple(int(k) for k in x.shape)
