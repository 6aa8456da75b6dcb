"""The losses of `preference_loss`: what each makes of the two rewards of a pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus


@dataclass(frozen=True, slots=True)
class Pairs:
    """What a link sees, all (b,): r = β·score, h = r_w − r_l − margin."""

    chosen: Tensor  # r_w
    rejected: Tensor  # r_l
    h: Tensor
    policy: Tensor  # β (ℓ_w − ℓ_l)
    reference: Tensor  # β (ℓ_ref,w − ℓ_ref,l)
    beta: float
    smoothing: float  # ε
    shift: Tensor  # δ of bco
    temperature: float  # τ of discopop


# ---------------------------------------------------------------- links


def _smoothed(h: Tensor, epsilon: float) -> Tensor:
    """−(1 − ε) log σ(h) − ε log σ(−h)."""
    if epsilon == 0.0:
        return -logsigmoid(h)
    return -(1 - epsilon) * logsigmoid(h) - epsilon * logsigmoid(-h)


def _logistic(x: Pairs) -> Tensor:
    """∂/∂h = −(1 − ε) σ(−h) + ε σ(h). DPO: Rafailov et al. (2023); ε: cDPO, Mitchell (2023)."""
    return _smoothed(x.h, x.smoothing)


def _robust(x: Pairs) -> Tensor:
    """∂/∂h = −[(1 − ε) σ(−h) + ε σ(h)] / (1 − 2ε). Chowdhury et al. (2024)."""
    e = x.smoothing
    return (-(1 - e) * logsigmoid(x.h) + e * logsigmoid(-x.h)) / (1 - 2 * e)


def _squared(x: Pairs) -> Tensor:
    """(h/β − 1/(2β))²; ∂/∂(h/β) = 2(h/β − 1/(2β)). IPO: Azar et al. (2023)."""
    return ((x.h - 0.5) / x.beta).square()


def _hinge(x: Pairs) -> Tensor:
    """max(0, 1 − h); ∂/∂h = −1[h < 1]. SLiC-HF: Zhao et al. (2023)."""
    return torch.relu(1 - x.h)


def _odds(x: Pairs) -> Tensor:
    """−β log σ(h/β), h/β the log odds ratio; ∂/∂h = −σ(−h/β). ORPO: Hong et al. (2024)."""
    return -x.beta * logsigmoid(x.h / x.beta)


def _binary(x: Pairs) -> Tensor:
    """−log σ(r_w − δ) − log σ(δ − r_l). BCO: Jung et al. (2024)."""
    return -logsigmoid(x.chosen - x.shift) - logsigmoid(x.shift - x.rejected)


def _noise_contrastive(x: Pairs) -> Tensor:
    """−log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l). NCA: Chen et al. (2024)."""
    negatives = logsigmoid(-x.chosen) + logsigmoid(-x.rejected)
    return -logsigmoid(x.chosen) - 0.5 * negatives


def _exact(x: Pairs) -> Tensor:
    """KL of (σ(h), σ(−h)) to (1 − ε, ε); ∂/∂h = σ(h)σ(−h)(h − log(1/ε − 1)). Ji et al. (2024)."""
    e = x.smoothing if x.smoothing > 0.0 else 1e-3  # ε = 0 would be infinitely far
    win = torch.sigmoid(x.h) * (logsigmoid(x.h) - math.log1p(-e))
    return win + torch.sigmoid(-x.h) * (logsigmoid(-x.h) - math.log(e))


def _self_play(x: Pairs) -> Tensor:
    """(r_w/β − 1/(2β))² + (r_l/β + 1/(2β))². SPPO with hard labels: Wu et al. (2024)."""
    return ((x.chosen - 0.5) / x.beta).square() + ((x.rejected + 0.5) / x.beta).square()


def _anchored_zero(x: Pairs) -> Tensor:
    """σ(−r_w) + σ(r_l): chosen up, rejected down. APO-zero: D'Oosterlinck et al. (2024)."""
    return torch.sigmoid(-x.chosen) + torch.sigmoid(x.rejected)


def _anchored_down(x: Pairs) -> Tensor:
    """σ(r_w) + σ(r_l − r_w): both down, rejected more. APO-down, ibid."""
    return torch.sigmoid(x.chosen) + torch.sigmoid(x.rejected - x.chosen)


def _transport_paired(x: Pairs) -> Tensor:
    """The logistic of sorted margins, policy against reference. AOT: Melnyk et al. (2024)."""
    return _smoothed(x.policy.sort().values - x.reference.sort().values, x.smoothing)


