"""Kullback–Leibler penalties: estimates from sampled tokens, the full sum, and a controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs


def k3(log_ratio: Tensor) -> Tensor:
    """e^d − d − 1 ≥ 0 with d = log q/p at x ~ p: an unbiased estimate of KL(p‖q).

    Schulman (2020), "Approximating KL divergence". Computed in float64: for |d| ≪ 1 the answer is
    d²/2, which float32 loses (at d = 1e-4 `exp(d) − d − 1` is 0 there).
    """
    d = log_ratio.double()
    return (torch.expm1(d) - d).to(log_ratio.dtype)


def _k1(d: Tensor, log_ratio: Tensor | None) -> Tensor:
    """−d; ∂/∂ℓ = 1. Unbiased, of either sign."""
    return -d


def _k2(d: Tensor, log_ratio: Tensor | None) -> Tensor:
    """½d²; ∂/∂ℓ = −d. Biased, of low variance."""
    return 0.5 * d.square()


def _k3(d: Tensor, log_ratio: Tensor | None) -> Tensor:
    """e^d − d − 1; ∂/∂ℓ = 1 − e^d. Unbiased and never negative."""
    return k3(d)


def _k3_plus(d: Tensor, log_ratio: Tensor | None) -> Tensor:
    """The value of k3, the gradient of k2 (straight through)."""
    slope = _k2(d, None)
    return k3(d).detach() + (slope - slope.detach())


def _weighted_k3(d: Tensor, log_ratio: Tensor | None) -> Tensor:
    """ρ (e^d − d − 1), ρ with its gradient; ∂/∂ℓ = −ρd. DeepSeek-V3.2 (2025)."""
    assert log_ratio is not None
    return log_ratio.exp() * k3(d)


Estimator = Callable[[Tensor, "Tensor | None"], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "k3+": _k3_plus,
    "ratio-k3": _weighted_k3,
}


def kl_penalty(
    logprob: Tensor,  # (b, t) or any shape: ℓ of the sampled tokens, with gradient
    ref_logprob: Tensor,  # like logprob: ℓ_ref, a constant
    mask: Tensor | None = None,  # like logprob, True = counts; None counts everything
    *,
    estimator: str = "k1",
    old_logprob: Tensor | None = None,  # like logprob: of the sampling policy, for ratio-k3
    bound: float | None = None,
    impl: str = "auto",
) -> Tensor:  # like logprob, not reduced; 0 where the mask is False
    """An estimate per token of KL(π‖π_ref); which gradient it has is another matter.

    With d = ℓ_ref − ℓ, tokens sampled from π (ratio-k3: from π_old, ρ = π/π_old):

               value          ∂/∂ℓ       in a loss, E[gradient] is that of
    k1         −d             1          nothing: it is 0 (use k1 in the reward)
    k2         ½ d²           −d         KL(π‖π_ref)
    k3         e^d − d − 1    1 − e^d    KL(π_ref‖π), the other direction
    k3+        e^d − d − 1    −d         KL(π‖π_ref)
    ratio-k3   ρ(e^d − d − 1) −ρd        KL(π‖π_ref), also off policy

    In a reward (detached, times the score function) k1 has the gradient of KL(π‖π_ref) and k3
    that of neither direction. Schulman (2020). `old_logprob=None` for ratio-k3 means on policy,
    ρ = 1 with its gradient. `bound` holds d within ±bound; beyond it the gradient is exactly 0
    (verl: 20). Reduce with `aggregate(…)`; add it to a policy loss after any importance weight.

    >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator="k1")
    tensor([0.5000])
    """
    owner = "kl_penalty"
    inputs.implementation(owner, impl)
    checks.choice(owner, "estimator", estimator, ESTIMATORS)
    logprob = inputs.floating(owner, "logprob", logprob)
    ref = inputs.matching(owner, "ref_logprob", ref_logprob, "logprob", logprob).detach()
    mask = inputs.counting(owner, mask, "logprob", logprob)
    if old_logprob is not None and estimator != "ratio-k3":
        rule = "old_logprob belongs to estimator='ratio-k3'"
        checks.fail(owner, rule, f"estimator={estimator!r}", "Leave it out.")
    d = inputs.zeroed(ref - logprob, mask)
    if bound is not None:
        bound = checks.real(owner, "bound", bound, above=0.0)
        d = d.clamp(-bound, bound)
    log_ratio = None
    if estimator == "ratio-k3":
        old = logprob if old_logprob is None else old_logprob
        old = inputs.matching(owner, "old_logprob", old, "logprob", logprob)
        log_ratio = inputs.zeroed(logprob - old.detach(), mask)
    return ESTIMATORS[estimator](d, log_ratio)


# ---------------------------------------------------------------- the whole vocabulary

DIRECTIONS = ("reverse", "forward")


def full_kl(
    logits: Tensor,  # (..., v) of the policy π, with gradient
    ref_logits: Tensor,  # (..., v) of the reference, a constant
    mask: Tensor | None = None,  # (...), True = counts; None counts everything
    *,
    direction: str = "reverse",
    temperature: float = 1.0,
    impl: str = "auto",
) -> Tensor:  # (...), float32 or float64; 0 where the mask is False
    """KL over the whole vocabulary, exact in value and gradient.

    reverse  KL(π‖π_ref) = Σ p (log p − log q);   ∂/∂z_j = p_j (log p_j − log q_j − KL) / τ
    forward  KL(π_ref‖π) = Σ q (log q − log p);   ∂/∂z_j = (p_j − q_j) / τ

    p = softmax(z/τ), q the same of the reference. A token at −inf in both, or with no weight in
    the first argument, adds 0 to value and gradient. One that has weight in the first argument
    alone makes the divergence infinite. The backward pass recomputes p and q from the logits.

    >>> float(full_kl(torch.zeros(2), torch.zeros(2)))
    0.0
    """
    owner = "full_kl"
    inputs.implementation(owner, impl)
    checks.choice(owner, "direction", direction, DIRECTIONS)
    temperature = checks.real(owner, "temperature", temperature, above=0.0)
    logits = inputs.floating(owner, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        checks.fail(owner, "logits must have shape (..., v), v ≥ 1", checks.shape(logits))
    ref = inputs.floating(owner, "ref_logits", ref_logits)
    inputs.same_device(owner, "ref_logits", ref, "logits", logits)
    if ref.shape != logits.shape:
        rule = f"ref_logits must have the shape of logits {checks.shape(logits)}"
        checks.fail(owner, rule, checks.shape(ref))
    if mask is not None:  # set aside before any arithmetic: a row may hold anything
        mask = inputs.flags(owner, "mask", mask, "logits[..., 0]", logits[..., 0])
        logits, ref = (x.masked_fill(~mask[..., None], 0.0) for x in (logits, ref))
    out: Tensor = _FullKL.apply(logits, ref.detach(), temperature, direction == "reverse")  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out


class _FullKL(torch.autograd.Function):
    """The divergence with its backward written out; autograd's own would give NaN at −inf."""

    @staticmethod
    def forward(ctx, logits, ref_logits, temperature, reverse):  # type: ignore[no-untyped-def]  # ctx has no public type
        log_p = torch.log_softmax(logits / temperature, -1)
        log_q = torch.log_softmax(ref_logits / temperature, -1)
        kl = _divergence(*((log_p, log_q) if reverse else (log_q, log_p)))
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature, ctx.reverse = temperature, reverse
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # ctx has no public type
        logits, ref_logits, kl = ctx.saved_tensors
        log_p = torch.log_softmax(logits / ctx.temperature, -1)
        log_q = torch.log_softmax(ref_logits / ctx.temperature, -1)
        p = log_p.exp()
        if ctx.reverse:
            slope = torch.where(p > 0, p * (log_p - log_q - kl[..., None]), 0.0)
        else:
            slope = p - log_q.exp()
        return slope * (grad / ctx.temperature)[..., None], None, None, None


