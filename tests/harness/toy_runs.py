"""Small experiments, and a script that runs one so that it can be killed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from kernrl.harness.launch import run_experiment

FROZEN = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "max_episode_steps": 30}}


def toy(*agents, seeds=3, steps=300, **settings):
    """An experiment on FrozenLake; by default Q-learning and an agent that always goes one way."""
    agents = agents or (
        {"agent": "harness.toy_agents.TabularQ"},
        {"agent": "harness.toy_agents.Constant", "params": {"action": 2}},
    )
    study = {"name": "toy", "steps": steps, "seeds": seeds, "report_episodes": 4}
    study |= {"eval_episodes": 2, "eval_every": 100} | settings
    return copy.deepcopy({"experiment": study, "envs": [FROZEN], "agents": list(agents)})


def go(config, out, **settings):
    """Run an experiment, with one worker and silently unless told otherwise."""
    return run_experiment(config, out=out, **{"jobs": 1, "progress": False} | settings)


def start(config, out, resume=False):
    """A process that runs an experiment with one worker."""
    code = f"""
        import sys
        sys.path[:] = {sys.path!r}
        from kernrl.harness.launch import Stopped, run_experiment
        try:
            run_experiment({config!r}, out={str(out)!r}, resume={resume}, jobs=1)
        except Stopped as stop:
            print(stop)
            sys.exit(130)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=60):
    """The first true value of `condition()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {seconds} s")


def alive(pid):
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(pid):
    """The worker processes that a launcher has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                words = (entry / "cmdline").read_text()
            except OSError:
                continue
            if f"\nPPid:\t{pid}\n" in status and "kernrl.harness.worker" in words:
                found.append(int(entry.name))
    return found


LINUX = os.path.isdir("/proc/self")
