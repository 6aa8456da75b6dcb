"""The sampler under every autoreset mode, seeds, spaces, and collected data sets."""

from __future__ import annotations

import re
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
from counted import LASTS, MODES, expected_rows, vector, zeros
from counter import Counter
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from kernrl.data.collect import Sampler, collect


def rows_of(steps, i):
    """The valid rows of environment i, as the sampler gave them."""
    return [
        (
            tuple(s.observations[i].tolist()),
            float(s.rewards[i]),
            tuple(s.next_observations[i].tolist()),
            bool(s.terminated[i] | s.truncated[i]),
        )
        for s in steps
        if s.valid[i]
    ]


def walk(sampler, n):
    return [sampler.step(zeros(sampler.observations)) for _ in range(n)]


# ---------------------------------------------------------------- autoreset


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copies", [True, False])
def test_every_row_is_the_counter_s_own(mode, copies):
    """True final observation, terminal reward, no reset row: every row is known in advance."""
    steps = walk(Sampler(vector(mode, copy=copies), seed=0), 20)
    for i, last in enumerate(LASTS):
        rows = rows_of(steps, i)
        assert rows == expected_rows(100 * i, last, len(rows))
    n_resets = sum(rows[3] for i in range(3) for rows in rows_of(steps, i))
    n_valid = sum(s.n_valid for s in steps)
    if mode is AutoresetMode.NEXT_STEP:  # each reset but one still due costs one row
        assert 60 - n_resets <= n_valid <= 60 - n_resets + 3
    else:
        assert n_valid == 60
    assert all(s.n_valid == s.valid.sum() for s in steps)


@pytest.mark.parametrize("mode", MODES)
def test_an_autoreset_row_carries_nothing(mode):
    for s in walk(Sampler(vector(mode), seed=0), 12):
        assert not s.rewards[~s.valid].any()
        assert not (s.terminated | s.truncated)[~s.valid].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_flags_keep_their_meaning(mode, end):
    for s in walk(Sampler(vector(mode, end), seed=0), 12):
        last = np.isin(s.next_observations[:, 1] - LASTS, 0) & s.valid
        assert s.terminated.tolist() == (last & (end != "truncated")).tolist()
        assert s.truncated.tolist() == (last & (end != "terminated")).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_episode_numbers_returns_and_lengths(mode):
    steps = walk(Sampler(vector(mode), seed=0), 30)
    numbers: dict[int, set] = {}
    for s in steps:
        for i in np.flatnonzero(s.valid):
            numbers.setdefault(int(s.episode[i]), set()).add(float(s.observations[i, 0]))
    assert all(len(own) == 1 for own in numbers.values())  # one number, one episode
    assert len({min(own) for own in numbers.values()}) == len(numbers)  # and the reverse
    finished = {pair for s in steps for pair in s.finished}
    assert finished == {(60.0, 3), (30.0, 2), (100.0, 4)}
    ends = sum(int((s.terminated | s.truncated).sum()) for s in steps)
    assert sum(len(s.finished) for s in steps) == ends


def test_async_environments_give_the_same_rows():
    envs = vector(AutoresetMode.SAME_STEP, kind=AsyncVectorEnv)
    try:
        steps = walk(Sampler(envs, seed=0), 6)
        assert rows_of(steps, 1) == expected_rows(100, 2, 6)
    finally:
        envs.close()


@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
@pytest.mark.parametrize("masked", [False, True])
def test_both_spellings_of_the_final_observation(key, masked):
    class Renamed(gym.vector.VectorWrapper):
        """Reports finals under another key, as a plain batch if `masked`."""

        def step(self, actions):
            *rest, info = self.env.step(actions)
            final = info.pop("final_obs", None)
            if final is not None:
                if masked:
                    final = np.stack([np.zeros(2) if x is None else x for x in final])
                info[key] = final
            return *rest, info

    steps = walk(Sampler(Renamed(vector(AutoresetMode.SAME_STEP)), seed=0), 8)
    for i, last in enumerate(LASTS):
        assert rows_of(steps, i) == expected_rows(100 * i, last, 8)


