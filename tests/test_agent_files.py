"""What an agent writes to its file, and what it refuses to read."""

from __future__ import annotations

import json
import os
import re
import sys

import numpy as np
import pytest
from counter import Counter
from small_agents import Logger, TabularQ, frozen_lake

from kernrl.agent import Agent
from kernrl.data import checkpoint
from kernrl.kernels.stationary import RBF


@pytest.fixture(scope="module")
def trained():
    return TabularQ(rng=0).fit(frozen_lake(), 10_000)


def test_what_is_loaded_is_what_was_saved(trained, tmp_path):
    trained.log_ = {"error": [(10, 0.5), (20, np.nan)], "none": []}
    path = tmp_path / "agent"
    trained.save(path)
    loaded = Agent.load(path)
    assert type(loaded) is TabularQ
    assert loaded.get_params() == trained.get_params()
    np.testing.assert_array_equal(loaded.q_, trained.q_)
    assert loaded.observation_space_ == trained.observation_space_
    assert loaded.action_space_ == trained.action_space_
    assert (loaded.steps_, loaded.n_updates_, loaded.n_envs_) == (10_000, 10_000, 1)
    assert loaded.episode_returns_ == trained.episode_returns_
    assert repr(loaded.log_) == repr(trained.log_)
    states = np.arange(16)
    np.testing.assert_array_equal(loaded.predict(states), trained.predict(states))
    for _ in range(3):  # random draws go on where they stood
        drawn = [agent.predict(states, deterministic=False).tolist() for agent in (loaded, trained)]
        assert drawn[0] == drawn[1]
    loaded.save(tmp_path / "again")
    assert loaded.fit(frozen_lake(), 50).steps_ == 50


@pytest.mark.parametrize("extra", [RBF(np.array([1.0, 2.0])), (1, [None, {"a": 2}]), np.inf])
def test_parameters_of_many_kinds(tmp_path, extra):
    agent = TabularQ(extra=extra, rng=np.random.default_rng(0)).fit(frozen_lake(), 5)
    agent.save(tmp_path / "agent")
    loaded = TabularQ.load(tmp_path / "agent")
    assert repr(loaded.extra) == repr(extra)
    assert loaded.rng is None  # a generator is a source, not a setting


@pytest.mark.parametrize("bits", ["PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_any_bit_generator(tmp_path, bits):
    agent = TabularQ(rng=np.random.Generator(getattr(np.random, bits)(3))).fit(frozen_lake(), 5)
    agent.save(tmp_path / "agent")
    loaded = Agent.load(tmp_path / "agent")
    assert loaded.rng_.random() == agent.rng_.random()


def test_a_parameter_that_cannot_be_saved_writes_nothing(tmp_path):
    agent = TabularQ(extra=lambda x: x).fit(frozen_lake(), 5)
    with pytest.raises(TypeError, match=re.escape("TabularQ.save: params.extra must be a number")):
        agent.save(tmp_path / "agent")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_the_old_agent(trained, tmp_path, monkeypatch):
    path = tmp_path / "agent"
    trained.save(path)

    def break_off(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", break_off)
    with pytest.raises(KeyboardInterrupt):
        TabularQ().fit(frozen_lake(), 5).save(path)
    assert Agent.load(path).steps_ == 10_000
    assert list(tmp_path.iterdir()) == [path]


def rewrite(path, **changes):
    """Change the header and set the checksum right, as a forger would."""
    state, header = checkpoint.read("test", path)
    checkpoint.write("test", path, state, {**header, **changes})


def test_saving_while_training(tmp_path):
    path = tmp_path / "agent"

    def keep(agent):
        agent.save(path)

    keep.every = 10
    TabularQ(rng=0).fit(frozen_lake(), 25, callbacks=[keep])
    assert Agent.load(path).steps_ == 20


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 2}, "Agent.load: the file must have format 1, got 2."),
        (
            {"class": "nowhere.Robot"},
            "Agent.load: the file's class must be one of kernrl or of a module already imported, "
            "got 'nowhere.Robot'. Import nowhere first, if you trust the file.",
        ),
        ({"class": "kernrl.control.missing.Robot"}, "Agent.load: the file's class must be one of"),
        ({"class": "subprocess.Popen"}, "Agent.load: the file must hold a Agent, got Popen."),
        ({"class": "os.system"}, "Agent.load: the file's class must be one of kernrl or"),
        ({"params": {"alpha": 1}}, "Agent.load: the file's parameters must be those of TabularQ"),
        (
            {"observation_space": {"kind": "Dict"}},
            "Agent.load: the kind of space must be one of Box",
        ),
        ({"rng": {"bit_generator": "os"}}, "Agent.load: the bit generator must be one of MT19937"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_forged_files(trained, tmp_path, changes, text):
    path = tmp_path / "agent"
    trained.save(path)
    rewrite(path, **changes)
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        Agent.load(path)


def test_a_damaged_file(trained, tmp_path):
    path = tmp_path / "agent"
    trained.save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    text = "It was damaged or changed after it was saved."
    with pytest.raises(ValueError, match=re.escape(text)):
        Agent.load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"Agent.load: path must be a file written by save"):
        Agent.load(path)


def test_another_agent_s_file(tmp_path):
    Logger().fit(Counter(), 1).save(tmp_path / "agent")
    with pytest.raises(ValueError, match=re.escape("TabularQ.load: the file must hold a TabularQ")):
        TabularQ.load(tmp_path / "agent")


def test_a_class_nobody_can_find_is_not_saved(tmp_path):
    class Local(Logger):
        pass

    text = "Local.save: a class to be saved must be importable by its name, got"
    with pytest.raises(ValueError, match=re.escape(text)):
        Local().fit(Counter(), 1).save(tmp_path / "agent")


def test_a_class_that_is_no_longer_imported(trained, tmp_path, monkeypatch):
    trained.save(tmp_path / "agent")
    monkeypatch.delitem(sys.modules, TabularQ.__module__)
    with pytest.raises(ValueError, match="the file's class must be one of kernrl or of a module"):
        Agent.load(tmp_path / "agent")


def test_the_header_is_json_that_anyone_can_read(trained, tmp_path):
    from safetensors import safe_open

    trained.save(tmp_path / "agent")
    with safe_open(str(tmp_path / "agent"), framework="numpy") as file:
        text = file.metadata()["kernrl"]
        assert file.get_tensor("state.q").shape == (16, 4)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    header = json.loads(text, parse_constant=refuse)
    assert header["class"].endswith("small_agents.TabularQ")
    assert header["params"]["learning_rate"] == 1.0