def _transport_unpaired(x: Pairs) -> Tensor:
    """The logistic of sorted rewards, chosen against rejected. AOT for unpaired data, ibid."""
    return _smoothed(x.chosen.sort().values - x.rejected.sort().values, x.smoothing)


def _discovered(x: Pairs) -> Tensor:
    """−(1 − m) log σ(h) + m e^(−h), m = σ(h/τ). DiscoPOP: Lu et al. (2024)."""
    gate = x.h / x.temperature
    # m e^(−h) in one exponent: e^(−h) alone is inf where m is 0.
    return -torch.sigmoid(-gate) * logsigmoid(x.h) + (logsigmoid(gate) - x.h).exp()


def _nothing(x: Pairs) -> Tensor:
    """0: the likelihood term alone is the loss."""
    return torch.zeros_like(x.h)


# ---------------------------------------------------------------- scores


def log_odds(mean_logprob: Tensor) -> Tensor:
    """ℓ̄ − log(1 − e^ℓ̄); ∂/∂ℓ̄ = 1/(1 − e^ℓ̄).

    Through expm1: log1p(−exp(−1e-8)) is −inf where the answer is −18.4. At ℓ̄ = 0 the odds are
    infinite, so ℓ̄ is held one rounding below, without gradient beyond.
    """
    x = mean_logprob.clamp(max=-torch.finfo(mean_logprob.dtype).eps)
    return x - torch.log(-torch.expm1(x))


# A divergence D_f puts f'(u) − f'(1), u = π/π_ref = e^Δ, in the place of Δ = log u: f-DPO, Wang
# et al. (2024). The constant cancels in h and makes the reward 0 where nothing has changed.
Divergence = Callable[[Tensor, float], Tensor]
EXPONENT = 80.0  # e^80 still leaves float32 room for products


def _alpha(delta: Tensor, alpha: float) -> Tensor:
    return -torch.expm1((-alpha * delta).clamp(max=EXPONENT)) / alpha


DIVERGENCES: dict[str, Divergence] = {
    "reverse-kl": lambda delta, alpha: delta,  # f = u log u
    "forward-kl": lambda delta, alpha: _alpha(delta, 1.0),  # f = −log u, f' = −1/u
    "js": lambda delta, alpha: math.log(2.0) + delta - softplus(delta),  # f' = log(2u/(1 + u))
    "alpha": _alpha,  # f' = (1 − u^−α)/α: reverse KL for α → 0, forward for α = 1
}

# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Kind:
    """A link, what it needs, and which options it understands."""

    link: Callable[[Pairs], Tensor]
    options: frozenset[str] = frozenset()
    reference: bool = True  # against a reference policy
    average: bool = False  # by default on log-probabilities per token
    nll_weight: float = 0.0  # by default, of −ℓ_w/n_w
    score: Callable[[Tensor], Tensor] | None = None  # of ℓ or ℓ − ℓ_ref; None: itself
    sorts: bool = False  # rows of the result are quantiles, not samples


LOGISTIC = frozenset({"margin", "label_smoothing"})
DIVERGENT = LOGISTIC | {"f_divergence"}

KINDS: dict[str, Kind] = {
    "dpo": Kind(_logistic, DIVERGENT),
    "robust": Kind(_robust, DIVERGENT),
    "hinge": Kind(_hinge, frozenset({"margin", "f_divergence"})),
    "ipo": Kind(_squared, average=True),
    "sigmoid-norm": Kind(_logistic, LOGISTIC, average=True),
    "simpo": Kind(_logistic, LOGISTIC, reference=False, average=True),
    "cpo": Kind(_logistic, LOGISTIC, reference=False, nll_weight=1.0),
    "orpo": Kind(_odds, reference=False, average=True, nll_weight=1.0, score=log_odds),
    "bco": Kind(_binary, frozenset({"shift"})),
    "nca": Kind(_noise_contrastive),
    "exo": Kind(_exact, frozenset({"label_smoothing"})),
    "sppo-hard": Kind(_self_play),
    "apo-zero": Kind(_anchored_zero),
    "apo-down": Kind(_anchored_down),
    "aot": Kind(_transport_paired, frozenset({"label_smoothing"}), sorts=True),
    "aot-unpaired": Kind(_transport_unpaired, frozenset({"label_smoothing"}), sorts=True),
    "discopop": Kind(_discovered, frozenset({"temperature"})),
    "sft": Kind(_nothing, reference=False, average=True, nll_weight=1.0),
}
