"""Losses of reward models: pairs of answers, and single steps of a solution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce
from kernrl.deep_alignment.ops.sequences import whole

IGNORED = -100  # the label that Hugging Face data use for "no step ends here"


def reward_model_loss(
    chosen: Tensor,  # (b,) scores s_w of the preferred answers, with gradient
    rejected: Tensor,  # (b,) scores s_l
    margin: float | Tensor | None = None,  # or (b,): how much better
    *,
    centre: float = 0.0,
    weights: Tensor | None = None,  # (b,)
    aggregate: str = "mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or (b,)), metrics () each
    """Bradley–Terry: −log σ(s_w − s_l − m) + `centre` · (s_w + s_l)².

    ∂/∂s_w = −σ(−(s_w − s_l − m)) + 2 centre (s_w + s_l). Bradley & Terry (1952); the margin m:
    Llama 2, Touvron et al. (2023); the centring, which fixes the free constant of the scores:
    Eisenstein et al. (2023). `margin` and `weights` are constants.

    aggregate: "mean" over pairs, or "none"; `denominator` replaces their number. Metrics, without
    gradient: accuracy (part with s_w > s_l), margin (mean s_w − s_l), score (mean of all scores).

    >>> loss, metrics = reward_model_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))
    >>> f"{float(loss):.4f} {float(metrics['accuracy'])}"
    '0.5032 0.5'
    """
    owner = "reward_model_loss"
    inputs.implementation(owner, impl)
    checks.choice(owner, "aggregate", aggregate, ("mean", "none"))
    centre = checks.real(owner, "centre", centre, at_least=0.0)
    chosen = inputs.floating(owner, "chosen", chosen)
    if chosen.ndim != 1:
        cure = "Squeeze the last axis of a scalar head."
        checks.fail(owner, "chosen must have shape (b,)", checks.shape(chosen), cure)
    rejected = inputs.matching(owner, "rejected", rejected, "chosen", chosen)
    gap = chosen - rejected
    loss = -logsigmoid(gap - _margin(owner, margin, chosen))
    if centre:
        loss = loss + centre * (chosen + rejected).square()
    if weights is not None:
        loss = loss * inputs.matching(owner, "weights", weights, "chosen", chosen).detach()
    with torch.no_grad():
        n = max(gap.numel(), 1)
        metrics = {
            "accuracy": (gap > 0).sum(dtype=gap.dtype) / n,
            "margin": gap.sum() / n,
            "score": (chosen + rejected).sum() / (2 * n),
        }
    how = "token-mean" if aggregate == "mean" else "none"
    return reduce(loss, None, how, denominator), metrics


def process_reward_loss(
    logits: Tensor,  # (b, t) of one class, or (b, t, c)
    labels: Tensor,  # (b, t): probabilities for one class, else class numbers
    mask: Tensor | None = None,  # (b, t), True = a step ends here; None: where labels are not -100
    *,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or (b, t)), metrics () each
    """Cross-entropy at the tokens where a step ends: is the solution right so far?

    one class   −y log σ(z) − (1 − y) log σ(−z),  y in [0, 1];   ∂/∂z = σ(z) − y
    c classes   −log softmax(z)_y;                               ∂/∂z_j = p_j − 1[j = y]

    Uesato et al. (2022), Lightman et al. (2023); soft y from rollouts: Math-Shepherd, Wang et al.
    (2024). Logits and labels elsewhere are not read, so any label may stand there. `aggregate`
    and `denominator` are those of `aggregate(…)`: "token-mean" weighs steps alike,
    "seq-mean-token-mean" solutions. Metric: accuracy over the steps (σ(z) ≥ ½ against y ≥ ½).

    >>> loss, _ = process_reward_loss(torch.zeros(1, 3), torch.tensor([[1, -100, 0]]))
    >>> f"{float(loss):.4f}"
    '0.6931'
    """
    owner = "process_reward_loss"
    inputs.implementation(owner, impl)
    logits = inputs.floating(owner, "logits", logits)
    if logits.ndim not in (2, 3):
        checks.fail(owner, "logits must have shape (b, t) or (b, t, c)", checks.shape(logits))
    like = logits if logits.ndim == 2 else logits[..., 0]
    labels = _labels(owner, labels, like, several=logits.ndim == 3)
    mask = inputs.counting(owner, mask, "logits", like)
    if mask is None:
        mask = labels != IGNORED
    labels = labels.masked_fill(~mask, 0)  # −100 is no index
    if logits.ndim == 2:
        z, y = inputs.zeroed(logits, mask), labels.to(logits.dtype)
        loss = binary_cross_entropy_with_logits(z, y, reduction="none")
        right = (z >= 0) == (y >= 0.5)
    else:
        z = logits.masked_fill(~mask[..., None], 0.0)
        loss = cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        right = z.argmax(-1) == labels
    accuracy = (right & mask).sum(dtype=logits.dtype) / inputs.count(mask, like)
    return reduce(loss, mask, aggregate, denominator), {"accuracy": accuracy}


def _labels(owner: str, labels: Tensor, like: Tensor, several: bool) -> Tensor:
    """Class numbers, or probabilities; of the shape of `like` and on its device."""
    floating = isinstance(labels, Tensor) and labels.is_floating_point()
    if several and floating:
        rule = "labels of several classes must be whole numbers"
        checks.fail(owner, rule, f"dtype {labels.dtype}", "Use .long().", TypeError)
    if not floating and not (isinstance(labels, Tensor) and labels.dtype == torch.bool):
        labels = whole(owner, "labels", labels).long()
    inputs.same_device(owner, "labels", labels, "logits", like)
    if labels.shape != like.shape:
        rule = f"labels must have shape {checks.shape(like)}"
        checks.fail(owner, rule, checks.shape(labels))
    return labels.long() if labels.dtype == torch.bool else labels


def _margin(owner: str, margin: float | Tensor | None, like: Tensor) -> float | Tensor:
    if margin is None:
        return 0.0
    if isinstance(margin, Tensor):
        return inputs.matching(owner, "margin", margin, "chosen", like).detach()
    return checks.real(owner, "margin", margin)
