"""The rules a row of experience keeps, and the choosing of rows: what Transitions is made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernrl import arrays, checks

Array = Any
Columns = dict[str, Array]  # every field by name; None where it is absent

FIELDS = (
    "states",
    "rewards",
    "next_states",
    "terminated",
    "actions",
    "next_actions",
    "truncated",
    "episode",
)
_NEEDED = ("states", "rewards", "next_states", "terminated")

# ---------------------------------------------------------------- checking


def checked(owner: str, given: Columns) -> Columns:
    """Every field as a fixed array that keeps the promises of Transitions, or one clear error."""
    states = arrays.take(owner, "states", given["states"])
    if states.ndim == 0:
        checks.fail(owner, "states must have shape (n, d) or (n,)", "a scalar")
    checks.not_empty(owner, "states", states)
    columns = {name: _beside(owner, name, given[name], states) for name in FIELDS}
    _check_shapes(owner, columns)
    columns["states"] = _as_states(columns["states"])
    columns["next_states"] = _as_states(columns["next_states"])
    columns["rewards"] = arrays.floating(columns["rewards"])
    for name in ("states", "actions", "rewards", "next_states", "next_actions"):
        if columns[name] is not None:
            checks.finite(owner, name.removesuffix("s"), columns[name])
    columns["terminated"] = _flags(owner, "terminated", columns["terminated"])
    if columns["truncated"] is None:
        columns["truncated"] = arrays.namespace(states).zeros_like(columns["terminated"])
    columns["truncated"] = _flags(owner, "truncated", columns["truncated"])
    columns["episode"] = _episodes(owner, columns)
    return {name: fixed(x, given[name]) for name, x in columns.items()}


def _beside(owner: str, name: str, x: object, states: Array) -> Array:
    """`x` as an array of n rows in the library and on the device of `states`; None stays None."""
    if x is None:
        if name in _NEEDED:
            checks.fail(owner, f"{name} must be an array", "None", error=TypeError)
        return None
    value = arrays.take(owner, name, x)
    if not arrays.is_array(x):
        value = arrays.namespace(states).asarray(value)
    arrays.namespace(states, value)  # refuses a mixture of libraries
    if value.ndim == 0:
        checks.fail(owner, f"{name} must have one entry for each row", "a scalar")
    checks.same_length(owner, int(states.shape[0]), **{name: value})
    return arrays.like(value, states, value.dtype)


def _as_states(x: Array) -> Array:
    return arrays.columns(x) if x.ndim == 1 else x


def _check_shapes(owner: str, columns: Columns) -> None:
    for name in ("rewards", "terminated", "truncated", "episode"):
        if columns[name] is not None:
            checks.ndim(owner, name, columns[name], 1, "(n,)")
    if columns["actions"] is not None:
        checks.ndim(owner, "actions", columns["actions"], (1, 2), "(n,) or (n, a)")
    for name in ("states", "actions"):
        x, after = columns[name], columns[f"next_{name}"]
        if after is not None and (x is None or checks.shape(x) != checks.shape(after)):
            got = f"{checks.shape(after)} and {'none' if x is None else checks.shape(x)}"
            checks.fail(owner, f"next_{name} must have the shape of {name}", got)
        if x is not None and 0 in checks.shape(x):
            checks.fail(owner, f"{name} must have at least one column", checks.shape(x))


def _flags(owner: str, name: str, x: Array) -> Array:
    """(n,) as booleans; anything but False, True, 0 and 1 is refused."""
    xp = arrays.namespace(x)
    if xp.isdtype(x.dtype, "bool"):
        return x
    bad = arrays.host((x != 0) & (x != 1))
    if bad.any():
        row = int(bad.argmax())
        got = f"{x[row].item()} at row {row}"
        checks.fail(owner, f"{name} must hold only True and False (or 0 and 1)", got)
    return x != 0


def _episodes(owner: str, columns: Columns) -> Array:
    """(n,) int64: the given ids, checked, or the runs that the flags cut out."""
    ends = arrays.host(columns["terminated"] | columns["truncated"])
    given = columns["episode"]
    if given is None:
        runs = np.concatenate([[0], np.cumsum(ends[:-1])])
        xp = arrays.namespace(columns["states"])
        return arrays.like(runs, columns["states"], xp.int64)
    xp = arrays.namespace(given)
    if not xp.isdtype(given.dtype, "integral"):
        checks.fail(owner, "episode must hold integers", f"dtype {given.dtype}", error=TypeError)
    ids = arrays.host(given)
    changes = ids[1:] != ids[:-1]
    if np.count_nonzero(changes) + 1 != np.unique(ids).size:
        rule = "the rows of an episode must be consecutive"
        checks.fail(owner, rule, "an id that comes back", "Sort the rows by episode and time.")
    runs_on = ends[:-1] & ~changes
    if runs_on.any():
        rule = "an episode must end at its terminated or truncated row"
        got = f"row {int(runs_on.argmax()) + 1} after the end"
        checks.fail(owner, rule, got, "Give the rows after the end another episode id.")
    return xp.astype(given, xp.int64, copy=False)


def fixed(x: Array, source: object = None) -> Array:
    """A NumPy array made read-only, copied first if it is memory of a writeable `source`."""
    if not isinstance(x, np.ndarray):
        return x
    x = np.asarray(x)
    if not x.dtype.isnative:  # a foreign byte order stops at BLAS and torch
        return fixed(x.astype(x.dtype.newbyteorder("=")))
    if x.flags.writeable:
        if isinstance(source, np.ndarray) and np.may_share_memory(x, source):
            x = x.copy()
        x.flags.writeable = False
    return x


# ---------------------------------------------------------------- choosing


def numbers(owner: str, key: object, n: int) -> np.ndarray:
    """Any key but a plain slice as row numbers in [0, n), or IndexError."""
    if isinstance(key, slice):
        return np.arange(n)[key]
    if isinstance(key, tuple) or key is None or key is Ellipsis:
        rule = "rows must be chosen along the first axis by one key"
        checks.fail(owner, rule, repr(key), error=IndexError)
    given = arrays.host(key) if arrays.is_array(key) else np.asarray(key)
    if given.dtype == np.bool_ and given.size:
        if given.shape != (n,):
            checks.fail(owner, f"a mask must have shape ({n},)", given.shape, error=IndexError)
        return np.flatnonzero(given)
    if given.ndim > 1 or (given.dtype.kind not in "iu" and given.size):
        rule = "rows must be chosen by integers, a slice or a mask"
        checks.fail(owner, rule, f"{given.dtype} {given.shape}", error=IndexError)
    found = np.atleast_1d(given).astype(np.int64)
    outside = (found < -n) | (found >= n)
    if outside.any():
        rule = f"a row number must be at least {-n} and below {n}"
        checks.fail(owner, rule, int(found[outside.argmax()]), error=IndexError)
    return np.where(found < 0, found + n, found)


def pick(x: Array, rows: np.ndarray) -> Array:
    """The rows of one field, on its own device; None stays None."""
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x[rows]
    xp = arrays.namespace(x)
    return xp.take(x, arrays.like(rows, x, xp.int64), axis=0)


def split_at_gaps(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Episode ids of the chosen rows, renumbered if an episode came apart in the choosing."""
    if rows.size == 0:
        return ids
    new = np.ones(rows.size, dtype=bool)
    new[1:] = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1] + 1)
    whole = np.count_nonzero(new) == np.unique(ids).size
    return ids if whole else np.cumsum(new) - 1