def _divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ a (log a − log b), where 0 · log 0 is 0. Rounding may not make it negative."""
    a = log_a.exp()
    terms = torch.where(a > 0, a * (log_a - log_b), 0.0)
    return terms.sum(-1).clamp(min=0.0)


# ---------------------------------------------------------------- the coefficient


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient β that follows a target divergence.

    β ← β (1 + clip(KL/target − 1, −clip, clip) · n/horizon) for a batch of n samples.
    Ziegler et al. (2019). Immutable: `updated` gives the next one.

    >>> round(AdaptiveKL(0.1, target=6.0, horizon=100).updated(12.0, n=10).coefficient, 6)
    0.102
    """

    coefficient: float
    target: float = 6.0
    horizon: float = 10_000.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        checks.real("AdaptiveKL", "coefficient", self.coefficient, at_least=0.0)
        checks.real("AdaptiveKL", "target", self.target, above=0.0)
        checks.real("AdaptiveKL", "horizon", self.horizon, above=0.0)
        checks.real("AdaptiveKL", "clip", self.clip, above=0.0)

    def updated(self, kl: float, n: int) -> AdaptiveKL:
        """The controller after n samples whose mean divergence was `kl`."""
        kl = checks.real("AdaptiveKL", "kl", kl)
        n = checks.integer("AdaptiveKL", "n", n, at_least=0)
        if n > self.horizon / self.clip:
            rule = f"n must be at most horizon/clip = {self.horizon / self.clip:g}, or β turns sign"
            checks.fail("AdaptiveKL", rule, n, "Raise horizon.")
        error = min(max(kl / self.target - 1.0, -self.clip), self.clip)
        return replace(self, coefficient=self.coefficient * (1.0 + error * n / self.horizon))
