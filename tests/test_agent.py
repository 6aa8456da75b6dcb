"""The one loop, the shapes of predict, Ctrl-C, and the file, on agents as small as can be."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
from counter import Counter
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.agent import Agent
from kernrl.data import checkpoint
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF


class TabularQ(Agent):
    """Watkins' Q-learning on a Discrete observation space."""

    def __init__(self, learning_rate=1.0, gamma=0.9, epsilon=1.0, extra=None, rng=None):
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.epsilon = epsilon
        self.extra = extra
        self.rng = rng

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        if not isinstance(observation_space, gym.spaces.Discrete):
            raise TypeError("TabularQ: the observation space must be Discrete")
        self.q_ = np.zeros((observation_space.n, action_space.n))

    def _actions(self, observations, deterministic):
        greedy = self.q_[observations].argmax(axis=1)
        if deterministic:
            return greedy
        explore = self.rng_.random(len(greedy)) < self.epsilon
        return np.where(explore, self.rng_.integers(self.q_.shape[1], size=len(greedy)), greedy)

    def _values(self, observations):
        return self.q_[observations].max(axis=1)

    def observe(self, step):
        self.step_ = step

    def update(self):
        s = self.step_
        ahead = np.where(s.terminated, 0.0, self._values(s.next_observations))
        for i in np.flatnonzero(s.valid):
            key = s.observations[i], s.actions[i]
            target = s.rewards[i] + self.gamma * ahead[i]
            self.q_[key] += self.learning_rate * (target - self.q_[key])
        return 1

    def _state(self):
        return {"q": self.q_}

    def _meta(self):
        return {"states": len(self.q_), "limit": np.inf}

    def _restore(self, state, meta):
        self.q_ = state["q"]
        assert meta == {"states": len(self.q_), "limit": np.inf}


class Logger(Agent):
    """Acts 0 and writes down what happens to it."""

    def __init__(self, batch=False, rng=None):
        self.batch = batch
        self.rng = rng

    def _begin(self, observation_space, action_space, n_envs, total_steps):
        self.events_ = [("begin", n_envs, total_steps)]

    def _actions(self, observations, deterministic):
        return np.full(len(observations), 0 if deterministic else 1)

    def act(self, observations):
        self.events_.append("act")
        return self._actions(observations, False)

    def observe(self, step):
        self.events_.append("observe")
        self.valid_ = [*getattr(self, "valid_", []), step.n_valid]

    def update(self):
        self.events_.append("update")

    def _end(self):
        self.events_.append("end")


class Batch(Logger):
    """Learns from a data set too."""

    def _fit_batch(self, transitions):
        self.seen_ = transitions
        if self.batch == "broken":
            raise ValueError("Batch: no")


def frozen_lake(**options):
    return gym.make("FrozenLake-v1", is_slippery=False, **options)


@pytest.fixture(scope="module")
def trained():
    return TabularQ(rng=0).fit(frozen_lake(), 10_000)


# ---------------------------------------------------------------- the loop


def test_it_learns(trained):
    """The shortest path on the lake has six steps, so v*(start) = γ⁵."""
    np.testing.assert_allclose(trained.value(0), 0.9**5, **tolerance("algebra"))
    assert trained.steps_ == trained.n_updates_ == 10_000
    assert set(trained.episode_returns_) == {0.0, 1.0}


def test_the_order_of_things():
    agent = Logger().fit(Counter(), 2)
    once = ["act", "observe", "update"]
    assert agent.events_ == [("begin", 1, 2), *once, *once, "end"]
    assert agent.n_updates_ == 0


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("total", [1, 10, 25])
def test_steps_are_those_executed(mode, total):
    envs = SyncVectorEnv([lambda n=n: Counter(last=n) for n in (2, 3, 4)], autoreset_mode=mode)
    agent = Logger().fit(envs, total)
    assert total <= agent.steps_ <= total + 2
    assert agent.steps_ == sum(agent.valid_)  # autoreset rows are no steps
    assert set(agent.episode_returns_) <= {30.0, 60.0, 100.0}


