"""The policy loss: one call for every kind, its options, and what a trainer watches."""

from __future__ import annotations

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce
from kernrl.deep_alignment.ops.importance import effective_fraction
from kernrl.deep_alignment.ops.kl import k3
from kernrl.deep_alignment.ops.policy_kinds import KINDS, SEQUENCE_KINDS, Terms

Pair = tuple[float, float]
FAR_KINDS = ("clip", "gspo", "gspo-token")  # those that a second bound for A < 0 is defined for


def policy_loss(
    logprob: Tensor,  # (b, t), or (b,) for kinds and aggregations without sequences
    old_logprob: Tensor | None,  # like logprob; None: the sampling policy is the current one
    advantage: Tensor,  # like logprob, or (b, 1): one for the whole sequence
    mask: Tensor | None = None,  # like logprob, True = counts; None counts everything
    *,
    kind: str = "clip",
    clip: float | Pair = (0.2, 0.2),
    dual_clip: float | None = None,
    two_sided: float | None = None,
    gate_temperature: Pair = (1.0, 1.05),
    gamma_weights: tuple[Pair, Pair] = ((2.0, 3.0), (3.0, 2.0)),
    weight: Tensor | None = None,  # like logprob, or (b, 1): see importance_weights
    entropy: Tensor | None = None,  # like logprob
    entropy_bonus: float = 0.0,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or like logprob), metrics () each
    """A policy-gradient loss to minimise, and what a trainer watches, from one pass.

    With Δ = ℓ − ℓ_old, ρ = e^Δ, s = exp(mean Δ over the sequence), ε = `clip` (low, high):

    none        −A ℓ (REINFORCE)
    clip        −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A) (PPO); with `dual_clip` c > 1 the loss
                of A < 0 stays below −cA (Ye et al. 2020); `two_sided` δ ≥ 1 + ε_high puts
                min(ρ, δ) in the first arm (INTELLECT-2, 2025), which is the same as c = δ
    cispo       −sg[clip(ρ)] A ℓ. ε counts from 1, as in the paper and verl; the bound that TRL
                and Liger call epsilon_high is 1 + ε_high. ε_low = 1 lifts the lower bound.
    sapo        −A (4/τ) σ(τ(ρ − 1)), τ = `gate_temperature` for (A > 0, A ≤ 0)
    gspo        clip with s in the place of ρ, the same loss on all tokens of a sequence; usually
                with "seq-mean-token-mean" and ε near 3e-4
    gspo-token  the value of gspo, the gradient of a token through its own ℓ and A
    gmpo        −A (∏ ρ)^(1/n), each ρ held at its clip bound when it is cut
    vespo       −sg[φ(w)] A ℓ, φ = e^λ w^k e^(−λw), w = ∏ ρ, (k, λ) = `gamma_weights` for
                (A ≥ 0, A < 0)

    `weight` multiplies the loss of every token and is a constant. With
    `importance_weights(old_logprob, behaviour_logprob, mask)` it makes truncated importance
    sampling and decoupled PPO (Hilton et al. 2022): the ratio counts from ℓ_old, the weight from
    the sampler. If ℓ_old is the sampler's own log-probability, pass none: it would count twice.
    `entropy` H adds −`entropy_bonus` · H to the loss of every token, unweighted.

    `aggregate` and `denominator` are those of `aggregate(…)`. ℓ_old and A are constants. Masked
    entries are set aside before exp, so whatever stands there reaches neither loss nor gradient.
    Half precision is computed in float32.

    Metrics, without gradient and without a device sync: clip_fraction_low and _high (tokens with
    A < 0 below, A > 0 above the clip range), dual_clip_fraction or two_sided_fraction if asked
    for, kl_k1 and kl_k3 (estimates of KL(old‖new) from Δ), ratio_min, ratio_mean, ratio_max and
    ess = (Σρ)² / (n Σρ²), the effective sample size as a part of n (of s or w for gspo and
    vespo), entropy if given.

    >>> old, new = torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.5, 0.75]))
    >>> loss, metrics = policy_loss(new, old, torch.tensor([1.0, 1.0]))
    >>> f"{float(loss):.2f} {float(metrics['clip_fraction_high']):.2f}"
    '-1.10 0.50'
    """
    inputs.implementation("policy_loss", impl)
    checks.choice("policy_loss", "kind", kind, KINDS)
    low, high = _clip_range(clip)
    _check_options(kind, gate_temperature, gamma_weights)
    bound = _far_bound(kind, dual_clip, two_sided, high)
    logprob, delta, advantage, mask = _prepare(logprob, old_logprob, advantage, mask)
    if kind in SEQUENCE_KINDS:
        inputs.sequences("policy_loss", f"kind={kind!r}", logprob)
    ratio_of, loss_of = KINDS[kind]
    log_ratio = ratio_of(logprob, delta, mask)
    with torch.no_grad():
        ratio = log_ratio.exp()
        held = clipped = ratio.clamp(1 - low, 1 + high)
        cut = (ratio - clipped) * advantage > 0  # out of the range on the side A asks for
        metrics = _metrics(delta, log_ratio, ratio, cut, advantage, mask)
        if bound is not None:
            far = (advantage < 0) & (ratio > bound)
            held, cut = held.masked_fill(far, bound), cut | far
            name = "two_sided_fraction" if dual_clip is None else "dual_clip_fraction"
            metrics[name] = far.sum(dtype=ratio.dtype) / inputs.count(mask, far)
    options = gate_temperature, gamma_weights
    terms = Terms(logprob, advantage, mask, log_ratio, ratio, clipped, held, cut, *options)
    loss = _weighted(loss_of(terms), weight, logprob)
    loss = _with_bonus(loss, entropy, entropy_bonus, logprob, mask, metrics)
    return reduce(loss, mask, aggregate, denominator), metrics


