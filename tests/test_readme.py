"""The lines of Python that README shows run as they stand."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_of_rooms_is_true() -> None:
    """Every name that it lists can be had from the face; the ops have a face of their own."""
    rows = re.findall(
        r"^\| (?:`(\w+)`)? *\|[^|]*\| (`.*) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) >= 8
    for room, names in rows:
        face = importlib.import_module("kernrl" + (".deep_alignment" * (room == "deep_alignment")))
        missing = [name for name in re.findall(r"`(\w+)`", names) if name not in face.__all__]
        assert not missing, (room, missing)
    rooms = {room for room, _ in rows if room}
    assert rooms <= {path.name for path in (ROOT / "kernrl").iterdir()}


def test_the_first_screen_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:kernrl", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cartpole.safetensors").stat().st_size > 0
    assert len(done.stdout.splitlines()) >= 2
