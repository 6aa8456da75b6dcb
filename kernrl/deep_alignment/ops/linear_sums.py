"""The language-model head and the row op in one: a part of the N × V logits exists at a time.

Forward: z = h Wᵀ + b for some tokens and some ids, its row sums, and the buffer is used again.
Backward: z once more, dz in its place, then dh += dz W, dW += dzᵀ h, db += Σ dz. Everything is
summed in float32 (float64 for float64), for half precision too.

On a CPU the parts are tiles that stay in a core's cache, and each thread has tiles of its own, so
that nothing waits between a product and its row sums. On a GPU a part is as wide as W is long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernrl.deep_alignment.ops import backend, rows
from kernrl.deep_alignment.ops.logprobs import in_range, twice_refused
from kernrl.deep_alignment.ops.threads import share

OWNER = "linear_token_logprobs"

# Tokens of a part, and on a CPU its ids: 2 MB of float32, the second cache of a server core.
# Fewer tokens would read W more often, which a GPU would feel most.
CPU_ROWS, CPU_COLUMNS = 1024, 512
CUDA_ROWS = 2048
SMALL = 1 << 22  # multiplications of a product below which one thread does it all


@dataclass(frozen=True, slots=True)
class Head:
    """The head's weight (v, h) and bias (v,), which ids it covers, and how it is applied."""

    weight: Tensor
    bias: Tensor | None
    start: int  # the id of its first row
    temperature: float
    impl: str

    @property
    def dtype(self) -> torch.dtype:
        """What logits and sums are held in."""
        return rows.accumulation(self.weight)

    def tiles(self) -> list[slice]:
        """The rows of the weight, a tile at a time."""
        v = len(self.weight)
        step = v if self.weight.is_cuda else CPU_COLUMNS
        return [slice(first, min(first + step, v)) for first in range(0, v, step)]

    def rows_at_once(self, n: int, chunk_size: int) -> int:
        """Tokens of a part: `chunk_size`, or for 0 what suits the machine; at most n."""
        return max(1, min(n, chunk_size or (CUDA_ROWS if self.weight.is_cuda else CPU_ROWS)))

    def threads(self, n: int) -> int:
        """How many threads n tokens are worth."""
        small = n * self.weight.numel() < SMALL
        return 1 if small or self.weight.is_cuda else torch.get_num_threads()

    def operand(self, x: Tensor) -> Tensor:
        """`x` as products take it: on a CPU raised, since half-precision products round there."""
        return x if x.is_cuda else x.to(self.dtype)

    def logits(self, hidden: Tensor, tile: slice, out: Tensor) -> Tensor:  # (r, h) -> (r, tile)
        """h Wᵀ + b for the ids of a tile, written to `out`."""
        _multiply(hidden, self.operand(self.weight[tile]).T, out)
        return out if self.bias is None else out.add_(self.bias[tile])

    def columns(self, ids: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        """Ids as columns of a tile, and which of them it holds; the others are moved inside."""
        column = ids - (self.start + tile.start)
        width = tile.stop - tile.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)


