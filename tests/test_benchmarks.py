"""The bench counts what it says: turns, the best of the repeats, rates, a readable file."""

from __future__ import annotations

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks import timing
from benchmarks.timing import Case, Row


def test_libraries_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    rows = list(timing.run(Case("case", 10, "rows", contenders, repeats=2)))
    assert calls == ["a", "b"] * 3
    assert [row.library for row in rows] == ["a", "b"]


def test_the_best_repeat_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(3.0, 2.0), (1.0, 0.5), (2.0, 1.0)])
    monkeypatch.setattr(timing, "_timed", lambda work: next(times))
    (row,) = timing.run(Case("case", 10, "rows", {"a": lambda: None}, repeats=3))
    assert row == Row("case", "a", 1.0, 0.5, 10, "rows", 3)
    assert row.rate == 10.0


def test_a_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    case = Case("small", 5, "steps", {"a": lambda: sum(range(1000))}, repeats=1)
    monkeypatch.setattr(bench, "cases", lambda only: [case])
    monkeypatch.setattr("sys.argv", ["bench", "small", "--out", str(tmp_path)])
    bench.main()
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content["rows"][0]["case"] == "small"
    assert content["rows"][0]["rate"] == pytest.approx(5 / content["rows"][0]["seconds"])
    assert {"python", "numpy", "torch"} <= set(content["versions"])
    assert content["machine"]["cores"] >= 1
    assert str(path) in capsys.readouterr().out
