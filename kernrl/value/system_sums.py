"""The feature systems of off-policy evaluation as sums over episodes, and a value from sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kernrl import arrays, checks, linalg
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.bellman_loss import damped_least_squares
from kernrl.value.fqe import RegressionSystem
from kernrl.value.pair_rows import Weighted, pair_rows, start_pairs
from kernrl.value.system import BLOCK_ROWS, Rows, ridged

Array = Any

MOST_NUMBERS = 50_000_000  # of all units' sums, 400 MB: beyond it episodes are summed in groups
UNSEEN = 1e-6  # of k(z, z) that φ sees, below which z is unlike all data
FEW_UNSEEN = 0.01  # of the policy's actions that may be so without a word
DRAWS = 32  # whose sums are made by one product


class Sums(NamedTuple):
    """A = Σ φ(φ − γφ')ᵀ, C = Σ φφᵀ, b = Σ φr over n rows, and the mean φ(s₀, π)."""

    matrix: np.ndarray  # (m, m)
    gram: np.ndarray  # (m, m)
    target: np.ndarray  # (m,)
    start: np.ndarray  # (m,)
    n: float


# ---------------------------------------------------------------- values from sums


def lstdq(s: Sums, gamma: float, ridge: float, owner: str) -> float:
    """E Q(s₀, π) by KLSTDQ's one solve."""
    weights = linalg.solve(ridged(s.matrix, s.n * ridge), s.target, owner=owner)
    return float(s.start @ weights)


def fqe(s: Sums, gamma: float, ridge: float, owner: str) -> float:
    """E Q(s₀, π) by KernelFQE's rounds w ← Tw + t, run by doubling; NaN where they diverge.

    After k rounds w = Σ_{i<k} Tⁱt; after 2k, w + Tᵏw.
    """
    factor = linalg.cholesky(ridged(s.gram, s.n * ridge), owner=owner).lower
    power = linalg.solve_cholesky(factor, s.gram - s.matrix)
    w = linalg.solve_cholesky(factor, s.target)
    for _ in range(60):  # 2⁶⁰ rounds: nothing that converges needs them
        change = power @ w
        w, power = w + change, power @ power
        size = np.abs(change).max()
        if not size < 1e100:  # its square still is a number
            return float("nan")
        if size <= 1e-12 * np.abs(w).max():
            return float(s.start @ w)
    return float("nan")


def mql(s: Sums, gamma: float, ridge: float, owner: str) -> float:
    """E Q(s₀, π) with MQL's Q."""
    weights = damped_least_squares(s.matrix / s.n, s.target / s.n, ridge, owner=owner)
    return float(s.start @ weights)


def mwl(s: Sums, gamma: float, ridge: float, owner: str) -> float:
    """Σ w(z_i) r_i / (n(1 − γ)) with MWL's w."""
    weights = damped_least_squares(s.matrix.T / s.n, (1 - gamma) * s.start, ridge, owner=owner)
    return float(s.target @ weights) / s.n / (1 - gamma)


SOLUTIONS = {"lstdq": lstdq, "fqe": fqe, "mql": mql, "mwl": mwl}
# Small, since the interval does not cover the bias of a ridge and 200 landmarks regularise already.
# A random policy on CartPole, 3000 steps, γ = 0.95, worth 12.65 ± 0.14: lstdq 11.74, 12.36, 12.67,
# 12.75 at 1e-3, 1e-4, 1e-5, 1e-6; mql 12.06, 12.43, 12.70 at 1e-6, 1e-8, 1e-10.
RIDGES = {"lstdq": 1e-5, "fqe": 1e-5, "mql": 1e-10, "mwl": 1e-10}


# ---------------------------------------------------------------- sums from episodes


def system_statistic(
    owner: str,
    t: Transitions,
    policy: Any,
    kernel: Kernel,
    features: Any,
    initial_states: Array,
    method: str,
    gamma: float,
    ridge: float,
) -> tuple[Callable[[np.ndarray], np.ndarray], int, str]:
    """(counts (b, units) ↦ values (b,), the number of units, what a unit is)."""
    if not isinstance(kernel, Kernel):
        checks.fail(owner, "kernel must be a kernel", repr(kernel), error=TypeError)
    if method == "mwl":
        checks.real(owner, "gamma", gamma, below=1.0)
    rows = pair_rows(owner, policy, t)
    features = features.with_kernel(features.kernel or kernel.resolve(rows.points, rng=0))
    features.fit(rows.points)
    begins = start_pairs(owner, policy, t, initial_states)
    _warn_of_the_unseen(owner, features, (*begins, *rows.following))
    fixed = None if initial_states is None else _start(features, begins, None)
    size = int(features.transform(rows.points[:1, :]).shape[1])
    episodes, per_unit = _units(t, size)
    table = _Table(size, len(episodes))
    for k, (where, starts) in enumerate(episodes):
        start = None if fixed is not None else _start(features, begins, starts)
        table.put(k, _system(features, gamma, rows, where), start, starts.stop - starts.start)
    solve = SOLUTIONS[method]

    def statistic(counts: np.ndarray) -> np.ndarray:
        return np.array([solve(s, gamma, ridge, owner) for s in table.drawn(counts, fixed)])

    unit = "episodes" if per_unit == 1 else f"groups of {per_unit} episodes"
    return statistic, len(episodes), unit


def _warn_of_the_unseen(owner: str, features: Any, measure: tuple[Weighted, ...]) -> None:
    """Where all of φ is 0 a value is 0, whatever the data: no interval knows of that."""
    lost = total = 0.0
    for weights, z in measure:
        for start in range(0, int(z.shape[0]), BLOCK_ROWS):
            part = z[start : start + BLOCK_ROWS, :]
            mass = arrays.host(weights[start : start + BLOCK_ROWS])
            seen = (arrays.host(features.transform(part)) ** 2).sum(axis=1)
            lost += mass[seen <= UNSEEN * arrays.host(features.kernel_.diagonal(part))].sum()
            total += mass.sum()
    if lost > FEW_UNSEEN * total:
        checks.warn(
            owner,
            f"{lost / total:.0%} of what the policy does is unlike all data (an action that no row "
            "took, or states far away) and counts as worth 0, in the interval too",
            "Gather such data, or pass a kernel that sees likeness there.",
        )


class _Table:
    """The sums of every unit, one a row; a draw is counts times them."""

    def __init__(self, m: int, units: int) -> None:
        self.m = m
        self.numbers = np.zeros((units, 2 * m * m + 2 * m + 2))

    def put(
        self, k: int, system: RegressionSystem, start: np.ndarray | None, n_starts: int
    ) -> None:
        """Unit k; `start` is the sum of φ(s₀, π) over its n_starts episodes."""
        parts = [arrays.host(x).ravel() for x in (system.matrix, system.gram, system.target)]
        parts += [np.zeros(self.m) if start is None else start, [system.n, n_starts]]
        self.numbers[k] = np.concatenate(parts)

    def drawn(self, counts: np.ndarray, fixed: np.ndarray | None) -> Iterator[Sums]:
        """The sums of each draw (a row of counts); `fixed` is the mean start, if it is given."""
        m, cuts = self.m, np.cumsum([self.m**2, self.m**2, self.m, self.m])
        for first in range(0, len(counts), DRAWS):
            for row in counts[first : first + DRAWS] @ self.numbers:
                matrix, gram, target, start, (n, n_starts) = np.split(row, cuts)
                start = start / n_starts if fixed is None else fixed
                yield Sums(matrix.reshape(m, m), gram.reshape(m, m), target, start, n)


def _units(t: Transitions, m: int) -> tuple[list[tuple[slice, slice]], int]:
    """(rows, episodes) of each unit, and how many episodes make one (the last may have fewer)."""
    edges = np.append(np.flatnonzero(arrays.host(t.episode_starts)), len(t))
    n = len(edges) - 1
    most = max(1, MOST_NUMBERS // (2 * m * (m + 1) + 2))
    per_unit = -(-n // most)
    units = []
    for first in range(0, n, per_unit):
        last = min(first + per_unit, n)
        units.append((slice(int(edges[first]), int(edges[last])), slice(first, last)))
    return units, per_unit


def _system(features: Any, gamma: float, rows: Rows, where: slice) -> RegressionSystem:
    """The system of some rows."""
    system = RegressionSystem(features, gamma)
    following = tuple((c[where], z[where, :]) for c, z in rows.following)
    system.add(Rows(rows.points[where, :], rows.rewards[where], rows.starts[where], following))
    return system


def _start(features: Any, begins: Any, which: slice | None) -> np.ndarray:  # -> (m,)
    """Σ φ(s₀, π) over the episodes `which`; their mean over all where None."""
    part = slice(None) if which is None else which
    total = sum(
        arrays.host(c[part]).astype(np.float64) @ arrays.host(features.transform(z[part, :]))
        for c, z in begins
    )
    return total if which is not None else total / int(begins[0][0].shape[0])
