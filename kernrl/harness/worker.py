"""The process that trains: `python -m kernrl.harness.worker`, JSON lines in and out.

A fresh interpreter, so that thread counts are set before NumPy loads, nothing is shared with the
launcher, and a script that calls run_experiment needs no `if __name__ == "__main__"`.

    {"check": [cells]}                 → {"complaints": [text, …]}
    {"run": cell, "folder": cells/}    → {"at": steps, "score": s} …, {"over": record}
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernrl.harness import environments, machine, records
from kernrl.harness.experiment import Cell
from kernrl.harness.training import make_agent, run_cell


def main() -> None:
    """Serve requests until the launcher closes the pipe."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")  # what agents print goes elsewhere
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    requests = _requests()
    send({"ready": os.getpid()})
    while True:
        request = requests.get()
        if "check" in request:
            send({"complaints": complaints([Cell(**cell) for cell in request["check"]])})
        else:
            cell, folder = Cell(**request["run"]), Path(request["folder"])
            send({"over": serve(cell, folder, lambda at, score: send({"at": at, "score": score}))})


def serve(cell: Cell, folder: Path, tell: Any) -> dict[str, Any]:
    """Run a cell in a hidden folder and move it into its place when all of it is there."""
    hidden, place = folder / f"{records.UNFINISHED}{cell.id}", folder / cell.id
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    with _output_to(hidden / "output.txt"):
        record = run_cell(cell, hidden, tell)
    shutil.rmtree(place, ignore_errors=True)  # an earlier failure
    os.replace(hidden, place)
    return record


def complaints(cells: list[Cell]) -> list[str]:
    """What would go wrong at once: agents that cannot be built, envs that cannot be made."""
    found: dict[str, None] = {}
    tried: set[str] = set()
    for cell in cells:
        for what, key, attempt in (
            (f"env {cell.env}", repr((cell.env_id, cell.env_kwargs, cell.n_envs)), _try_env),
            (f"agent {cell.agent}", repr((cell.agent_class, cell.params)), make_agent),
        ):
            if key in tried:
                continue
            tried.add(key)
            try:
                attempt(cell)
            except Exception as error:  # all of them are to be listed, whatever they are
                found[f"{what}: {_text(error)}"] = None
    return list(found)


def _try_env(cell: Cell) -> None:
    environments.make(cell.env_id, cell.env_kwargs, cell.n_envs).close()


def _text(error: Exception) -> str:
    """An error's sentence, with its type unless it is one of the house's own."""
    text = str(error)
    for owner in ("build: ", "env: "):
        if text.startswith(owner):
            return text.removeprefix(owner)
    return text if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {text}"


def _requests() -> queue.SimpleQueue[dict[str, Any]]:
    """Requests as they come. When the launcher is gone, however it ended, so is this process."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return waiting


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Everything printed, by Python or by libraries, goes to a file."""
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(before, 1)
            os.dup2(before, 2)
            os.close(before)


if __name__ == "__main__":
    machine.hold_torch()
    main()
