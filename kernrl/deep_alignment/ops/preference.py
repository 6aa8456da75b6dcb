"""The preference loss: a margin between two log-probabilities, and a table of links."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce
from kernrl.deep_alignment.ops.preference_links import DIVERGENCES, KINDS, Kind, Pairs
from kernrl.deep_alignment.ops.sequences import whole

OWNER = "preference_loss"


def preference_loss(
    chosen_logprob: Tensor,  # (b,) Σ log π over the tokens of y_w, with gradient
    rejected_logprob: Tensor,  # (b,) the same of y_l
    ref_chosen: Tensor | None = None,  # (b,) of the reference policy, a constant
    ref_rejected: Tensor | None = None,  # (b,)
    *,
    kind: str = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,  # tokens of y_w and y_l, (b,) each
    average: bool | None = None,
    margin: float | Tensor | None = None,  # or (b,)
    f_divergence: str | None = None,
    alpha: float = 0.5,
    reference_free: bool = False,
    nll_weight: float | None = None,
    shift: float | Tensor | None = None,
    temperature: float | None = None,
    weights: Tensor | None = None,  # (b,)
    aggregate: str = "mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or (b,)), metrics () each
    """A loss that prefers y_w to y_l, from sequence sums alone, and what a trainer watches.

    Δ = ℓ − ℓ_ref, ℓ̄ = ℓ/n, r = βΔ (βΔ̄, βℓ or βℓ̄ as the kind has it), h = r_w − r_l − `margin`,
    ε = `label_smoothing`:

    dpo           −(1 − ε) log σ(h) − ε log σ(−h), ε > 0 is cDPO      (Rafailov et al. 2023)
    robust        [−(1 − ε) log σ(h) + ε log σ(−h)] / (1 − 2ε)        (Chowdhury et al. 2024)
    hinge         max(0, 1 − h)                                       (SLiC-HF, Zhao et al. 2023)
    ipo           (Δ̄_w − Δ̄_l − 1/(2β))², per-token averages           (Azar et al. 2023)
    sigmoid-norm  dpo on averages                                     (Tülu 3, Lambert et al. 2024)
    simpo         dpo on averages without reference; margin is its γ  (Meng et al. 2024)
    cpo           dpo without reference + NLL                         (Xu et al. 2024)
    orpo          −β log σ(o_w − o_l) + NLL, o = ℓ̄ − log(1 − e^ℓ̄)     (Hong et al. 2024)
    bco           −log σ(r_w − δ) − log σ(δ − r_l), δ = `shift`       (Jung et al. 2024)
    nca           −log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l)         (Chen et al. 2024)
    exo           KL[(σ(h), σ(−h)) ‖ (1 − ε, ε)], ε = 0 means 1e-3    (Ji et al. 2024)
    sppo-hard     (Δ_w − 1/(2β))² + (Δ_l + 1/(2β))²                   (Wu et al. 2024)
    apo-zero      σ(−r_w) + σ(r_l)                                    (D'Oosterlinck et al. 2024)
    apo-down      σ(r_w) + σ(r_l − r_w)                               (the same)
    aot           dpo of sorted policy minus sorted reference margins (Melnyk et al. 2024)
    aot-unpaired  dpo of sorted r_w minus sorted r_l; TRL: aot_pair   (the same)
    discopop      −(1 − m) log σ(h) + m e^(−h), m = σ(h/τ)            (Lu et al. 2024)
    sft           NLL alone

    `average` True or False overrides the kind's choice between ℓ/n and ℓ; lengths are needed where
    it averages. `nll_weight` a adds −a ℓ_w/n_w per pair (RPO, Pang et al. 2024); it is 1 for cpo,
    orpo and sft, else 0. `f_divergence` forward-kl, js or alpha (order `alpha`) puts f'(π/π_ref) in
    the place of Δ (Wang et al. 2024). `reference_free` sets ℓ_ref = 0. `shift` None is the batch
    mean of r_w and r_l, detached; give the running mean over ranks if there is one. `temperature`
    is τ, 0.05 if None. `weights` multiply the pairs' losses. ℓ_ref and all options are constants.
    β acts on sums for dpo and on averages where the kind averages: simpo wants one near 2.

    aggregate: "mean" over pairs, or "none" (for aot: quantiles, not pairs); `denominator` replaces
    the number of pairs. LD-DPO: take the sums from `sequence_logprobs(…, tail_weight=α)`.

    Metrics, without gradient: reward_chosen, reward_rejected (means of r), margin (mean of
    r_w − r_l), accuracy (part with r_w > r_l), nll and shift where they are used.

    >>> w, l = torch.tensor([-1.0]), torch.tensor([-3.0])
    >>> loss, metrics = preference_loss(w, l, torch.tensor([-2.0]), torch.tensor([-2.0]), beta=0.5)
    >>> f"{float(loss):.4f} {float(metrics['margin']):.1f}"
    '0.3133 1.0'
    """
    inputs.implementation(OWNER, impl)
    checks.choice(OWNER, "kind", kind, KINDS)
    checks.choice(OWNER, "aggregate", aggregate, ("mean", "none"))
    checks.real(OWNER, f"beta of kind={kind!r}", beta, above=0.0)
    smoothing = checks.real(OWNER, "label_smoothing", label_smoothing, at_least=0.0, below=0.5)
    entry = KINDS[kind]
    divergence = "reverse-kl" if f_divergence is None else f_divergence
    checks.choice(OWNER, "f_divergence", divergence, DIVERGENCES)
    _options(kind, margin=margin, f_divergence=f_divergence, shift=shift, temperature=temperature,
             label_smoothing=smoothing or None)  # fmt: skip
    chosen, rejected = _pair("chosen_logprob", chosen_logprob, "rejected_logprob", rejected_logprob)
    references = _references(kind, ref_chosen, ref_rejected, reference_free, chosen)
    averaged = entry.average if average is None else average
    nll = entry.nll_weight if nll_weight is None else nll_weight
    nll = checks.real(OWNER, "nll_weight", nll, at_least=0.0)
    counts = _lengths(kind, averaged, nll, lengths, chosen)
    policy = chosen, rejected
    if averaged:
        policy, references = _divided(policy, counts), _divided(references, counts)
    order = checks.real(OWNER, "alpha", alpha, above=0.0)
    r_w, r_l = (
        beta * _score(entry, divergence, order, x - ref)
        for x, ref in zip(policy, references, strict=True)
    )
    pairs = Pairs(
        chosen=r_w,
        rejected=r_l,
        h=r_w - r_l - _constant("margin", margin, chosen),
        policy=beta * (policy[0] - policy[1]),
        reference=beta * (references[0] - references[1]),
        beta=beta,
        smoothing=smoothing,
        shift=_shift(shift, r_w, r_l),
        temperature=0.05 if temperature is None else temperature,
    )
    loss, metrics = entry.link(pairs), _metrics(pairs, "shift" in entry.options)
    if nll:
        likelihood = -chosen / counts[0]
        loss = loss + nll * likelihood
        metrics["nll"] = likelihood.detach().sum() / max(likelihood.numel(), 1)
    if weights is not None:
        loss = loss * _weights(kind, weights, chosen)
    how = "token-mean" if aggregate == "mean" else "none"
    return reduce(loss, None, how, denominator), metrics


# ---------------------------------------------------------------- options


def _options(kind: str, **given: Any) -> None:
    """Every option that was given must be one that the kind understands."""
    if given["temperature"] is not None:
        checks.real(OWNER, "temperature", given["temperature"], above=0.0)
    for name, value in given.items():
        if value is not None and name not in KINDS[kind].options:
            known = ", ".join(other for other, entry in KINDS.items() if name in entry.options)
            checks.fail(OWNER, f"{name} belongs to kind {known}", f"kind={kind!r}", "Leave it out.")


def _needs(kind: str, what: str, cure: str) -> NoReturn:
    checks.fail(OWNER, f"kind={kind!r} needs {what}", "None", cure)


# ---------------------------------------------------------------- tensors


def _pair(name: str, x: Any, other_name: str, other: Any) -> tuple[Tensor, Tensor]:
    x = inputs.floating(OWNER, name, x)
    if x.ndim != 1:
        cure = "Sum over tokens first: sequence_logprobs(logprob, mask)."
        checks.fail(OWNER, f"{name} must have shape (b,)", checks.shape(x), cure)
    return x, inputs.matching(OWNER, other_name, other, name, x)


def _references(
    kind: str, ref_chosen: Any, ref_rejected: Any, reference_free: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """ℓ_ref of both, as constants; zeros where there is no reference."""
    both = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    if not KINDS[kind].reference:
        for name, x in both.items():
            rule = f"kind={kind!r} knows no reference, so {name} must be None"
            if x is not None:
                checks.fail(OWNER, rule, type(x).__name__, "Leave it out.")
    if not KINDS[kind].reference or reference_free:
        zero = torch.zeros_like(like)
        return zero, zero
    for name, x in both.items():
        if x is None:
            _needs(kind, name, "Pass both references, or reference_free=True.")
    first, second = (
        inputs.matching(OWNER, name, x, "chosen_logprob", like).detach() for name, x in both.items()
    )
    return first, second


def _lengths(
    kind: str, averaged: bool, nll: float, lengths: Any, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Token counts of both, at least 1; ones where nothing asks for them."""
    if not averaged and not nll:
        one = torch.ones_like(like)
        return one, one
    if lengths is None:
        what = "lengths to average over tokens" if averaged else "lengths for its NLL term"
        _needs(kind, what, "Pass (chosen tokens, rejected tokens).")
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        rule = "lengths must be (chosen tokens, rejected tokens)"
        checks.fail(OWNER, rule, type(lengths).__name__)
    first, second = (
        inputs.matching(
            OWNER, "lengths", x if _is_floating(x) else whole(OWNER, "lengths", x).to(like.dtype),
            "chosen_logprob", like,
        ).clamp(min=1)  # an empty sequence has ℓ = 0, and 0/1 is its average
        for x in lengths
    )  # fmt: skip
    return first, second


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _divided(pair: tuple[Tensor, Tensor], counts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0] / counts[0], pair[1] / counts[1]


def _score(entry: Kind, divergence: str, alpha: float, delta: Tensor) -> Tensor:
    delta = DIVERGENCES[divergence](delta, alpha)
    return delta if entry.score is None else entry.score(delta)


def _constant(name: str, value: float | Tensor | None, like: Tensor) -> float | Tensor:
    """A number, or one per pair without gradient; 0 if None."""
    if value is None:
        return 0.0
    if isinstance(value, Tensor) and value.ndim:
        return inputs.matching(OWNER, name, value, "chosen_logprob", like).detach()
    return value.detach() if isinstance(value, Tensor) else checks.real(OWNER, name, value)


def _shift(shift: float | Tensor | None, r_w: Tensor, r_l: Tensor) -> Tensor:
    if shift is None:
        return (r_w + r_l).detach().sum() / max(2 * r_w.numel(), 1)
    return torch.zeros_like(r_w) + _constant("shift", shift, r_w)


def _weights(kind: str, weights: Any, like: Tensor) -> Tensor:
    if KINDS[kind].sorts:
        rule = f"kind={kind!r} compares sorted batches, so weights must be None"
        checks.fail(OWNER, rule, type(weights).__name__, "Leave them out.")
    return inputs.matching(OWNER, "weights", weights, "chosen_logprob", like).detach()


@torch.no_grad()
def _metrics(x: Pairs, shifted: bool) -> dict[str, Tensor]:
    n = max(x.chosen.numel(), 1)
    metrics = {
        "reward_chosen": x.chosen.sum() / n,
        "reward_rejected": x.rejected.sum() / n,
        "margin": (x.chosen - x.rejected).sum() / n,
        "accuracy": (x.chosen > x.rejected).sum(dtype=x.chosen.dtype) / n,
    }
    if shifted:
        metrics["shift"] = x.shift.sum() / max(x.shift.numel(), 1)
    return metrics
