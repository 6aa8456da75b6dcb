"""Statistics of scores: arrays (runs × tasks) in, numbers and intervals out; nothing is stored.

A one-dimensional array is one task. Functions that reduce a table also take a batch of tables
(b, runs, tasks) and then give (b,): that is what makes the bootstrap one array operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

from kernrl import arrays, checks

Array = Any
Statistic = Callable[[Array], Any]

FEWEST_RUNS = 3
MANY_RUNS = 10  # from here on quantiles of the bootstrap distribution beat its spread
CHUNK = 4_000_000  # resampled numbers held at once


@dataclass(frozen=True)
class Interval:
    """A confidence interval that says how it was made and from how many runs.

    >>> print(Interval(1.0, 2.5, "mean ± Student t", 5))
    [1, 2.5] (95 %, mean ± Student t, n = 5)
    """

    low: float
    high: float
    method: str
    n: int
    level: float = 0.95

    def __str__(self) -> str:
        percent = 100 * self.level
        return f"[{self.low:.4g}, {self.high:.4g}] ({percent:.3g} %, {self.method}, n = {self.n})"


# ---------------------------------------------------------------- one number from a table


def iqm(scores: Array) -> Any:  # (runs,), (runs, tasks) -> float; (b, runs, tasks) -> (b,)
    """Interquartile mean: the mean of the middle half of all runs × tasks scores.

    ⌊n/4⌋ scores are cut from either end, as in scipy.stats.trim_mean(scores, 0.25).
    Agarwal et al. (2021), "Deep RL at the edge of the statistical precipice", §4.3.

    >>> iqm([1.0, 2.0, 3.0, 100.0])
    2.5
    """
    pooled = np.sort(_pooled(_scores("iqm", scores)), axis=-1)
    cut = pooled.shape[-1] // 4
    return _plain(pooled[..., cut : pooled.shape[-1] - cut].mean(axis=-1))


def mean(scores: Array) -> Any:  # (runs, tasks) -> float; (b, runs, tasks) -> (b,)
    """The mean over runs and tasks."""
    return _plain(_pooled(_scores("mean", scores)).mean(axis=-1))


def median(scores: Array) -> Any:  # (runs, tasks) -> float; (b, runs, tasks) -> (b,)
    """The median over runs of each run's mean over tasks."""
    return _plain(np.median(_scores("median", scores).mean(axis=-1), axis=-1))


def performance_profile(scores: Array, thresholds: Array) -> Array:  # (runs, tasks), (k,) -> (k,)
    """F(τ) = fraction of all runs that score above τ, every task weighing the same.

    Agarwal et al. (2021), §4.2; Dolan & Moré (2002). Reads at ½ as the median score.
    A batch (b, runs, tasks) gives (b, k).
    """
    pooled = np.sort(_pooled(_scores("performance_profile", scores)), axis=-1)
    levels = np.asarray(thresholds, dtype=float).reshape(-1)
    rows = pooled.reshape(-1, pooled.shape[-1])
    above = [row.size - np.searchsorted(row, levels, side="right") for row in rows]
    return (np.array(above) / pooled.shape[-1]).reshape(*pooled.shape[:-1], levels.size)


def probability_of_improvement(scores_a: Array, scores_b: Array) -> float:
    """P(A > B) + ½ P(A = B) for one run of each, averaged over tasks.

    (runs_a, tasks), (runs_b, tasks) -> float. The Mann–Whitney statistic divided by runs_a·runs_b;
    Agarwal et al. (2021), §4.3. One half means no difference. The two may differ in runs.
    """
    owner = "probability_of_improvement"
    a, b = _scores(owner, scores_a, "scores_a"), _scores(owner, scores_b, "scores_b")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        got = f"{checks.shape(a)} and {checks.shape(b)}"
        checks.fail(owner, "both tables must be (runs, tasks) with the same tasks", got)
    return float(np.mean(np.sign(a[:, None] - b[None]) / 2 + 0.5))


# ---------------------------------------------------------------- learning curves


