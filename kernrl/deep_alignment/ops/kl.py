"""Estimates of a Kullback–Leibler divergence from log-ratios of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(log_ratio: Tensor) -> Tensor:
    """e^d − d − 1 ≥ 0 with d = log q/p at x ~ p: an unbiased estimate of KL(p‖q).

    Schulman (2020), "Approximating KL divergence". In float32 `exp(d) − d − 1` is 0 at d = 1e-4
    and `expm1(d) − d` has lost most digits by d = 1e-5, hence the series for small d.
    """
    series = log_ratio.square() * (0.5 + log_ratio / 6 + log_ratio.square() / 24)
    return torch.where(log_ratio.abs() < 1e-2, series, torch.expm1(log_ratio) - log_ratio)
