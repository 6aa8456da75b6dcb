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
Numbers = tuple[Tensor, Tensor, Tensor | None, Tensor]  # r, a, b, c, (n,) each; b None: all 0


class Work:
    """Two buffers for rows of `like` or narrower ones, which every block uses again."""

    def __init__(self, like: Tensor, n_rows: int) -> None:
        # At least two rows: torch sums one long row by parts whose number depends on the number
        # of threads, but each of two or more rows in one go. A row's sum is then the same, to
        # the bit, whatever rows come with it.
        size = max(n_rows, 2) * like.shape[-1]
        dtype, device = accumulation(like), like.device
        self._flat = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]

    def take(self, n_rows: int, v: int) -> tuple[Tensor, Tensor]:  # -> (n_rows, v) twice
        """The front of both buffers as matrices."""
        shifted, weight = (x[: n_rows * v].view(n_rows, v) for x in self._flat)
        return shifted, weight

    def weight_sums(self, n_rows: int, v: int) -> Tensor:  # -> (n_rows,)
        """Row sums of the second buffer."""
        rows = max(n_rows, 2)
        return self._flat[1][: rows * v].view(rows, v).sum(-1)[:n_rows]


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


def _share(
    worker: Callable[[], Callable[[Rows], None]], z: Tensor, blocks: list[Rows], alone: bool
) -> None:
    """On the CPU each block on one thread; elsewhere, and where there is little, one by one."""
    alone = alone or z.is_cuda or z.numel() < BLOCK
    share(worker, blocks, threads=1 if alone else None)


def sums(
    z: Tensor, ids: Tensor, chosen: Tensor | None, temperature: float, work: Work | None = None
) -> Tensor:  # (n, v), (n,) -> (4, n): m, s, t, z_y/τ − m
    """The sums of the chosen rows; (0, 1, 0, 0), the row of one certain token, for the others.

    With `work` the calling thread does it alone, in these buffers.
    """
    n, v = z.shape
    out = torch.zeros((4, n), dtype=accumulation(z), device=z.device)
    out[1] = 1.0
    size = block_rows(n, v)

    def worker() -> Callable[[Rows], None]:
        mine = work or Work(z, size)

        def block(rows: Rows) -> None:
            out[:, rows] = _block_sums(z[rows], ids[rows], temperature, mine)

        return block

    _share(worker, z, runs(n, chosen, size), alone=work is not None)
    return out


def _block_sums(z: Tensor, ids: Tensor, temperature: float, work: Work) -> Tensor:
    n, v = z.shape
    shifted, weight = work.take(n, v)
    highest = z.amax(-1, keepdim=True).to(shifted.dtype)
    _shift(z, highest.masked_fill(highest == -torch.inf, 0.0), shifted)  # −∞ − (−∞) is NaN
    if temperature != 1.0:
        shifted.div_(temperature)
        highest = highest / temperature
    torch.exp(shifted, out=weight)
    target = shifted.gather(-1, ids[:, None])[:, 0]
    total = work.weight_sums(n, v)
    weight.mul_(shifted)
    weighted = work.weight_sums(n, v)
    if bool(weighted.isnan().any()):  # some logit is −∞, and 0 · (−∞) must count as 0
        shifted.clamp_(min=FLOOR)
        torch.exp(shifted, out=weight).mul_(shifted)
        weighted = work.weight_sums(n, v)
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
    numbers: Numbers,
    temperature: float,
    out: Tensor,  # (n, v): may be z itself
    work: Work | None = None,
) -> None:
    """Write dz_j = (1/τ) [e^{d_j} (a + b d_j) + c δ_{jy}], and zeros where a row is not chosen.

    With `work` the calling thread does it alone, in these buffers.
    """
    n, v = z.shape
    if chosen is not None:
        unread = torch.ones(n, dtype=torch.bool, device=z.device)
        unread[chosen] = False
        out[unread] = 0.0
    r, a, b, c = numbers
    columns = (
        (r * temperature)[:, None],
        (a / temperature)[:, None],
        None if b is None else (b / temperature)[:, None],
        (c / temperature)[:, None],
    )
    size = block_rows(n, v)

    def worker() -> Callable[[Rows], None]:
        mine = work or Work(z, size)

        def block(rows: Rows) -> None:
            here = tuple(None if x is None else x[rows] for x in columns)
            direct = isinstance(rows, slice) and out.dtype == accumulation(z)
            into = out[rows] if direct else mine.take(len(ids[rows]), v)[1]
            _block_gradient(z[rows], ids[rows], here, temperature, into, mine)
            if not direct:
                out[rows] = into.to(out.dtype)

        return block

    _share(worker, z, runs(n, chosen, size), alone=work is not None)


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
    shifted, _ = work.take(*z.shape)
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


def joined(
    highest: Tensor, total: Tensor, weighted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # (k, n) each -> (n,) each
    """m, s, t of rows that come in k parts.

    With w_k = e^{m_k − m}: s = Σ w_k s_k, t = Σ w_k (t_k + s_k (m_k − m)). The m are constants to
    autograd.
    """
    top = highest.detach().amax(0)
    base = top.masked_fill(top == -torch.inf, 0.0)
    # A part far below the others adds 0, and must not make 0 · ∞: its distance is held finite.
    gap = (highest.detach() - base).clamp(min=FLOOR)
    share_of = gap.exp()
    return top, (share_of * total).sum(0), (share_of * (weighted + total * gap)).sum(0)


def unused(grad: Tensor | None) -> bool:
    """Whether no gradient comes in: autograd may hand over zeros for results nobody used."""
    return grad is None or (not grad.is_cuda and not bool(grad.any()))
