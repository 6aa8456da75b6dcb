"""The one recurrence behind GAE, TD(λ) and their cousins."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_scan(decay: Tensor, x: Tensor) -> Tensor:  # (..., t), (..., t) -> (..., t)
    """y_t = x_t + decay_t · y_{t+1}, with y = 0 past the end.

    Composes the affine steps over strides 1, 2, 4, …: ⌈log₂ t⌉ passes over whole tensors
    (Hillis & Steele 1986) in place of t small ones. Only products of decays are formed, never
    quotients, so nothing overflows for |decay| ≤ 1. A product of k decays carries k roundings:
    relative error near ε/(1 − decay), 4e-6 in float32 at a constant decay of 0.999.
    """
    y, product = x.clone(), decay.clone()
    stride, t = 1, x.shape[-1]
    while stride < t:
        y[..., :-stride] += product[..., :-stride] * y[..., stride:]
        stride *= 2
        if stride < t:  # the new stride's products; entries that reach past the end go unread
            half = stride // 2
            product[..., :-half] = product[..., :-half] * product[..., half:]
    return y


def cut_decay(
    decay: float | Tensor, cut: Tensor, mask: Tensor | None, like: Tensor, ends: Tensor
) -> Tensor:
    """`decay` where the episode goes on, 0 where it is cut, 1 across entries that do not count.

    `ends` are the boundaries of packed segments: 0 there even if the entry does not count, or
    the trace would leak from one sequence into the padding and then the tokens of the one before.
    """
    steps = torch.zeros_like(like) + decay
    steps.masked_fill_(cut, 0.0)
    if mask is not None:
        steps.masked_fill_(~mask, 1.0)
    return steps.masked_fill_(ends, 0.0)
