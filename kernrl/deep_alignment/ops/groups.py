"""Advantages from groups of answers to one prompt: each is judged by its siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.sequences import whole

# Every kind sees a table (g, n): one group a row, rewards and which entries count.
Scorer = Callable[[Tensor, Tensor, float], Tensor]


def _grpo(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """(r − μ)/(σ + eps). Shao et al. (2024)."""
    centred = _centred(r, mask)
    return centred / (_deviation(centred, mask) + eps)


def _dr_grpo(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """r − μ. Dr. GRPO: Liu et al. (2025)."""
    return _centred(r, mask)


def _rloo(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """rᵢ − mean of the others = n/(n − 1) (r − μ). Kool et al. (2019), Ahmadian et al. (2024)."""
    n = mask.sum(-1, keepdim=True)
    return _centred(r, mask) * n / (n - 1).clamp(min=1)


def _lite_ppo(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """(r − μ of the group)/(σ of the batch + eps). Lite PPO: Liu et al. (2025)."""
    return _centred(r, mask) / (_deviation(*_whole_batch(r, mask)) + eps)


def _reinforce(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """(r − μ)/(σ + eps), both of the batch. REINFORCE++: Hu (2025)."""
    centred, counts = _whole_batch(r, mask)
    return (centred / (_deviation(centred, counts) + eps)).view_as(r)


def _reinforce_baseline(r: Tensor, mask: Tensor, eps: float) -> Tensor:
    """r − μ of the group, over its own deviation in the batch. REINFORCE++-baseline, ibid."""
    centred = _centred(r, mask)  # sums to 0 in every group, hence in the batch: no second mean
    return centred / (_deviation(centred.reshape(1, -1), mask.reshape(1, -1)) + eps)


KINDS: dict[str, Scorer] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "lite_ppo": _lite_ppo,
    "reinforce++": _reinforce,
    "reinforce++-baseline": _reinforce_baseline,
}


@torch.no_grad()
def group_advantages(
    rewards: Tensor,  # (b,); NaN = could not be scored
    groups: int | Tensor,  # the size of consecutive groups, or the group of every row, (b,)
    kind: str = "grpo",
    *,
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:  # (b,)
    """Advantages of whole answers, from the rewards of the other answers to the same prompt.

    grpo                  (r − μ_g)/(σ_g + eps)
    dr_grpo               r − μ_g
    rloo                  r − mean of the others in the group
    lite_ppo              (r − μ_g)/(σ_batch + eps)
    reinforce++           (r − μ_batch)/(σ_batch + eps); the groups do not matter
    reinforce++-baseline  (r − μ_g)/(σ of these in the batch + eps)

    σ is the sample deviation (n − 1), so two rewards of grpo become ±0.707. A NaN reward takes no
    part and gets 0. Equal rewards give exactly 0, decided by comparing them (eight times 0.1 in
    float32 has σ = 8e-9, and any eps of that size makes −0.4 of it); so does a group of one, of
    which nothing can be compared (with an empty baseline its advantage would be its reward).
    Group ids need not be sorted; they cost a device sync, a size does not. Batch statistics are
    those of this call: gather the rewards first if the batch is spread over ranks. No gradient
    flows.

    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2, "rloo").tolist()
    [-2.0, 2.0, 0.0, 0.0]
    """
    owner = "group_advantages"
    inputs.implementation(owner, impl)
    checks.choice(owner, "kind", kind, KINDS)
    eps = inputs.epsilon(owner, "eps", eps)
    table, mask, place = _table(owner, rewards, groups)
    if not table.numel():
        return table.view(-1)
    return KINDS[kind](table, mask, eps).reshape(-1)[place]


@torch.no_grad()
def informative_groups(
    rewards: Tensor,  # (b,); NaN = could not be scored
    groups: int | Tensor,  # the size of consecutive groups, or the group of every row, (b,)
) -> Tensor:  # (b,) bool
    """True in groups whose rewards differ: the others have no gradient and may be dropped.

    Dynamic sampling, DAPO: Yu et al. (2025). Unscored rows are False.

    >>> informative_groups(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2).tolist()
    [True, True, False, False]
    """
    table, mask, place = _table("informative_groups", rewards, groups)
    if not table.numel():
        return table.view(-1) != 0
    return (_varies(table, mask) & mask).reshape(-1)[place]


# ---------------------------------------------------------------- the table


def _table(owner: str, rewards: Any, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards as (g, n), zeros where nothing counts; the mask; where each of b went."""
    rewards = inputs.floating(owner, "rewards", rewards)
    if rewards.ndim != 1:
        checks.fail(owner, "rewards must have shape (b,)", checks.shape(rewards))
    if isinstance(groups, Tensor):
        place, shape = _by_id(owner, groups, rewards)
    else:
        place, shape = _by_size(owner, groups, rewards)
    table = rewards.new_full((shape[0] * shape[1],), torch.nan)
    table[place] = rewards
    table = table.view(shape)
    mask = ~table.isnan()
    return inputs.zeroed(table, mask), mask, place


def _by_size(owner: str, size: Any, rewards: Tensor) -> tuple[Tensor, tuple[int, int]]:
    size = checks.integer(owner, "groups", size, at_least=1)
    b = rewards.shape[0]
    if b % size:
        cure = "Pass the group of every row instead."
        checks.fail(owner, f"groups of {size} must divide the number of rewards", b, cure)
    return torch.arange(b, device=rewards.device), (b // size, size)


def _by_id(owner: str, groups: Tensor, rewards: Tensor) -> tuple[Tensor, tuple[int, int]]:
    ids = whole(owner, "groups", groups)
    inputs.same_device(owner, "groups", ids, "rewards", rewards)
    if ids.shape != rewards.shape:
        rule = f"groups must have the shape of rewards {checks.shape(rewards)}"
        checks.fail(owner, rule, checks.shape(ids))
    if not ids.numel():
        return ids.long(), (0, 0)
    _, row, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    # Within the sorted rows, the position in the group is the distance to the group's start.
    start = (counts.cumsum(0) - counts)[row[order]]
    width = int(counts.amax())
    place = torch.empty_like(row)
    place[order] = row[order] * width + torch.arange(len(row), device=row.device) - start
    return place, (counts.shape[0], width)


# ---------------------------------------------------------------- statistics of rows


def _varies(r: Tensor, mask: Tensor) -> Tensor:  # (g, n) -> (g, 1)
    high = r.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    low = r.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    return high > low


def _centred(r: Tensor, mask: Tensor) -> Tensor:
    """r − μ of every row; exact zeros in rows of equal rewards, and where nothing counts."""
    mean = r.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return inputs.zeroed(r - mean, mask & _varies(r, mask))


def _deviation(centred: Tensor, mask: Tensor) -> Tensor:  # (g, n) -> (g, 1)
    """σ of every row (n − 1); 1 where it is 0, since there is nothing to divide then."""
    n = mask.sum(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (n - 1).clamp(min=1)
    return torch.where(variance > 0, variance, 1.0).sqrt()


def _whole_batch(r: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # both (1, g n)
    """The batch as one row: centred rewards, and the mask."""
    return _centred(r.reshape(1, -1), mask.reshape(1, -1)), mask.reshape(1, -1)
