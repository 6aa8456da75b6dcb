"""Three disjoint streams of seeds from one root: to train, to choose while training, to report.

Never `seed + i`: base seed 5 with three environments would then share two of them with base seed 6.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kernrl import checks

STREAMS = {"train": 0, "select": 1, "report": 2}


def stream(root: int, name: str, env: str, seed: int) -> np.random.SeedSequence:
    """The seed sequence of one stream for one (env, seed index), the same for every agent.

    SeedSequence(root, spawn_key=(stream, hash of env, seed index)): adding an environment, an agent
    or a seed to an experiment moves no other sequence.
    """
    checks.choice("seeds", "stream", name, STREAMS)
    digest = hashlib.sha256(env.encode()).digest()
    key = (STREAMS[name], int.from_bytes(digest[:4], "little"), seed)
    return np.random.SeedSequence(root, spawn_key=key)


def number(sequence: np.random.SeedSequence) -> int:
    """One 31-bit seed, for an API that wants an int."""
    return numbers(sequence, 1)[0]


def numbers(sequence: int | np.random.SeedSequence, n: int) -> list[int]:
    """n distinct 31-bit seeds; a longer list starts with the shorter one.

    >>> numbers(0, 2) == numbers(0, 5)[:2]
    True
    """
    if not isinstance(sequence, np.random.SeedSequence):
        sequence = np.random.SeedSequence(sequence)
    drawn: dict[int, None] = {}
    size = n
    while len(drawn) < n:
        drawn = dict.fromkeys((sequence.generate_state(size) >> 1).tolist())
        size += n
    return list(drawn)[:n]
