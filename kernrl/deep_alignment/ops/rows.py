"""Sums of exponentials along rows of logits, and the gradient through them, a few rows at a time.

For a row z, a temperature τ and a reference number r write d_j = z_j/τ − r. Everything the row ops
return comes from m = max_j z_j/τ, s = Σ_j e^{d_j} and t = Σ_j e^{d_j} d_j at r = m:

    log Σ_j e^{z_j/τ} = m + log s,    H = log s − t/s,    log p_y = (z_y/τ − m) − log s,

and every gradient has the one form

    dz_j = (1/τ) [e^{d_j} (a + b d_j) + c δ_{jy}]

with three numbers a, b, c per row. Rows are taken in blocks that stay in a core's cache, in
buffers that are used again: the logits are read from memory once, and nothing of their size is
written but the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernrl.deep_alignment.ops.threads import share

# Entries of a block: the logits and two float32 buffers of it are 1.5 MB, within the second cache
# of a server core. Smaller blocks lose to call overhead, larger ones to memory.
BLOCK = 1 << 17
# exp is exactly 0 below it in every dtype, and 0 · FLOOR = 0, whereas 0 · (−∞) is NaN.
FLOOR = -1e4

Rows = slice | Tensor  # a run of rows, or the indices of scattered ones


class Work:
    """Two buffers (rows, v) that every block uses again."""

    def __init__(self, like: Tensor, n_rows: int) -> None:
        dtype = accumulation(like)
        # At least two rows: torch sums one long row by parts whose number depends on the number
        # of threads, but each of two or more rows in one go. A row's sum is then the same, to
        # the bit, whatever rows come with it.
        self.rows = max(n_rows, 1)
        shape = (max(n_rows, 2), like.shape[-1])
        self._shifted = torch.zeros(shape, dtype=dtype, device=like.device)
        self._weight = torch.zeros_like(self._shifted)

    def take(self, n_rows: int) -> tuple[Tensor, Tensor]:
        """The first rows of both buffers."""
        return self._shifted[:n_rows], self._weight[:n_rows]

    def weight_sums(self, n_rows: int) -> Tensor:  # -> (n_rows,)
        """Row sums of the second buffer."""
        return self._weight[: max(n_rows, 2)].sum(-1)[:n_rows]


def accumulation(x: Tensor) -> torch.dtype:
    """float32 for everything up to float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def kept(mask: Tensor | None) -> Tensor | None:
    """Indices of the rows that count; None if all do."""
    if mask is None or bool(mask.all()):
        return None
    return mask.flatten().nonzero()[:, 0]


def matrices(x: Tensor) -> Iterator[Tensor]:  # (..., v) -> (n_k, v), Σ n_k = n
    """Views of `x` as matrices, without a copy: one, or several where strides forbid one."""
    try:
        yield x.view(-1, x.shape[-1])
    except RuntimeError:
        for part in x:
            yield from matrices(part)


def runs(n: int, chosen: Tensor | None, size: int) -> list[Rows]:
    """The chosen of n rows in blocks of `size`."""
    total = n if chosen is None else len(chosen)
    places = [slice(start, min(start + size, total)) for start in range(0, total, size)]
    return [place if chosen is None else _run(chosen[place]) for place in places]


def _run(chosen: Tensor) -> Rows:
    """A slice where the rows follow one another: it can be read without a copy."""
    first, last = int(chosen[0]), int(chosen[-1])
    return slice(first, last + 1) if last - first == len(chosen) - 1 else chosen


