"""A few worker processes and the events they send; a worker that dies takes one cell with it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernrl import checks
from kernrl.harness import machine
from kernrl.harness.experiment import Cell


@dataclass(frozen=True)
class Event:
    """What happened to a cell: "started", "at" (a point of its curve), "over" or "lost"."""

    kind: str
    cell: Cell
    content: dict[str, Any] = field(default_factory=dict)


class Worker:
    """One process of kernrl.harness.worker; its messages are put into a shared queue."""

    def __init__(self, messages: queue.SimpleQueue[tuple[Worker, dict[str, Any]]]) -> None:
        self.cell: Cell | None = None
        self.ready = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kernrl.harness.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env=os.environ | machine.one_thread() | {"PYTHONPATH": _path(), "MPLBACKEND": "Agg"},
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        threading.Thread(target=self._listen, args=(messages,), daemon=True).start()

    def send(self, request: dict[str, Any]) -> None:
        """Hand over a request; if the process is gone, its end is reported through the queue."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.errors.close()

    def last_words(self) -> str:
        """The end of what the process wrote to stderr outside of cells."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()[-2000:]

    def _listen(self, messages: queue.SimpleQueue[tuple[Worker, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                messages.put((self, json.loads(line)))
        messages.put((self, {"lost": self.process.wait()}))


class Workers:
    """A context of up to n workers that serve cells one by one."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.messages: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.all: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.all:
            worker.stop()

    def check(self, cells: Sequence[Cell]) -> list[str]:
        """What a worker complains about before anything is run."""
        worker = self._new()
        worker.send({"check": [asdict(cell) for cell in cells]})
        while True:
            _, message = self.messages.get()
            if "complaints" in message:
                return list(message["complaints"])
            self._note(worker, message)
            if "lost" in message:
                self.all.remove(worker)
                return [f"while importing or building them Python was ended by {end(message)}"]

    def run(self, cells: Sequence[Cell], folder: Path) -> Iterator[Event]:
        """Run every cell; its files go to folder/<id>. Yields what happens as it happens."""
        waiting = deque(cells)
        while len(self.all) < min(self.n, len(waiting)):
            self._new()
        free = list(self.all)
        busy = 0
        while waiting or busy:
            while free and waiting:
                worker, cell = free.pop(), waiting.popleft()
                worker.cell, busy = cell, busy + 1
                worker.send({"run": asdict(cell), "folder": str(folder)})
                yield Event("started", cell)
            worker, message = self.messages.get()
            self._note(worker, message)
            if worker.cell is None:
                continue
            kind = next(key for key in message)
            if kind in ("at", "over", "lost"):
                yield Event(kind, worker.cell, message)
            if kind in ("over", "lost"):
                worker.cell, busy = None, busy - 1
                free.append(worker if kind == "over" else self._replace(worker))

    def _new(self) -> Worker:
        worker = Worker(self.messages)
        self.all.append(worker)
        return worker

    def _replace(self, worker: Worker) -> Worker:
        self.all.remove(worker)
        worker.stop()
        return self._new()

    def _note(self, worker: Worker, message: dict[str, Any]) -> None:
        """A worker that ends before it was ready will not be better the next time."""
        worker.ready = worker.ready or "ready" in message
        if "lost" in message and not worker.ready:
            text = worker.last_words() or end(message)
            checks.fail("run", "a worker process must start", text, error=RuntimeError)


def end(message: dict[str, Any]) -> str:
    """How a process ended: "signal SIGKILL" or "exit status 3"."""
    code = message["lost"]
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _path() -> str:
    """The launcher's import path: what can be imported here can be imported in a worker."""
    return os.pathsep.join(os.path.abspath(place or ".") for place in sys.path)
