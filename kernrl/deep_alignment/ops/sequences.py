"""Tokens and the sequences they belong to: lengths to masks, sums, packed rows, the next value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.scan import reverse_scan


def length_mask(
    lengths: Tensor,  # (b,) whole numbers
    t: int,
    *,
    side: str = "right",
) -> Tensor:  # (b, t) bool, True = a real token
    """The mask of padded sequences, from their lengths; `side` is where the padding stands.

    Take masks from lengths, never from `ids != pad`: where pad and end of sequence are one id,
    that drops the real end, and with it the reward that stands there.

    >>> length_mask(torch.tensor([1, 3]), 3).int().tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    checks.choice("length_mask", "side", side, ("left", "right"))
    t = checks.integer("length_mask", "t", t, at_least=0)
    lengths = whole("length_mask", "lengths", lengths)
    if lengths.ndim != 1:
        checks.fail("length_mask", "lengths must have shape (b,)", checks.shape(lengths))
    position = torch.arange(t, device=lengths.device)
    return (position if side == "right" else t - 1 - position) < lengths[:, None]


def segment_ids(
    cu_seqlens: Tensor,  # (k + 1,) whole numbers: 0, end of the first sequence, …, end of the last
    t: int,
) -> Tensor:  # (t,) int64
    """Which of k packed sequences each of t tokens belongs to; k for tokens past the last.

    >>> segment_ids(torch.tensor([0, 2, 3]), 4).tolist()
    [0, 0, 1, 2]
    """
    t = checks.integer("segment_ids", "t", t, at_least=0)
    ends = whole("segment_ids", "cu_seqlens", cu_seqlens)
    if ends.ndim != 1 or ends.shape[0] == 0:
        checks.fail("segment_ids", "cu_seqlens must have shape (k + 1,)", checks.shape(ends))
    position = torch.arange(t, device=ends.device)
    return torch.searchsorted(ends[1:].contiguous().long(), position, right=True)


def sequence_logprobs(
    logprob: Tensor,  # (b, t) of the sampled tokens, with gradient
    mask: Tensor | None = None,  # (b, t), True = counts; None counts everything
    *,
    shared_length: Tensor | None = None,  # (b,) or (b, 1) whole numbers
    tail_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:  # log-probabilities (b,), lengths (b,) int64
    """Σ m ℓ and Σ m per sequence: what the preference losses take.

    With `shared_length` (the shorter of the two sequences of a pair) and `tail_weight` α < 1, the
    counting tokens past that length weigh α. LD-DPO: Liu et al. (2024). The lengths count all.

    >>> sequence_logprobs(torch.tensor([[-1.0, -2.0]]))
    (tensor([-3.]), tensor([2]))
    """
    owner = "sequence_logprobs"
    logprob = inputs.floating(owner, "logprob", logprob)
    inputs.sequences(owner, "logprob", logprob)
    mask = inputs.counting(owner, mask, "logprob", logprob)
    tail_weight = checks.real(owner, "tail_weight", tail_weight, at_least=0.0, at_most=1.0)
    counts = torch.ones_like(logprob, dtype=torch.long) if mask is None else mask.long()
    total = inputs.zeroed(logprob, mask)
    if shared_length is None:
        if tail_weight != 1.0:
            cure = "Pass the shorter length of every pair, or tail_weight=1."
            checks.fail(owner, "tail_weight needs shared_length", "None", cure)
        return total.sum(-1), counts.sum(-1)
    shared = whole(owner, "shared_length", shared_length)
    if shared.shape == logprob.shape[:-1]:
        shared = shared[..., None]
    if shared.shape != (*logprob.shape[:-1], 1):
        rule = f"shared_length must have shape {checks.shape(logprob)[:-1]}"
        checks.fail(owner, rule, checks.shape(shared))
    tail = counts.cumsum(-1) > shared
    return torch.where(tail, tail_weight * total, total).sum(-1), counts.sum(-1)


@torch.no_grad()
def next_values(
    values: Tensor,  # (b, t) V of every token
    mask: Tensor | None = None,  # (b, t), True = counts; None counts everything
    *,
    bootstrap: Tensor | None = None,  # (b,) or (b, 1): V after the last counting token; None: 0
    segments: Tensor | None = None,  # (b, t) ids of packed sequences
) -> Tensor:  # (b, t)
    """V of the next counting token, for `gae` and its cousins; nothing is read across segments.

    The last token of a row gets `bootstrap`, the last one of an inner segment 0: mark it
    terminated. A masked entry (a tool's token) gets what the token before it gets.

    >>> next_values(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, False, True]]))
    tensor([[3., 3., 0.]])
    """
    owner = "next_values"
    values = inputs.floating(owner, "values", values)
    inputs.sequences(owner, "values", values)
    mask = inputs.counting(owner, mask, "values", values)
    ends = boundaries(owner, segments, "values", values)
    x = inputs.zeroed(values, mask)
    if mask is not None:  # masked entries hand on what stands after them in their segment
        x = reverse_scan((~mask).to(x.dtype).masked_fill_(ends, 0.0), x)
    out = following(x).masked_fill(ends, 0.0)
    if bootstrap is None or values.shape[-1] == 0:
        return out
    last = inputs.floating(owner, "bootstrap", bootstrap)
    inputs.same_device(owner, "bootstrap", last, "values", values)
    if last.shape == values.shape[:-1]:
        last = last[..., None]
    last = inputs.matching(owner, "bootstrap", last, "values", values)
    return torch.where(~later_counts(mask, ends, values), last, out)


# ---------------------------------------------------------------- shared by the scans


def following(x: Tensor) -> Tensor:  # (b, t) -> (b, t)
    """x_{t+1}, and 0 past the end."""
    return torch.nn.functional.pad(x[..., 1:], (0, 1))


def boundaries(owner: str, segments: Any, like_name: str, like: Tensor) -> Tensor:
    """True where the next entry of the row belongs to another segment; False on the last one."""
    ends = torch.zeros_like(like, dtype=torch.bool)
    if segments is None:
        return ends
    ids = whole(owner, "segments", segments)
    inputs.same_device(owner, "segments", ids, like_name, like)
    if ids.shape != like.shape:
        rule = f"segments must have the shape of {like_name} {checks.shape(like)}"
        checks.fail(owner, rule, checks.shape(ids))
    ends[..., :-1] = ids[..., 1:] != ids[..., :-1]
    return ends


def later_counts(mask: Tensor | None, ends: Tensor, like: Tensor) -> Tensor:
    """True where a later entry of the row counts, or another segment begins after this one."""
    later = torch.ones_like(like) if mask is None else mask.to(like.dtype)
    later = later.masked_fill(ends, 1.0)
    ahead = following(later.flip(-1).cumsum(-1).flip(-1))
    return (ahead > 0) | ends


def last_counting(mask: Tensor | None, like: Tensor) -> Tensor:  # (b, t) bool
    """True at the last counting entry of every row that has one."""
    if mask is None:
        out = torch.zeros_like(like, dtype=torch.bool)
        out[..., -1:] = True
        return out
    return mask & (mask.long().flip(-1).cumsum(-1).flip(-1) == 1)


def whole(owner: str, name: str, x: Any) -> Tensor:
    """A tensor of whole numbers."""
    out = inputs.tensor(owner, name, x)
    if out.is_floating_point() or out.is_complex() or out.dtype == torch.bool:
        rule = f"{name} must be a tensor of whole numbers"
        checks.fail(
            owner, rule, f"dtype {out.dtype}", "Convert it first, with x.long().", TypeError
        )
    return out
