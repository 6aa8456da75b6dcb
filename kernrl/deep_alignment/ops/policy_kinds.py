"""The policy losses of `policy_loss`: which ratio, and what is done where it strays too far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernrl.deep_alignment.ops import inputs


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
    gamma_weights: tuple[tuple[float, float], tuple[float, float]]  # (k, λ) for A ≥ 0, A < 0


# ---------------------------------------------------------------- which ratio


def _token(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log ρₜ = Δₜ = ℓₜ − ℓ_old,ₜ."""
    return delta


def _sequence(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log s = Σ m Δ / n, the same for every token. GSPO: Zheng et al. (2025)."""
    return (delta.sum(-1, keepdim=True) / inputs.lengths(mask, delta)).expand_as(delta)


def _product(logprob: Tensor, delta: Tensor, mask: Tensor | None) -> Tensor:
    """log w = Σ m Δ, the same for every token: the ratio of whole sequences, length and all."""
    return delta.sum(-1, keepdim=True).expand_as(delta)


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


def _tilted(x: Terms) -> Tensor:
    """−sg[φ(w)] A ℓ, φ = e^λ w^k e^(−λw); ∂/∂ℓ = −φ A. VESPO: Shen et al. (2026)."""
    (k, rate), (k_negative, rate_negative) = x.gamma_weights
    good = x.advantage >= 0
    with torch.no_grad():
        power = torch.full_like(x.ratio, k_negative).masked_fill_(good, k)
        decay = torch.full_like(x.ratio, rate_negative).masked_fill_(good, rate)
        log_w = x.log_ratio.clamp(max=20.0)  # φ is 0 by then; w = inf would make inf − inf
        phi = (decay + power * log_w - decay * log_w.exp()).exp()
    return -phi * x.advantage * x.logprob


Ratio = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
KINDS: dict[str, tuple[Ratio, Callable[[Terms], Tensor]]] = {
    "none": (_token, _reinforce),
    "clip": (_token, _pessimistic),
    "cispo": (_token, _weighted),
    "sapo": (_token, _gated),
    "gspo": (_sequence, _pessimistic),
    "gspo-token": (_sequence_token, _pessimistic),
    "gmpo": (_token, _geometric),
    "vespo": (_product, _tilted),
}
SEQUENCE_KINDS = ("gspo", "gspo-token", "gmpo", "vespo")
