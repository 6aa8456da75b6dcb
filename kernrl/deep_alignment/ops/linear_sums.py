"""The language-model head and the row op in one: N × V logits exist a chunk of rows at a time.

Forward: z = h Wᵀ + b for a chunk of rows, its row sums, and the chunk's buffer is used again.
Backward: z once more, dz in its place, then dh = dz W, dW += dzᵀ h, db += Σ dz. Sums over chunks
and the products of half-precision tensors are taken in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernrl.deep_alignment.ops import backend, rows
from kernrl.deep_alignment.ops.logprobs import in_range, twice_refused

OWNER = "linear_token_logprobs"

# Entries of the chunk's buffer: 32 MB in float32, and products of 260 rows at V = 32 000, which
# is enough for a CPU's BLAS. A GPU re-reads W for every chunk, so it wants thousands of rows.
CHUNK = 1 << 23
CUDA_ROWS = 2048
TILE = 1 << 22  # entries of W raised to float32 at a time


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
        """What sums and logits are held in."""
        return rows.accumulation(self.weight)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:  # (r, h), (r, v) -> (r, v)
        """h Wᵀ + b, written to `out`."""
        for tile, weight in self._tiles():
            torch.mm(hidden.to(weight.dtype), weight.T, out=out[:, tile])
        return out if self.bias is None else out.add_(self.bias)

    def pull_back(self, dz: Tensor) -> Tensor:  # (r, v) -> (r, h)
        """dh = dz W."""
        out = dz.new_zeros((len(dz), self.weight.shape[1]))
        for tile, weight in self._tiles():
            out.addmm_(dz[:, tile], weight)
        return out

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids as rows of this weight, and which of them it holds; the others are moved inside."""
        v = len(self.weight)
        inside = ids - self.start
        return inside.clamp(0, v - 1), (inside >= 0) & (inside < v)

    def _tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """The weight in the dtype of the sums: itself, or parts of it raised one by one."""
        v, h = self.weight.shape
        size = v if self.weight.dtype == self.dtype else max(1, TILE // max(h, 1))
        for first in range(0, v, size):
            tile = slice(first, first + size)
            yield tile, self.weight[tile].to(self.dtype)


def chunk_rows(n: int, weight: Tensor, chunk_size: int) -> int:
    """`chunk_size` rows, or for 0 what suits the machine; at most n."""
    if chunk_size == 0:
        chunk_size = CUDA_ROWS if weight.is_cuda else max(1, CHUNK // len(weight))
    return max(1, min(n, chunk_size))


def _chunks(hidden: Tensor, ids: Tensor, mask: Tensor | None, size: int) -> list[rows.Rows]:
    return rows.runs(len(hidden), rows.kept(mask), size)


_SCHEMA = "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask"
_OPTIONS = "float temperature, int chunk_size, int start, int size, str impl"


@torch.library.custom_op(
    "kernrl::linear_sums",
    mutates_args=(),
    schema=f"({_SCHEMA}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    if size:
        in_range(OWNER, ids, rows.kept(mask), size)
    head = Head(weight, bias, start, temperature, impl)
    local, held = head.local(ids)
    held = held if mask is None else held & mask
    out = torch.zeros((4, len(hidden)), dtype=head.dtype, device=hidden.device)
    out[1] = 1.0  # a masked row is that of one certain token
    step = chunk_rows(len(hidden), weight, chunk_size)
    buffer = torch.empty((step, len(weight)), dtype=head.dtype, device=hidden.device)
    for chosen in _chunks(hidden, ids, mask, step):
        part = hidden[chosen]
        z = head.logits(part, buffer[: len(part)])
        out[:, chosen] = _sums(z, local[chosen], head)
    return out[0].clone(), out[1].clone(), out[2].clone(), out[3] * held, held


@linear_sums.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: object) -> tuple[Tensor, ...]:
    dtype = rows.accumulation(weight)
    numbers = [hidden.new_empty(len(hidden), dtype=dtype) for _ in range(4)]
    return (*numbers, hidden.new_empty(len(hidden), dtype=torch.bool))


@torch.library.custom_op(
    "kernrl::linear_sums_backward",
    mutates_args=(),
    schema=f"({_SCHEMA}, Tensor highest, Tensor held, Tensor? grad_sum, Tensor? grad_weighted,"
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
    head = Head(weight, bias, start, temperature, impl)
    zeros = torch.zeros_like(highest)
    a = zeros if grad_sum is None else grad_sum
    b = grad_weighted
    if b is not None and not b.is_cuda and not bool(b.any()):
        b = None  # nothing hangs on the entropy
    a = a if b is None else a + b
    c = zeros if grad_target is None else grad_target * held
    reference = highest.masked_fill(highest == -torch.inf, 0.0)
    local, _ = head.local(ids)
    d_hidden, d_weight, d_bias = _empty_gradients(hidden, head, wanted)
    step = chunk_rows(len(hidden), weight, chunk_size)
    buffer = torch.empty((step, len(weight)), dtype=head.dtype, device=hidden.device)
    for chosen in _chunks(hidden, ids, mask, step):
        part = hidden[chosen]
        z = head.logits(part, buffer[: len(part)])
        numbers = (reference[chosen], a[chosen], None if b is None else b[chosen], c[chosen])
        _gradient_in_place(z, local[chosen], numbers, head)
        if wanted[0]:
            d_hidden[chosen] = head.pull_back(z).to(hidden.dtype)
        if wanted[1]:
            d_weight.addmm_(z.T, part.to(head.dtype))
        if wanted[2]:
            d_bias += z.sum(0)
    return d_hidden, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


@_backward.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    wanted = rest[7]
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(
        hidden.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)
    )


def _empty_gradients(
    hidden: Tensor, head: Head, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    v, h = head.weight.shape
    return (
        torch.zeros(hidden.shape if wanted[0] else (0,), dtype=hidden.dtype, device=hidden.device),
        torch.zeros((v, h) if wanted[1] else (0,), dtype=head.dtype, device=hidden.device),
        torch.zeros((v,) if wanted[2] else (0,), dtype=head.dtype, device=hidden.device),
    )


def _sums(z: Tensor, ids: Tensor, head: Head) -> Tensor:
    if backend.takes_triton(OWNER, head.impl, z):
        from kernrl.deep_alignment.ops._triton import logprobs as triton

        return triton.sums(z, ids, head.temperature)
    return rows.sums(z, ids, None, head.temperature)


def _gradient_in_place(
    z: Tensor, ids: Tensor, numbers: tuple[Tensor, Tensor, Tensor | None, Tensor], head: Head
) -> None:
    if backend.takes_triton(OWNER, head.impl, z):
        from kernrl.deep_alignment.ops._triton import logprobs as triton

        triton.gradient(z, ids, None, numbers, head.temperature, z)
    else:
        rows.gradient(z, ids, None, numbers, head.temperature, z)


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