def test_an_env_id_will_do():
    assert Logger().fit("CartPole-v1", 30).steps_ == 30


def test_every_fit_starts_afresh(trained):
    agent = TabularQ(rng=0)
    first = agent.fit(frozen_lake(), 500).q_.copy()
    agent.leftover_ = 1
    again = agent.fit(frozen_lake(), 500)
    assert again is agent
    np.testing.assert_array_equal(agent.q_, first)
    assert agent.steps_ == 500
    assert not hasattr(agent, "leftover_")


def test_the_seed_decides_everything():
    runs = [TabularQ(rng=seed).fit("CliffWalking-v1", 600) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0].q_, runs[1].q_)
    assert runs[0].episode_returns_ == runs[1].episode_returns_
    assert not np.array_equal(runs[0].q_, runs[2].q_)


def test_a_generator_goes_on():
    agent = TabularQ(rng=np.random.default_rng(0))
    first = agent.fit("CliffWalking-v1", 300).q_
    assert not np.array_equal(agent.fit("CliffWalking-v1", 300).q_, first)


def test_the_log():
    class Recorder(Logger):
        def update(self):
            self.record("double", np.float32(2 * self.steps_))

    agent = Recorder().fit(Counter(), 3)
    assert agent.log_ == {"double": [(1, 2.0), (2, 4.0), (3, 6.0)]}


def test_the_loop_costs_little():
    """An agent that does nothing added 4 % to the sampler's own cost on a quiet machine."""
    import time

    from kernrl.data.collect import Sampler

    class Idle(Agent):
        def __init__(self, rng=None):
            self.rng = rng

        def act(self, observations):
            return action

    action, n = np.zeros(1, dtype=np.int64), 2000
    sampler = Sampler("CartPole-v1", seed=0)
    agent = Idle().fit("CartPole-v1", 1)
    bare, looped = [], []
    for _ in range(25):  # the fastest of many short turns is what the code costs by itself
        start = time.process_time()
        for _ in range(n):
            sampler.step(action)
        bare.append(time.process_time() - start)
        agent.steps_, start = 0, time.process_time()
        agent._interact(sampler, n, [])
        looped.append(time.process_time() - start)
    assert min(looped) < 1.3 * min(bare)  # room for a busy one


