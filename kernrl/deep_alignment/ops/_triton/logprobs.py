"""The row op in Triton: a program reads a row once and forgets it; the gradient is one pass more.

m, s and t of `rows.py` come from tiles of the vocabulary (online softmax: Milakov & Gimelshein
2018), so nothing is written but a few numbers a row. A program sees one row only: what it computes
does not depend on the others. No constant of compilation depends on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits of a tile. Its size may depend on the vocabulary, which a model has one of, and on nothing
# else: another size would be another order of summation, and another last bit.
BLOCK = 4096
# As in rows.py: exp is 0 below it, and 0 · FLOOR is 0 where 0 · (−∞) would be NaN.
FLOOR = tl.constexpr(-1e4)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _row_sums(row, n_vocab, per_temperature, BLOCK: tl.constexpr):
    """m (before the temperature), s, t of the logits at `row`."""
    columns = tl.arange(0, BLOCK)
    highest = NOTHING
    total = 0.0
    weighted = 0.0
    for start in range(0, n_vocab, BLOCK):
        z = tl.load(row + start + columns, mask=start + columns < n_vocab, other=NOTHING)
        z = z.to(tl.float32)
        top = tl.maximum(highest, tl.max(z, 0))
        base = tl.where(top == NOTHING, 0.0, top)  # a leading block of −∞: −∞ − (−∞) is NaN
        d = (z - base) * per_temperature
        e = tl.exp(d)
        gap = tl.maximum((highest - base) * per_temperature, FLOOR)
        shrink = tl.exp(gap)
        weighted = shrink * (weighted + total * gap) + tl.sum(e * tl.maximum(d, FLOOR), 0)
        total = shrink * total + tl.sum(e, 0)
        highest = top
    return highest, total, weighted


@triton.jit
def _row_start(logits, i, n_inner, outer_stride, inner_stride):
    """Where row i of logits (outer, inner, v) begins; i is int64, since N·V passes 2³¹."""
    return logits + (i // n_inner) * outer_stride + (i % n_inner) * inner_stride


@triton.jit
def _chosen(row, ids, i, n_vocab, counts):
    """The logit of the chosen id; NaN where the id is none of the vocabulary's."""
    y = tl.load(ids + i)
    known = (y >= 0) & (y < n_vocab) & counts
    return tl.load(row + y, mask=known, other=float("nan")).to(tl.float32)


