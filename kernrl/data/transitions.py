"""Transitions: rows (s, a, r, s', a', terminated, truncated, episode), checked once, then fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np

from kernrl import arrays, checks

Array = Any


@dataclass(frozen=True, eq=False, repr=False)
class Transitions:
    """n checked rows of experience; immutable, and an X for scikit-learn as it is.

    `terminated` ends the value (no bootstrapping past it); `truncated` ends the episode only, so a
    truncated row still bootstraps from its next state. A row may carry both; terminated wins.
    `episode` names runs of consecutive rows: derived from the flags where it is not given. A
    selection that leaves a gap inside an episode splits it, so that traces and returns computed
    on the result never cross the gap.

    NumPy arrays are copied unless already read-only, then made read-only; torch and CuPy arrays
    have no such switch and are kept as they are. 1-D states become (n, 1).

    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
    >>> t, t.shape, t[1:].rewards
    (Transitions(n=2, d=1, 1 episode), (2, 1), array([1.]))
    """

    states: Array  # (n, d)
    rewards: Array  # (n,)
    next_states: Array  # (n, d)
    terminated: Array  # (n,) bool
    _: KW_ONLY
    actions: Array = None  # (n,) or (n, a)
    next_actions: Array = None  # as actions
    truncated: Array = None  # (n,) bool
    episode: Array = None  # (n,) int64

    def __post_init__(self) -> None:
        for name, value in _checked(self).items():
            object.__setattr__(self, name, value)

    @classmethod
    def _trusted(cls, columns: dict[str, Array]) -> Transitions:
        """Rows that come from checked rows; their arrays are made read-only, not copied."""
        rows = object.__new__(cls)
        for name in FIELDS:
            object.__setattr__(rows, name, _fix(columns[name]))
        return rows

    # ------------------------------------------------------------ as a sequence of rows

    @property
    def n(self) -> int:
        return int(self.states.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `states`, (n, d): what scikit-learn asks of an X."""
        return checks.shape(self.states)

    @property
    def columns(self) -> dict[str, Array]:
        """Every field by name, None where absent."""
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def episode_starts(self) -> Array:  # (n,) bool
        """True at the first row of every episode: where traces and returns begin anew."""
        xp = arrays.namespace(self.episode)
        first = xp.ones_like(self.terminated[:1])
        return xp.concat([first, self.episode[1:] != self.episode[:-1]])

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        n_episodes = int(np.count_nonzero(arrays.host(self.episode_starts)))
        action = "" if self.actions is None else f", actions {_kind(self.actions)}"
        dims = "×".join(str(k) for k in self.shape[1:])
        plural = "" if n_episodes == 1 else "s"
        return f"Transitions(n={self.n}, d={dims}{action}, {n_episodes} episode{plural})"

    def __getitem__(self, key: Any) -> Transitions:
        """The chosen rows as Transitions: an int, a slice, a mask, indices, or (key, ...)."""
        if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
            key = key[0]  # how scikit-learn indexes whatever has a shape
        if isinstance(key, slice) and key.step in (None, 1):
            chosen = {k: None if x is None else x[key] for k, x in self.columns.items()}
        else:
            rows = _rows(key, self.n)
            chosen = {k: _pick(x, rows) for k, x in self.columns.items()}
            runs = _split_at_gaps(arrays.host(chosen["episode"]), rows)
            chosen["episode"] = arrays.like(runs, self.episode)
        checks.not_empty("Transitions", "a selection", chosen["states"])
        return self._trusted(chosen)

    def __iter__(self) -> Iterator[Transitions]:
        return (self[i : i + 1] for i in range(self.n))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        checks.fail(
            "Transitions",
            "it has no single array to be turned into",
            None,
            "Use one of its fields, for example .states.",
            TypeError,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.columns,)

    # ------------------------------------------------------------ new from old

    def replace(self, **changes: Array) -> Transitions:
        """The same rows with some fields exchanged, checked again."""
        for name in changes:
            checks.choice("Transitions.replace", "the field", name, FIELDS)
        return Transitions(**{**self.columns, **changes})

    @staticmethod
    def concatenate(parts: Iterable[Transitions]) -> Transitions:
        """All rows in order; the episodes of different parts stay different.

        Renumbers episodes 0, 1, 2, … in order of appearance.
        """
        parts = list(parts)
        checks.require(
            len(parts) > 0, "Transitions.concatenate", "it needs at least one part", "none"
        )
        for k, part in enumerate(parts):
            _check_part(parts[0], part, k)
        xp = arrays.namespace(*(part.states for part in parts))
        joined: dict[str, Array] = {}
        for name, first in parts[0].columns.items():
            joined[name] = (
                None if first is None else xp.concat([getattr(part, name) for part in parts])
            )
        starts = np.concatenate([arrays.host(part.episode_starts) for part in parts])
        joined["episode"] = arrays.like(np.cumsum(starts) - 1, parts[0].episode)
        return Transitions._trusted(joined)

    # ------------------------------------------------------------ files and other libraries

    def to_parquet(self, path: Any) -> None:
        """Write one parquet file, atomically. Needs pyarrow (extra `data`)."""
        from kernrl.data import parquet

        parquet.write(self, path)

    @staticmethod
    def from_parquet(path: Any) -> Transitions:
        """The rows of a file written by `to_parquet`: same dtypes and shapes, as NumPy arrays."""
        from kernrl.data import parquet

        return parquet.read(path)

    @staticmethod
    def from_minari(dataset: Any) -> Transitions:
        """The rows of a Minari dataset (or of the id of a local one). Needs minari."""
        from kernrl.data import minari

        return minari.read(dataset)


