"""From a run folder to numbers: scores, learning curves, comparisons. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernrl.harness import stats
from kernrl.harness.records import Run
from kernrl.harness.stats import Interval

Array = Any
CURVE_RESAMPLES = 2_000  # a band is looked at, not quoted
GRID = 50  # points of an averaged curve whose seeds were not evaluated at the same places


@dataclass(frozen=True)
class Trace:
    """The learning curve of one run: k evaluations."""

    seed: int
    steps: Array  # (k,)
    cpu: Array  # (k,) training seconds
    score: Array  # (k,) mean return


@dataclass(frozen=True)
class Band:
    """A curve averaged over runs: IQM and its interval; low and high are NaN under three runs."""

    x: Array
    middle: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Result:
    """One agent in one environment: its runs, and what follows from them."""

    agent: str
    env: str
    seeds: list[int]
    scores: Array  # (n,) mean return of each run's report episodes
    failed: int
    steps: float  # executed, median over runs
    cpu_s: float
    wall_s: float
    peak_memory_mib: float
    threshold: float | None
    traces: list[Trace]

    @property
    def n(self) -> int:
        """Runs that finished."""
        return len(self.scores)

    @property
    def median(self) -> float:
        """Median over runs."""
        return float(np.median(self.scores))

    @property
    def iqm(self) -> float:
        """Interquartile mean over runs."""
        return float(stats.iqm(self.scores))

    @property
    def mean(self) -> float:
        """Mean over runs."""
        return float(np.mean(self.scores))

    @property
    def worst(self) -> float:
        """The worst run."""
        return float(np.min(self.scores))

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the IQM; None under three runs."""
        return stats.bootstrap_interval(self.scores, stats.iqm) if self._enough else None

    @property
    def mean_interval(self) -> Interval | None:
        """95 % t interval of the mean; None under three runs."""
        return stats.mean_interval(self.scores) if self._enough else None

    @property
    def auc(self) -> float:
        """Median over runs of the mean height of the learning curve."""
        return float(np.median([stats.auc(t.steps, t.score) for t in self.traces]))

    @property
    def solved_at(self) -> Array:
        """(n,) steps at which each run first reached the threshold; empty if there is none."""
        if self.threshold is None:
            return np.array([])
        found = [stats.steps_to_threshold(t.steps, t.score, self.threshold) for t in self.traces]
        return np.array(found)

    @property
    def solved(self) -> str:
        """How many runs reached the threshold while training: "4 of 5 at 6000 steps"."""
        at = self.solved_at
        reached = at[np.isfinite(at)]
        if not at.size:
            return ""
        text = f"{reached.size} of {at.size}"
        return f"{text} at {np.median(reached):.0f} steps" if reached.size else text

    @property
    def _enough(self) -> bool:
        return self.n >= stats.FEWEST_RUNS

    def band(self, axis: str) -> Band:
        """The averaged curve against "steps" or "cpu"; where all runs have one, no farther."""
        return average([getattr(t, axis) for t in self.traces], [t.score for t in self.traces])

    def row(self) -> dict[str, Any]:
        """What goes into scores.csv."""
        iqm, mean = self.interval, self.mean_interval
        reached = self.solved_at[np.isfinite(self.solved_at)]
        return {
            "env": self.env,
            "agent": self.agent,
            "runs": self.n,
            "failed": self.failed,
            "median": self.median,
            "iqm": self.iqm,
            "iqm_low": iqm.low if iqm else None,
            "iqm_high": iqm.high if iqm else None,
            "iqm_method": iqm.method if iqm else None,
            "mean": self.mean,
            "mean_low": mean.low if mean else None,
            "mean_high": mean.high if mean else None,
            "worst": self.worst,
            "auc": self.auc,
            "threshold": self.threshold,
            "reached_threshold": reached.size if self.threshold is not None else None,
            "steps_to_threshold": float(np.median(reached)) if reached.size else None,
            "executed_steps": self.steps,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "peak_memory_mib": self.peak_memory_mib,
        }


def summarise(run: Run) -> list[Result]:
    """The results of a run, env by env, agents in the order of the experiment."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in run.cells:
        groups.setdefault((cell["env"], cell["agent"]), []).append(cell)
    envs = list(dict.fromkeys(env for env, _ in groups))
    results = [_result(run, cells) for cells in groups.values()]
    return sorted((r for r in results if r.n), key=lambda r: envs.index(r.env))


def _result(run: Run, cells: list[dict[str, Any]]) -> Result:
    done = [cell for cell in cells if cell["status"] == "done"]

    def middle(key: str) -> float:
        return float(np.median([cell[key] for cell in done])) if done else float("nan")

    return Result(
        agent=cells[0]["agent"],
        env=cells[0]["env"],
        seeds=[cell["seed"] for cell in done],
        scores=np.array([cell["score"] for cell in done]),
        failed=len(cells) - len(done),
        steps=middle("steps"),
        cpu_s=middle("cpu_s"),
        wall_s=middle("wall_s"),
        peak_memory_mib=middle("peak_memory_mib"),
        threshold=done[0]["threshold"] if done else None,
        traces=[_trace(cell["seed"], run.rows(cell)) for cell in done],
    )


def _trace(seed: int, rows: list[dict[str, Any]]) -> Trace:
    points: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["stream"] == "select":
            points.setdefault(row["env_steps"], []).append(row)
    return Trace(
        seed,
        np.array(list(points), dtype=float),
        np.array([episodes[0]["cpu_s"] for episodes in points.values()]),
        np.array([np.mean([e["return"] for e in episodes]) for episodes in points.values()]),
    )


def average(xs: Iterable[Array], ys: Iterable[Array]) -> Band:
    """IQM and interval at every x. Runs seen at different places are interpolated linearly
    between the first x that all of them have and the last one.
    """
    xs, ys = list(xs), list(ys)
    if all(np.array_equal(x, xs[0]) for x in xs):
        grid = xs[0]
    else:
        grid = np.linspace(max(x[0] for x in xs), min(x[-1] for x in xs), GRID)
        grid = grid if np.all(np.diff(grid) > 0) else grid[:1]
    values = np.array([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])  # (n, k)
    middle = np.array([stats.iqm(column) for column in values.T])
    ends = np.full((2, len(grid)), np.nan)
    if len(values) >= stats.FEWEST_RUNS:
        for k, column in enumerate(values.T):
            found = stats.bootstrap_interval(column, stats.iqm, n_resamples=CURVE_RESAMPLES)
            ends[:, k] = found.low, found.high
    return Band(grid, middle, *ends)


def improvements(results: list[Result]) -> tuple[list[str], Array]:
    """Agents, and P(row beats column) averaged over the environments that both ran in."""
    agents = list(dict.fromkeys(r.agent for r in results))
    scores = {(r.agent, r.env): r.scores for r in results}
    envs = list(dict.fromkeys(r.env for r in results))
    table = np.full((len(agents), len(agents)), np.nan)
    for i, a in enumerate(agents):
        for j, b in enumerate(agents):
            shared = [e for e in envs if (a, e) in scores and (b, e) in scores]
            if i != j and shared:
                found = [
                    stats.probability_of_improvement(scores[a, e], scores[b, e]) for e in shared
                ]
                table[i, j] = np.mean(found)
    return agents, table
