"""How a row is timed: alternating repeats, the best of each, wall and CPU seconds."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
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
    extra_bytes: float | None = None  # the peak of one more call above what was there before it

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
    memory: bool = False  # measure extra_bytes as well


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
        extra = extra_bytes(case.contenders[name]) if case.memory else None
        yield Row(case.name, name, wall, cpu, case.work, case.unit, case.repeats, extra)


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def extra_bytes(work: Callable[[], Any]) -> float | None:
    """How far one call raises this process's memory; None where it cannot be read."""
    if sys.platform != "linux":
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed is not this one's to use unseen
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    work()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(x.split()[1]) for x in lines if x.startswith(field))