def test_a_same_step_env_without_final_observations_is_refused():
    class Mute(gym.vector.VectorWrapper):
        def step(self, actions):
            *rest, _ = self.env.step(actions)
            return *rest, {}

    sampler = Sampler(Mute(vector(AutoresetMode.SAME_STEP)), seed=0)
    text = "an env that resets in the same step must report info['final_obs'], got none"
    with pytest.raises(ValueError, match=re.escape(text)):
        walk(sampler, 5)


@pytest.mark.parametrize("declared", [None, "sometimes"])
def test_an_undeclared_autoreset_mode_is_refused(declared):
    envs = vector(AutoresetMode.NEXT_STEP)
    envs.metadata["autoreset_mode"] = declared
    text = "must be one of NEXT_STEP, SAME_STEP, DISABLED, got " + repr(declared)
    with pytest.raises(ValueError, match=re.escape(text)):
        Sampler(envs, seed=0)


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_one_environment(end):
    steps = walk(Sampler(Counter(end), seed=0), 10)
    assert rows_of(steps, 0) == expected_rows(0, 3, 10)
    assert [int(s.episode[0]) for s in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [s.finished for s in steps[:4]] == [[], [], [(60.0, 3)], []]
    assert steps[2].terminated.tolist() == [end != "truncated"]
    assert steps[2].truncated.tolist() == [end != "terminated"]
    assert all(s.n_valid == 1 and s.valid.all() for s in steps)


def test_time_limits_truncate():
    steps = walk(Sampler(gym.wrappers.TimeLimit(Counter(), 2), seed=0), 4)
    assert [bool(s.truncated[0]) for s in steps] == [False, True, False, True]
    assert not any(s.terminated[0] for s in steps)


# ---------------------------------------------------------------- seeds


def seeds_of(seed, n=3):
    envs = vector(AutoresetMode.NEXT_STEP, lasts=(3,) * n)
    Sampler(envs, seed=seed)
    return [env.seeds[0] for env in envs.envs]


def test_every_environment_has_its_own_seed_and_no_run_shares_one():
    runs = [seeds_of(seed) for seed in range(50)]
    flat = [seed for run in runs for seed in run]
    assert len(set(flat)) == len(flat)
    gaps = {b - a for run in runs for a, b in pairwise(run)}
    assert 1 not in gaps  # Gymnasium makes s, s + 1, … of an int
    assert seeds_of(7) == runs[7]
    sequence = np.random.SeedSequence(7)
    assert seeds_of(sequence) == runs[7]
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in flat)


def test_a_generator_is_drawn_from():
    generator = np.random.default_rng(0)
    first = seeds_of(generator)
    assert seeds_of(generator) != first
    assert seeds_of(np.random.default_rng(0)) == first


@pytest.mark.parametrize("seed", [-1, 0.5, "a"])
def test_what_is_no_seed(seed):
    with pytest.raises((TypeError, ValueError), match="Sampler: seed must be an integer of at lea"):
        Sampler(Counter(), seed=seed)


def test_environments_are_seeded_once():
    env = Counter()
    walk(Sampler(env, seed=3), 7)
    assert env.seeds[0] is not None
    assert env.seeds[1:] == [None, None]


