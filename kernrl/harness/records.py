"""What a run leaves behind, and how it is read: everything a report shows follows from this.

<name>-<time>/            appears whole, when the run is finished; until then .tmp-<name>-<time>
    manifest.json         command, configuration, versions, machine, seeds, seconds, hash
    experiment.json       the configuration and the ids of its cells
    results.csv           the long table: one row for every evaluation episode
    ledger.jsonl          what happened when, append-only
    cells/<id>/           one agent × env × seed; appears whole as well
        cell.json         settings, status, seconds, memory, hash; the traceback if it failed
        rows.jsonl        its rows of the long table
        agent.safetensors the trained agent, where it can be saved
        output.txt        whatever was printed
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernrl import checks
from kernrl.data.files import replacing

UNFINISHED = ".tmp-"
TIMES = ("cpu_s", "wall_s")  # columns that no two runs share
COLUMNS = (
    "run",
    "cell",
    "agent",
    "env",
    "env_package",
    "stream",
    "seed",
    "env_steps",
    "updates",
    *TIMES,
    "episode",
    "episode_seed",
    "return",
    "length",
    "terminated",
    "truncated",
    "mode",
)


@dataclass(frozen=True)
class Run:
    """A finished run folder."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json."""
        return dict(read_json(self.folder / "manifest.json"))

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """The cell.json of every cell of the experiment, in the order of its plan."""
        plan = read_json(self.folder / "experiment.json")["cells"]
        return [read_json(cell_folder(self.folder, name) / "cell.json") for name in plan]

    @property
    def done(self) -> list[dict[str, Any]]:
        """The cells that finished."""
        return [cell for cell in self.cells if cell["status"] == "done"]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The cells that did not."""
        return [cell for cell in self.cells if cell["status"] != "done"]

    def rows(self, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of the long table that belong to one cell."""
        return read_lines(cell_folder(self.folder, cell["id"]) / "rows.jsonl")


def open_run(folder: str | Path | Run) -> Run:
    """A finished run; says what to do about one that is not."""
    if isinstance(folder, Run):
        return folder
    path = Path(checks.path("run", "the run folder", folder))
    if path.name.startswith(UNFINISHED):
        cure = "Finish it with: kernrl run FILE.toml --resume"
        checks.fail("run", "the run must be finished", repr(str(path)), cure)
    if not (path / "manifest.json").is_file():
        cure = "kernrl run prints the folder that it made."
        rule = "a run folder must hold manifest.json"
        checks.fail("run", rule, f"none in {str(path)!r}", cure, FileNotFoundError)
    return Run(path)


def cell_folder(folder: Path, cell_id: str) -> Path:
    """Where one cell lies."""
    return folder / "cells" / cell_id


def has_finished(folder: Path, cell_id: str) -> bool:
    """Whether a cell is there and did not fail."""
    path = cell_folder(folder, cell_id) / "cell.json"
    return path.is_file() and read_json(path)["status"] == "done"


# ---------------------------------------------------------------- files


def write_text(path: Path, text: str) -> None:
    """A whole file or none: written beside its place, flushed to the disk, moved."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """`value` as readable JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cure = "Run that cell again with --resume."
        raise ValueError(checks.sentence("run", "a file is not readable", error, cure)) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; a last line that was cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one line in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _plain(value) for key, value in row.items()})
    write_text(path, text.getvalue())


def _plain(value: Any) -> Any:
    """Truth values as 0 and 1, numbers to ten digits."""
    if isinstance(value, bool):
        return int(value)
    return f"{value:.10g}" if isinstance(value, float) else value


def long_table(
    folder: Path, run_id: str, cells: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of all finished cells, with the run's and cell's ids."""
    for cell in cells:
        if cell["status"] == "done":
            for row in read_lines(cell_folder(folder, cell["id"]) / "rows.jsonl"):
                yield {"run": run_id, "cell": cell["id"], **row}


# ---------------------------------------------------------------- hashes


def fingerprint(*values: Any) -> str:
    """A short hash of JSON values."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_times(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what differs between two runs of the same thing."""
    return [{key: row[key] for key in row if key not in TIMES} for row in rows]
