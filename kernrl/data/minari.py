"""Transitions from Minari's offline data sets."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernrl import checks
from kernrl.data.transitions import Transitions

_OWNER = "Transitions.from_minari"


def read(dataset: Any) -> Transitions:
    """The transitions of all episodes of a Minari dataset, or of the id of a local one.

    Minari keeps t + 1 observations for t steps, so the last row has its true final observation.
    """
    if isinstance(dataset, str):
        dataset = _load(dataset)
    if not hasattr(dataset, "iterate_episodes"):
        rule = "dataset must be a Minari dataset or its id"
        checks.fail(_OWNER, rule, type(dataset).__name__, error=TypeError)
    return Transitions.concatenate(_episode(e) for e in dataset.iterate_episodes())


def _episode(episode: Any) -> Transitions:
    observations = episode.observations
    for name, x in (("observations", observations), ("actions", episode.actions)):
        if not isinstance(x, np.ndarray):
            cure = "Flatten its Dict or Tuple space first."
            got = type(x).__name__
            checks.fail(_OWNER, f"the {name} of an episode must be an array", got, cure, TypeError)
    t = len(episode.rewards)
    rule = f"an episode of {t} steps must have {t + 1} observations"
    checks.require(len(observations) == t + 1, _OWNER, rule, len(observations))
    return Transitions(
        observations[:-1],
        episode.rewards,
        observations[1:],
        episode.terminations,
        actions=episode.actions,
        truncated=episode.truncations,
        episode=np.zeros(t, dtype=np.int64),
    )


def _load(name: str) -> Any:
    try:
        import minari
    except ImportError as error:
        cure = "Install the extra: pip install 'kernrl[data]'."
        raise ImportError(
            checks.sentence(_OWNER, "Minari data sets need minari", "no such package", cure)
        ) from error
    try:
        return minari.load_dataset(name)
    except (FileNotFoundError, ValueError) as error:
        cure = f"Fetch it first: minari download {name}"
        raise ValueError(
            checks.sentence(_OWNER, "dataset must be the id of a local one", repr(name), cure)
        ) from error