# ---------------------------------------------------------------- options


def _clip_range(clip: float | Pair) -> Pair:
    """(ε_low, ε_high) from a pair, or from one number for both."""
    pair = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    rule = "clip must be one number or (low, high)"
    checks.require(len(pair) == 2, "policy_loss", rule, repr(clip))
    low = inputs.epsilon("policy_loss", "clip low", pair[0])
    return low, inputs.epsilon("policy_loss", "clip high", pair[1])


def _check_options(kind: str, gate: Pair, gamma: tuple[Pair, Pair]) -> None:
    if kind == "sapo":
        for tau in gate:
            checks.real("policy_loss", "gate_temperature", tau, above=0.0)
    if kind == "vespo":
        for power, rate in gamma:
            checks.real("policy_loss", "gamma_weights k", power, above=0.0)
            checks.real("policy_loss", "gamma_weights λ", rate, above=0.0)


def _far_bound(
    kind: str, dual_clip: float | None, two_sided: float | None, high: float
) -> float | None:
    """Where the ratio of a bad action (A < 0) is held, if anywhere."""
    if dual_clip is None and two_sided is None:
        return None
    name, value = ("two_sided", two_sided) if dual_clip is None else ("dual_clip", dual_clip)
    if kind not in FAR_KINDS:
        rule = f"{name} belongs to kind {', '.join(FAR_KINDS)}"
        cure = "Leave it out, or use kind='clip'."
        checks.fail("policy_loss", rule, f"kind={kind!r}", cure)
    if dual_clip is not None and two_sided is not None:
        rule = "dual_clip and two_sided both bound the loss of A < 0"
        checks.fail("policy_loss", rule, "both", "Leave one out.")
    # Below 1 + ε_high the bound δ would also cut the first arm of good actions.
    least = {"above": 1.0} if two_sided is None else {"at_least": 1 + high}
    return checks.real("policy_loss", name, value, **least)


# ---------------------------------------------------------------- tensors


def _prepare(
    logprob: Tensor, old_logprob: Tensor | None, advantage: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Checked ℓ, Δ, A and mask, with zeros where the mask is False."""
    logprob = inputs.floating("policy_loss", "logprob", logprob)
    if old_logprob is None:
        old_logprob = logprob
    old_logprob = inputs.matching("policy_loss", "old_logprob", old_logprob, "logprob", logprob)
    advantage = inputs.matching("policy_loss", "advantage", advantage, "logprob", logprob)
    mask = inputs.counting("policy_loss", mask, "logprob", logprob)
    delta = inputs.zeroed(logprob - old_logprob.detach(), mask)
    advantage = inputs.zeroed(advantage.detach(), mask)
    return inputs.zeroed(logprob, mask), delta, advantage, mask


def _weighted(loss: Tensor, weight: Tensor | None, like: Tensor) -> Tensor:
    if weight is None:
        return loss
    weight = inputs.matching("policy_loss", "weight", weight, "logprob", like)
    return loss * weight.detach()


def _with_bonus(
    loss: Tensor,
    entropy: Tensor | None,
    bonus: float,
    like: Tensor,
    mask: Tensor | None,
    metrics: dict[str, Tensor],
) -> Tensor:
    """loss − bonus · H; the mean H goes to the metrics."""
    bonus = checks.real("policy_loss", "entropy_bonus", bonus)
    if entropy is None:
        if bonus != 0.0:
            cure = "Pass the entropy of every token, or entropy_bonus=0."
            checks.fail("policy_loss", "entropy_bonus needs entropy", "None", cure)
        return loss
    entropy = inputs.zeroed(
        inputs.matching("policy_loss", "entropy", entropy, "logprob", like), mask
    )
    metrics["entropy"] = entropy.detach().sum() / inputs.count(mask, entropy)
    return loss if bonus == 0.0 else loss - bonus * entropy


# ---------------------------------------------------------------- metrics


def _metrics(
    delta: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    cut: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    n = inputs.count(mask, delta)
    high = (cut & (advantage > 0)).sum(dtype=ratio.dtype)
    lowest, highest = _extremes(ratio, mask)
    return {
        "clip_fraction_low": (cut.sum(dtype=ratio.dtype) - high) / n,
        "clip_fraction_high": high / n,
        "kl_k1": -delta.sum() / n,
        "kl_k3": k3(delta).sum() / n,
        "ratio_min": lowest,
        "ratio_mean": inputs.zeroed(ratio, mask).sum() / n,
        "ratio_max": highest,
        "ess": effective_fraction(log_ratio, mask),
    }


def _extremes(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest counting entry; 0 and 0 where nothing counts."""
    if x.numel() == 0:
        return x.new_zeros(()), x.new_zeros(())
    if mask is None:
        return torch.aminmax(x)
    some = mask.any()
    lowest = x.masked_fill(~mask, torch.inf).amin()
    highest = x.masked_fill(~mask, -torch.inf).amax()
    return inputs.zeroed(lowest, some), inputs.zeroed(highest, some)