# ---------------------------------------------------------------- callbacks and progress


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Logger().fit(np.zeros((3, 2))),
            "Logger: env must be a gymnasium Env, a VectorEnv or an environment id, got ndarray.",
        ),
        (
            lambda: Logger().fit(Counter(), 5, callbacks=print),
            "Logger: callbacks must be a list, got one callback. Write [callback].",
        ),
        (
            lambda: Logger().fit(Counter(), 5, callbacks=3),
            "Logger: callbacks must be a list, got 3",
        ),
        (lambda: Logger().fit(Counter(), 5).save(None), "Logger.save: path must be a path, got No"),
        (lambda: Agent.load(None), "Agent.load: path must be a path, got None."),
    ],
)
def test_things_of_the_wrong_kind(call, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        call()


def test_a_callback_sees_every_step_and_may_stop():
    seen = []

    def watch(agent):
        seen.append(agent.steps_)
        return agent.steps_ == 4

    assert Logger().fit(Counter(), 100, callbacks=[watch]).steps_ == 4
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_callback_has_its_rhythm(n_envs):
    seen = []

    class Watch:
        every = 4

        def __call__(self, agent):
            seen.append(agent.steps_)

    env = SyncVectorEnv([lambda: Counter(last=50)] * n_envs)
    Logger().fit(env, 12, callbacks=(Watch(), lambda agent: False))
    assert seen == ([4, 8, 12] if n_envs == 1 else [6, 9, 12])


def test_progress_without_a_terminal(capsys):
    Logger().fit(Counter(), 50, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "Logger  return 60.0  50/50"
    assert "\x1b" not in "".join(lines)


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    Logger().fit(Counter(), 50, progress=True)
    shown = capsys.readouterr().err
    assert "50/50" in shown and "\x1b" in shown


def test_no_progress_no_output(capsys):
    Logger().fit(Counter(), 50)
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- interruption


def interrupt(at):
    def callback(agent):
        if agent.steps_ == at:
            os.kill(os.getpid(), signal.SIGINT)

    return callback


def test_control_c_ends_between_two_steps():
    agent = Logger()
    with pytest.raises(KeyboardInterrupt):
        agent.fit(Counter(), 1000, callbacks=[interrupt(at=7)])
    assert agent.steps_ == 7
    assert agent.events_[-3:] == ["observe", "update", "end"]
    assert agent.predict([0.0, 0.0]) == 0  # and the agent is usable
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_control_c_does_not_cut_an_update_in_two():
    class Slow(Logger):
        def update(self):
            os.kill(os.getpid(), signal.SIGINT)
            self.events_.append("all of the update")

    agent = Slow()
    with pytest.raises(KeyboardInterrupt):
        agent.fit(Counter(), 1000)
    assert agent.events_[-2:] == ["all of the update", "end"]


def test_control_c_twice_ends_at_once():
    class Stuck(Logger):
        def update(self):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            self.events_.append("unreachable")

    agent = Stuck()
    with pytest.raises(KeyboardInterrupt):
        agent.fit(Counter(), 1000)
    assert agent.events_[-2:] == ["observe", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_keyboard_interrupt_from_anywhere_still_ends_well():
    def callback(agent):
        raise KeyboardInterrupt

    agent = Logger()
    with pytest.raises(KeyboardInterrupt):
        agent.fit(Counter(), 1000, callbacks=[callback])
    assert agent.events_[-1] == "end"


def test_a_handler_of_the_caller_s_is_left_alone():
    def mine(number, frame):
        pass

    signal.signal(signal.SIGINT, mine)
    try:
        agent = Logger().fit(
            Counter(), 5, callbacks=[lambda a: signal.getsignal(signal.SIGINT) is not mine]
        )
        assert agent.steps_ == 5
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_threads_may_fit():
    agent = Logger()
    thread = threading.Thread(target=agent.fit, args=(Counter(), 5))
    thread.start()
    thread.join()
    assert agent.steps_ == 5


# ---------------------------------------------------------------- whole or not at all


def test_a_fit_that_cannot_begin_changes_nothing(trained):
    agent = clone(trained)
    with pytest.raises(TypeError, match="must be Discrete"):
        agent.fit("CartPole-v1", 10)
    with pytest.raises(NotFittedError):
        agent.predict(0)
    agent.fit(frozen_lake(), 100)
    before = agent.q_
    for env, steps in (("CartPole-v1", 10), ("KartPole-v1", 10), (frozen_lake(), 0), (3, 10)):
        with pytest.raises((TypeError, ValueError)):
            agent.fit(env, steps)
        assert agent.q_ is before and agent.steps_ == 100


def test_a_broken_batch_changes_nothing():
    t = Transitions(np.zeros(2), [0, 0], np.zeros(2), [0, 0], actions=[0, 1])
    agent = Batch(batch="broken")
    with pytest.raises(ValueError, match="Batch: no"):
        agent.fit(t)
    assert not hasattr(agent, "action_space_")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            ("CartPole-v1",),
            TypeError,
            "Logger: total_steps must be an integer of at least 1, got No",
        ),
        (
            ("CartPole-v1", 0),
            ValueError,
            "Logger: total_steps must be an integer of at least 1, got",
        ),
        (
            ("CartPole-v1", 5, [3]),
            TypeError,
            "Logger: every callback must be callable with the age",
        ),
        (
            (Transitions([0.0], [0], [0.0], [1], actions=[0]),),
            TypeError,
            "Logger: it learns from an environment only, got Transitions. "
            "Pass an env, a vector env or an env id.",
        ),
    ],
)
def test_bad_requests(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Logger().fit(*arguments)


# ---------------------------------------------------------------- data sets


def test_a_batch_agent_takes_transitions():
    t = Transitions(np.zeros((3, 2)), [0] * 3, np.zeros((3, 2)), [0] * 3, actions=[0, 2, 1])
    agent = Batch().fit(t)
    assert agent.seen_ is t
    assert agent.action_space_ == gym.spaces.Discrete(3)
    assert agent.predict([0.0, 0.0]) == 0
    assert agent.steps_ == 0
    assert Batch().fit(Counter(), 5).steps_ == 5


@pytest.mark.parametrize(
    ("changes", "steps", "text"),
    [
        (
            {},
            5,
            "Batch: total_steps belongs to an environment and must be None with Transitions, go",
        ),
        ({"actions": None}, None, "Batch: the transitions must have actions, got none."),
        ({"actions": [-1, 0]}, None, "Batch: discrete actions must be numbered from 0, got -1."),
    ],
)
def test_batches_we_cannot_take(changes, steps, text):
    t = Transitions(np.zeros(2), [0, 0], np.zeros(2), [0, 0], **{"actions": [0, 1], **changes})
    with pytest.raises(ValueError, match=re.escape(text)):
        Batch().fit(t, steps)


# ---------------------------------------------------------------- predict and value


def test_one_observation_or_many(trained):
    assert trained.predict(0).shape == ()
    many = trained.predict([0, 1, 2])
    assert many.shape == (3,)
    assert [trained.predict(k) for k in range(3)] == many.tolist()
    assert trained.value(np.arange(16)).shape == (16,)
    assert trained.value(14) == trained.value(np.arange(16))[14]


def test_deterministic_or_not():
    agent = Logger().fit(Counter(), 1)
    assert agent.predict(np.zeros(2)) == 0
    assert agent.predict(np.zeros((3, 2)), deterministic=False).tolist() == [1, 1, 1]


def test_observations_of_any_library():
    import torch

    assert Logger().fit(Counter(), 1).predict(torch.zeros(4, 2)).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("observations", "error", "text"),
    [
        (np.zeros(3), ValueError, "Logger: observations must have shape (2) or (b, 2), got (3,)."),
        (
            np.zeros((1, 2, 2)),
            ValueError,
            "Logger: observations must have shape (2) or (b, 2), got",
        ),
        (
            np.zeros((0, 2)),
            ValueError,
            "Logger: observations must have at least one row, got (0, 2)",
        ),
        ([np.nan, 0], ValueError, "Logger: every observation must be finite, got nan at row 0. "),
        (["a", "b"], TypeError, "Logger: observations must be real numbers, got dtype <U1."),
    ],
)
def test_observations_we_cannot_take(observations, error, text):
    agent = Logger().fit(Counter(), 1)
    with pytest.raises(error, match=re.escape(text)):
        agent.predict(observations)


