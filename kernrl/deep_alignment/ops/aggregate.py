"""From per-token numbers to the loss: who is divided by what, said aloud."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs

Parts = tuple[Tensor, "int | Tensor"]  # a sum, and what it is divided by by default


def _token_mean(x: Tensor, mask: Tensor | None) -> Parts:
    """Σ m x / Σ m. With the count of all ranks as denominator: DAPO (Yu et al. 2025)."""
    return x.sum(), inputs.count(mask, x)


def _seq_mean_token_mean(x: Tensor, mask: Tensor | None) -> Parts:
    """Mean over sequences of Σ m x / nᵢ. GRPO (Shao et al. 2024)."""
    return (x.sum(-1, keepdim=True) / inputs.lengths(mask, x)).sum(), _rows(x, mask)


def _seq_mean_token_sum(x: Tensor, mask: Tensor | None) -> Parts:
    """Mean over sequences of Σ m x: the log-probability of the whole sequence is the unit."""
    return x.sum(), _rows(x, mask)


def _constant(x: Tensor, mask: Tensor | None) -> Parts:
    """Σ m x / (b t), whatever the lengths. Dr. GRPO (Liu et al. 2025)."""
    return x.sum(), max(x.numel(), 1)


def _rows(x: Tensor, mask: Tensor | None) -> int | Tensor:
    """How many sequences have at least one counting token; at least 1."""
    if mask is None:
        return max(x.numel() // max(x.shape[-1], 1), 1)
    return mask.any(-1).sum().clamp(min=1)


MODES: dict[str, Callable[[Tensor, Tensor | None], Parts]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "constant": _constant,
}


def aggregate(
    x: Tensor,  # (b, t), or (b,) for the modes that know no sequences
    mask: Tensor | None,  # like x, True = counts; None counts everything
    how: str = "token-mean",
    denominator: float | Tensor | None = None,
) -> Tensor:  # () or, for "none", like x
    """Reduce per-token values to a loss.

    token-mean           Σ m x / Σ m
    seq-mean-token-mean  meanᵢ (Σₜ m x / nᵢ)   over sequences with at least one counting token
    seq-mean-token-sum   meanᵢ  Σₜ m x         over sequences with at least one counting token
    constant             Σ m x / (b t)         the Dr. GRPO constant
    none                 m x, not reduced

    `denominator` replaces the last division (Σ m, the number of sequences, or b t). Under
    gradient accumulation or data parallelism pass the count of the whole accumulation window
    (divided by the world size where gradients are averaged over ranks); no collective is called
    here. A batch in which nothing counts gives 0 with zero gradient, never NaN.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0], [6.0, 0.0]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> [float(aggregate(x, mask, how)) for how in ("token-mean", "seq-mean-token-mean")]
    [3.0, 3.75]
    """
    checks.choice("aggregate", "how", how, (*MODES, "none"))
    x = inputs.floating("aggregate", "x", x)
    mask = inputs.counting("aggregate", mask, "x", x)
    if how.startswith("seq"):
        inputs.sequences("aggregate", f"how={how!r}", x)
    x = inputs.zeroed(x, mask)
    if how == "none":
        cure = "Divide the result, or choose another mode."
        rule = "how='none' divides by nothing, so denominator must be None"
        checks.require(denominator is None, "aggregate", rule, denominator, cure)
        return x
    total, default = MODES[how](x, mask)
    if denominator is None:
        return total / default
    if not isinstance(denominator, Tensor):  # a tensor is not read: that would stall a GPU
        checks.real("aggregate", "denominator", denominator, above=0.0)
    return total / denominator
