"""From an experiment to a finished run folder: what is missing is run, in parallel."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernrl import checks
from kernrl.harness import machine, records
from kernrl.harness.experiment import Cell, Experiment, load
from kernrl.harness.progress import Progress
from kernrl.harness.records import Run
from kernrl.harness.training import describe
from kernrl.harness.workers import Event, Workers, end

FORMAT = 1  # of the run folder


class Stopped(KeyboardInterrupt):
    """Ctrl-C during a run; says where the finished cells are and how to go on."""


def run_experiment(
    config: str | Path | Mapping[str, Any] | Experiment,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    out: str | Path = "runs",
    resume: bool = False,
    quick: bool = False,
    progress: bool = True,
) -> Run:
    """Run every agent × env × seed of an experiment; returns the run, which lies in a new folder.

    `config` is a TOML file, a mapping of the same form, or an Experiment. `seeds` replaces the
    number of seeds, `quick` cuts everything down to see whether it runs at all, `jobs` is the
    number of processes (default: the cores), `out` is where run folders go.

    The folder <out>/<name>-<time> appears when all cells have ended. A cell that fails is recorded
    with its traceback and does not stop the others. After an interruption of any kind
    `resume=True` takes up the newest folder that shares cells with this experiment, and runs only
    what is missing or failed. Ctrl-C raises Stopped. Two runs of one configuration differ only in
    times: `manifest["hash"]` is the same.
    """
    experiment = load(config)
    experiment = experiment.quick() if quick else experiment
    experiment = experiment if seeds is None else experiment.with_seeds(seeds)
    jobs = machine.cores() if jobs is None else checks.integer("run", "jobs", jobs, at_least=1)
    plan = experiment.cells()
    out = _writable(Path(out))
    with Workers(min(jobs, len(plan))) as workers:
        _accept(workers.check(plan))
        with _workspace(out, experiment, plan, resume) as (hidden, final):
            missing = [cell for cell in plan if not records.has_finished(hidden, cell.id)]
            _work(workers, hidden, plan, missing, progress)
            _finish(hidden, experiment, plan, jobs)
            os.replace(hidden, final)
    return Run(final)


def _accept(complaints: list[str]) -> None:
    if complaints:
        rule = "every agent and environment must be buildable"
        got = complaints[0] if len(complaints) == 1 else f"{len(complaints)} that are not"
        cure = "" if len(complaints) == 1 else " · ".join(complaints)
        raise ValueError(checks.sentence("experiment", rule, got.rstrip("."), cure))


def _work(
    workers: Workers, hidden: Path, plan: list[Cell], missing: list[Cell], progress: bool
) -> None:
    """Run the missing cells, writing down and showing what happens."""
    ledger = hidden / "ledger.jsonl"
    _log(ledger, "session", command=command(), missing=len(missing), of=len(plan))
    with Progress(plan, missing, progress) as display:
        try:
            for event in workers.run(missing, hidden / "cells"):
                if event.kind == "lost":
                    event = _bury(event, hidden / "cells")
                if event.kind == "started":
                    _log(ledger, "running", cell=event.cell.id)
                elif event.kind == "over":
                    _log(ledger, event.content["over"]["status"], cell=event.cell.id)
                display.show(event)
        except KeyboardInterrupt:
            _log(ledger, "interrupted")
            done = sum(records.has_finished(hidden, cell.id) for cell in plan)
            text = f"run: stopped with {done} of {len(plan)} cells done. Go on with --resume."
            raise Stopped(text) from None


def _bury(event: Event, folder: Path) -> Event:
    """The record of a cell whose process died under it: killed, out of memory, crashed."""
    hidden, place = folder / f"{records.UNFINISHED}{event.cell.id}", folder / event.cell.id
    hidden.mkdir(parents=True, exist_ok=True)
    output = hidden / "output.txt"
    printed = output.read_text(errors="replace")[-4000:] if output.is_file() else ""
    record = describe(event.cell) | {
        "status": "failed",
        "error": f"the process was ended by {end(event.content)}",
        "traceback": printed,
        "finished": time.time(),
    }
    records.write_json(hidden / "cell.json", record)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(hidden, place)
    return Event("over", event.cell, {"over": record})


# ---------------------------------------------------------------- the folder


def _writable(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        checks.fail("run", "out must be a folder to write into", error, error=OSError)
    if not os.access(out, os.W_OK):
        checks.fail("run", "out must be a folder to write into", f"no access to {str(out)!r}")
    return out


@contextmanager
def _workspace(
    out: Path, experiment: Experiment, plan: list[Cell], resume: bool
) -> Iterator[tuple[Path, Path]]:
    """(hidden, final) folder: a new one, or with `resume` the newest one that shares cells.

    A finished folder is hidden again while it is added to. The lock keeps two launchers apart.
    """
    earlier = _earlier(out, experiment.experiment.name, plan) if resume else None
    final = out / (earlier or _free(out, experiment.experiment.name))
    hidden = final.with_name(records.UNFINISHED + final.name)
    if earlier and final.exists():
        with _locked(final):
            os.replace(final, hidden)
    hidden.mkdir(exist_ok=bool(earlier))
    with _locked(hidden):
        (hidden / "cells").mkdir(exist_ok=True)
        for partial in (hidden / "cells").glob(f"{records.UNFINISHED}*"):
            shutil.rmtree(partial)  # a cell that was cut short begins anew
        (hidden / "manifest.json").unlink(missing_ok=True)
        content = {"experiment": experiment.model_dump(), "cells": [cell.id for cell in plan]}
        records.write_json(hidden / "experiment.json", content)
        yield hidden, final


def _earlier(out: Path, name: str, plan: list[Cell]) -> str | None:
    """The newest folder, finished or not, whose plan shares cells with this one."""
    wanted = {cell.id for cell in plan}
    found = []
    for path in out.glob("*/experiment.json"):
        folder = path.parent.name.removeprefix(records.UNFINISHED)
        if folder.startswith(f"{name}-") and wanted & set(records.read_json(path)["cells"]):
            found.append(folder)
    return max(found, default=None)  # names end in the time


def _free(out: Path, name: str) -> str:
    """A name that is not taken: <name>-<year><month><day>-<hour><minute><second>."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{k}" for k in range(2, 100))]
    return next(n for n in names if not any((out / f"{p}{n}").exists() for p in ("", ".tmp-")))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder; the system lets go of it however this process ends."""
    try:
        import fcntl
    except ImportError:  # not POSIX: two launchers on one folder are then the user's to avoid
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        cure = "Wait for it, or run without --resume."
        checks.fail("run", f"{str(folder)!r} is being run by another process", cure=cure)
    finally:
        os.close(handle)


def _finish(hidden: Path, experiment: Experiment, plan: list[Cell], jobs: int) -> None:
    """Write the long table and the manifest, from the cells alone."""
    run = Run(hidden)
    run_id = records.fingerprint([cell.id for cell in plan])
    table = records.long_table(hidden, run_id, run.cells)
    records.write_table(hidden / "results.csv", table, records.COLUMNS)
    _log(hidden / "ledger.jsonl", "finished")
    records.write_json(hidden / "manifest.json", _manifest(run, experiment, run_id, jobs))


def _manifest(run: Run, experiment: Experiment, run_id: str, jobs: int) -> dict[str, Any]:
    study, cells = experiment.experiment, run.cells
    sessions = _sessions(records.read_lines(run.folder / "ledger.jsonl"))
    return {
        "format": FORMAT,
        "name": study.name,
        "description": study.description,
        "run": run_id,
        "hash": records.fingerprint([cell.get("hash") for cell in cells]),
        "cells": len(cells),
        "failed": len(run.failed),
        "command": sessions[-1]["command"],
        "sessions": sessions,
        "wall_s": round(sum(s["wall_s"] for s in sessions), 2),
        "cpu_s": round(sum(cell.get("cpu_s", 0.0) for cell in cells), 2),
        "peak_memory_mib": max((cell.get("peak_memory_mib", 0.0) for cell in cells), default=0.0),
        "jobs": jobs,
        "threads": cells[0].get("threads", {}),
        "root_seed": study.root_seed,
        "seeds": study.seeds,
        "versions": machine.versions(),
        "cell_versions": _distinct(cell["versions"] for cell in cells if "versions" in cell),
        "machine": machine.describe(),
        "commit": machine.commit(),
        "experiment": experiment.model_dump(),
    }


def _sessions(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each launch: its command, when it started, how long it was seen alive."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "session":
            found.append({"command": event["command"], "started": event["time"], "wall_s": 0.0})
        elif found:
            found[-1]["wall_s"] = round(event["time"] - found[-1]["started"], 2)
    return found


def _distinct(values: Iterator[dict[str, str]]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _log(ledger: Path, event: str, **facts: Any) -> None:
    records.append_line(ledger, {"time": round(time.time(), 3), "event": event, **facts})


def command() -> str:
    """The command line that started this process."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    name = "kernrl" if program in ("kernrl", "__main__.py") else f"python {sys.argv[0]}"
    return f"{name} {shlex.join(sys.argv[1:])}".strip()