def test_scalar_observations_are_said_so(trained):
    text = "TabularQ: observations must have shape () or (b), got (2, 2)."
    with pytest.raises(ValueError, match=re.escape(text)):
        trained.predict([[0, 1], [1, 2]])


def test_unfitted():
    text = "TabularQ: it must be fitted before use. Call fit(...) first."
    agent = TabularQ()
    for call in (agent.predict, agent.value, agent.save):
        with pytest.raises(NotFittedError, match=re.escape(text)):
            call(0)


def test_value_is_there_only_where_there_is_one(trained):
    assert hasattr(trained, "value")
    assert not hasattr(Logger(), "value")


def test_scikit_learn_parameters(trained):
    copy = clone(trained)
    assert copy.get_params() == trained.get_params()
    assert not hasattr(copy, "q_")
    assert copy.set_params(gamma=0.5).gamma == 0.5
    assert TabularQ(extra=RBF(2.0)).get_params()["extra__length_scale"] == 2.0
    assert repr(TabularQ(gamma=0.5)) == "TabularQ(gamma=0.5)"


# ---------------------------------------------------------------- files


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
    monkeypatch.delitem(sys.modules, __name__)
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
    assert header["class"].endswith("test_agent.TabularQ")
    assert header["params"]["learning_rate"] == 1.0
