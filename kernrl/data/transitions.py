"""Transitions: rows (s, a, r, s', a', terminated, truncated, episode), checked once, then fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data import rows

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
        for name, value in rows.checked("Transitions", self.columns).items():
            object.__setattr__(self, name, value)

    @classmethod
    def _trusted(cls, columns: dict[str, Array]) -> Transitions:
        """Rows that come from checked rows; their arrays are made read-only, not copied."""
        made = object.__new__(cls)
        for name in rows.FIELDS:
            object.__setattr__(made, name, rows.fixed(columns[name]))
        return made

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
        return {name: getattr(self, name) for name in rows.FIELDS}

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
            kept = rows.numbers("Transitions", key, self.n)
            chosen = {k: rows.pick(x, kept) for k, x in self.columns.items()}
            runs = rows.split_at_gaps(arrays.host(chosen["episode"]), kept)
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
            checks.choice("Transitions.replace", "the field", name, rows.FIELDS)
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
