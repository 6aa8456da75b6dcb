"""Showing a run while it runs: bars on a terminal, one plain line per cell elsewhere."""

from __future__ import annotations

from typing import Any

from kernrl.harness.experiment import Cell
from kernrl.harness.workers import Event


class Progress:
    """A context that shows events; silent if not `wanted`."""

    def __init__(self, plan: list[Cell], missing: list[Cell], wanted: bool = True) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, quiet=not wanted, highlight=False)
        self.total, self.over = len(plan), len(plan) - len(missing)
        self.steps = sum(cell.steps for cell in missing)
        self.at: dict[str, int] = {}
        self.tasks: dict[str, Any] = {}
        self.bars = self._bars() if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.over:
            self.console.print(f"{self.over} of {self.total} cells are there already.")
        if self.bars is not None:
            self.bars.start()
            self.whole = self.bars.add_task("all cells", total=max(1, self.steps), note="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def show(self, event: Event) -> None:
        """Show one event."""
        {"started": self._start, "at": self._move, "over": self._end}[event.kind](event)

    def _start(self, event: Event) -> None:
        cell = event.cell
        self.at[cell.id] = 0
        if self.bars is not None:
            self.tasks[cell.id] = self.bars.add_task(str(cell), total=cell.steps, note="")

    def _move(self, event: Event) -> None:
        cell, at = event.cell, event.content["at"]
        if self.bars is not None:
            at = min(at, cell.steps)
            note = f"{event.content['score']:.1f}"
            self.bars.update(self.tasks[cell.id], completed=at, note=note)
            self.bars.advance(self.whole, at - self.at[cell.id])
            self.at[cell.id] = at

    def _end(self, event: Event) -> None:
        cell, record = event.cell, event.content["over"]
        self.over += 1
        if self.bars is not None:
            self.bars.remove_task(self.tasks.pop(cell.id))
            self.bars.advance(self.whole, cell.steps - self.at[cell.id])
        self.console.print(_line(self.over, self.total, cell, record), markup=False, soft_wrap=True)

    def _bars(self) -> Any:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        return Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )


def _line(k: int, total: int, cell: Cell, record: dict[str, Any]) -> str:
    """[ 7/30] CartPole-v1 · PPO · seed 2: 498.2 after 20480 steps, 12.3 CPU s"""
    head = f"[{k:>{len(str(total))}}/{total}] {cell}: "
    if record["status"] != "done":
        return head + f"FAILED, {record['error']}".splitlines()[0]
    return (
        head + f"{record['score']:.1f} after {record['steps']} steps, {record['cpu_s']:.1f} CPU s"
    )