class Part:
    """Room for the logits of some tokens and one tile, and for taking their row sums."""

    def __init__(self, head: Head, n_rows: int) -> None:
        tile = head.tiles()[0]
        width = tile.stop - tile.start
        device = head.weight.device
        self.head = head
        self._flat: Tensor = torch.empty(n_rows * width, dtype=head.dtype, device=device)
        self.work = rows.Work(self.room(1, tile), rows.block_rows(n_rows, width))

    def room(self, n_rows: int, tile: slice) -> Tensor:
        """(n_rows, tile) of uninitialised memory."""
        width = tile.stop - tile.start
        return self._flat[: n_rows * width].view(n_rows, width)

    def logits(self, hidden: Tensor, tile: slice) -> Tensor:
        """The head's logits for the ids of a tile, in this room."""
        return self.head.logits(hidden, tile, self.room(len(hidden), tile))

    def sums(self, z: Tensor, ids: Tensor) -> Tensor:  # (r, tile), (r,) -> (3, r): m, s, t
        """Row sums of z."""
        head = self.head
        if backend.takes_triton(OWNER, head.impl, z):
            from kernrl.deep_alignment.ops._triton import logprobs as triton

            return triton.sums(z, ids, head.temperature)[:3]
        return rows.sums(z, ids, None, head.temperature, self.work)[:3]

    def differentiate(self, z: Tensor, ids: Tensor, numbers: rows.Numbers) -> None:
        """dz in the place of z."""
        head = self.head
        if backend.takes_triton(OWNER, head.impl, z):
            from kernrl.deep_alignment.ops._triton import logprobs as triton

            triton.gradient(z, ids, None, numbers, head.temperature, z)
        else:
            rows.gradient(z, ids, None, numbers, head.temperature, z, self.work)


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a b, or out += a b; a GPU's half-precision factors are summed in out's float32."""
    if b.dtype == out.dtype:
        torch.addmm(out, a, b, beta=1 if add else 0, out=out)
    elif add:
        out += torch.mm(a.to(b.dtype), b, out_dtype=out.dtype)
    else:
        torch.mm(a.to(b.dtype), b, out_dtype=out.dtype, out=out)


# ---------------------------------------------------------------- forward

_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask"
_OPTIONS = "float temperature, int chunk_size, int start, int size, str impl"


@torch.library.custom_op(
    "kernrl::linear_sums",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_sums(
    hidden: Tensor,  # (n, h)
    weight: Tensor,  # (v, h)
    bias: Tensor | None,  # (v,)
    ids: Tensor,  # (n,)
    mask: Tensor | None,  # (n,)
    temperature: float,
    chunk_size: int,
    start: int,  # the id that the first row of weight stands for
    size: int,  # how many ids there are in all; 0: not known
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """m, s, t, z_y/τ − m and whether y is held, (n,) each: see rows.py."""
    chosen = rows.kept(mask)
    if size:
        in_range(OWNER, ids, chosen, size)
    head = Head(weight, bias, start, temperature, impl)
    held = (ids >= start) & (ids < start + len(weight))
    held = held if mask is None else held & mask
    out = torch.zeros((4, len(hidden)), dtype=head.dtype, device=hidden.device)
    out[1] = 1.0  # a masked row is that of one certain token
    n = len(hidden) if chosen is None else len(chosen)
    threads = head.threads(n)
    step = head.rows_at_once(-(-n // threads), chunk_size)

    def worker() -> Callable[[rows.Rows], None]:
        part = Part(head, step)

        def some(which: rows.Rows) -> None:
            out[:, which] = _row_sums(part, hidden[which], ids[which])

        return some

    share(worker, rows.runs(len(hidden), chosen, step), threads)
    target = torch.where(held, out[3], 0.0)
    return out[0].clone(), out[1].clone(), out[2].clone(), target, held


def _row_sums(part: Part, hidden: Tensor, ids: Tensor) -> Tensor:  # (r, h), (r,) -> (4, r)
    head = part.head
    hidden = head.operand(hidden)
    target = torch.zeros(len(ids), dtype=head.dtype, device=ids.device)
    so_far: list[Tensor] = []
    for tile in head.tiles():
        z = part.logits(hidden, tile)
        column, held = head.columns(ids, tile)
        target += torch.where(held, z.gather(1, column[:, None])[:, 0], 0.0)
        so_far.append(part.sums(z, column))
        if len(so_far) == 2:
            so_far = [torch.stack(rows.joined(*torch.stack(so_far, 1)))]
    highest, total, weighted = so_far[0]
    return torch.stack((highest, total, weighted, target / head.temperature - highest))


@linear_sums.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: object) -> tuple[Tensor, ...]:
    dtype = rows.accumulation(weight)
    numbers = [hidden.new_empty(len(hidden), dtype=dtype) for _ in range(4)]
    return (*numbers, hidden.new_empty(len(hidden), dtype=torch.bool))


# ---------------------------------------------------------------- backward


@torch.library.custom_op(
    "kernrl::linear_sums_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor highest, Tensor held, Tensor? grad_sum, Tensor? grad_weighted,"
    f" Tensor? grad_target, bool[] wanted, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    mask: Tensor | None,
    highest: Tensor,
    held: Tensor,
    grad_sum: Tensor | None,
    grad_weighted: Tensor | None,
    grad_target: Tensor | None,
    wanted: list[bool],
    temperature: float,
    chunk_size: int,
    start: int,
    size: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, each empty where it is not wanted."""
    head, chosen = Head(weight, bias, start, temperature, impl), rows.kept(mask)
    numbers = _coefficients(highest, held, grad_sum, grad_weighted, grad_target)
    shapes = [
        x.shape if want else (0,)
        for x, want in zip((weight, weight[:, 0]), wanted[1:], strict=True)
    ]
    d_hidden = torch.zeros_like(hidden) if wanted[0] else hidden.new_zeros(0)
    d_weight, d_bias = (weight.new_zeros(shape, dtype=head.dtype) for shape in shapes)
    n = len(hidden) if chosen is None else len(chosen)
    step = head.rows_at_once(n, chunk_size)
    pull = _PullBack(head, step, head.threads(n), d_weight, d_bias, wanted)
    for which in rows.runs(len(hidden), chosen, step):
        here = tuple(None if x is None else x[which] for x in numbers)
        found = pull(hidden[which], ids[which], here)  # type: ignore[arg-type]  # None only as b
        if wanted[0]:
            d_hidden[which] = found.to(hidden.dtype)
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def _coefficients(
    highest: Tensor,
    held: Tensor,
    grad_sum: Tensor | None,
    grad_weighted: Tensor | None,
    grad_target: Tensor | None,
) -> rows.Numbers:
    """∂s/∂z_j = e^{d_j}, ∂t/∂z_j = e^{d_j} (1 + d_j), ∂(z_y − m)/∂z_j = δ_{jy}; m is constant."""
    zeros = torch.zeros_like(highest)
    a = zeros if grad_sum is None else grad_sum
    b = None if rows.unused(grad_weighted) else grad_weighted
    c = zeros if grad_target is None else grad_target * held
    reference = highest.masked_fill(highest == -torch.inf, 0.0)
    return reference, a if b is None else a + b, b, c