def test_the_same_seed_gives_the_same_rows():
    one, two, three = (collect("CartPole-v1", "random", 200, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.states, two.states)
    np.testing.assert_array_equal(one.actions, two.actions)  # the action space is seeded too
    assert not np.array_equal(one.states[0], three.states[0])


def test_a_natively_batched_environment_takes_one_seed():
    envs = gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    one = collect(envs, "random", 90, seed=0)
    two = collect(envs, "random", 90, seed=0)
    np.testing.assert_array_equal(one.states, two.states)
    follows = (one.next_states[:-1] == one.states[1:]).all(axis=1)
    assert follows.tolist() == (~one.episode_starts[1:]).tolist()


# ---------------------------------------------------------------- what is refused


class Strange(Counter):
    def __init__(self, observation=None, action=None):
        super().__init__()
        self.observation_space = observation or self.observation_space
        self.action_space = action or self.action_space


DICT = gym.spaces.Dict({"x": gym.spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        (
            Strange(observation=DICT),
            TypeError,
            f"Sampler: the observation space must be Box, Discrete, MultiBinary or MultiDiscrete, "
            f"got {DICT}. Wrap the env, for example in gymnasium.wrappers.FlattenObservation.",
        ),
        (
            Strange(observation=gym.spaces.Text(3)),
            TypeError,
            "Sampler: the observation space must be Box, Discrete, MultiBinary or MultiDiscrete, "
            "got Text(",
        ),
        (
            Strange(action=gym.spaces.Tuple((gym.spaces.Discrete(2),))),
            TypeError,
            "Sampler: the action space must be Box, Discrete, MultiBinary or MultiDiscrete, "
            "got Tuple(Discrete(2)). "
            "Wrap the env in a gymnasium.ActionWrapper that offers one of these.",
        ),
        (
            3,
            TypeError,
            "Sampler: env must be a gymnasium Env, a VectorEnv or an environment id, got int.",
        ),
        (
            "KartPole-v1",
            ValueError,
            "Sampler: env must be a registered environment id, got 'KartPole-v1'. ",
        ),
    ],
    ids=["dict", "text", "tuple", "int", "id"],
)
def test_what_is_no_environment_for_us(env, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Sampler(env, seed=0)


class Broken(Counter):
    """Returns a bad number at its second step."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if observation[1] == 2:
            reward = np.nan if self.where == "reward" else reward
            observation = observation * (np.inf if self.where == "observation" else 1)
        return observation, reward, *rest


class Shapeless(Counter):
    """Reaches an observation that its space does not have."""

    def __init__(self, reached):
        super().__init__()
        self.reached = reached

    def step(self, action):
        return self.reached, *super().step(action)[1:]


@pytest.mark.parametrize("reached", [np.zeros(5, np.float32), 3.0, "somewhere"])
def test_observations_of_another_shape(reached):
    text = (
        "Sampler: the env must give observations of the shape of its observation space, (2,), got ("
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        collect(Shapeless(reached), "random", 5, seed=0)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("action", [2, -1])
def test_an_action_outside_the_space_is_named_where_the_env_fails_on_it(action, many):
    env = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync") if many else "CartPole-v1"
    with pytest.raises(ValueError, match=r"Sampler: every action must be in .*Discrete\(.*, got"):
        collect(env, lambda observations: np.full(len(observations), action), 5, seed=0)


def test_a_failure_of_the_env_itself_stays_what_it_is():
    class Failing(Counter):
        def step(self, action):
            raise ArithmeticError("the motor is cold")

    with pytest.raises(ArithmeticError, match="the motor is cold"):
        collect(Failing(), "random", 5, seed=0)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("where", ["reward", "observation"])
@pytest.mark.parametrize("many", [False, True])
def test_numbers_that_are_none(where, many):
    env = SyncVectorEnv([lambda: Broken(where)] * 2) if many else Broken(where)
    sampler = Sampler(env, seed=0)
    walk(sampler, 1)
    with pytest.raises(ValueError, match=f"Sampler: every {where} of the environment must be fini"):
        walk(sampler, 1)


def test_large_observations_are_no_error():
    class Large(Counter):
        def reset(self, **options):
            observation, info = super().reset(**options)
            return observation + 1e200, info  # its square overflows

    assert Sampler(Large(), seed=0).observations[0, 0] >= 1e200


@pytest.mark.parametrize("actions", [np.zeros((1, 1), int), np.zeros(2, int), [0], 0])
def test_actions_of_another_shape(actions):
    with pytest.raises(ValueError, match=r"Sampler: actions must have shape \(1,\), one row for"):
        Sampler(Counter(), seed=0).step(actions)


def test_only_its_own_env_is_closed():
    class Closing(Counter):
        closed = False

        def close(self):
            self.closed = True

    env = Closing()
    with Sampler(env, seed=0):
        pass
    assert not env.closed
    gym.register("kernrl-test/Closing-v0", entry_point=lambda: env)
    try:
        with Sampler("kernrl-test/Closing-v0", seed=0):
            pass
        assert env.closed
        env.closed, env.action_space = False, gym.spaces.Text(2)
        with pytest.raises(TypeError, match="Text"):
            Sampler("kernrl-test/Closing-v0", seed=0)
        assert env.closed
    finally:
        del gym.registry["kernrl-test/Closing-v0"]