def block_rows(n: int, v: int) -> int:
    """How many rows of length v make a block."""
    return max(1, min(n, BLOCK // v))


def _share(worker: Callable[[], Callable[[Rows], None]], z: Tensor, blocks: list[Rows]) -> None:
    """On the CPU each block on one thread; elsewhere, and where there is little, one by one."""
    small = z.is_cuda or z.numel() < BLOCK
    share(worker, blocks, threads=1 if small else None)


def sums(
    z: Tensor, ids: Tensor, chosen: Tensor | None, temperature: float
) -> Tensor:  # (n, v), (n,) -> (4, n): m, s, t, z_y/τ − m
    """The sums of the chosen rows; (0, 1, 0, 0), the row of one certain token, for the others."""
    n, v = z.shape
    out = torch.zeros((4, n), dtype=accumulation(z), device=z.device)
    out[1] = 1.0
    size = block_rows(n, v)

    def worker() -> Callable[[Rows], None]:
        work = Work(z, size)

        def block(rows: Rows) -> None:
            out[:, rows] = _block_sums(z[rows], ids[rows], temperature, work)

        return block

    _share(worker, z, runs(n, chosen, size))
    return out


def _block_sums(z: Tensor, ids: Tensor, temperature: float, work: Work) -> Tensor:
    n = len(z)
    shifted, weight = work.take(n)
    highest = z.amax(-1, keepdim=True).to(shifted.dtype)
    _shift(z, highest.masked_fill(highest == -torch.inf, 0.0), shifted)  # −∞ − (−∞) is NaN
    if temperature != 1.0:
        shifted.div_(temperature)
        highest = highest / temperature
    torch.exp(shifted, out=weight)
    target = shifted.gather(-1, ids[:, None])[:, 0]
    total = work.weight_sums(n)
    weight.mul_(shifted)
    weighted = work.weight_sums(n)
    if bool(weighted.isnan().any()):  # some logit is −∞, and 0 · (−∞) must count as 0
        shifted.clamp_(min=FLOOR)
        torch.exp(shifted, out=weight).mul_(shifted)
        weighted = work.weight_sums(n)
    return torch.stack((highest[:, 0], total, weighted, target))


def _shift(z: Tensor, reference: Tensor, out: Tensor) -> None:
    """out = z − reference, raised to out's dtype before the subtraction."""
    if z.dtype == out.dtype:
        torch.sub(z, reference, out=out)
    else:
        out.copy_(z).sub_(reference)


def gradient(
    z: Tensor,  # (n, v)
    ids: Tensor,  # (n,)
    chosen: Tensor | None,
    coefficients: tuple[Tensor, Tensor, Tensor | None, Tensor],  # r, a, b, c: (n,) each
    temperature: float,
    out: Tensor,  # (n, v): may be z itself
) -> None:
    """Write dz_j = (1/τ) [e^{d_j} (a + b d_j) + c δ_{jy}], and zeros where a row is not chosen."""
    n, v = z.shape
    if chosen is not None:
        unread = torch.ones(n, dtype=torch.bool, device=z.device)
        unread[chosen] = False
        out[unread] = 0.0
    r, a, b, c = coefficients
    columns = (
        (r * temperature)[:, None],
        (a / temperature)[:, None],
        None if b is None else (b / temperature)[:, None],
        (c / temperature)[:, None],
    )
    size = block_rows(n, v)

    def worker() -> Callable[[Rows], None]:
        work = Work(z, size)

        def block(rows: Rows) -> None:
            numbers = tuple(None if x is None else x[rows] for x in columns)
            direct = isinstance(rows, slice) and out.dtype == accumulation(z)
            into = out[rows] if direct else work.take(len(ids[rows]))[1]
            _block_gradient(z[rows], ids[rows], numbers, temperature, into, work)
            if not direct:
                out[rows] = into.to(out.dtype)

        return block

    _share(worker, z, runs(n, chosen, size))


def _block_gradient(
    z: Tensor,
    ids: Tensor,
    columns: tuple[Tensor | None, ...],
    temperature: float,
    out: Tensor,
    work: Work,
) -> None:
    r, a, b, c = columns
    assert r is not None and a is not None and c is not None
    shifted, _ = work.take(len(z))
    _shift(z, r, shifted)
    if temperature != 1.0:
        shifted.div_(temperature)
    if b is None:
        torch.exp(shifted, out=out).mul_(a)
    else:
        shifted.clamp_(min=FLOOR)
        torch.exp(shifted, out=out)
        out.mul_(shifted.mul_(b).add_(a))
    out.scatter_add_(-1, ids[:, None], c)
