"""Advantages: generalised advantage estimation and whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.scan import cut_decay, reverse_scan
from kernrl.deep_alignment.ops.sequences import boundaries


@torch.no_grad()
def gae(
    rewards: Tensor,  # (b, t) r_t
    values: Tensor,  # (b, t) V(s_t)
    next_values: Tensor,  # (b, t) V(s_{t+1}) of the true next observation, also at a time limit
    terminated: Tensor,  # (b, t) the episode ended in the world: nothing follows
    truncated: Tensor | None = None,  # (b, t) it was cut off: V(s_{t+1}) still counts
    *,
    gamma: float,
    trace_decay: float,
    mask: Tensor | None = None,  # (b, t) True = a real transition
    segments: Tensor | None = None,  # (b, t) whole numbers, for sequences packed into a row
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # advantages, returns: both (b, t)
    """Generalised advantage estimates and the returns they imply.

    δ_t = r_t + γ (1 − terminated_t) V(s_{t+1}) − V(s_t)
    A_t = δ_t + γλ (1 − terminated_t ∨ truncated_t) A_{t+1},   A past the end = 0
    R_t = A_t + V(s_t)

    Schulman et al. (2016), eqs. 11 and 16. λ = 0 gives the one-step TD error, λ = 1 the
    discounted return minus V. A step both terminated and truncated is terminated. An entry that
    does not count (padding, the row a vector env spends on its reset) is read nowhere and gets
    0; the trace passes over it undiminished. Where `segments` changes (`segment_ids(cu_seqlens)`)
    the trace is cut; V(s_{t+1}) there counts unless terminated, as at the end of a row.
    `next_values(values, …)` makes V(s_{t+1}) for token sequences. No gradient flows. Cost
    O(b t log t), no loop over t.

    >>> rewards, values = torch.ones(1, 3), torch.zeros(1, 3)
    >>> end = torch.tensor([[False, False, True]])
    >>> gae(rewards, values, values, end, gamma=0.5, trace_decay=1.0)[0]
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    inputs.implementation("gae", impl)
    gamma = checks.real("gae", "gamma", gamma, at_least=0.0, at_most=1.0)
    trace_decay = checks.real("gae", "trace_decay", trace_decay, at_least=0.0, at_most=1.0)
    rewards = inputs.floating("gae", "rewards", rewards)
    values = inputs.matching("gae", "values", values, "rewards", rewards)
    next_values = inputs.matching("gae", "next_values", next_values, "rewards", rewards)
    terminated = inputs.flags("gae", "terminated", terminated, "rewards", rewards)
    truncated = inputs.flags("gae", "truncated", truncated, "rewards", rewards)
    mask = inputs.counting("gae", mask, "rewards", rewards)
    # masked_fill, not a product with 1 − terminated: V past an end may be anything, even inf.
    delta = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    delta = inputs.zeroed(delta, mask)
    ends = boundaries("gae", segments, "rewards", rewards)
    decay = cut_decay(gamma * trace_decay, terminated | truncated, mask, delta, ends)
    advantages = inputs.zeroed(reverse_scan(decay, delta), mask)
    return advantages, advantages + inputs.zeroed(values, mask)


def whiten(
    x: Tensor,  # any shape
    mask: Tensor | None = None,  # like x
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    impl: str = "auto",
) -> Tensor:  # like x; 0 where the mask is False
    """(x − μ) / (σ + eps) over the entries that count; `shift_mean=False` adds μ back.

    σ is the sample deviation (n − 1), as in the common PPO codes. Equal values, hence also a
    single one, give exactly 0: they carry no preference, and rounding noise in σ must not be
    blown up into one (eight rewards of 0.1 in float32 have σ = 8e-9).

    >>> whiten(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.,  0.,  1.])
    """
    inputs.implementation("whiten", impl)
    x = inputs.floating("whiten", "x", x)
    eps = inputs.epsilon("whiten", "eps", eps)
    mask = inputs.counting("whiten", mask, "x", x)
    if x.numel() == 0:
        return x.clone()
    n = inputs.count(mask, x)
    mean = inputs.zeroed(x, mask).sum() / n
    centred = inputs.zeroed(x - mean, mask)
    varies = _largest(x, mask) > -_largest(-x, mask)
    variance = centred.square().sum() / _at_least_one(n - 1)
    # Selected before the root: its slope at 0 is infinite, and 0 · inf would be the gradient.
    deviation = torch.where(varies, variance, 1.0).sqrt()
    scaled = inputs.zeroed(centred / (deviation + eps), varies)
    return scaled if shift_mean else inputs.zeroed(scaled + mean, mask)


def _at_least_one(n: int | Tensor) -> int | Tensor:
    return n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1)


def _largest(x: Tensor, mask: Tensor | None) -> Tensor:
    return (x if mask is None else x.masked_fill(~mask, -torch.inf)).amax()
