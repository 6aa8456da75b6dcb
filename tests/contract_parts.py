"""Parts that the contracts share: equality, fingerprints, global generators, pickle, parameters."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.base import clone

from kernrl import arrays


def same(a: Any, b: Any) -> bool:
    """Equal parameters, looking into kernels, arrays and nested estimators."""
    if hasattr(a, "get_params"):
        return type(a) is type(b) and same(a.get_params(), b.get_params())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if arrays.is_array(a):
        return type(a) is type(b) and np.array_equal(arrays.host(a), arrays.host(b))
    return a is b or (type(a) is type(b) and a == b)


def digest(*things: Any) -> str:
    """A hash of arrays, numbers and text, sensitive to every bit, shape and dtype."""
    sha = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, dict):
            for key in sorted(x):
                sha.update(str(key).encode())
                add(x[key])
        elif isinstance(x, list | tuple):
            sha.update(str(len(x)).encode())
            for item in x:
                add(item)
        elif arrays.is_array(x):
            host = arrays.host(x)
            sha.update(f"{host.dtype}{host.shape}".encode() + np.ascontiguousarray(host).tobytes())
        else:
            sha.update(repr(x).encode())

    add(things)
    return sha.hexdigest()


def check_parameters(thing: Any) -> None:
    """The constructor stores what it is given; clone, get_params and set_params agree with it."""
    params = thing.get_params(deep=False)
    accepted = inspect.signature(type(thing)).parameters
    assert set(params) == set(accepted), "get_params must name every constructor argument"
    made = type(thing)(**params)
    for name, value in params.items():
        assert getattr(made, name) is value, f"the constructor must store {name} untouched"
    assert same(made.get_params(), thing.get_params())
    twin = clone(thing)
    assert twin is not thing
    assert same(twin, thing), "clone must keep every parameter"
    assert twin.set_params(**thing.get_params()) is twin
    assert same(twin, thing), "set_params(get_params()) must change nothing"
    with pytest.raises(ValueError, match="no_such_parameter"):
        twin.set_params(no_such_parameter=1)


def check_learnt_names(before: set[str], fitted: Any) -> None:
    """What a fit adds ends in _ or is private; what the constructor stored is still there."""
    new = set(vars(fitted)) - before
    public = {name for name in new if not name.startswith("_")}
    assert public, "fit must leave something learnt"
    wrong = sorted(name for name in public if not name.endswith("_"))
    assert not wrong, f"learnt attributes must end in _: {wrong}"
    assert before <= set(vars(fitted))


@contextmanager
def global_streams_untouched() -> Iterator[None]:
    """The global generators of NumPy, torch and `random` stand afterwards as they stood before."""

    def states() -> str:
        return digest(list(np.random.get_state()), torch.get_rng_state(), random.getstate())

    before = states()
    yield
    assert states() == before, "a global random generator was used or seeded"


@contextmanager
def no_pickle() -> Iterator[None]:
    """Any use of pickle or torch.save inside the block raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    with ExitStack() as stack:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            stack.enter_context(mock.patch.object(pickle, name, refuse))
        for name in ("save", "load"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
        yield


def disturb_global_streams(seed: int) -> None:
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.seed(seed)
