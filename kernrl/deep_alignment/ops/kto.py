"""The KTO loss: single answers judged good or bad, against a reference point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce

OWNER = "kto_loss"


def kto_loss(
    logprob: Tensor,  # (b,) Σ log π over the tokens of each answer, with gradient
    ref_logprob: Tensor,  # (b,) of the reference policy, a constant
    desirable: Tensor,  # (b,) True = a good answer
    *,
    kl: float | Tensor | None = None,  # ()
    mismatched: tuple[Tensor, Tensor] | None = None,  # log π and log π_ref, (m,) each
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    aggregate: str = "mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or (b,)), metrics () each
    """Kahneman–Tversky optimisation: utility against the divergence the policy already has.

    r = β (ℓ − ℓ_ref);  loss = w_d (1 − σ(r − βκ)) if desirable, else w_u (1 − σ(βκ − r))
    ∂/∂r = −w_d σ(1 − σ), or +w_u σ(1 − σ)

    Ethayarajh et al. (2024). κ estimates KL(π‖π_ref) in log-probability, from *mismatched* pairs
    (prompt i with the answer of prompt j), and is a constant: κ = max(0, mean(ℓ − ℓ_ref)) over
    `mismatched`, or the number `kl`, say that mean averaged over ranks. Exactly one of the two;
    `kl=0` is the unpaired APO-zero. Works on a batch of good answers alone, or of bad ones.

    aggregate: "mean" over answers, or "none"; `denominator` replaces their number. Metrics,
    without gradient: reward_desirable and reward_undesirable (means of r over each part, 0 if it
    is empty), margin (their difference, 0 if either is empty), kl (κ).

    >>> good = torch.tensor([True, False])
    >>> loss, _ = kto_loss(torch.zeros(2), torch.zeros(2), good, kl=0.0)
    >>> float(loss)
    0.5
    """
    inputs.implementation(OWNER, impl)
    checks.choice(OWNER, "aggregate", aggregate, ("mean", "none"))
    beta = checks.real(OWNER, "beta", beta, above=0.0)
    good_weight = checks.real(OWNER, "desirable_weight", desirable_weight, at_least=0.0)
    bad_weight = checks.real(OWNER, "undesirable_weight", undesirable_weight, at_least=0.0)
    logprob = _flat("logprob", logprob)
    ref = inputs.matching(OWNER, "ref_logprob", ref_logprob, "logprob", logprob).detach()
    good = inputs.flags(OWNER, "desirable", desirable, "logprob", logprob)
    kappa = _kappa(kl, mismatched, logprob)
    reward = beta * (logprob - ref)
    sign = torch.where(good, 1.0, -torch.ones_like(reward))
    weight = torch.where(good, good_weight, bad_weight * torch.ones_like(reward))
    # 1 − σ(x) = σ(−x): the difference from 1 rounds to 0 long before the loss does.
    loss = weight * torch.sigmoid(-sign * (reward - beta * kappa))
    how = "token-mean" if aggregate == "mean" else "none"
    return reduce(loss, None, how, denominator), _metrics(reward, good, kappa)


def _kappa(kl: float | Tensor | None, mismatched: Any, like: Tensor) -> Tensor:
    """max(0, ·) of what was given, a constant."""
    if (kl is None) == (mismatched is None):
        got = "neither" if kl is None else "both"
        cure = "Pass the mismatched log-probabilities, or their mean difference."
        checks.fail(OWNER, "exactly one of kl and mismatched must be given", got, cure)
    if mismatched is None:
        if not isinstance(kl, Tensor):
            given = max(checks.real(OWNER, "kl", kl), 0.0)
            return torch.tensor(given, dtype=like.dtype, device=like.device)
        if kl.ndim:
            checks.fail(OWNER, "kl must be one number", f"shape {checks.shape(kl)}")
        return kl.detach().to(like.device, like.dtype).clamp(min=0.0)
    if not isinstance(mismatched, (tuple, list)) or len(mismatched) != 2:
        rule = "mismatched must be (log-probabilities, reference log-probabilities)"
        checks.fail(OWNER, rule, type(mismatched).__name__)
    policy = _flat("mismatched", mismatched[0])
    ref = inputs.matching(OWNER, "mismatched", mismatched[1], "its first", policy)
    inputs.same_device(OWNER, "mismatched", policy, "logprob", like)
    difference = (policy - ref).detach().to(like.dtype)
    return (difference.sum() / max(difference.numel(), 1)).clamp(min=0.0)


def _flat(name: str, x: Any) -> Tensor:
    out = inputs.floating(OWNER, name, x)
    if out.ndim != 1:
        cure = "Sum over tokens first: sequence_logprobs(logprob, mask)."
        checks.fail(OWNER, f"{name} must have shape (b,)", checks.shape(out), cure)
    return out


@torch.no_grad()
def _metrics(reward: Tensor, good: Tensor, kappa: Tensor) -> dict[str, Tensor]:
    up, down = (
        inputs.zeroed(reward, part).sum() / part.sum().clamp(min=1) for part in (good, ~good)
    )
    both = good.any() & (~good).any()
    return {
        "reward_desirable": up,
        "reward_undesirable": down,
        "margin": inputs.zeroed(up - down, both),
        "kl": kappa,
    }
