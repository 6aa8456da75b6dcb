"""Own threads for blocks of work: errors come back, and torch's own number stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernrl.deep_alignment.ops import threads


def test_a_thread_that_fails_tells_the_caller():
    def fails(item: int) -> None:
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError):
        threads.share(lambda: fails, [1, 2, 3, 4], 2)


def test_threads_leave_torch_as_it_was():
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(3)
        threads._pool.cache_clear()  # new threads, started while torch has three
        threads.share(lambda: lambda _: seen.append(torch.get_num_threads()), list(range(8)), 4)
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as fresh:  # what a thread that starts later finds
            assert fresh.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 8
