"""The value loss, with the clipping that PPO codes share and Huber as an option."""

from __future__ import annotations

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.aggregate import aggregate as reduce


def value_loss(
    value: Tensor,  # (b, t) or (b,)
    old_value: Tensor | None,  # like value: when the data were sampled; None unless clip is given
    returns: Tensor,  # like value
    mask: Tensor | None = None,  # like value, True = counts; None counts everything
    *,
    clip: float | None = None,
    huber: float | None = None,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:  # loss () (or like value), metrics () each
    """½ (v − R)², or with `clip` ε the worse of v and v_c = v_old + clip(v − v_old, −ε, ε).

    loss = ½ max((v − R)², (v_c − R)²);  ∂/∂v = v − R, or 0 where |v − v_old| > ε and v_c is
    worse. The ½ is included: a trainer's coefficient of 0.5 on the plain square is 1 here.
    `huber` δ replaces ½e² by δ(|e| − ½δ) where |e| > δ. Schulman et al. (2017) with the clipping
    of OpenAI Baselines. `aggregate` and `denominator` are those of `aggregate(…)`.

    Metrics, without gradient: clip_fraction (tokens with no gradient), error (mean v − R),
    absolute_error (mean |v − R|).

    >>> value, returns = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0])
    >>> float(value_loss(value, None, returns)[0])
    0.25
    """
    inputs.implementation("value_loss", impl)
    value = inputs.floating("value_loss", "value", value)
    returns = inputs.matching("value_loss", "returns", returns, "value", value).detach()
    mask = inputs.counting("value_loss", mask, "value", value)
    error = inputs.zeroed(value - returns, mask)
    counted = error if clip is None else _clipped(error, value, old_value, returns, mask, clip)
    with torch.no_grad():
        n = inputs.count(mask, value)
        metrics = {"error": error.sum() / n, "absolute_error": error.abs().sum() / n}
        if clip is not None:
            metrics["clip_fraction"] = (counted != error).sum() / n
    return reduce(_penalty(counted, huber), mask, aggregate, denominator), metrics


def _clipped(
    error: Tensor,
    value: Tensor,
    old_value: Tensor | None,
    returns: Tensor,
    mask: Tensor | None,
    clip: float,
) -> Tensor:
    """The error of v or, where v has left v_old ± ε and this is worse, the constant of v_c."""
    epsilon = inputs.epsilon("value_loss", "clip", clip)
    if old_value is None:
        cure = "Pass the values at sampling time, or clip=None."
        checks.fail("value_loss", "clip needs old_value", "None", cure)
    old = inputs.matching("value_loss", "old_value", old_value, "value", value).detach()
    with torch.no_grad():
        step = inputs.zeroed(value - old, mask)
        other = inputs.zeroed(old + step.clamp(-epsilon, epsilon) - returns, mask)
        # |v − v_old| ≤ ε decides first: v_old + (v − v_old) is not v in floating point, so
        # comparing the two squares alone would drop some gradients inside the range.
        own = (step.abs() <= epsilon) | (error.abs() >= other.abs())
    return torch.where(own, error, other)


def _penalty(error: Tensor, huber: float | None) -> Tensor:
    if huber is None:
        return 0.5 * error.square()
    delta = checks.real("value_loss", "huber", huber, above=0.0)
    return torch.nn.functional.huber_loss(
        error, torch.zeros_like(error), reduction="none", delta=delta
    )