def auc(steps: Array, values: Array) -> Any:  # (k,), (..., k) -> (...)
    """Mean height of a learning curve over its steps: ∫ v ds / (s_k − s_1), by trapezoids.

    In the unit of the scores, so curves of different lengths can be compared.

    >>> auc([0, 10, 20], [0.0, 1.0, 1.0])
    0.75
    """
    x, y = _curve("auc", steps, values)
    if x.size == 1:
        return _plain(y[..., 0])
    return _plain(np.trapezoid(y, x, axis=-1) / (x[-1] - x[0]))


def steps_to_threshold(steps: Array, values: Array, threshold: float) -> Any:
    """First step at which the curve is at or above `threshold`; inf if it never is.

    (k,), (..., k) -> (...). No interpolation: a score between two evaluations was never seen.

    >>> steps_to_threshold([100, 200, 300], [1.0, 5.0, 4.0], 5)
    200.0
    """
    x, y = _curve("steps_to_threshold", steps, values)
    reached = y >= threshold
    first = x[np.argmax(reached, axis=-1)]
    return _plain(np.where(reached.any(axis=-1), first, np.inf))


# ---------------------------------------------------------------- intervals


def mean_interval(scores: Array, *, level: float = 0.95) -> Interval:  # (runs, tasks)
    """Student's t interval of the mean over runs and tasks, tasks being fixed strata.

    se² = Σ_task s²_task / (n T²), with Welch–Satterthwaite degrees of freedom; for one task this
    is the textbook t interval. Measured coverage of 95 %: 96 % on normal scores at n = 5,
    but 86 % on exponential and 81 % on lognormal ones: prefer `bootstrap_interval(scores, iqm)`.
    """
    table = _enough("mean_interval", scores)
    level = checks.real("mean_interval", "level", level, above=0, below=1)
    n, tasks = table.shape
    parts = table.var(axis=0, ddof=1) / (n * tasks**2)
    variance = parts.sum()
    freedom = (n - 1) * variance**2 / (parts**2).sum() if variance > 0 else n - 1
    half = student.ppf((1 + level) / 2, freedom) * np.sqrt(variance)
    centre = table.mean()
    return Interval(float(centre - half), float(centre + half), "mean ± Student t", n, level)


def bootstrap_interval(
    scores: Array,  # (runs, tasks)
    statistic: Statistic,
    *,
    n_resamples: int = 10_000,
    level: float = 0.95,
    rng: arrays.Seed = None,
) -> Interval:
    """Interval of any statistic of a table, resampling runs within each task (stratified).

    Fewer than 10 runs: estimate ± t_{n−1} · √(n/(n−1)) · (spread of the resampled statistic).
    From 10 runs on: quantiles of the resampled statistic at the levels Φ(∓√(n/(n−1)) t_{n−1}),
    the expanded percentile interval of Hesterberg (2015), "What teachers should know about the
    bootstrap". The plain percentile interval that the field prints is too narrow: of its 95 %
    it kept 85 % for means and 88–91 % for IQMs of 5 runs. Measured here for the IQM, nominal 95 %,
    on normal, exponential, lognormal and capped scores: 94–98 % at n = 5, 96–97 % at n = 10;
    on a 70 % chance of solving: 78 % at n = 5 (one sample in six has no failure in it), 95 % at 10.
    The bootstrap-t (studentised by its own error) was tried too: infinite where resamples tie.

    `statistic` may take a batch (b, runs, tasks) -> (b,), which is fast, or one table -> float.
    rng=None is seed 0: the same scores always give the same interval. Raises under 3 runs.
    """
    owner = "bootstrap_interval"
    table = _enough(owner, scores)
    level = checks.real(owner, "level", level, above=0, below=1)
    checks.integer(owner, "n_resamples", n_resamples, at_least=100)
    if not callable(statistic):
        rule = "statistic must be a function of scores, such as iqm"
        checks.fail(owner, rule, repr(statistic), error=TypeError)
    n = table.shape[0]
    resampled = _resample(table, statistic, n_resamples, arrays.rng(0 if rng is None else rng))
    quantile = student.ppf((1 + level) / 2, n - 1) * np.sqrt(n / (n - 1))
    if n < MANY_RUNS:
        centre, half = float(statistic(table)), quantile * float(resampled.std())
        return Interval(centre - half, centre + half, "stratified bootstrap t", n, level)
    from scipy.special import ndtr

    low, high = np.quantile(resampled, [ndtr(-quantile), ndtr(quantile)])
    method = "stratified bootstrap, expanded percentile"
    return Interval(float(low), float(high), method, n, level)


