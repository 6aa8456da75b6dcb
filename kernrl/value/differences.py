"""H of the model r = HV + N: a reward is a difference of two values (Engel, Mannor & Meir 2005).

Row i of H holds 1 at s_i and −γ at s'_i, or the 1 alone where the transition terminated. The points
of H are the visited states in order: where one row's next state is the next row's state in the same
episode they share a point, otherwise the next state is a point of its own (the open end of a
truncated episode, or of one that still runs). So −γ always stands one column right of the 1, and H
is never stored: its products are differences of neighbouring rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernrl import arrays
from kernrl.data.transitions import Transitions
from kernrl.kernels.gram import parallel_rows

Array = Any
Vector = np.ndarray

TILE_ROWS = 64  # a megabyte a tile at 2000 rows


@dataclass(frozen=True, eq=False)
class Differences:
    """The rows of H, and the points they touch. All on the host, in float64."""

    points: Vector  # (p, d)
    here: Vector  # (n,) int64: the point of s_i; that of s'_i is the one behind it
    discount: Vector  # (n,): γ, 0 where terminated
    starts: Vector  # (n,) bool: row i shares no point with row i − 1
    rewards: Vector  # (n,)
    is_open: bool  # the last row's episode has not ended: more rows may continue it

    def __len__(self) -> int:
        return int(self.here.size)

    @property
    def ahead(self) -> Vector:  # (n,) int64
        """The point of s'_i, or any point at all where there is none and γ is 0."""
        return np.minimum(self.here + 1, len(self.points) - 1)

    def apply(self, x: Vector) -> Vector:  # (p, ...) -> (n, ...)
        """H x, by differences: no product with H is formed."""
        return x[self.here] - _beside(self.discount, x) * x[self.ahead]

    def spread(self, y: Vector) -> Vector:  # (n, ...) -> (p, ...)
        """Hᵀ y."""
        first, one, second, gamma = self._transposed()
        return _beside(one, y) * y[first] - _beside(gamma, y) * y[second]

    def congruence(self, k: Vector) -> Vector:  # (p, p) -> (n, n)
        """H K Hᵀ. O(p²), each entry of K read once."""
        ones = np.ones(len(self))
        return _two_sided(k, (self.here, ones, self.ahead, self.discount))

    def spread_both(self, m: Vector, minus: Vector | None = None) -> Vector:  # (n, n) -> (p, p)
        """Hᵀ M H, less an outer square vvᵀ, v (p,). O(p²).

        Hᵀ(∂f/∂S)H is the gradient of f(HKHᵀ) with respect to K.
        """
        return _two_sided(m, self._transposed(), minus)

    def add_noise(self, s: Vector, noise: float, correlated: bool) -> None:  # (n, n), in place
        """S + Σ: σ²HHᵀ, which is tridiagonal, if correlated; else σ²I."""
        i = np.arange(len(self))
        if not correlated:
            s[i, i] += noise
            return
        s[i, i] += noise * (1.0 + self.discount**2)
        after = np.flatnonzero(~self.starts[1:]) + 1
        shared = noise * self.discount[after - 1]
        s[after, after - 1] -= shared
        s[after - 1, after] -= shared

    def _transposed(self) -> tuple[Vector, Vector, Vector, Vector]:
        """Hᵀ as two entries a row: (column, 1 or 0, column, γ or 0), like H itself."""
        p = len(self.points)
        first, one = np.zeros(p, dtype=np.int64), np.zeros(p)
        first[self.here], one[self.here] = np.arange(len(self)), 1.0
        second, gamma = np.zeros(p, dtype=np.int64), np.zeros(p)
        rows = np.flatnonzero(self.discount)
        second[self.here[rows] + 1], gamma[self.here[rows] + 1] = rows, self.discount[rows]
        return first, one, second, gamma

    @property
    def end(self) -> Vector | None:  # (d,)
        """The state where an open episode stands, for more rows to continue from."""
        return self.points[-1] if self.is_open else None

    def joined(self, more: Differences) -> Differences:
        """These rows and then `more`; an open end is shared if `more` continues it."""
        shared = not more.starts[0]
        return Differences(
            np.concatenate((self.points, more.points[int(shared) :])),
            np.concatenate((self.here, more.here + (len(self.points) - int(shared)))),
            np.concatenate((self.discount, more.discount)),
            np.concatenate((self.starts, more.starts)),
            np.concatenate((self.rewards, more.rewards)),
            more.is_open,
        )


def differences(t: Transitions, gamma: float, end: Vector | None = None) -> Differences:
    """The rows of t. They continue the episode that stands at `end`, if they begin there."""
    states, following = _host(t.states), _host(t.next_states)
    terminated, truncated = arrays.host(t.terminated), arrays.host(t.truncated)
    episode = arrays.host(t.episode)  # not t.episode_starts: online, each call here counts
    starts = np.empty(len(states), dtype=bool)
    starts[0] = end is None or not (end.shape == states[0].shape and (end == states[0]).all())
    starts[1:] = episode[1:] != episode[:-1]  # as it does behind every flag
    starts[1:] |= (following[:-1] != states[1:]).any(axis=1)
    alone = ~terminated & np.append(starts[1:], True)  # rows whose s' is a point of its own
    before = np.concatenate(([0], np.cumsum(alone)))
    here = np.arange(len(states)) + before[:-1]
    points = np.empty((len(states) + int(before[-1]), states.shape[1]))
    points[here] = states
    points[here[alone] + 1] = following[alone]
    return Differences(
        points,
        here,
        np.where(terminated, 0.0, gamma),
        starts,
        _host(t.rewards)[:, 0],
        not bool(terminated[-1] | truncated[-1]),
    )


def _host(x: Array) -> Vector:  # (n, ...) -> (n, d) float64
    return np.asarray(arrays.host(arrays.columns(x)), dtype=np.float64)


def _beside(v: Vector, x: Vector) -> Vector:
    """v (k,) shaped to scale the rows of x."""
    return v.reshape(-1, *([1] * (x.ndim - 1)))


def _two_sided(x: Vector, entries: tuple[Vector, ...], minus: Vector | None = None) -> Vector:
    """B X Bᵀ − vvᵀ for a B with rows a_i e_first − b_i e_second, in tiles that stay in cache."""
    first, a, second, b = entries
    n = len(first)
    out = np.empty((n, n))

    def work(start: int) -> None:
        rows = slice(start, min(start + TILE_ROWS, n))
        half = a[rows, None] * x[first[rows]]
        half -= b[rows, None] * x[second[rows]]
        tile = np.take(half, first, axis=1, out=out[rows], mode="clip")
        tile *= a
        half = np.take(half, second, axis=1, mode="clip")
        half *= b
        tile -= half
        if minus is not None:
            tile -= minus[rows, None] * minus

    parallel_rows(work, n, TILE_ROWS, n * n)
    return out