FIELDS = tuple(field.name for field in fields(Transitions))


# ---------------------------------------------------------------- checking


def _checked(t: Transitions) -> dict[str, Array]:
    """Every field as a fixed array that keeps the promises of the class."""
    owner = "Transitions"
    states = arrays.take(owner, "states", t.states)
    checks.require(
        states.ndim > 0, owner, "states must have shape (n, d) or (n,)", checks.shape(states)
    )
    checks.not_empty(owner, "states", states)
    n = int(states.shape[0])
    given = {k: _beside(owner, k, getattr(t, k), states, n) for k in FIELDS if k != "states"}
    columns = {"states": states, **given}
    for name in ("states", "next_states"):
        columns[name] = _as_states(columns[name])
    if checks.shape(columns["states"]) != checks.shape(columns["next_states"]):
        got = f"{checks.shape(columns['next_states'])} and {checks.shape(columns['states'])}"
        checks.fail(owner, "next_states must have the shape of states", got)
    for name in ("rewards", "terminated", "truncated", "episode"):
        if columns[name] is not None:
            checks.ndim(owner, name, columns[name], 1, "(n,)")
    columns["rewards"] = arrays.floating(columns["rewards"])
    _check_actions(owner, columns["actions"], columns["next_actions"])
    for name in ("states", "actions", "rewards", "next_states", "next_actions"):
        if columns[name] is not None:
            checks.finite(owner, name.removesuffix("s"), columns[name])
    xp = arrays.namespace(states)
    columns["terminated"] = _flags(owner, "terminated", columns["terminated"])
    if columns["truncated"] is None:
        columns["truncated"] = xp.zeros_like(columns["terminated"])
    columns["truncated"] = _flags(owner, "truncated", columns["truncated"])
    columns["episode"] = _episodes(owner, columns)
    return {name: _fix(x, getattr(t, name)) for name, x in columns.items()}


def _beside(owner: str, name: str, x: object, states: Array, n: int) -> Array:
    """`x` as an array of n rows in the library and on the device of `states`; None stays None."""
    if x is None:
        if name in ("rewards", "next_states", "terminated"):
            checks.fail(owner, f"{name} must be an array", "None", error=TypeError)
        return None
    value = arrays.take(owner, name, x)
    if not arrays.is_array(x):
        value = arrays.namespace(states).asarray(value)
    arrays.namespace(states, value)
    if value.ndim == 0:
        checks.fail(owner, f"{name} must have n rows", "a scalar")
    checks.same_length(owner, n, **{name: value})
    return arrays.like(value, states, value.dtype)


