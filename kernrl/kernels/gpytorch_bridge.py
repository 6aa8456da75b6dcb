"""kernrl kernels as GPyTorch kernels with the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch.kernels as gk
import numpy as np
import torch

from kernrl import arrays, checks
from kernrl.kernels import base, dot, stationary
from kernrl.kernels.state_action import StateAction


class _CityBlock(gk.Kernel):
    """exp(−Σ |x_k − y_k|/ℓ_k), which GPyTorch lacks."""

    has_lengthscale = True

    def forward(self, x1: Any, x2: Any, diag: bool = False, **_: Any) -> Any:
        a, b = x1.div(self.lengthscale), x2.div(self.lengthscale)
        if diag:
            return torch.exp(-(a - b).abs().sum(-1))
        return torch.exp(-(a.unsqueeze(-2) - b.unsqueeze(-3)).abs().sum(-1))


class _Equal(gk.Kernel):
    """1[x = y]."""

    def forward(self, x1: Any, x2: Any, diag: bool = False, **_: Any) -> Any:
        if diag:
            return (x1 == x2).all(-1).to(x1.dtype)
        return (x1.unsqueeze(-2) == x2.unsqueeze(-3)).all(-1).to(x1.dtype)


class _Columns(gk.Kernel):
    """A kernel on some columns, by slice or list (active_dims takes no negative ends)."""

    def __init__(self, kernel: Any, columns: Any) -> None:
        super().__init__()
        self.kernel, self.columns = kernel, columns

    def forward(self, x1: Any, x2: Any, diag: bool = False, **params: Any) -> Any:
        a, b = x1[..., self.columns], x2[..., self.columns]
        value = self.kernel(a, b, diag=diag, **params)
        return value if diag else value.to_dense()


def _scale(value: Any) -> torch.Tensor:
    return torch.tensor(np.atleast_2d(np.array(arrays.host(value), dtype=np.float64, order="C")))


def _with_scale(build: Callable[..., Any], kernel: Any, **options: Any) -> Any:
    scale = _scale(kernel.length_scale)
    made = build(ard_num_dims=scale.shape[1] if scale.numel() > 1 else None, **options)
    made = made.double()
    made.lengthscale = scale
    return made


def _rational_quadratic(kernel: Any) -> Any:
    made = _with_scale(gk.RQKernel, kernel)
    made.alpha = torch.tensor(float(kernel.mixture), dtype=torch.float64)
    return made


def _periodic(kernel: Any) -> Any:
    width = max(np.size(kernel.length_scale), np.size(kernel.period))
    made = gk.PeriodicKernel(**({"ard_num_dims": width} if width > 1 else {})).double()
    made.lengthscale = (
        _scale(kernel.length_scale).expand(1, width) ** 2
    )  # theirs divides by ℓ, not ℓ²
    made.period_length = _scale(kernel.period).expand(1, width)
    return made


def _constant(value: float) -> Any:
    made = gk.ConstantKernel().double()
    made.constant = torch.tensor(value, dtype=torch.float64)
    return made


def _linear(kernel: Any) -> Any:
    made = gk.LinearKernel().double()
    made.variance = torch.tensor([[float(kernel.variance)]], dtype=torch.float64)
    return made + _constant(float(kernel.offset)) if kernel.offset else made


def _polynomial(kernel: Any) -> Any:
    made = gk.PolynomialKernel(power=int(kernel.degree)).double()
    made.offset = torch.tensor([max(float(kernel.offset), 1e-12)], dtype=torch.float64)
    return made


def _scaled(kernel: Any) -> Any:
    made = gk.ScaleKernel(to_gpytorch(kernel.kernel)).double()
    made.outputscale = torch.tensor(float(kernel.factor), dtype=torch.float64)
    return made


def _state_action(kernel: Any) -> Any:
    cut = kernel.n_action_columns
    return _Columns(to_gpytorch(kernel.state_kernel), slice(None, -cut)) * _Columns(
        to_gpytorch(kernel.action_kernel), slice(-cut, None)
    )


_BRIDGE: dict[type, Callable[[Any], Any]] = {
    stationary.RBF: lambda k: _with_scale(gk.RBFKernel, k),
    stationary.Matern: lambda k: _with_scale(gk.MaternKernel, k, nu=k.nu),
    stationary.RationalQuadratic: _rational_quadratic,
    stationary.Periodic: _periodic,
    stationary.Laplacian: lambda k: _with_scale(_CityBlock, k),
    dot.Linear: _linear,
    dot.Polynomial: _polynomial,
    base.Delta: lambda k: _Equal(),
    base.Sum: lambda k: to_gpytorch(k.left) + to_gpytorch(k.right),
    base.Product: lambda k: to_gpytorch(k.left) * to_gpytorch(k.right),
    base.Scaled: _scaled,
    base.OnDimensions: lambda k: _Columns(to_gpytorch(k.kernel), list(k.dims)),
    StateAction: _state_action,
}


def to_gpytorch(kernel: base.Kernel) -> Any:
    """A float64 GPyTorch kernel that evaluates to the same matrix."""
    build = _BRIDGE.get(type(kernel))
    if build is None:
        checks.fail(
            type(kernel).__name__,
            "to_gpytorch knows kernrl's own kernels only",
            type(kernel).__qualname__,
            "Write the GPyTorch kernel by hand.",
            TypeError,
        )
    return build(kernel)
