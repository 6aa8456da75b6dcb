"""Importance weights between the policy that is trained from and the one that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs

LEVELS = ("token", "sequence", "geometric")
HOW = ("truncate", "mask", "none")


@torch.no_grad()
def importance_weights(
    old_logprob: Tensor,  # (b, t) ℓ_old, of the policy the update starts from
    behaviour_logprob: Tensor,  # (b, t) ℓ_b, as the sampler reported it
    mask: Tensor | None = None,  # (b, t), True = counts; None counts everything
    *,
    level: str = "token",
    how: str = "truncate",
    bounds: tuple[float, float] = (0.0, 2.0),
    sequence_bounds: tuple[float, float] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # weights (b, t), 0 where the mask is False; metrics () each
    """w = π_old / π_b, tamed: what a loss is multiplied by when another policy sampled its data.

    level  token      w = e^(ℓ_old − ℓ_b)
           sequence   w = exp(Σ m (ℓ_old − ℓ_b)), the same for every token of a sequence
           geometric  w = exp(Σ m (ℓ_old − ℓ_b) / n)
    how    truncate   clip(w, lo, hi) with (lo, hi) = `bounds` (truncated importance sampling)
           mask       w where lo ≤ w ≤ hi, else 0 (masked importance sampling, IcePop)
           none       w (the behaviour weight of decoupled PPO, Hilton et al. 2022)

    `sequence_bounds` further drops (weight 0) every sequence whose geometric weight is outside:
    with level="token" the sequence-masked form. Truncation: Ionides (2008). Constants: no
    gradient flows. A dropped token stays in the denominator of `aggregate(…)`.

    Metrics: weight_mean, weight_max (of the weights returned), in_bounds (part of the counting
    tokens that kept their plain w), ess = (Σw)² / (n Σw²) of the plain w.

    >>> old, sampler = torch.zeros(1, 3), torch.tensor([[0.0, -2.0, 1.0]])
    >>> importance_weights(old, sampler)[0]
    tensor([[1.0000, 2.0000, 0.3679]])
    """
    owner = "importance_weights"
    inputs.implementation(owner, impl)
    checks.choice(owner, "level", level, LEVELS)
    checks.choice(owner, "how", how, HOW)
    old = inputs.floating(owner, "old_logprob", old_logprob)
    behaviour = inputs.matching(owner, "behaviour_logprob", behaviour_logprob, "old_logprob", old)
    mask = inputs.counting(owner, mask, "old_logprob", old)
    if level != "token" or sequence_bounds is not None:
        what = f"level={level!r}" if level != "token" else "sequence_bounds"
        inputs.sequences(owner, what, old)
    delta = inputs.zeroed(old - behaviour, mask)
    log_weight = _log_weight(level, delta, mask)
    plain = log_weight.exp()
    weight, kept = _tamed(plain, how, _interval(owner, "bounds", bounds))
    if sequence_bounds is not None:
        low, high = _interval(owner, "sequence_bounds", sequence_bounds)
        mean = _log_weight("geometric", delta, mask).exp()
        near = (mean >= low) & (mean <= high)
        weight, kept = inputs.zeroed(weight, near), kept & near
    weight = inputs.zeroed(weight, mask)
    n = inputs.count(mask, weight)
    metrics = {
        "weight_mean": weight.sum() / n,
        "weight_max": weight.amax() if weight.numel() else weight.new_zeros(()),
        "in_bounds": (kept if mask is None else kept & mask).sum(dtype=weight.dtype) / n,
        "ess": effective_fraction(log_weight, mask),
    }
    return weight, metrics


@torch.no_grad()
def off_policy_mask(
    logprob: Tensor,  # (b, t) ℓ of the current policy
    behaviour_logprob: Tensor,  # (b, t) ℓ_b of the policy that sampled
    advantage: Tensor,  # (b, t) or (b, 1)
    mask: Tensor | None = None,  # (b, t), True = counts; None counts everything
    *,
    limit: float,
    impl: str = "auto",
) -> Tensor:  # (b, t) ones and zeros, a weight for policy_loss
    """0 where A < 0 and the sequence has drifted: mean m (ℓ_b − ℓ) > limit; 1 elsewhere.

    Off-policy sequence masking, DeepSeek-V3.2 (2025): bad samples the policy has already left
    teach little and disturb much. The mean estimates KL(behaviour‖current) per token.

    >>> new, sampler = torch.tensor([[-3.0, -3.0], [-3.0, -3.0]]), torch.full((2, 2), -1.0)
    >>> off_policy_mask(new, sampler, torch.tensor([[1.0], [-1.0]]), limit=0.5)
    tensor([[1., 1.],
            [0., 0.]])
    """
    owner = "off_policy_mask"
    inputs.implementation(owner, impl)
    limit = checks.real(owner, "limit", limit, at_least=0.0)
    logprob = inputs.floating(owner, "logprob", logprob)
    behaviour = inputs.matching(owner, "behaviour_logprob", behaviour_logprob, "logprob", logprob)
    advantage = inputs.matching(owner, "advantage", advantage, "logprob", logprob)
    mask = inputs.counting(owner, mask, "logprob", logprob)
    inputs.sequences(owner, "logprob", logprob)
    drift = -_log_weight("geometric", inputs.zeroed(logprob - behaviour, mask), mask)
    return torch.where((advantage < 0) & (drift > limit), 0.0, torch.ones_like(logprob))


def effective_fraction(log_weight: Tensor, mask: Tensor | None) -> Tensor:  # () in [0, 1]
    """(Σw)² / (n Σw²), Kish (1965): 1 for equal weights, 1/n if one outweighs all; 0 for none.

    Every weight is divided by the largest first, so that none overflows.
    """
    if log_weight.numel() == 0:
        return log_weight.new_zeros(())
    x = log_weight if mask is None else log_weight.masked_fill(~mask, -torch.inf)
    largest = x.amax()
    weight = (x - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    squares = weight.square().sum()
    some = squares > 0
    fraction = weight.sum().square() / (inputs.count(mask, x) * squares.masked_fill(~some, 1.0))
    return inputs.zeroed(fraction, some)


def _log_weight(level: str, delta: Tensor, mask: Tensor | None) -> Tensor:
    if level == "token":
        return delta
    total = delta.sum(-1, keepdim=True)
    mean = total / inputs.lengths(mask, delta) if level == "geometric" else total
    return mean.expand_as(delta)


def _tamed(weight: Tensor, how: str, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The weight after `how`, and where it is still the plain one."""
    low, high = bounds
    inside = (weight >= low) & (weight <= high)
    if how == "none":
        return weight, torch.ones_like(inside)
    return (weight.clamp(low, high) if how == "truncate" else inputs.zeroed(weight, inside)), inside


def _interval(owner: str, name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    rule = f"{name} must be (low, high)"
    pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    checks.require(pair, owner, rule, repr(bounds))
    low = checks.real(owner, f"{name} low", bounds[0], at_least=0.0)
    return low, checks.real(owner, f"{name} high", bounds[1], above=low)