def _as_states(x: Array) -> Array:
    return arrays.columns(x) if x.ndim == 1 else x


def _check_actions(owner: str, actions: Array, next_actions: Array) -> None:
    if actions is not None:
        checks.ndim(owner, "actions", actions, (1, 2), "(n,) or (n, a)")
    if next_actions is None:
        return
    if actions is None or checks.shape(actions) != checks.shape(next_actions):
        wanted = "no actions" if actions is None else checks.shape(actions)
        got = f"{checks.shape(next_actions)} and {wanted}"
        checks.fail(owner, "next_actions must have the shape of actions", got)


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


def _episodes(owner: str, columns: dict[str, Array]) -> Array:
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


def _fix(x: Array, source: object = None) -> Array:
    """A NumPy array made read-only, copied first if it is memory of a writeable `source`."""
    if not isinstance(x, np.ndarray):
        return x
    x = np.asarray(x)
    if x.flags.writeable:
        if isinstance(source, np.ndarray) and np.may_share_memory(x, source):
            x = x.copy()
        x.flags.writeable = False
    return x


# ---------------------------------------------------------------- choosing and joining rows


def _rows(key: object, n: int) -> np.ndarray:
    """Any key but a plain slice as row numbers in [0, n), or IndexError."""
    if isinstance(key, slice):
        return np.arange(n)[key]
    if isinstance(key, tuple) or key is None or key is Ellipsis:
        rule = "rows must be chosen along the first axis by one key"
        checks.fail("Transitions", rule, repr(key), error=IndexError)
    rows = arrays.host(key) if arrays.is_array(key) else np.asarray(key)
    if rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.dtype == np.bool_:
        if rows.shape != (n,):
            checks.fail("Transitions", f"a mask must have shape ({n},)", rows.shape, "", IndexError)
        return np.flatnonzero(rows)
    if rows.dtype.kind not in "iu" or rows.ndim > 1:
        rule = "rows must be chosen by integers, a slice or a mask"
        checks.fail("Transitions", rule, f"{rows.dtype} {rows.shape}", error=IndexError)
    rows = np.atleast_1d(rows).astype(np.int64)
    outside = (rows < -n) | (rows >= n)
    if outside.any():
        got = int(rows[outside.argmax()])
        checks.fail("Transitions", f"a row number must be in [-{n}, {n})", got, "", IndexError)
    return np.where(rows < 0, rows + n, rows)


def _pick(x: Array, rows: np.ndarray) -> Array:
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x[rows]
    xp = arrays.namespace(x)
    return xp.take(x, arrays.like(rows, x, xp.int64), axis=0)


def _split_at_gaps(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Episode ids of the chosen rows, renumbered if an episode came apart in the choosing."""
    if rows.size == 0:
        return ids
    new = np.ones(rows.size, dtype=bool)
    new[1:] = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1] + 1)
    whole = np.count_nonzero(new) == np.unique(ids).size
    return ids if whole else np.cumsum(new) - 1


def _check_part(first: Transitions, part: Transitions, k: int) -> None:
    owner = "Transitions.concatenate"
    if not isinstance(part, Transitions):
        checks.fail(
            owner,
            "every part must be Transitions",
            f"{type(part).__name__} at part {k}",
            "",
            TypeError,
        )
    for name, x in part.columns.items():
        mine = getattr(first, name)
        if (x is None) != (mine is None):
            checks.fail(owner, f"all parts must have {name} or none", f"a difference at part {k}")
        if x is not None and x.shape[1:] != mine.shape[1:]:
            rule = f"{name} must have the same columns in all parts"
            got = f"{checks.shape(mine)} and {checks.shape(x)} at part {k}"
            checks.fail(owner, rule, got)


def _kind(actions: Array) -> str:
    dims = "" if actions.ndim == 1 else f"(n, {int(actions.shape[1])}) "
    return f"{dims}{str(actions.dtype).removeprefix('torch.')}"


def _rebuild(columns: dict[str, Array]) -> Transitions:
    return Transitions._trusted(columns)