@triton.jit(do_not_specialize=["n_inner"])
def _stats_kernel(
    logits,
    ids,
    mask,
    logprob,
    entropy,
    lse,
    n_vocab,
    n_inner,
    outer_stride,
    inner_stride,
    per_temperature,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    counts = True
    if MASKED:
        counts = tl.load(mask + i) != 0
    row = _row_start(logits, i, n_inner, outer_stride, inner_stride)
    length = tl.where(counts, n_vocab, 0)  # a masked row is not read
    highest, total, weighted = _row_sums(row, length, per_temperature, BLOCK)
    target = (_chosen(row, ids, i, n_vocab, counts) - highest) * per_temperature
    log_total = tl.log(total)
    tl.store(logprob + i, tl.where(counts, target - log_total, 0.0))
    tl.store(entropy + i, tl.where(counts, log_total - weighted / total, 0.0))
    tl.store(lse + i, tl.where(counts, highest * per_temperature + log_total, 0.0))


@triton.jit
def _sums_kernel(logits, ids, out, n_rows, n_vocab, per_temperature, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * n_vocab
    highest, total, weighted = _row_sums(row, n_vocab, per_temperature, BLOCK)
    target = (_chosen(row, ids, i, n_vocab, True) - highest) * per_temperature
    place = out + i
    tl.store(place, highest * per_temperature)
    tl.store(place + n_rows, total)
    tl.store(place + n_rows + n_rows, weighted)
    tl.store(place + n_rows + n_rows + n_rows, target)


@triton.jit(do_not_specialize=["n_inner"])
def _gradient_kernel(
    logits,
    ids,
    mask,
    reference,
    a,
    b,
    c,
    out,
    n_vocab,
    n_tiles,
    n_inner,
    outer_stride,
    inner_stride,
    per_temperature,
    MASKED: tl.constexpr,
    SLOPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    i = program // n_tiles
    columns = (program % n_tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n_vocab
    counts = True
    if MASKED:
        counts = tl.load(mask + i) != 0
    row = _row_start(logits, i, n_inner, outer_stride, inner_stride)
    z = tl.load(row + columns, mask=inside & counts, other=0.0).to(tl.float32)
    d = z * per_temperature - tl.load(reference + i)
    factor = tl.load(a + i)
    if SLOPED:
        factor = factor + tl.load(b + i) * tl.maximum(d, FLOOR)
    dz = tl.exp(d) * factor + tl.where(columns == tl.load(ids + i), tl.load(c + i), 0.0)
    dz = tl.where(counts, dz * per_temperature, 0.0)  # zeros are written, whatever stands there
    tl.store(out + i * n_vocab + columns, dz, mask=inside)


# ---------------------------------------------------------------- host


def token_stats(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:  # (..., v), (...) -> (...) three times
    """ℓ, H and lse of every row: one launch."""
    out = [torch.empty(ids.shape, dtype=torch.float32, device=logits.device) for _ in range(3)]
    logits, n_inner, strides = _rows_of(logits)
    v = logits.shape[-1]
    if ids.numel():
        _stats_kernel[(ids.numel(),)](
            logits,
            ids.contiguous(),
            _bytes(mask),
            *out,
            v,
            n_inner,
            *strides,
            1.0 / temperature,
            MASKED=mask is not None,
            **_launch(v),
        )
    return out[0], out[1], out[2]


def sums(z: Tensor, ids: Tensor, temperature: float) -> Tensor:  # (n, v), (n,) -> (4, n)
    """m, s, t, z_y/τ − m of every row of a contiguous z: one launch."""
    n, v = z.shape
    out = torch.empty((4, n), dtype=torch.float32, device=z.device)
    if n:
        _sums_kernel[(n,)](z, ids, out, n, v, 1.0 / temperature, **_launch(v))
    return out


def gradient(
    logits: Tensor,  # (..., v)
    ids: Tensor,  # (...)
    mask: Tensor | None,
    numbers: tuple[Tensor, Tensor, Tensor | None, Tensor],  # r, a, b, c, (...) each
    temperature: float,
    out: Tensor,  # (..., v), contiguous: may be logits itself
) -> None:
    """Write dz_j = (1/τ) [e^{d_j} (a + b d_j) + c δ_{jy}]: one launch."""
    r, a, b, c = (None if x is None else x.float().contiguous() for x in numbers)
    logits, n_inner, strides = _rows_of(logits)
    v = logits.shape[-1]
    options = _launch(v)
    n_tiles = triton.cdiv(v, options["BLOCK"])
    if ids.numel():
        _gradient_kernel[(ids.numel() * n_tiles,)](
            logits,
            ids.contiguous(),
            _bytes(mask),
            r,
            a,
            b,
            c,
            out,
            v,
            n_tiles,
            n_inner,
            *strides,
            1.0 / temperature,
            MASKED=mask is not None,
            SLOPED=b is not None,
            **options,
        )


def _launch(v: int) -> dict[str, int | bool]:
    block = min(BLOCK, triton.next_power_of_2(v))
    # Fused multiply-adds are said aloud, since Triton's default for them changes between versions.
    return {"BLOCK": block, "num_warps": 8 if block == BLOCK else 4, "enable_fp_fusion": True}


def _rows_of(logits: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """Logits seen as (outer, inner, v): themselves, inner, and the strides of outer and inner.

    A slice logits[:, :-1] is read where it lies; stranger strides cost a copy.
    """
    v = logits.shape[-1]
    if logits.stride(-1) != 1 and v > 1:
        logits = logits.contiguous()
    try:
        flat = logits.view(-1, v)
        return logits, max(len(flat), 1), (0, flat.stride(0))
    except RuntimeError:
        if logits.ndim != 3:
            return _rows_of(logits.contiguous())
    return logits, logits.shape[1], (logits.stride(0), logits.stride(1))


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)
