"""How a row is timed: alternating repeats, the best of each, wall and CPU seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One library on one case: the best of the repeats, and what was counted in them."""

    case: str
    library: str
    seconds: float
    cpu_seconds: float
    work: float
    unit: str
    repeats: int

    @property
    def rate(self) -> float:
        """Units of work per wall second."""
        return self.work / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        return {**asdict(self), "rate": self.rate}


@dataclass(frozen=True)
class Case:
    """The same work by several libraries; `contenders` maps a library's name to what it runs."""

    name: str
    work: float
    unit: str
    contenders: dict[str, Callable[[], Any]]
    repeats: int = REPEATS


def run(case: Case) -> Iterable[Row]:
    """One row a library. The libraries take turns, so that a busy moment hits all alike."""
    best = {name: (float("inf"), float("inf")) for name in case.contenders}
    if case.repeats > 1:
        for work in case.contenders.values():
            work()  # first touches: caches, lazy imports, thread pools
    for _ in range(case.repeats):
        for name, work in case.contenders.items():
            best[name] = min(best[name], _timed(work))
    for name, (wall, cpu) in best.items():
        yield Row(case.name, name, wall, cpu, case.work, case.unit, case.repeats)


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
