"""Estimates of a Kullback–Leibler divergence from log-ratios of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(log_ratio: Tensor) -> Tensor:
    """e^d − d − 1 ≥ 0 with d = log q/p at x ~ p: an unbiased estimate of KL(p‖q).

    Schulman (2020), "Approximating KL divergence". Computed in float64: for |d| ≪ 1 the answer is
    d²/2, which float32 loses (at d = 1e-4 `exp(d) − d − 1` is 0 there).
    """
    d = log_ratio.double()
    return (torch.expm1(d) - d).to(log_ratio.dtype)