def _resample(table: Array, statistic: Statistic, n_resamples: int, rng: Any) -> Array:
    """The statistic of `n_resamples` stratified resamples. (runs, tasks) -> (n_resamples,)"""
    n, tasks = table.shape
    apply = statistic if _takes_batches(statistic, table) else _one_by_one(statistic)
    per_chunk = max(1, CHUNK // table.size)
    column = np.arange(tasks)
    out = []
    for start in range(0, n_resamples, per_chunk):
        size = min(per_chunk, n_resamples - start)
        rows = rng.integers(0, n, size=(size, n, tasks))
        out.append(np.asarray(apply(table[rows, column]), dtype=float))
    return np.concatenate(out)


def _takes_batches(statistic: Statistic, table: Array) -> bool:
    """Whether `statistic` reduces a batch table by table: tried on three that differ."""
    probe = np.stack([table, table[::-1] + 1.0, 2.0 * table])
    try:
        got = np.asarray(statistic(probe))
    except Exception:  # any refusal of a third axis means the same: call it once a table
        return False
    if got.shape != (3,):
        return False
    return bool(np.allclose(got, [statistic(one) for one in probe], rtol=1e-9, atol=1e-12))


def _one_by_one(statistic: Statistic) -> Statistic:
    return lambda batch: [float(statistic(one)) for one in batch]


# ---------------------------------------------------------------- shapes


def _scores(owner: str, scores: Array, name: str = "scores") -> Array:
    """(runs,) -> (runs, 1); (runs, tasks) and (b, runs, tasks) stay; NaN is refused."""
    x = np.asarray(arrays.take(owner, name, scores), dtype=float)
    checks.ndim(owner, name, x, (1, 2, 3), "(runs,) or (runs, tasks)")
    if x.ndim == 1:
        x = x[:, None]
    checks.require(
        x.shape[-1] > 0 and x.shape[-2] > 0, owner, f"{name} must not be empty", checks.shape(x)
    )
    checks.finite(owner, name.removesuffix("s"), x, cure="Leave failed runs out.")
    return x


def _enough(owner: str, scores: Array) -> Array:
    table = _scores(owner, scores)
    checks.ndim(owner, "scores", table, 2, "(runs, tasks)")
    if table.shape[0] < FEWEST_RUNS:
        cure = "Run more seeds, or show the scores themselves."
        checks.fail(owner, f"scores must have at least {FEWEST_RUNS} runs", table.shape[0], cure)
    return table


def _pooled(table: Array) -> Array:  # (..., runs, tasks) -> (..., runs · tasks)
    return table.reshape(*table.shape[:-2], -1)


def _curve(owner: str, steps: Array, values: Array) -> tuple[Array, Array]:
    x = np.asarray(arrays.take(owner, "steps", steps), dtype=float)
    y = np.asarray(arrays.take(owner, "values", values), dtype=float)
    checks.ndim(owner, "steps", x, 1, "(k,)")
    checks.not_empty(owner, "steps", x)
    if y.ndim == 0 or y.shape[-1] != x.size:
        checks.fail(owner, f"values must end in as many columns as steps ({x.size})", y.shape)
    if x.size > 1 and not np.all(np.diff(x) > 0):
        checks.fail(owner, "steps must increase", f"{x.tolist()}")
    return x, y


def _plain(x: Array) -> Any:
    """A zero-dimensional result as a float."""
    return float(x) if np.ndim(x) == 0 else x
