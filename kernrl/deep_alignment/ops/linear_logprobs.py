"""Token statistics straight from hidden states, also where several devices share the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs, rows
from kernrl.deep_alignment.ops.linear_sums import OWNER, linear_sums
from kernrl.deep_alignment.ops.logprobs import TokenStats, check_ids


class ShardPartials(NamedTuple):
    """What one part of the vocabulary knows of each token, with z = logits/τ over its own ids."""

    max: Tensor  # m = max_j z_j, a constant
    sum: Tensor  # s = Σ_j e^{z_j − m}
    weighted: Tensor  # t = Σ_j e^{z_j − m} (z_j − m)
    target: Tensor  # z_y − m where y is held here, else 0
    holds: Tensor  # bool: y is one of its ids, and the token counts


def linear_token_logprobs(
    hidden: Tensor,  # (..., h)
    weight: Tensor,  # (v, h)
    ids: Tensor,  # (...), integers in [0, v) where the mask is True
    *,
    bias: Tensor | None = None,  # (v,)
    temperature: float = 1.0,
    mask: Tensor | None = None,  # (...), True = counts; None counts everything
    chunk_size: int | None = None,
    impl: str = "auto",
) -> TokenStats:  # (...) each: float32, or float64 for float64 hidden
    """`token_logprobs(hidden @ weight.T + bias, ids)` without ever holding those logits.

    `chunk_size` rows of logits exist at a time (None: 32 MB of them on a CPU, 2048 rows on a GPU).
    The backward pass makes them again and sums gradients over chunks in float32, so the price of
    the memory is one more product: four in place of three. Gradients that nobody needs are not
    computed: a frozen weight costs no dW. Masked tokens enter no product. Logits of half-precision
    inputs are kept in float32, where a head of its own would round them. Memory beyond inputs and
    gradients: one chunk, a float32 dW, and a few numbers a token.

    For a vocabulary that is split over devices see `shard_partials`.

    >>> hidden, weight = torch.eye(2), torch.log(torch.tensor([[0.5, 0.1], [0.5, 0.9]]))
    >>> stats = linear_token_logprobs(hidden, weight, torch.tensor([0, 1]))
    >>> [round(float(p), 4) for p in stats.logprob.exp()]
    [0.5, 0.9]
    """
    whole = _partials(hidden, weight, ids, bias, temperature, mask, chunk_size, None, impl)
    return merge_partials([whole])


def shard_partials(
    hidden: Tensor,  # (..., h): the same on every device
    weight: Tensor,  # (v_k, h): this device's rows of the whole weight
    ids: Tensor,  # (...), ids of the whole vocabulary
    *,
    vocab_start: int,
    bias: Tensor | None = None,  # (v_k,)
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> ShardPartials:  # (...) each
    """This device's part of the sums, where its weight holds ids from `vocab_start` on.

    No collective is called: gather the partials of all devices, with gradient or with the others'
    detached, and `merge_partials` them. Each device's backward pass then gives the gradient of its
    own weight and bias, and a part of the gradient of `hidden`: sum that over devices.
    """
    start = checks.integer("shard_partials", "vocab_start", vocab_start, at_least=0)
    return _partials(hidden, weight, ids, bias, temperature, mask, chunk_size, start, impl)


def merge_partials(partials: Sequence[ShardPartials]) -> TokenStats:
    """Token statistics of the whole vocabulary from those of its parts, in any order.

    With M = max_k m_k and w_k = e^{m_k − M}: S = Σ w_k s_k, T = Σ w_k (t_k + s_k (m_k − M)),
    lse = M + log S, H = log S − T/S. A token that no part holds is masked: zeros.
    """
    if not partials:
        checks.fail("merge_partials", "there must be at least one part", "none")
    if len(partials) == 1:
        highest, total, weighted, target, counts = partials[0]
    else:
        highest, total, weighted, target, counts = _add(partials)
    log_total = total.log()
    stats = (target - log_total, log_total - weighted / total, highest + log_total)
    return TokenStats(*(inputs.zeroed(x, counts) for x in stats))


def _add(partials: Sequence[ShardPartials]) -> tuple[Tensor, ...]:
    top, sums, weighted, target, holds = (torch.stack(x) for x in zip(*partials, strict=True))
    highest, total, weighted = rows.joined(top, sums, weighted)
    base = highest.masked_fill(highest == -torch.inf, 0.0)
    chosen = torch.where(holds, target + (top - base).detach(), 0.0).sum(0)
    return highest, total, weighted, chosen, holds.any(0)


def _partials(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    mask: Tensor | None,
    chunk_size: int | None,
    start: int | None,  # None: the weight is the whole vocabulary
    impl: str,
) -> ShardPartials:
    owner = OWNER if start is None else "shard_partials"
    hidden, weight, bias = _check(owner, hidden, weight, bias)
    ids, mask = check_ids(owner, ids, mask, "hidden", hidden)
    temperature = checks.real(owner, "temperature", temperature, above=0.0)
    checks.choice(owner, "impl", impl, inputs.IMPLEMENTATIONS)
    size = 0 if chunk_size is None else checks.integer(owner, "chunk_size", chunk_size, at_least=1)
    flat = linear_sums(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        ids.reshape(-1),
        None if mask is None else mask.reshape(-1),
        temperature,
        size,
        start or 0,
        len(weight) if start is None else 0,
        impl,
    )
    return ShardPartials(*(x.view(ids.shape) for x in flat))


def _check(owner: str, hidden: Any, weight: Any, bias: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Floating tensors of one dtype on one device, (..., h), (v, h) and (v,)."""
    hidden = inputs.uncast(owner, "hidden", hidden)
    weight = inputs.uncast(owner, "weight", weight)
    if weight.ndim != 2 or len(weight) == 0:
        checks.fail(owner, "weight must have shape (v, h) with v > 0", checks.shape(weight))
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        rule = f"hidden must have shape (..., h) with h = {weight.shape[1]}, as weight (v, h) has"
        checks.fail(owner, rule, checks.shape(hidden))
    _alike(owner, "hidden", hidden, weight)
    if bias is not None:
        bias = inputs.uncast(owner, "bias", bias)
        if bias.shape != weight.shape[:1]:
            checks.fail(owner, f"bias must have shape (v,) = ({len(weight)},)", checks.shape(bias))
        _alike(owner, "bias", bias, weight)
    return hidden, weight, bias


def _alike(owner: str, name: str, x: Tensor, weight: Tensor) -> None:
    inputs.same_device(owner, name, x, "weight", weight)
    if x.dtype != weight.dtype:
        rule = f"{name} must have the dtype of weight ({weight.dtype})"
        cure = f"Convert one of them, for example with {name}.to(weight.dtype)."
        checks.fail(owner, rule, x.dtype, cure, TypeError)
