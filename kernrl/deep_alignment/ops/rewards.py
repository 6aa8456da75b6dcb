"""Rewards of token sequences: where the score goes, what divergence costs, how long is too long."""

from __future__ import annotations

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.sequences import last_counting, whole


@torch.no_grad()
def shape_rewards(
    rewards: Tensor,  # (b,) one score a sequence, or (b, t) one a token
    kl: Tensor | None,  # (b, t) from kl_penalty, or None for no penalty
    mask: Tensor | None = None,  # (b, t), True = counts; None counts everything
    *,
    beta: float = 0.0,
    clip: float | None = None,
    impl: str = "auto",
) -> Tensor:  # (b, t), 0 where the mask is False
    """Rewards per token: r_t = −β kl_t + 1[t is the last counting token] clip(R, −c, c).

    Stiennon et al. (2020), Ouyang et al. (2022). The last *counting* token is found from the mask
    alone, so padding on either side, a gap, or an end token equal to the padding do not move it; a
    sequence in which nothing counts gets no reward. Scores per token (b, t) stay where they are,
    clipped one by one: so also for packed rows. `kl_penalty(…, estimator="k1")` is the
    estimate whose use here has the gradient of KL(π‖π_ref). No gradient flows.

    >>> mask = torch.tensor([[True, True, False]])
    >>> shape_rewards(torch.tensor([5.0]), torch.ones(1, 3), mask, beta=0.5, clip=2.0)
    tensor([[-0.5000,  1.5000,  0.0000]])
    """
    owner = "shape_rewards"
    inputs.implementation(owner, impl)
    beta = checks.real(owner, "beta", beta, at_least=0.0)
    rewards = inputs.floating(owner, "rewards", rewards)
    grid = kl if kl is not None else mask if mask is not None else rewards
    if not isinstance(grid, Tensor) or grid.ndim != 2:
        rule = "one of rewards, kl and mask must be a tensor of shape (b, t)"
        got = checks.shape(grid) if isinstance(grid, Tensor) else type(grid).__name__
        checks.fail(owner, rule, got)
    like = torch.zeros(grid.shape, dtype=rewards.dtype, device=grid.device)
    mask = inputs.counting(owner, mask, "the tokens", like)
    inputs.same_device(owner, "rewards", rewards, "the tokens", like)
    if clip is not None:
        bound = checks.real(owner, "clip", clip, above=0.0)
        rewards = rewards.clamp(-bound, bound)
    out = _placed(owner, rewards, like, mask)
    if kl is not None:
        out = out - beta * inputs.matching(owner, "kl", kl, "the tokens", like)
    return inputs.zeroed(out, mask)


def _placed(owner: str, rewards: Tensor, like: Tensor, mask: Tensor | None) -> Tensor:
    if rewards.ndim == 1:
        if rewards.shape != like.shape[:1]:
            rule = f"rewards must have shape {checks.shape(like)[:1]}, one a sequence"
            checks.fail(owner, rule, checks.shape(rewards))
        return torch.where(last_counting(mask, like), rewards[:, None], 0.0)
    if rewards.shape != like.shape:
        rule = f"rewards must have shape {checks.shape(like)[:1]} or {checks.shape(like)}"
        checks.fail(owner, rule, checks.shape(rewards))
    return rewards


@torch.no_grad()
def overlong_penalty(
    lengths: Tensor,  # (b,) tokens of each answer, whole numbers
    *,
    limit: int,
    buffer: int,
) -> Tensor:  # (b,) float32 in [−1, 0], to be added to the reward
    """0 up to limit − buffer, then down in a line to −1 at `limit`, and −1 beyond.

    Soft overlong punishment, DAPO: Yu et al. (2025). Multiply by what it shall cost.

    >>> overlong_penalty(torch.tensor([6, 9, 12]), limit=10, buffer=4).tolist()
    [0.0, -0.75, -1.0]
    """
    owner = "overlong_penalty"
    limit = checks.integer(owner, "limit", limit, at_least=1)
    buffer = checks.integer(owner, "buffer", buffer, at_least=1, at_most=limit)
    room = (limit - buffer) - whole(owner, "lengths", lengths)
    return (room.float() / buffer).clamp(-1.0, 0.0)
