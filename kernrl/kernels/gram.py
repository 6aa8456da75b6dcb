"""The Gram matrix: dense, or in row tiles that are never all in memory.

On NumPy, row tiles run on an own thread pool with BLAS held at one thread: tiles stay in cache
between the product and the kernel's function, and BLAS' own threads would spin between products.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kernrl import arrays, checks

if TYPE_CHECKING:
    from kernrl.kernels.base import Kernel

Array = Any
T = TypeVar("T")

TILE_ROWS = 256  # 256 x 2000 float32 is 2 MB: the product, the clamp and the exp hit cache
SMALL = 1 << 16  # entries below which a pool costs more than it saves
DEVICE_TILE = 1 << 27  # entries of one tile off NumPy: 1 GiB in float64


def rows(owner: str, name: str, x: object) -> Array:
    """`x` as a finite floating (n, d) matrix of its own library; (n,) becomes (n, 1)."""
    x = arrays.floating(arrays.take(owner, name, x))
    checks.ndim(owner, name, x, (1, 2), "(n, d)")
    x = arrays.columns(x)
    checks.finite(owner, name, x)
    return x


def gram(kernel: Kernel, x: Array, y: Array | None = None) -> Array:  # (n, d), (m, d) -> (n, m)
    """K_ij = k(x_i, y_j). With y None, K(x, x), symmetric to rounding with an exact diagonal.

    Raises ValueError for NaN, infinities, mismatched columns and unresolved length scales.
    O(nmd) work, O(nm) memory and nothing more.
    """
    return GramOperator(kernel, x, y).dense()


def matvec(
    kernel: Kernel, x: Array, z: Array, w: Array
) -> Array:  # (m,) or (m, k) -> (n,) or (n, k)
    """K(x, z) w without the (n, m) matrix: O(nm) work, one tile of memory."""
    return GramOperator(kernel, x, z) @ w


class GramOperator:
    """K(x, y) as a thing that makes row tiles: `tiles()`, `@ w`, `rmatvec(v)`, `dense()`."""

    def __init__(self, kernel: Kernel, x: Array, y: Array | None = None) -> None:
        owner = type(kernel).__name__
        x = rows(owner, "x", x)
        self.symmetric = y is None
        y = x if y is None else rows(owner, "y", y)
        xp = arrays.namespace(x, y)
        checks.same_columns(owner, x, y)
        if x.dtype != y.dtype:
            common = xp.result_type(x, y)
            x, y = xp.astype(x, common, copy=False), xp.astype(y, common, copy=False)
        self.kernel, self.xp, self.x, self.y = kernel, xp, x, y
        kernel._require_resolved()
        self.shape = (int(x.shape[0]), int(y.shape[0]))
        self.dtype = x.dtype

    @functools.cached_property
    def _section(self) -> Callable[[Array], Array]:
        return self.kernel._section(self.xp, self.y)

    @functools.cached_property
    def _filler(self) -> Callable[[np.ndarray, np.ndarray], None]:
        return self.kernel._filler(self.y)

    def tile(self, start: int, stop: int, out: Array = None) -> Array:  # -> (stop − start, m)
        """Rows start:stop of K, the diagonal exact where K is symmetric.

        On NumPy they may be made in `out`, so that no tile is made only to be copied.
        """
        if out is None:
            block = self._section(self.x[start:stop, :])
        else:
            self._filler(self.x[start:stop], out)
            block = out
        if self.symmetric:
            exact = self.kernel._diagonal(self.xp, self.x[start:stop, :])
            block = arrays.with_diagonal(block, exact, offset=start)
        return block

    def tiles(self, size: int = TILE_ROWS) -> Iterator[tuple[slice, Array]]:
        """(rows, K[rows]) in order, one at a time."""
        for start in range(0, self.shape[0], size):
            stop = min(start + size, self.shape[0])
            yield slice(start, stop), self.tile(start, stop)

    def dense(self) -> Array:  # -> (n, m)
        """The whole matrix."""
        if not arrays.is_numpy(self.xp):
            return self._tiled(lambda block: block)
        out = np.empty(self.shape, dtype=self.dtype)
        self._each_tile(lambda start, stop: self.tile(start, stop, out[start:stop]))
        return out

    def __matmul__(self, w: Array) -> Array:  # (m,) or (m, k) -> (n,) or (n, k)
        w = arrays.take("GramOperator", "w", w)
        if w.shape[0] != self.shape[1]:
            checks.fail("GramOperator", f"w must have {self.shape[1]} rows", checks.shape(w))
        if arrays.is_numpy(self.xp):
            return self._threaded_product(w)
        w = arrays.like(w, self.x)
        return self._tiled(lambda block: self.xp.matmul(block, w))

    def rmatvec(self, v: Array) -> Array:  # (n,) -> (m,)
        """Kᵀ v, one tile at a time."""
        total = self.xp.zeros(self.shape[1], dtype=self.dtype, device=arrays.device(self.x))
        for where, block in self.tiles():
            total = total + self.xp.matmul(block.T, v[where])
        return total

    def _tiled(self, function: Callable[[Array], Array]) -> Array:
        size = max(1, DEVICE_TILE // max(1, self.shape[1]))
        parts = [function(block) for _, block in self.tiles(size)]
        if not parts:
            return function(self.tile(0, 0))
        return parts[0] if len(parts) == 1 else self.xp.concat(parts, axis=0)

    def _threaded_product(self, w: np.ndarray) -> np.ndarray:
        n, m = self.shape
        out = np.empty((n, *w.shape[1:]), dtype=np.result_type(self.dtype, w.dtype))
        own = threading.local()  # one tile a thread, used again and again, stays in its cache

        def work(start: int, stop: int) -> None:
            if not hasattr(own, "tile"):
                own.tile = np.empty((min(TILE_ROWS, n), m), dtype=self.dtype)
            np.matmul(self.tile(start, stop, own.tile[: stop - start]), w, out=out[start:stop])

        self._each_tile(work)
        return out

    def _each_tile(self, work: Callable[[int, int], object]) -> None:
        n = self.shape[0]
        parallel_rows(
            lambda start: work(start, min(start + TILE_ROWS, n)), n, TILE_ROWS, n * self.shape[1]
        )


def parallel_rows(work: Callable[[int], object], n: int, step: int, entries: int) -> None:
    """work(start) for start = 0, step, … < n: on the pool if `entries` are worth it."""
    starts = range(0, n, step)
    threads = n_threads()
    if threads == 1 or len(starts) < 2 or entries < SMALL:
        for start in starts:
            work(start)
        return
    with arrays.single_threaded_blas():
        for _ in _pool(threads, os.getpid()).map(work, starts):
            pass


def ordered(work: Callable[[int], T], n: int, step: int) -> Iterator[T]:
    """work(start) for start = 0, step, … < n on the pool, the results in that order.

    At most one result a thread waits, so memory does not grow when the consumer is slow.
    """
    starts = range(0, n, step)
    threads = min(n_threads(), len(starts))
    with arrays.single_threaded_blas():
        if threads <= 1:
            yield from map(work, starts)
            return
        pool, waiting = _pool(n_threads(), os.getpid()), collections.deque[Future[T]]()
        try:
            for start in starts:
                waiting.append(pool.submit(work, start))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def n_threads() -> int:
    """Threads for row tiles: OMP_NUM_THREADS if set, else the cores this process may use."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(int(limit), cores)) if limit.isdigit() else cores


@functools.lru_cache(maxsize=4)
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:  # pid: a pool does not survive a fork
    return ThreadPoolExecutor(threads, thread_name_prefix="kernrl-gram")
