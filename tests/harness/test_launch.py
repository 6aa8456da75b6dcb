from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness.toy_agents import TabularQ
from harness.toy_runs import LINUX, alive, go, start, toy, wait_for, workers_of

from kernrl.harness import machine, records, seeds
from kernrl.harness.evaluation import evaluate
from kernrl.harness.experiment import load
from kernrl.harness.records import open_run

AGENT = "harness.toy_agents."


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two agents × one env × three seeds, done once for the tests that only look."""
    with pytest.MonkeyPatch.context() as patch:
        for name in machine.THREADS:
            patch.setenv(name, "2")  # what the launcher has must not reach its workers
        return go(toy(), tmp_path_factory.mktemp("runs"), jobs=2)


def rows_of(run, **wanted):
    with (run.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row[key] == str(value) for key, value in wanted.items())]


# ---------------------------------------------------------------- what is recorded


def test_every_cell_is_there_and_done(run):
    assert len(run.cells) == len(run.done) == 6
    assert run.manifest["cells"] == 6
    assert run.manifest["failed"] == 0
    assert not list(run.folder.parent.glob(".tmp-*"))
    assert not list((run.folder / "cells").glob(".tmp-*"))


def test_the_long_table_has_a_row_for_every_episode(run):
    rows = rows_of(run)
    assert list(rows[0]) == list(records.COLUMNS)
    assert len(rows) == 6 * (3 * 2 + 4)  # cells × (checkpoints × select episodes + report episodes)
    one = rows_of(run, agent="TabularQ", seed=1, stream="select")
    assert [row["env_steps"] for row in one] == ["100", "100", "200", "200", "300", "300"]
    assert {row["mode"] for row in rows} == {"deterministic"}
    assert {row["env_package"] for row in rows} == {rows[0]["env_package"]}
    assert rows[0]["env_package"].startswith("gymnasium ")
    assert {row["run"] for row in rows} == {run.manifest["run"]}


def test_agents_are_paired_and_streams_are_apart(run):
    """One (env, seed): the same training seed and episodes for both agents. Else nothing shared."""
    drawn = {}
    for seed in range(3):
        for name in ("select", "report"):
            found = [
                [row["episode_seed"] for row in rows_of(run, agent=agent, seed=seed, stream=name)]
                for agent in ("TabularQ", "Constant")
            ]
            assert found[0] == found[1]
            assert len(found[0]) == (4 if name == "report" else 3 * 2)
            drawn[name, seed] = {int(x) for x in found[0]}
        train = {cell["train_seed"] for cell in run.cells if cell["seed"] == seed}
        assert len(train) == 1
        drawn["train", seed] = train
    assert len(set().union(*drawn.values())) == sum(len(x) for x in drawn.values())


def test_the_report_is_that_of_the_trained_agent(run):
    """Trained and evaluated again by hand, from nothing but the seeds."""
    cell = next(c for c in run.cells if (c["agent"], c["seed"]) == ("TabularQ", 1))
    env = {"id": "FrozenLake-v1", "is_slippery": False, "max_episode_steps": 30}
    label = cell["env"]
    import gymnasium

    agent = TabularQ(rng=seeds.number(seeds.stream(0, "train", label, 1)))
    agent.fit(gymnasium.make(**env), 300)
    stream = seeds.stream(0, "report", label, 1)
    scores = evaluate(agent, lambda: gymnasium.make(**env), 4, stream)
    assert [float(row["return"]) for row in rows_of(run, cell=cell["id"], stream="report")] == (
        scores.returns.tolist()
    )
    saved = TabularQ.load(run.folder / "cells" / cell["id"] / "agent.safetensors")
    np.testing.assert_array_equal(saved.table_, agent.table_)


def test_workers_have_one_thread(run):
    for cell in run.cells:
        assert cell["threads"]
        assert set(cell["threads"].values()) == {1}


def test_the_manifest_says_how_it_was_made(run):
    manifest = run.manifest
    assert manifest["experiment"] == load(toy()).model_dump()
    assert manifest["seeds"] == [0, 1, 2]
    assert {"python", "kernrl", "numpy", "torch", "gymnasium"} <= set(manifest["versions"])
    assert manifest["machine"]["cores"] >= 1
    assert manifest["wall_s"] > 0
    assert manifest["cpu_s"] == pytest.approx(sum(c["cpu_s"] for c in run.cells), abs=0.01)
    assert manifest["peak_memory_mib"] > 20
    assert sys.argv[0] in manifest["command"] or "kernrl" in manifest["command"]


def test_what_agents_print_is_kept_apart(run):
    cell = next(c for c in run.cells if c["agent"] == "Constant")
    text = (run.folder / "cells" / cell["id"] / "output.txt").read_text()
    assert text == "hello from an agent\nand a complaint\n"


def test_the_ledger_tells_what_happened(run):
    events = [e["event"] for e in records.read_lines(run.folder / "ledger.jsonl")]
    assert events[0] == "session"
    assert events[-1] == "finished"
    assert events.count("running") == events.count("done") == 6


# ---------------------------------------------------------------- the same again


def test_the_same_configuration_gives_the_same_results(run, tmp_path):
    """And so it does with another number of processes."""
    again = go(toy(), tmp_path)
    assert again.manifest["hash"] == run.manifest["hash"]
    for first, second in zip(run.cells, again.cells, strict=True):
        assert records.without_times(run.rows(first)) == records.without_times(again.rows(second))


def test_another_root_seed_gives_other_results(run, tmp_path):
    other = go(toy(root_seed=1), tmp_path)
    assert other.manifest["hash"] != run.manifest["hash"]


def test_resume_with_more_seeds_runs_only_those(tmp_path):
    first = go(toy(seeds=1), tmp_path)
    stamp = (first.folder / "cells" / first.cells[0]["id"] / "cell.json").stat().st_mtime_ns
    second = go(toy(seeds=2), tmp_path, resume=True)
    assert second.folder == first.folder
    assert len(second.done) == 4
    assert (second.folder / "cells" / first.cells[0]["id"] / "cell.json").stat().st_mtime_ns == (
        stamp
    )
    session = records.read_lines(second.folder / "ledger.jsonl")
    assert [e["missing"] for e in session if e["event"] == "session"] == [2, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_resume_does_not_touch_another_experiment(tmp_path):
    first = go(toy(seeds=1), tmp_path)
    other = go(toy(seeds=1, steps=200), tmp_path, resume=True)
    assert other.folder != first.folder
    assert len(open_run(first.folder).done) == 2


def test_without_resume_every_run_has_a_folder(tmp_path):
    one = toy({"agent": AGENT + "Constant"}, seeds=1)
    folders = {go(one, tmp_path).folder for _ in range(2)}
    assert len(folders) == 2


# ---------------------------------------------------------------- failures


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    config = toy(
        {"agent": AGENT + "Constant", "name": "crashes", "params": {"crash_at": 150}},
        {"agent": AGENT + "Constant", "name": "dies", "params": {"die_at": 150}},
        {"agent": AGENT + "TabularQ"},
        seeds=2,
    )
    run = go(config, tmp_path, jobs=2)
    assert {(c["agent"], c["status"]) for c in run.cells} == {
        ("crashes", "failed"),
        ("dies", "failed"),
        ("TabularQ", "done"),
    }
    crashed, died, _ = run.cells[:3]
    assert crashed["error"] == "ArithmeticError: the sum is off\nand this is a second line"
    assert "in update" in crashed["traceback"]
    assert died["error"] == "the process was ended by signal SIGKILL"
    assert "last words" in died["traceback"]
    assert run.manifest["failed"] == 4
    assert {row["agent"] for row in rows_of(run)} == {"TabularQ"}
    again = go(config, tmp_path, resume=True)  # they are tried again
    session = [e for e in records.read_lines(again.folder / "ledger.jsonl") if "missing" in e]
    assert [e["missing"] for e in session] == [6, 4]


def test_a_class_that_is_no_agent_of_ours_can_run(tmp_path):
    run = go(toy({"agent": AGENT + "Plain"}, seeds=1), tmp_path)
    (cell,) = run.done
    assert cell["steps"] == 300
    assert not (run.folder / "cells" / cell["id"] / "agent.safetensors").exists()


FAULTS = {
    "an agent nearly right": (
        toy({"agent": AGENT + "TabularQQ"}),
        f"experiment: every agent and environment must be buildable, got agent TabularQQ: "
        f"'{AGENT}TabularQQ' must be importable, got no 'TabularQQ' in harness.toy_agents. "
        "Did you mean 'TabularQ'?.",
    ),
    "a parameter nearly right": (
        toy({"agent": AGENT + "TabularQ", "params": {"gama": 0.9}}),
        "experiment: every agent and environment must be buildable, got agent TabularQ: "
        "TabularQ has no parameter 'gama'. Did you mean 'gamma'?.",
    ),
    "two faults": (
        toy({"agent": AGENT + "X"}) | {"envs": [{"id": "FrozenLake-v2"}]},
        "experiment: every agent and environment must be buildable, got 2 that are not. "
        "env FrozenLake-v2: the id must be registered with Gymnasium, got 'FrozenLake-v2'. "
        "Did you mean 'FrozenLake-v1'? · agent X: 'harness.toy_agents.X' must be importable, "
        "got no 'X' in harness.toy_agents.",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cannot_work_is_refused_before_anything_is_written(what, tmp_path):
    config, text = FAULTS[what]
    with pytest.raises(ValueError) as caught:
        go(config, tmp_path)
    assert str(caught.value) == text
    assert list(tmp_path.iterdir()) == []


def test_jobs_and_seeds_must_be_numbers(tmp_path):
    with pytest.raises(ValueError, match="run: jobs must be an integer of at least 1, got 0"):
        go(toy(), tmp_path, jobs=0)
    with pytest.raises(ValueError, match="experiment: seeds must be an integer of at least 1"):
        go(toy(), tmp_path, seeds=0)


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="run: out must be a folder to write into, got"):
        go(toy(), tmp_path / "file")


def test_a_worker_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="run: a worker process must start, got exit status 1"):
        go(toy(), tmp_path)


# ---------------------------------------------------------------- interruptions

SLOW = toy({"agent": AGENT + "TabularQ", "params": {"pause": 0.001}}, seeds=4, steps=600)


def interrupted(tmp_path, number):
    """Start SLOW, send a signal after the first finished cell, in the middle of another."""
    process = start(SLOW, tmp_path)

    def in_the_middle():
        assert process.poll() is None, process.communicate()
        done = list(tmp_path.glob(".tmp-toy-*/cells/[!.]*/cell.json"))
        return done and list(tmp_path.glob(".tmp-toy-*/cells/.tmp-*/output.txt"))

    wait_for(in_the_middle)
    workers = workers_of(process.pid)
    assert len(workers) == 1
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    wait_for(lambda: not any(alive(pid) for pid in workers), 10)
    return process.returncode, out


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return go(SLOW, tmp_path_factory.mktemp("straight"))


@pytest.mark.skipif(not LINUX, reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl-c"])
def test_an_interrupted_run_never_looks_finished_and_resumes(number, tmp_path, straight):
    code, out = interrupted(tmp_path, number)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-toy-")
    assert not (left / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"the run must be finished, got .* --resume"):
        open_run(left)
    if number == signal.SIGINT:
        assert code == 130
        assert out.startswith("run: stopped with ")
        assert out.strip().endswith("of 4 cells done. Go on with --resume.")
    before = {path.parent.name for path in left.glob("cells/[!.]*/cell.json")}
    assert 1 <= len(before) < 4
    run = go(SLOW, tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [left.name.removeprefix(".tmp-")]
    sessions = [e for e in records.read_lines(run.folder / "ledger.jsonl") if "missing" in e]
    assert [e["missing"] for e in sessions] == [4, 4 - len(before)]
    assert len(run.manifest["sessions"]) == 2
    assert run.manifest["hash"] == straight.manifest["hash"]
    assert not list((run.folder / "cells").glob(".tmp-*"))


def test_two_launchers_do_not_share_a_folder(tmp_path):
    process = start(SLOW, tmp_path)
    try:
        wait_for(lambda: list(tmp_path.glob(".tmp-toy-*/cells/.tmp-*")))
        with pytest.raises(ValueError, match=r"is being run by another process\. Wait for it"):
            go(SLOW, tmp_path, resume=True)
    finally:
        process.kill()
        process.communicate()


def test_a_torn_line_in_the_ledger_is_passed_over(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
    assert [e["event"] for e in records.read_lines(path)] == ["a", "b"]


def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    config = toy({"agent": AGENT + "Constant"}, seeds=1)
    script.write_text(
        f"import sys\nsys.path[:] = {sys.path!r}\n"
        "from kernrl.harness.launch import run_experiment\n"
        f"print(run_experiment({config!r}, out={str(tmp_path / 'runs')!r}).folder)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "runs").glob("*/manifest.json").__next__().read_text())
    assert manifest["command"] == f"python {script}"
    assert "[1/1] FrozenLake-v1" in done.stderr  # plain lines where there is no terminal
    assert os.path.isdir(done.stdout.strip())
