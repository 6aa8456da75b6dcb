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

Array = Any
Vector = np.ndarray


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
    def ahead(self) -> tuple[Vector, Vector]:
        """The rows that have a −γ, and the points it stands at."""
        rows = np.flatnonzero(self.discount)
        return rows, self.here[rows] + 1

    def apply(self, x: Vector) -> Vector:  # (p, ...) -> (n, ...)
        """H x, by differences: no product with H is formed."""
        out = x[self.here]
        rows, points = self.ahead
        out[rows] -= _beside(self.discount[rows], x) * x[points]
        return out

    def spread(self, y: Vector) -> Vector:  # (n, ...) -> (p, ...)
        """Hᵀ y."""
        out = np.zeros((len(self.points), *y.shape[1:]))
        out[self.here] = y
        rows, points = self.ahead
        out[points] -= _beside(self.discount[rows], y) * y[rows]
        return out

    def congruence(self, k: Vector) -> Vector:  # (p, p) -> (n, n)
        """H K Hᵀ. O(p²)."""
        half = self.apply(k)
        out = half[:, self.here]
        rows, points = self.ahead
        out[:, rows] -= half[:, points] * self.discount[rows]
        return out

    def spread_both(self, m: Vector) -> Vector:  # (n, n) -> (p, p)
        """Hᵀ M H: the gradient of f(H K Hᵀ) with respect to K, if M is that of f. O(p²)."""
        half = self.spread(m)
        out = np.zeros((len(self.points), len(self.points)))
        out[:, self.here] = half
        rows, points = self.ahead
        out[:, points] -= half[:, rows] * self.discount[rows]
        return out

    def own_noise(self) -> Vector:  # (n,)
        """The diagonal of HHᵀ."""
        return 1.0 + self.discount**2

    @property
    def is_square(self) -> bool:
        """Every episode terminated: H is then invertible, with determinant 1."""
        return len(self) == len(self.points)

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
    starts = np.array(arrays.host(t.episode_starts))
    same = np.all(following[:-1] == states[1:], axis=1)
    starts[1:] |= ~same | terminated[:-1] | truncated[:-1]
    starts[0] = end is None or not np.array_equal(end, states[0])
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
