from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from kernrl.harness import experiment
from kernrl.harness.experiment import load

TEXT = """
[experiment]
name = "small"
steps = 1000
seeds = 2

[[envs]]
id = "CartPole-v1"

[[envs]]
id = "FrozenLake-v1"
kwargs = { is_slippery = false }
steps = 500

[[agents]]
agent = "a.First"
params = { gamma = 0.9, ridge = 1e-3 }
env.FrozenLake-v1 = { steps = 50, n_envs = 4, params = { ridge = 1.0 } }

[[agents]]
name = "other"
agent = "a.Second"
steps = 300
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(TEXT)
    return load(path)


def cell(found, agent, env, seed=0):
    (one,) = [c for c in found.cells() if (c.agent, c.env_id, c.seed) == (agent, env, seed)]
    return one


def test_cells_are_agents_times_envs_times_seeds_seed_by_seed(small):
    cells = small.cells()
    assert len(cells) == 8
    assert [c.seed for c in cells] == [0] * 4 + [1] * 4
    assert str(cells[1]) == "CartPole-v1 · other · seed 0"
    assert len({c.id for c in cells}) == 8


def test_the_nearest_setting_wins(small):
    assert cell(small, "First", "CartPole-v1").steps == 1000  # the experiment's
    assert cell(small, "First", "FrozenLake-v1").steps == 50  # the preset's
    assert cell(small, "other", "FrozenLake-v1").steps == 300  # the agent's before the env's
    preset = cell(small, "First", "FrozenLake-v1")
    assert preset.params == {"gamma": 0.9, "ridge": 1.0}
    assert (preset.n_envs, preset.eval_every) == (4, 5)
    assert preset.env == "FrozenLake-v1 (is_slippery=False)"


def test_a_cells_id_is_its_content(small):
    before = cell(small, "First", "CartPole-v1").id
    assert cell(small.with_seeds(7), "First", "CartPole-v1").id == before
    data = small.model_dump()
    data["agents"][1]["params"] = {"x": 1}  # another agent's
    assert cell(load(data), "First", "CartPole-v1").id == before
    for change in ({"gamma": 0.91}, {"gamma": 0.9, "ridge": 1e-3, "new": None}):
        data["agents"][0]["params"] = change
        assert cell(load(data), "First", "CartPole-v1").id != before


def test_a_cells_id_does_not_depend_on_the_process(small):
    code = f"from kernrl.harness.experiment import Cell; print(Cell(**{vars(small.cells()[0])}).id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == small.cells()[0].id


def test_quick_is_a_tenth(small):
    quick = small.quick()
    assert cell(quick, "First", "CartPole-v1").steps == 100
    assert cell(quick, "First", "FrozenLake-v1").steps == 5
    assert quick.experiment.report_episodes == experiment.QUICK["episodes"]
    assert small.with_seeds(9).quick().experiment.seeds == [0, 1, 2]


def test_seeds_are_a_number_or_a_list():
    data = base()
    data["experiment"]["seeds"] = [4, 2]
    assert [c.seed for c in load(data).cells()] == [4, 2]
    assert load(load(data)) == load(data)


# ---------------------------------------------------------------- errors


def base():
    return {
        "experiment": {"name": "x", "steps": 100},
        "envs": [{"id": "CartPole-v1"}],
        "agents": [{"agent": "a.b.C"}],
    }


KNOWN = (
    "description, deterministic, eval_episodes, eval_every, name, report_episodes, root_seed, "
    "seeds, steps"
)
FAULTS = {
    "a key nearly right": (
        lambda d: d["experiment"].update(stpes=3),
        "unknown key 'stpes' in experiment. Did you mean 'steps'?",
    ),
    "a key far off": (
        lambda d: d["experiment"].update(zzz=3),
        f"unknown key 'zzz' in experiment. Known: {KNOWN}.",
    ),
    "a table nearly right": (
        lambda d: d.update(agnets=[]),
        "unknown key 'agnets'. Did you mean 'agents'?",
    ),
    "a key in a list": (
        lambda d: d["agents"][0].update(parms={}),
        "unknown key 'parms' in agents[0]. Did you mean 'params'?",
    ),
    "a key in a preset": (
        lambda d: d["agents"][0].update(env={"CartPole-v1": {"stpes": 3}}),
        "unknown key 'stpes' in agents[0].env.CartPole-v1. Did you mean 'steps'?",
    ),
    "text for a number": (
        lambda d: d["experiment"].update(steps="3"),
        "experiment.steps must be an integer, got '3'.",
    ),
    "no steps": (
        lambda d: d["experiment"].update(steps=0),
        "experiment.steps must be at least 1, got 0.",
    ),
    "no seeds": (
        lambda d: d["experiment"].update(seeds=0),
        "experiment.seeds must be at least 1, or a list of seeds, got 0.",
    ),
    "a seed twice": (
        lambda d: d["experiment"].update(seeds=[1, 1]),
        "experiment.seeds must be distinct, and at least one, got [1, 1].",
    ),
    "a negative seed": (
        lambda d: d["experiment"].update(seeds=[1, -1]),
        "experiment.seeds[1] must be at least 0, got -1.",
    ),
    "a name that is no folder's": (
        lambda d: d["experiment"].update(name="a/b"),
        "experiment.name must match ^[A-Za-z0-9][A-Za-z0-9_.-]*$, got 'a/b'.",
    ),
    "no name": (lambda d: d["experiment"].pop("name"), "experiment.name is missing. Add it."),
    "no envs": (lambda d: d.pop("envs"), "envs is missing. Add it."),
    "empty envs": (lambda d: d.update(envs=[]), "envs must have at least 1 entry, got []."),
    "one bracket too few": (
        lambda d: d.update(envs={"id": "x"}),
        "envs must be a list, got {'id': 'x'}.",
    ),
    "two agents of one name": (
        lambda d: d["agents"].append({"agent": "x.C"}),
        "[[agents]] must have different names, got 'C' twice. Give each its own name.",
    ),
    "one env twice": (
        lambda d: d["envs"].append({"id": "CartPole-v1"}),
        "[[envs]] must have different names, got 'CartPole-v1' twice. Drop one.",
    ),
    "a preset for nothing": (
        lambda d: d["agents"][0].update(env={"CartPol-v1": {}}),
        "the env of a preset of C must be one of CartPole-v1, got 'CartPol-v1'. "
        "Did you mean 'CartPole-v1'?",
    ),
    "an object": (
        lambda d: d["agents"][0].update(params={"x": object()}),
        "every value must be a number, text, truth value, list or table, "
        "got Object of type object is not JSON serializable.",
    ),
    "two faults": (
        lambda d: d["experiment"].update(steps=0, stpes=3),
        "unknown key 'stpes' in experiment. Did you mean 'steps'? (1 more.)",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_one_sentence(what):
    spoil, text = FAULTS[what]
    data = copy.deepcopy(base())
    load(data)
    spoil(data)
    with pytest.raises(ValueError) as caught:
        load(data)
    assert str(caught.value) == f"experiment: {text}"


def test_a_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("steps = 1000", "stepps = 1000"))
    with pytest.raises(ValueError, match=r"^mine.toml: unknown key 'stepps' in experiment\. Did"):
        load(path)
    path.write_text("[experiment\n")
    with pytest.raises(ValueError, match=r"^mine.toml: the file must be TOML, got .*line 1"):
        load(path)


def test_a_file_that_is_not_there_is_guessed(tmp_path):
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(FileNotFoundError, match=r"got no file '.*quikstart.toml'. Did you mean '"):
        load(tmp_path / "quikstart.toml")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        load(tmp_path / "nowhere" / "quickstart.toml")
