"""Stepping an environment: the one place that knows autoreset.

Gymnasium's vector environments reset a finished sub-environment in one of three ways. NEXT_STEP
spends the next `step` on it, and that row is no experience (Gymnasium 1.4: action ignored,
reward 0). SAME_STEP resets at once and hides the true final observation in `info`. DISABLED
leaves it to the caller. A `Step` looks the same under all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from kernrl import arrays, checks
from kernrl.data import spaces
from kernrl.data.transitions import Transitions

Array = Any
Policy = Callable[[np.ndarray], Any]


class Step(NamedTuple):
    """What one step of b environments left behind; every array has b rows."""

    observations: np.ndarray  # (b, …) before the step
    actions: np.ndarray  # (b, …)
    rewards: np.ndarray  # (b,) float64
    next_observations: np.ndarray  # (b, …) the true final observation where an episode ended
    terminated: np.ndarray  # (b,) bool
    truncated: np.ndarray  # (b,) bool
    valid: np.ndarray  # (b,) bool; False: an autoreset row, no experience, never to be kept
    episode: np.ndarray  # (b,) int64, a new number for every episode
    finished: list[tuple[float, int]]  # (return, length) of the episodes that ended here
    n_valid: int  # rows with valid=True


class Sampler:
    """Steps an env, a vector env or the env of an id, and hands out `Step`s.

    `observations` (b, …) are always the ones to act on. Environments and action space are seeded
    with distinct numbers drawn from SeedSequence(seed), so runs with seeds 0, 1, 2, … share none.
    Observations are copied, since an env may reuse its buffer.
    """

    step: Callable[[np.ndarray], Step]  # (b, …) actions -> Step; chosen once, by the kind of env

    def __init__(self, env: Any, *, seed: arrays.Seed = None) -> None:
        self.env, self._owned = _resolve(env)
        try:
            self._open(seed)
        except BaseException:
            self.close()
            raise

    def _open(self, seed: arrays.Seed) -> None:
        vector = isinstance(self.env, VectorEnv)
        prefix = "single_" if vector else ""
        self.observation_space = spaces.check(
            "Sampler", "observation", getattr(self.env, prefix + "observation_space")
        )
        self.action_space = spaces.check(
            "Sampler", "action", getattr(self.env, prefix + "action_space")
        )
        self.n_envs = int(self.env.num_envs) if vector else 1
        self._floats = self.observation_space.dtype is not None and (
            np.issubdtype(self.observation_space.dtype, np.floating)
        )
        self._shape = (self.n_envs, *(self.observation_space.shape or ()))
        self._wanted = (self.n_envs, *(self.action_space.shape or ()))
        self.step = self._vector_step if vector else self._single_step
        self._begin(seed, vector)

    def _begin(self, seed: arrays.Seed, vector: bool) -> None:
        """Reset and seed everything, and start counting episodes."""
        env_seeds, action_seed = _seeds(seed, self.n_envs)
        if not vector:
            start, _ = self.env.reset(seed=env_seeds[0])
            self.observations = self._batch_of_one(start)
        else:
            self._mode = _autoreset_mode(self.env)
            start, _ = self.env.reset(seed=_vector_seed(self.env, env_seeds))
            self.observations = self._batch(start)
        self.env.action_space.seed(action_seed)
        self._return, self._length = 0.0, 0
        self._returns, self._lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, dtype=np.int64)
        self._resetting = np.zeros(self.n_envs, dtype=bool)
        self.episode = np.arange(self.n_envs, dtype=np.int64)
        self._n_episodes = self.n_envs

    def random_actions(self) -> np.ndarray:  # (b, …)
        """One action for each environment from the seeded action space."""
        drawn = self.env.action_space.sample()
        return np.asarray(drawn) if isinstance(self.env, VectorEnv) else np.asarray(drawn)[None]

    def close(self) -> None:
        """Close the env if the sampler made it."""
        if self._owned:
            self.env.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ one environment

    def _single_step(self, actions: np.ndarray) -> Step:
        """One step of a plain env, on the path where every microsecond shows."""
        if getattr(actions, "shape", None) != self._wanted:
            _refuse_actions(actions, self._wanted)
        before, episode = self.observations, self.episode
        try:
            after, reward, terminated, truncated, _ = self.env.step(actions[0])
        except Exception as error:
            _blame_action(error, self.env.action_space, actions[0])
            raise
        reward = float(reward)
        if not math.isfinite(reward):
            _refuse("reward", reward)
        reached = self.observations = self._batch_of_one(after)
        self._return += reward
        self._length += 1
        finished: list[tuple[float, int]] = []
        if terminated or truncated:
            finished.append((self._return, self._length))
            self._return, self._length = 0.0, 0
            self.episode = episode + 1
            start, _ = self.env.reset()
            self.observations = self._batch_of_one(start)
        return Step(
            before,
            actions,
            np.array((reward,)),
            reached,
            _TRUE if terminated else _FALSE,
            _TRUE if truncated else _FALSE,
            _TRUE,
            episode,
            finished,
            1,
        )

    def _batch_of_one(self, observation: Any) -> np.ndarray:
        batch = np.array(observation, ndmin=len(self._shape))  # copies, and adds the leading axis
        if batch.shape != self._shape:
            _refuse_shape(batch.shape, self._shape)
        if self._floats and not math.isfinite(np.vdot(batch, batch)):
            _check_observations(batch)
        return batch

    # ------------------------------------------------------------ many environments

    def _vector_step(self, actions: np.ndarray) -> Step:
        if getattr(actions, "shape", None) != self._wanted:
            _refuse_actions(actions, self._wanted)
        before, episode = self.observations, self.episode
        try:
            after, rewards, terminated, truncated, info = self.env.step(actions)
        except Exception as error:
            _blame_action(error, self.env.action_space, actions)
            raise
        valid = ~self._resetting
        rewards = np.where(valid, np.asarray(rewards, dtype=np.float64), 0.0)
        if not np.isfinite(rewards).all():
            _refuse("reward", rewards[~np.isfinite(rewards)][0])
        terminated = np.asarray(terminated, dtype=bool) & valid
        truncated = np.asarray(truncated, dtype=bool) & valid
        ended = terminated | truncated
        reached = self.observations = self._batch(after)
        finished = self._count(rewards, valid, ended)
        if finished:
            reached = self._start_anew(reached, ended, info)
        self._resetting = ended if self._mode is AutoresetMode.NEXT_STEP else _NONE(ended)
        n_valid = int(np.count_nonzero(valid))
        return Step(
            before,
            actions,
            rewards,
            reached,
            terminated,
            truncated,
            valid,
            episode,
            finished,
            n_valid,
        )

    def _batch(self, observations: Any) -> np.ndarray:
        batch = np.array(observations)
        if batch.shape != self._shape:
            _refuse_shape(batch.shape, self._shape)
        if self._floats and not math.isfinite(np.vdot(batch, batch)):
            _check_observations(batch)
        return batch

    def _count(
        self, rewards: np.ndarray, valid: np.ndarray, ended: np.ndarray
    ) -> list[tuple[float, int]]:
        """Add up returns and lengths; hand out, and clear, those of the episodes that ended."""
        self._returns += rewards
        self._lengths += valid
        if not ended.any():
            return []
        finished = list(
            zip(self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True)
        )
        self._returns[ended], self._lengths[ended] = 0.0, 0
        self.episode = self.episode.copy()
        self.episode[ended] = np.arange(self._n_episodes, self._n_episodes + len(finished))
        self._n_episodes += len(finished)
        return finished

    def _start_anew(self, reached: np.ndarray, ended: np.ndarray, info: Any) -> np.ndarray:
        """Make `observations` the new starts; return the observations that were truly reached."""
        if self._mode is AutoresetMode.SAME_STEP:
            return _with_final(reached, ended, info)
        if self._mode is AutoresetMode.DISABLED:
            starts, _ = self.env.reset(options={"reset_mask": ended.copy()})
            self.observations = reached.copy()
            self.observations[ended] = self._batch(starts)[ended]
        return reached


_TRUE, _FALSE = np.ones(1, dtype=bool), np.zeros(1, dtype=bool)
_TRUE.flags.writeable = _FALSE.flags.writeable = False
_NONE = np.zeros_like


# ---------------------------------------------------------------- what the sampler asks of an env


def check_env(owner: str, env: object) -> None:
    """An env, a vector env or text; whether the text is an id shows when it is opened."""
    if not isinstance(env, str | gymnasium.Env | VectorEnv):
        rule = "env must be a gymnasium Env, a VectorEnv or an environment id"
        checks.fail(owner, rule, type(env).__name__, error=TypeError)


def _resolve(env: Any) -> tuple[Any, bool]:
    """The environment object, and whether it was made here from an id."""
    if isinstance(env, str):
        try:
            return gymnasium.make(env), True
        except gymnasium.error.Error as error:
            rule = "env must be a registered environment id"
            raise ValueError(checks.sentence("Sampler", rule, repr(env), str(error))) from error
    check_env("Sampler", env)
    return env, False


def _autoreset_mode(env: Any) -> AutoresetMode:
    """The mode the vector env declares; there is no safe guess where it declares none."""
    declared = (env.metadata or {}).get("autoreset_mode")
    try:
        return declared if isinstance(declared, AutoresetMode) else AutoresetMode(declared)
    except ValueError:
        known = ", ".join(mode.name for mode in AutoresetMode)
        checks.fail(
            "Sampler",
            f"the vector env's metadata['autoreset_mode'] must be one of {known}",
            repr(declared),
            "Set it to the way this env resets finished sub-environments.",
        )


def _seeds(seed: arrays.Seed, n_envs: int) -> tuple[list[int], int]:
    """Distinct 31-bit seeds, one for each environment, and one for the action space."""
    if isinstance(seed, np.random.Generator):
        seed = arrays.fresh_seed(seed)
    if seed is not None and not isinstance(seed, np.random.SeedSequence):
        seed = checks.integer("Sampler", "seed", seed, at_least=0)
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    drawn = np.random.default_rng(root).choice(2**31, size=n_envs + 1, replace=False)
    return drawn[:-1].tolist(), int(drawn[-1])


def _vector_seed(env: Any, seeds: list[int]) -> list[int] | int:
    """Sub-environments that are envs of their own take a list; a natively batched env one int."""
    return seeds if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv) else seeds[0]


def _with_final(starts: np.ndarray, ended: np.ndarray, info: Any) -> np.ndarray:
    """`starts` with the rows of ended episodes replaced by their true final observations."""
    final = info.get("final_obs", info.get("final_observation"))
    rows = np.flatnonzero(ended)
    if final is None or any(final[i] is None for i in rows):
        checks.fail(
            "Sampler",
            "an env that resets in the same step must report info['final_obs']",
            "none",
            "Build the vector env with AutoresetMode.NEXT_STEP.",
        )
    reached = starts.copy()
    for i in rows:
        reached[i] = final[i]
    return reached


def _refuse_actions(actions: np.ndarray, wanted: tuple[int, ...]) -> None:
    rule = f"actions must have shape {wanted}, one row for each environment"
    checks.fail("Sampler", rule, getattr(actions, "shape", type(actions).__name__))


def _blame_action(error: Exception, space: Any, action: Any) -> None:
    """Where an env failed on an action outside its space, say that; asked only after a failure."""
    if isinstance(space, gymnasium.spaces.Box) or space.contains(action):
        return
    rule = f"every action must be in {space}"
    raise ValueError(checks.sentence("Sampler", rule, action)) from error


def _refuse_shape(got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    rule = f"the env must give observations of the shape of its observation space, {wanted[1:]}"
    checks.fail("Sampler", rule, got[1:], "Repair the environment or wrap it.")


def _check_observations(batch: np.ndarray) -> None:
    if not np.isfinite(batch).all():  # the squared norm alone may have overflowed
        _refuse("observation", float(batch[~np.isfinite(batch)][0]))


def _refuse(what: str, value: float) -> None:
    cure = "Repair the environment or wrap it."
    checks.fail("Sampler", f"every {what} of the environment must be finite", value, cure)


# ---------------------------------------------------------------- collecting a data set


def collect(env: Any, policy: Any, n_steps: int, seed: arrays.Seed = None) -> Transitions:
    """`n_steps` transitions of `env` under `policy`, each episode's rows consecutive.

    `policy` maps observations (b, …) to actions (b, …); an agent stands for its deterministic
    `predict`, "random" for the seeded action space. Where the collection stops inside an episode,
    its last row is marked `truncated`: the cut is no end of the value, and bootstrapping remains.
    With a vector env the rows of its last step beyond `n_steps` are dropped.

    >>> collect("CartPole-v1", "random", 100, seed=0).shape
    (100, 4)
    """
    n_steps = checks.integer("collect", "n_steps", n_steps, at_least=1)
    with Sampler(env, seed=seed) as sampler:
        act = _policy(policy, sampler)
        steps, n = [], 0
        while n < n_steps:
            steps.append(sampler.step(act(sampler.observations)))
            n += steps[-1].n_valid
    return _assemble(steps, n_steps)


def _policy(policy: Any, sampler: Sampler) -> Policy:
    """`policy` as a function from observations to a NumPy array of actions."""
    if isinstance(policy, str):
        checks.choice("collect", "policy", policy, ("random",))
        return lambda observations: sampler.random_actions()
    choose = getattr(policy, "predict", policy)
    if not callable(choose):
        rule = "policy must be callable, an agent or 'random'"
        checks.fail("collect", rule, type(policy).__name__, error=TypeError)

    def act(observations: np.ndarray) -> np.ndarray:
        chosen = choose(observations)
        return arrays.host(chosen) if arrays.is_array(chosen) else np.asarray(chosen)

    return act


def _assemble(steps: list[Step], n_steps: int) -> Transitions:
    """The valid rows of all steps, sorted so that every episode is one run."""
    keep = np.concatenate([step.valid for step in steps]).nonzero()[0][:n_steps]
    episode = np.concatenate([step.episode for step in steps])[keep]
    order = keep[np.argsort(episode, kind="stable")]

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(step, name) for step in steps])[order]

    ids = np.unique(episode, return_inverse=True)[1]
    ids.sort()
    terminated, truncated = column("terminated"), column("truncated")
    last = np.append(ids[1:] != ids[:-1], True)
    return Transitions(
        column("observations"),
        column("rewards"),
        column("next_observations"),
        terminated,
        actions=column("actions"),
        truncated=truncated | (last & ~terminated),
        episode=ids,
    )
