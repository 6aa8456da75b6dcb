"""One cell: train an agent once, watch it on the way, judge it at the end, write it all down."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import NotFittedError

from kernrl.harness import build, environments, machine, records, seeds
from kernrl.harness.evaluation import evaluate
from kernrl.harness.experiment import Cell

Tell = Callable[[int, float], None]


class Clock:
    """CPU and wall seconds of training; it stands still while something else is done."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    @property
    def cpu(self) -> float:
        """CPU seconds of this process so far, pauses left out."""
        return time.process_time() - self._cpu

    @property
    def wall(self) -> float:
        """Seconds so far, pauses left out."""
        return time.perf_counter() - self._wall

    @contextmanager
    def paused(self) -> Iterator[tuple[float, float]]:
        """Hold the clock; gives the CPU and wall seconds at which it was held."""
        cpu, wall = self.cpu, self.wall
        try:
            yield cpu, wall
        finally:
            self._cpu, self._wall = time.process_time() - cpu, time.perf_counter() - wall


class Watcher:
    """The callback of `fit`: evaluates every `every` steps, on episodes kept apart for that."""

    def __init__(self, cell: Cell, tell: Tell) -> None:
        self.cell, self.tell, self.every = cell, tell, cell.eval_every
        self.clock = Clock()
        self.rows: list[dict[str, Any]] = []
        self.seen = -1  # steps at the last evaluation

    def __call__(self, agent: Any) -> None:
        """Evaluate `agent` as it stands, with the training clock held.

        One that still gathers its first data and cannot act yet has no point on the curve.
        """
        with self.clock.paused() as (cpu, wall), suppress(NotFittedError):
            score = self._add(agent, "select", self.cell.eval_episodes, cpu, wall)
            self.seen = _executed(agent, self.cell)
            self.tell(self.seen, score)

    def finish(self, agent: Any) -> float:
        """The last point of the curve, and the report: the score that counts."""
        with self.clock.paused() as (cpu, wall):
            if self.seen < _executed(agent, self.cell):
                self._add(agent, "select", self.cell.eval_episodes, cpu, wall)
            return self._add(agent, "report", self.cell.report_episodes, cpu, wall)

    def _add(self, agent: Any, stream: str, n: int, cpu: float, wall: float) -> float:
        cell = self.cell
        scores = evaluate(
            agent,
            partial(environments.make, cell.env_id, cell.env_kwargs),
            n_episodes=n,
            seed=seeds.stream(cell.root_seed, stream, cell.env, cell.seed),
            deterministic=cell.deterministic,
        )
        common = {
            "agent": cell.agent,
            "env": cell.env,
            "env_package": environments.package(cell.env_id),
            "stream": stream,
            "seed": cell.seed,
            "env_steps": _executed(agent, cell),
            "updates": int(getattr(agent, "n_updates_", 0)),
            "cpu_s": round(cpu, 4),
            "wall_s": round(wall, 4),
        }
        self.rows += [
            common
            | {
                "episode": k,
                "episode_seed": int(scores.seeds[k]),
                "return": float(scores.returns[k]),
                "length": int(scores.lengths[k]),
                "terminated": bool(scores.terminated[k]),
                "truncated": bool(scores.truncated[k]),
                "mode": scores.mode,
            }
            for k in range(n)
        ]
        return scores.mean


def make_agent(cell: Cell) -> Any:
    """The agent of a cell, with the seed of its training stream."""
    params = build.construct(cell.params)
    agent = build.instance(cell.agent_class, params)
    if hasattr(agent, "get_params") and "rng" in agent.get_params(deep=False):
        agent.set_params(rng=train_seed(cell))
    return agent


def train_seed(cell: Cell) -> int:
    """What the agent's `rng` is set to: the same for every agent of one (env, seed)."""
    return seeds.number(seeds.stream(cell.root_seed, "train", cell.env, cell.seed))


def run_cell(cell: Cell, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train and judge one cell, write its files into `folder`, return its cell.json.

    An exception of the agent or the environment is written down, not raised.
    """
    started = time.time()
    machine.forget_peak_memory()
    try:
        outcome = {"status": "done", **_train(cell, folder, tell)}
    except Exception as error:  # whatever a user's agent raises: the other cells go on
        outcome = {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    record = (
        describe(cell)
        | outcome
        | {
            "started": started,
            "finished": time.time(),
            "peak_memory_mib": round(machine.peak_memory(), 1),
            "threads": machine.threads(),
            "versions": machine.versions(),
        }
    )
    records.write_json(folder / "cell.json", record)
    return record


def describe(cell: Cell) -> dict[str, Any]:
    """What a cell's record starts with, however it ends."""
    return {
        "id": cell.id,
        "agent": cell.agent,
        "env": cell.env,
        "seed": cell.seed,
        "settings": vars(cell),
        "train_seed": train_seed(cell),
    }


def _train(cell: Cell, folder: Path, tell: Tell) -> dict[str, Any]:
    build.locate(cell.agent_class)  # imports, so that what is set next reaches torch as well
    machine.hold_torch()
    machine.seed_globals(train_seed(cell))
    agent = make_agent(cell)
    env = environments.make(cell.env_id, cell.env_kwargs, cell.n_envs)
    try:
        watcher = Watcher(cell, tell)
        agent.fit(env, total_steps=cell.steps, callbacks=[watcher])
        cpu, wall = watcher.clock.cpu, watcher.clock.wall
        score = watcher.finish(agent)
    finally:
        env.close()
    records.write_lines(folder / "rows.jsonl", watcher.rows)
    if hasattr(agent, "save"):
        agent.save(folder / "agent.safetensors")
    return {
        "score": score,
        "steps": _executed(agent, cell),
        "updates": int(getattr(agent, "n_updates_", 0)),
        "cpu_s": round(cpu, 4),
        "wall_s": round(wall, 4),
        "env_package": environments.package(cell.env_id),
        "threshold": environments.threshold(cell.env_id),
        "hash": records.fingerprint(records.without_times(watcher.rows), _weights(agent)),
    }


def _executed(agent: Any, cell: Cell) -> int:
    """Environment steps that were really executed; an agent that does not count ran its budget."""
    return int(getattr(agent, "steps_", cell.steps))


def _weights(agent: Any) -> str:
    """A hash of what was learnt: mean returns of two different runs agree too easily."""
    digest = hashlib.sha256()
    state = agent._state() if hasattr(agent, "_state") else {}
    for name in sorted(state):
        x = np.ascontiguousarray(state[name])
        digest.update(f"{name} {x.dtype} {x.shape}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()
