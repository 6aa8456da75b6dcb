"""What an experiment is: agents × environments × seeds, read from TOML and checked before it runs.

    [experiment]
    name = "quickstart"
    steps = 20_000
    seeds = 5

    [[envs]]
    id = "CartPole-v1"

    [[agents]]
    agent = "kernrl.control.klspi.KLSPI"
    params = { gamma = 0.99, kernel = { class = "kernrl.kernels.stationary.RBF" } }
    env.CartPole-v1 = { steps = 10_000, params = { ridge = 1e-5 } }

What is nearest wins: an agent's setting for one env, then the agent's, then the env's, then the
experiment's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kernrl import checks
from kernrl.harness import complaints

FORMAT = 1  # part of every cell's id: raised when the meaning of a setting changes
POINTS = 10  # evaluations along a learning curve unless eval_every says otherwise
QUICK = {"shorter": 10, "seeds": 3, "episodes": 5}  # what --quick makes of an experiment

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^/\\\x00-\x1f]+$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Study(_Table):
    """[experiment]: what holds for every agent and environment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    description: str = ""
    steps: Count = 20_000
    seeds: list[Annotated[int, Field(ge=0)]] = list(range(5))
    root_seed: Annotated[int, Field(ge=0)] = 0
    eval_every: Count | None = None
    eval_episodes: Count = 5
    report_episodes: Count = 20
    deterministic: bool = True

    @field_validator("seeds", mode="before")
    @classmethod
    def _n_or_list(cls, value: Any) -> Any:
        """A number n means the seeds 0 … n−1."""
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("must be at least 1, or a list of seeds")
            return list(range(value))
        return value

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: list[int]) -> list[int]:
        if not value or len(set(value)) < len(value):
            raise ValueError("must be distinct, and at least one")
        return value


class EnvEntry(_Table):
    """[[envs]]: a Gymnasium environment."""

    id: Name
    kwargs: dict[str, Any] = {}
    steps: Count | None = None

    @property
    def label(self) -> str:
        """The id, with the keyword arguments where there are any."""
        extra = ", ".join(f"{key}={value!r}" for key, value in sorted(self.kwargs.items()))
        return f"{self.id} ({extra})" if extra else self.id


class Preset(_Table):
    """agents.env.<id>: what an agent does differently in one environment."""

    steps: Count | None = None
    n_envs: Count | None = None
    params: dict[str, Any] = {}


class AgentEntry(_Table):
    """[[agents]]: an import path, its parameters, and presets for single environments."""

    agent: Name
    name: Name | None = None
    params: dict[str, Any] = {}
    steps: Count | None = None
    n_envs: Count = 1
    env: dict[str, Preset] = {}

    @property
    def label(self) -> str:
        """The given name, or the class's."""
        return self.name or self.agent.rpartition(".")[2]


@dataclass(frozen=True)
class Cell:
    """One agent trained once in one environment with one seed; says everything that decides it."""

    agent: str
    agent_class: str
    params: dict[str, Any]
    env: str
    env_id: str
    env_kwargs: dict[str, Any]
    n_envs: int
    steps: int
    seed: int
    root_seed: int
    eval_every: int
    eval_episodes: int
    report_episodes: int
    deterministic: bool

    @property
    def id(self) -> str:
        """A hash of the content: the same settings have the same id in every experiment."""
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.env} · {self.agent} · seed {self.seed}"


class Experiment(_Table):
    """A whole experiment; `cells()` lists what has to be run."""

    experiment: Study
    envs: Annotated[list[EnvEntry], Field(min_length=1)]
    agents: Annotated[list[AgentEntry], Field(min_length=1)]

    def cells(self) -> list[Cell]:
        """Every agent × env × seed, seed by seed, so that an early stop leaves whole seeds."""
        return [
            self._cell(agent, env, seed)
            for seed in self.experiment.seeds
            for env in self.envs
            for agent in self.agents
        ]

    def with_seeds(self, n: int) -> Experiment:
        """The same experiment with the seeds 0 … n−1."""
        checks.integer("experiment", "seeds", n, at_least=1)
        return self._with(seeds=list(range(n)))

    def quick(self) -> Experiment:
        """A tenth of the steps, at most three seeds, at most five episodes: does it run at all?"""
        study, divide = self.experiment, QUICK["shorter"]
        data = self.model_dump()
        every = {"eval_every": max(1, study.eval_every // divide)} if study.eval_every else {}
        data["experiment"] |= every | {
            "seeds": study.seeds[: QUICK["seeds"]],
            "eval_episodes": min(study.eval_episodes, QUICK["episodes"]),
            "report_episodes": min(study.report_episodes, QUICK["episodes"]),
        }
        presets = [preset for agent in data["agents"] for preset in agent["env"].values()]
        for table in (data["experiment"], *data["envs"], *data["agents"], *presets):
            table["steps"] = max(1, table["steps"] // divide) if table["steps"] else None
        return Experiment.model_validate(data)

    def _with(self, **changes: Any) -> Experiment:
        data = self.model_dump()
        data["experiment"] |= changes
        return Experiment.model_validate(data)

    def _cell(self, agent: AgentEntry, env: EnvEntry, seed: int) -> Cell:
        study, preset = self.experiment, agent.env.get(env.id, Preset())
        steps = preset.steps or agent.steps or env.steps or study.steps
        return Cell(
            agent=agent.label,
            agent_class=agent.agent,
            params=agent.params | preset.params,
            env=env.label,
            env_id=env.id,
            env_kwargs=env.kwargs,
            n_envs=preset.n_envs or agent.n_envs,
            steps=steps,
            seed=seed,
            root_seed=study.root_seed,
            eval_every=study.eval_every or max(1, steps // POINTS),
            eval_episodes=study.eval_episodes,
            report_episodes=study.report_episodes,
            deterministic=study.deterministic,
        )


def load(config: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    """An experiment from a TOML file, a mapping of the same form, or as it is.

    Raises ValueError that names the file and the key, and guesses what was meant.
    """
    if isinstance(config, Experiment):
        return config
    if isinstance(config, Mapping):
        return _validated(dict(config), "experiment")
    path = Path(checks.path("experiment", "the configuration", config))
    owner = path.name
    if not path.is_file():
        checks.fail(
            "experiment",
            "the configuration must be a TOML file",
            f"no file {str(path)!r}",
            complaints.nearby(path),
            FileNotFoundError,
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        checks.fail(owner, "the file must be TOML", str(error))
    return _validated(data, owner)


def _validated(data: dict[str, Any], owner: str) -> Experiment:
    try:
        found = Experiment.model_validate(data)
    except ValidationError as error:
        raise ValueError(complaints.first(error, Experiment, owner)) from None
    _names_fit(found, owner)
    return found


def _names_fit(found: Experiment, owner: str) -> None:
    """Names are unique, and every preset is for an environment that is there."""
    for kind, entries in (("agents", found.agents), ("envs", found.envs)):
        names = [entry.label for entry in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            cure = "Give each its own name." if kind == "agents" else "Drop one."
            checks.fail(owner, f"[[{kind}]] must have different names", f"{twice[0]!r} twice", cure)
    known = [env.id for env in found.envs]
    for agent in found.agents:
        for env_id in agent.env:
            checks.choice(owner, f"the env of a preset of {agent.label}", env_id, known)
    try:
        json.dumps(found.model_dump())
    except TypeError as error:  # TOML dates, or Python objects in a mapping
        checks.fail(owner, "every value must be a number, text, truth value, list or table", error)
