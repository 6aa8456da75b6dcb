"""Blocks of work on own threads, torch at one thread each: one wait at the end, none per call.

torch spreads each call over its threads and waits for all of them, which costs more than a block
that fits in cache takes, and far more on a busy machine: on two cores that others used as well,
exp of a million numbers took 1 ms on one thread and 18 ms on two.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def share(
    worker: Callable[[], Callable[[Item], None]], items: list[Item], threads: int | None = None
) -> None:
    """Call `worker()(item)` for all items; each thread makes its own worker, with own buffers.

    `threads` is torch's own number unless given; with one thread or one item the caller does it.
    Items must write to places of their own. No gradient is recorded.
    """
    n = min(torch.get_num_threads() if threads is None else threads, len(items))
    left = iter(items)  # advancing a list's iterator is atomic: each item goes to one thread
    if n <= 1:
        with torch.no_grad():
            _work(worker, left)
        return
    inference = torch.is_inference_mode_enabled()

    def job() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both belong to a thread
            _work(worker, left)

    pool = _pool(n, os.getpid())
    for done in [pool.submit(job) for _ in range(n)]:
        done.result()


def _work(worker: Callable[[], Callable[[Item], None]], items: Iterable[Item]) -> None:
    step = worker()
    for item in items:
        step(item)


@functools.lru_cache(maxsize=8)
def _pool(n: int, pid: int) -> ThreadPoolExecutor:  # pid: a pool does not survive a fork
    mine = torch.get_num_threads()
    ready = threading.Barrier(n)
    pool = ThreadPoolExecutor(n, "kernrl-ops", _single_torch_thread)
    for started in [pool.submit(ready.wait) for _ in range(n)]:
        started.result()  # all of them are there: the last call below undoes what they told MKL
    torch.set_num_threads(mine)
    return pool


def _single_torch_thread() -> None:
    torch.get_num_threads()  # a thread's first question resets its number, so it is asked first
    torch.set_num_threads(1)
