"""Agent: fit, predict, save, load, and the one interaction loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from gymnasium import spaces as gym_spaces
from sklearn.base import BaseEstimator
from sklearn.utils.metaestimators import available_if

from kernrl import arrays, checks
from kernrl.data import checkpoint, spaces
from kernrl.data.collect import Sampler, Step, check_env
from kernrl.data.transitions import Transitions

Array = Any
Space = gym_spaces.Space[Any]
Callback = Callable[["Agent"], Any]


def _has_values(agent: Agent) -> bool:
    return hasattr(agent, "_values")


def _learns_from_batches(agent: Agent) -> bool:
    return type(agent)._fit_batch is not Agent._fit_batch


class Agent(BaseEstimator):
    """What every agent is: a scikit-learn estimator that learns by acting.

    A child stores its constructor's arguments (one of them `rng`), and fills in:
    `_begin` (make what is learnt), `_actions` (observations → actions), `observe` (take in a
    `Step`; rows with valid=False are no experience), `update` (learn; returns how many updates it
    made), where they exist `_values`, `_fit_batch`, `_end`; and `_state`, `_meta`, `_restore` for
    the file.

    Learnt by every fit: `steps_` (env steps executed), `n_updates_`, `episode_returns_`,
    `log_` (name → list of (step, value), by `record`), `observation_space_`, `action_space_`,
    `n_envs_`, `rng_`.
    """

    steps_: int
    n_updates_: int
    n_envs_: int
    episode_returns_: list[float]
    log_: dict[str, list[tuple[int, float]]]
    observation_space_: Space
    action_space_: Space
    rng_: np.random.Generator

    # ------------------------------------------------------------ learning

    def fit(
        self,
        env: Any,
        total_steps: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> Self:
        """Learn afresh from `total_steps` steps in `env`, or from Transitions.

        `env` is a Gymnasium env, vector env or env id. With b environments up to b − 1 steps more
        may be executed; `steps_` says how many were. A callback is called with the agent after
        every step, or every `callback.every` steps where it has that, and ends training by
        returning something true. Ctrl-C ends training between two steps, with the agent usable,
        and then raises KeyboardInterrupt; pressed twice it raises at once.
        """
        if isinstance(env, Transitions):
            return self._learn_batch(env, total_steps)
        check_env(self._owner, env)
        total_steps = checks.integer(self._owner, "total_steps", total_steps, at_least=1)
        if not isinstance(callbacks, Iterable):
            got = "one callback" if callable(callbacks) else repr(callbacks)
            checks.fail(
                self._owner, "callbacks must be a list", got, "Write [callback].", TypeError
            )
        watchers = [_Watcher(self._owner, callback) for callback in callbacks]
        rng = arrays.rng(getattr(self, "rng", None))
        with Sampler(env, seed=arrays.fresh_seed(rng)) as sampler:
            world = sampler.observation_space, sampler.action_space, sampler.n_envs
            with self._all_or_nothing():
                self._reset(*world, rng)
                self._begin(*world, total_steps)
            with _progress(progress, type(self).__name__, total_steps) as bar:
                self._interact(sampler, total_steps, watchers + bar)
        return self

    def _interact(self, sampler: Sampler, total_steps: int, watchers: list[_Watcher]) -> None:
        """The one loop: act, step, observe, update.

        BLAS keeps to one thread: a step is many small products, whose pool would spin between
        them (five times the CPU seconds), and bits would depend on the number of cores.
        """
        returns = self.episode_returns_
        with arrays.single_threaded_blas(), _interruptible() as interrupted:
            try:
                while self.steps_ < total_steps and not interrupted:
                    step = sampler.step(self.act(sampler.observations))
                    self.steps_ += step.n_valid
                    if step.finished:
                        returns.extend([total for total, _ in step.finished])
                    self.observe(step)
                    made = self.update()
                    if made:
                        self.n_updates_ += made
                    if watchers and any([watcher(self) for watcher in watchers]):
                        break
            except KeyboardInterrupt:
                interrupted.append(signal.SIGINT)
            self._end()
        if interrupted:
            raise KeyboardInterrupt

    def _learn_batch(self, transitions: Transitions, total_steps: int | None) -> Self:
        if not _learns_from_batches(self):
            self._fit_batch(transitions)
        if total_steps is not None:
            rule = "total_steps belongs to an environment and must be None with Transitions"
            checks.fail(self._owner, rule, total_steps)
        if transitions.actions is None:
            checks.fail(self._owner, "the transitions must have actions", "none")
        observation_space = spaces.of_states(transitions.shape)
        action_space = spaces.of_actions(self._owner, arrays.host(transitions.actions))
        rng = arrays.rng(getattr(self, "rng", None))
        with self._all_or_nothing():
            self._reset(observation_space, action_space, 1, rng)
            self._fit_batch(transitions)
        return self

    def _reset(
        self, observation_space: Space, action_space: Space, n_envs: int, rng: np.random.Generator
    ) -> None:
        """Forget what was learnt and take in the world's shape."""
        for name in [k for k in self.__dict__ if k.endswith("_") and not k.startswith("_")]:
            delattr(self, name)
        self.rng_ = rng
        self.observation_space_, self.action_space_ = observation_space, action_space
        self.n_envs_ = n_envs
        self.steps_ = self.n_updates_ = 0
        self.episode_returns_ = []
        self.log_ = {}

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put everything back if the block fails: an agent is fitted or it is not."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def record(self, name: str, value: float) -> None:
        """Add (steps_, value) to the log under `name`."""
        self.log_.setdefault(name, []).append((self.steps_, float(value)))

    # ------------------------------------------------------------ what a child fills in

    def _begin(
        self, observation_space: Space, action_space: Space, n_envs: int, total_steps: int
    ) -> None:
        """Check the spaces and make whatever is to be learnt."""

    def act(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, …)
        """Actions for training, exploration included."""
        return self._actions(observations, False)

    def observe(self, step: Step) -> None:
        """Take in one step of the b environments."""

    def update(self) -> int | None:
        """Learn from what was observed; returns the number of updates made (None: 0)."""
        return 0

    def _end(self) -> None:
        """Called once when training ends, interrupted or not."""

    def _actions(self, observations: np.ndarray, deterministic: bool) -> np.ndarray:
        """(b, …) observations -> (b, …) actions."""
        raise NotImplementedError(f"{type(self).__name__} must define _actions")

    def _fit_batch(self, transitions: Transitions) -> None:
        """Learn from a fixed data set."""
        checks.fail(
            self._owner,
            "it learns from an environment only",
            "Transitions",
            "Pass an env, a vector env or an env id.",
            TypeError,
        )

    def _state(self) -> dict[str, np.ndarray]:
        """The learnt arrays, by name."""
        return {}

    def _meta(self) -> dict[str, Any]:
        """Learnt things that are no arrays: what `checkpoint.encode` takes."""
        return {}

    def _restore(self, state: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Take back what `_state` and `_meta` gave; spaces and counters are already there."""

    # ------------------------------------------------------------ using what was learnt

    def predict(self, observations: Any, deterministic: bool = True) -> Any:
        """The action for one observation, or actions (b, …) for a batch (b, …)."""
        batch, single = self._batch(observations)
        actions = self._actions(batch, deterministic)
        return actions[0] if single else actions

    @available_if(_has_values)  # type: ignore[untyped-decorator]  # scikit-learn has no types
    def value(self, observations: Any) -> Any:
        """The value of one observation, or values (b,) of a batch (b, …)."""
        batch, single = self._batch(observations)
        values = self._values(batch)
        return values[0] if single else values

    def _batch(self, observations: Any) -> tuple[np.ndarray, bool]:
        """(b, …) host array, and whether it was a single observation."""
        checks.fitted(self, "action_space_")
        x = arrays.host(arrays.take(self._owner, "observations", observations))
        wanted = self.observation_space_.shape or ()
        single = x.shape == wanted
        if single:
            x = x[None]
        elif x.shape[1:] != wanted or x.ndim != len(wanted) + 1:
            inner = ", ".join(str(k) for k in wanted)
            rule = f"observations must have shape ({inner}) or (b{inner and ', '}{inner})"
            checks.fail(self._owner, rule, x.shape)
        checks.not_empty(self._owner, "observations", x)
        checks.finite(self._owner, "observation", x)
        return x, single

    # ------------------------------------------------------------ files

    def save(self, path: Any) -> None:
        """Write parameters and learnt state to one file, atomically. No pickle: see checkpoint."""
        owner = f"{self._owner}.save"
        checks.fitted(self, "action_space_")
        header = {
            "class": checkpoint.class_path(owner, type(self)),
            "params": self.get_params(deep=False),
            "observation_space": spaces.to_json(owner, self.observation_space_),
            "action_space": spaces.to_json(owner, self.action_space_),
            "rng": self.rng_.bit_generator.state,
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "meta": self._meta(),
        }
        encoded = {name: checkpoint.encode(owner, name, x) for name, x in header.items()}
        state = {f"state.{name}": np.asarray(x) for name, x in self._state().items()}
        state |= {f"log.{name}": np.array(rows) for name, rows in self.log_.items()}
        state["returns"] = np.array(self.episode_returns_, dtype=np.float64)
        checkpoint.write(owner, path, state, encoded)

    @classmethod
    def load(cls, path: Any) -> Self:
        """The agent that `save` wrote. Agents from outside kernrl must be imported first."""
        owner = f"{cls.__name__}.load"
        state, header = checkpoint.read(owner, path, _HEADER)
        found = checkpoint.find_class(owner, header.pop("class"))
        if not issubclass(found, cls):
            checks.fail(owner, f"the file must hold a {cls.__name__}", found.__name__)
        header = checkpoint.decode(owner, header)
        agent = checkpoint.build(owner, found, header["params"])
        assert isinstance(agent, cls)
        agent._take_back(owner, state, header)
        return agent

    def _take_back(self, owner: str, state: dict[str, np.ndarray], header: dict[str, Any]) -> None:
        rng = _generator(owner, header["rng"])
        space, actions = (
            spaces.from_json(owner, header[f"{role}_space"]) for role in ("observation", "action")
        )
        self._reset(space, actions, 1, rng)
        for name in _COUNTS:
            setattr(self, name, header["counts"][name])
        self.episode_returns_ = state["returns"].tolist()
        for name, rows in _under("log.", state).items():
            self.log_[name] = [(int(step), value) for step, value in rows.tolist()]
        self._restore(_under("state.", state), header["meta"])

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "action_space_")


_HEADER = ("class", "params", "observation_space", "action_space", "rng", "counts", "meta")
_COUNTS = ("steps_", "n_updates_", "n_envs_")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _under(prefix: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}


def _generator(owner: str, state: dict[str, Any]) -> np.random.Generator:
    """The host generator as it stood when the agent was saved."""
    checks.choice(owner, "the bit generator", state["bit_generator"], _BIT_GENERATORS)
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


# ---------------------------------------------------------------- callbacks, progress, Ctrl-C


class _Watcher:
    """A callback with its rhythm: true if it asks to stop."""

    def __init__(self, owner: str, callback: Callback) -> None:
        if not callable(callback):
            rule = "every callback must be callable with the agent"
            checks.fail(owner, rule, type(callback).__name__, error=TypeError)
        every = getattr(callback, "every", 1)
        self.every = checks.integer(owner, "callback.every", every, at_least=1)
        self.callback, self.due = callback, self.every

    def __call__(self, agent: Agent) -> bool:
        if agent.steps_ < self.due:
            return False
        self.due = agent.steps_ - agent.steps_ % self.every + self.every
        return bool(self.callback(agent))


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C puts something into; a second Ctrl-C raises at once.

    An interrupt in the middle of an update would leave half-written weights. Only Python's own
    handler is replaced, and only in the main thread, where handlers may be set.
    """
    interrupted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)

    replace = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not replace:
        yield interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress(wanted: bool, title: str, total: int) -> Iterator[list[_Watcher]]:
    """The watcher that draws a bar on a terminal, or prints ten lines where there is none."""
    if not wanted:
        yield []
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    live = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, disable=not live) as bar:
        task = bar.add_task(title, total=total)

        def show(agent: Agent) -> None:
            mean = np.mean(agent.episode_returns_[-100:]) if agent.episode_returns_ else np.nan
            text = f"{title}  return {mean:.1f}"
            if live:
                bar.update(task, completed=min(agent.steps_, total), description=text)
            else:
                console.print(f"{text}  {agent.steps_}/{total}", highlight=False)

        show.every = max(1, total // (500 if live else 10))  # type: ignore[attr-defined]
        yield [_Watcher(title, show)]
