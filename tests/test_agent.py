"""The one loop, the shapes of predict, Ctrl-C, and the file, on agents as small as can be."""

from __future__ import annotations

import os
import re
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
from counter import Counter
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from small_agents import Batch, Logger, TabularQ, frozen_lake
from tolerances import tolerance

from kernrl.agent import Agent
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF


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
