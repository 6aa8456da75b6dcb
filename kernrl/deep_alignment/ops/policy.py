"""Policy losses: which ratio is weighed, and what is done with it where it strays too far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce
from kernrl.deep_alignment.ops.kl import k3


@dataclass(frozen=True, slots=True)
class Terms:
    """What a loss sees, all (b, t). A masked entry is harmless: ℓ = 0, ρ = 1, A = 0."""

    logprob: Tensor  # ℓ
    advantage: Tensor  # A
    mask: Tensor | None
    log_ratio: Tensor  # log ρ, with gradient
    ratio: Tensor  # ρ
    clipped: Tensor  # ρ moved into [1 − ε_low, 1 + ε_high]
    held: Tensor  # what stands for ρ where it is cut
    cut: Tensor  # True where the step A asks for leads further out: no gradient there
    gate_temperature: tuple[float, float]


# ---------------------------------------------------------------- which ratio


def _token(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log ρₜ = Δₜ = ℓₜ − ℓ_old,ₜ."""
    return delta


def _sequence(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log s = Σ m Δ / n, the same for every token. GSPO: Zheng et al. (2025)."""
    return (delta.sum(-1, keepdim=True) / inputs.lengths(mask, delta)).expand_as(delta)


def _sequence_token(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log s in value, ℓₜ in gradient: sₜ = sg[s] π/sg[π]. GSPO-token, ibid."""
    # In this order the two ℓ cancel exactly; adding log s first would round.
    return _sequence(logprob, delta, mask).detach() + (logprob - logprob.detach())


# ---------------------------------------------------------------- which loss


def _reinforce(x: Terms) -> Tensor:
    """−A ℓ; ∂/∂ℓ = −A. Williams (1992)."""
    return -x.advantage * x.logprob


def _pessimistic(x: Terms) -> Tensor:
    """−min(ρA, clip(ρ)A); ∂/∂log ρ = −ρA where not cut. PPO: Schulman et al. (2017), eq. 7."""
    # Filled before exp: a cut token may have ρ = inf, and 0 · inf in the backward pass is NaN.
    return -x.advantage * torch.where(x.cut, x.held, x.log_ratio.masked_fill(x.cut, 0.0).exp())


def _weighted(x: Terms) -> Tensor:
    """−sg[clip(ρ)] A ℓ; ∂/∂ℓ = −clip(ρ) A. CISPO: MiniMax-M1 (2025)."""
    return -x.clipped * x.advantage * x.logprob


def _gated(x: Terms) -> Tensor:
    """−A (4/τ) σ(τ(ρ − 1)); ∂/∂ℓ = −4 A σ(1 − σ) ρ. SAPO: Gao et al. (2025)."""
    positive, negative = x.gate_temperature
    tau = torch.full_like(x.ratio, negative).masked_fill_(x.advantage > 0, positive)
    ratio = x.log_ratio.clamp(max=20.0).exp()  # σ is 1 by then; ρ = inf would make 0 · inf
    return -x.advantage * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


def _geometric(x: Terms) -> Tensor:
    """−A R, R = (∏ held ρ)^(1/n); ∂/∂ℓ = −A R/n where not cut. GMPO: Zhao et al. (2025)."""
    log_ratio = torch.where(x.cut, x.held.log(), x.log_ratio)
    return -x.advantage * _sequence(x.logprob, log_ratio, x.mask).exp()


Ratio = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
KINDS: dict[str, tuple[Ratio, Callable[[Terms], Tensor]]] = {
    "none": (_token, _reinforce),
    "clip": (_token, _pessimistic),
    "cispo": (_token, _weighted),
    "sapo": (_token, _gated),
    "gspo": (_sequence, _pessimistic),
    "gspo-token": (_sequence_token, _pessimistic),
    "gmpo": (_token, _geometric),
}
SEQUENCE_KINDS = ("gspo", "gspo-token", "gmpo")


def policy_loss(
    logprob: Tensor,  # (b, t), or (b,) for kinds and aggregations without sequences
    old_logprob: Tensor | None,  # like logprob; None: the sampling policy is the current one
    advantage: Tensor,  # like logprob, or (b, 1): one for the whole sequence
    mask: Tensor | None = None,  # like logprob, True = counts; None counts everything
    *,
    kind: str = "clip",
    clip: float | tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    gate_temperature: tuple[float, float] = (1.0, 1.05),
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or like logprob), metrics () each
    """A policy-gradient loss to minimise, and what a trainer watches, from one pass.

    With Δ = ℓ − ℓ_old, ρ = e^Δ, s = exp(mean Δ over the sequence), ε = `clip` (low, high):

    none        −A ℓ (REINFORCE)
    clip        −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A) (PPO); with `dual_clip` c > 1 the loss
                of A < 0 stays below −cA (Ye et al. 2020)
    cispo       −sg[clip(ρ)] A ℓ. ε counts from 1, as in the paper and verl; the bound that TRL
                and Liger call epsilon_high is 1 + ε_high. ε_low = 1 lifts the lower bound.
    sapo        −A (4/τ) σ(τ(ρ − 1)), τ = `gate_temperature` for (A > 0, A ≤ 0)
    gspo        clip with s in the place of ρ, the same loss on all tokens of a sequence; usually
                with "seq-mean-token-mean" and ε near 3e-4
    gspo-token  the value of gspo, the gradient of a token through its own ℓ and A
    gmpo        −A (∏ ρ)^(1/n), each ρ held at its clip bound when it is cut

    `aggregate` and `denominator` are those of `aggregate(…)`. ℓ_old and A are constants. Masked
    entries are set aside before exp, so whatever stands there reaches neither loss nor gradient.
    Half precision is computed in float32.

    Metrics, without gradient and without a device sync: clip_fraction_low and _high (tokens with
    A < 0 below, A > 0 above the clip range), dual_clip_fraction if asked for, kl_k1 and kl_k3
    (estimates of KL(old‖new) from Δ), ratio_min, ratio_mean, ratio_max (of s for gspo).

    >>> old, new = torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.5, 0.75]))
    >>> loss, metrics = policy_loss(new, old, torch.tensor([1.0, 1.0]))
    >>> f"{float(loss):.2f} {float(metrics['clip_fraction_high']):.2f}"
    '-1.10 0.50'
    """
    inputs.implementation("policy_loss", impl)
    checks.choice("policy_loss", "kind", kind, KINDS)
    low, high = _clip_range(clip)
    _check_options(kind, dual_clip, gate_temperature)
    logprob, delta, advantage, mask = _prepare(logprob, old_logprob, advantage, mask)
    if kind in SEQUENCE_KINDS:
        inputs.sequences("policy_loss", f"kind={kind!r}", logprob)
    ratio_of, loss_of = KINDS[kind]
    log_ratio = ratio_of(logprob, delta, mask)
    with torch.no_grad():
        ratio = log_ratio.exp()
        held = clipped = ratio.clamp(1 - low, 1 + high)
        cut = (ratio - clipped) * advantage > 0  # out of the range on the side A asks for
        metrics = _metrics(delta, ratio, cut, advantage, mask)
        if dual_clip is not None:
            far = (advantage < 0) & (ratio > dual_clip)
            held, cut = held.masked_fill(far, dual_clip), cut | far
            metrics["dual_clip_fraction"] = far.sum(dtype=ratio.dtype) / inputs.count(mask, far)
    terms = Terms(logprob, advantage, mask, log_ratio, ratio, clipped, held, cut, gate_temperature)
    return reduce(loss_of(terms), mask, aggregate, denominator), metrics


def _clip_range(clip: float | tuple[float, float]) -> tuple[float, float]:
    """(ε_low, ε_high) from a pair, or from one number for both."""
    pair = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    rule = "clip must be one number or (low, high)"
    checks.require(len(pair) == 2, "policy_loss", rule, repr(clip))
    low = inputs.epsilon("policy_loss", "clip low", pair[0])
    return low, inputs.epsilon("policy_loss", "clip high", pair[1])


def _check_options(kind: str, dual_clip: float | None, gate: tuple[float, float]) -> None:
    if dual_clip is not None:
        cure = "Leave it out, or use kind='clip'."
        rule = "dual_clip belongs to kind='clip'"
        checks.require(kind == "clip", "policy_loss", rule, f"kind={kind!r}", cure)
        checks.real("policy_loss", "dual_clip", dual_clip, above=1.0)
    if kind == "sapo":
        for tau in gate:
            checks.real("policy_loss", "gate_temperature", tau, above=0.0)


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


def _metrics(
    delta: Tensor, ratio: Tensor, cut: Tensor, advantage: Tensor, mask: Tensor | None
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