class _PullBack:
    """From dz to dW and db, added up, and dh: each thread has some tiles of W to itself."""

    def __init__(
        self,
        head: Head,
        n_rows: int,
        threads: int,
        d_weight: Tensor,
        d_bias: Tensor,
        wanted: list[bool],
    ) -> None:
        tiles = head.tiles()
        threads = min(threads, len(tiles))
        self.stripes = [tiles[k::threads] for k in range(threads)]
        self.parts = [Part(head, n_rows) for _ in self.stripes]
        self.head, self.wanted = head, wanted
        self.d_weight, self.d_bias = d_weight, d_bias

    def __call__(self, hidden: Tensor, ids: Tensor, numbers: rows.Numbers) -> Tensor:  # -> (r, h)
        hidden = self.head.operand(hidden)
        shape = (len(self.stripes), *hidden.shape) if self.wanted[0] else (len(self.stripes), 0)
        found = torch.zeros(shape, dtype=self.head.dtype, device=hidden.device)

        def worker() -> Callable[[int], None]:
            return lambda k: self._stripe(k, hidden, ids, numbers, found[k])

        share(worker, list(range(len(self.stripes))), len(self.stripes))
        return found.sum(0)

    def _stripe(
        self, k: int, hidden: Tensor, ids: Tensor, numbers: rows.Numbers, found: Tensor
    ) -> None:
        head, part = self.head, self.parts[k]
        r, a, b, c = numbers
        for tile in self.stripes[k]:
            z = part.logits(hidden, tile)
            column, held = head.columns(ids, tile)
            part.differentiate(z, column, (r, a, b, c * held))
            if self.wanted[0]:
                _multiply(z, head.operand(head.weight[tile]), found, add=True)
            if self.wanted[1]:
                _multiply(z.T, hidden, self.d_weight[tile], add=True)
            if self.wanted[2]:
                self.d_bias[tile] += z.sum(0)


@_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wanted = rest[8]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(
        hidden.new_empty(shape if want else (0,))
        for shape, want in zip(shapes, wanted, strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, ids, mask, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, ids, mask, output[0], output[4])
    ctx.mark_non_differentiable(output[0], output[4])


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward(*ctx.saved_tensors, *grads[1:4], wanted, *ctx.options)
    gradients = [g if want else None for g, want in zip(found, wanted, strict=True)]
    return (*gradients, *[None] * 7)


linear_sums.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(lambda ctx, *grads: twice_refused(OWNER))
