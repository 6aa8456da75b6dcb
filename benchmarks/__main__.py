"""`make bench`: time every case, print a table, write JSON to benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.cases import cases
from benchmarks.timing import run
from kernrl.harness import machine


def main() -> None:
    """Run the cases and keep the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    rows = []
    for case in cases(given.only):
        print(case.name, flush=True)
        for row in run(case):
            rows.append(row.as_dict())
            memory = "" if row.extra_bytes is None else f"  {row.extra_bytes / 1e6:8.0f} MB extra"
            print(
                f"  {row.library:18} {row.seconds:9.3f} s  {row.cpu_seconds:9.3f} CPU s  "
                f"{row.rate:14,.0f} {row.unit}/s{memory}",
                flush=True,
            )
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y-%m-%d')}{'-' if given.only else ''}{given.only}.json"
    about = {"machine": machine.describe(), "versions": machine.versions(), "rows": rows}
    (given.out / name).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {given.out / name}")


if __name__ == "__main__":
    main()
