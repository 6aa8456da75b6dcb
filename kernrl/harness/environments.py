"""Making environments by id, with an error that guesses; what a run writes down about them."""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import gymnasium

from kernrl import checks

STEP_LIMIT = 10_000  # for an environment that has none: CliffWalking would walk forever


def make(env_id: str, kwargs: Mapping[str, Any] | None = None, n_envs: int = 1) -> Any:
    """One Gymnasium env, or a synchronous vector env if n_envs > 1.

    Raises ValueError for an id that is not registered and for keyword arguments that do not fit.
    """
    try:
        if n_envs > 1:
            return gymnasium.make_vec(env_id, n_envs, vectorization_mode="sync", **(kwargs or {}))
        return gymnasium.make(env_id, disable_env_checker=True, **(kwargs or {}))
    except gymnasium.error.DependencyNotInstalled as error:
        checks.fail("env", f"{env_id!r} needs a package that is not installed", error)
    except (gymnasium.error.Error, ImportError) as error:
        close = difflib.get_close_matches(env_id, list(gymnasium.registry), n=1)
        cure = f"Did you mean {close[0]!r}?" if close else f"Gymnasium says: {error}"
        checks.fail("env", "the id must be registered with Gymnasium", repr(env_id), cure)
    except TypeError as error:
        checks.fail("env", f"{env_id} must accept its kwargs", error)


def step_limit(env: gymnasium.Env) -> int:
    """The time limit of the registered environment, or STEP_LIMIT if it has none."""
    spec = env.spec
    return (spec.max_episode_steps if spec is not None else None) or STEP_LIMIT


def package(env_id: str) -> str:
    """The package and version an environment comes from, such as "gymnasium 1.4.0"."""
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    entry = getattr(spec, "entry_point", None)
    if entry is None:
        return "unknown"
    module = (entry if isinstance(entry, str) else entry.__module__).partition(".")[0]
    try:
        return f"{module} {importlib.metadata.version(module)}"
    except importlib.metadata.PackageNotFoundError:
        return module


def threshold(env_id: str) -> float | None:
    """The mean return from which the environment counts as solved, where Gymnasium states one."""
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    return None if spec is None else spec.reward_threshold
