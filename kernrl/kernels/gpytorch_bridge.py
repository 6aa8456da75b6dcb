"""kernrl kernels as GPyTorch kernels with the same values, back again, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
    # Not `+` and `*`, which flatten: `differentiate` walks both trees side by side.
    base.Sum: lambda k: gk.AdditiveKernel(to_gpytorch(k.left), to_gpytorch(k.right)),
    base.Product: lambda k: gk.ProductKernel(to_gpytorch(k.left), to_gpytorch(k.right)),
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


# ---------------------------------------------------------------- back


def from_gpytorch(module: Any) -> base.Kernel:
    """The kernel that a GPyTorch kernel is now, after training, say: the inverse of to_gpytorch.

    Knows what to_gpytorch makes, with any number of terms and factors, and active_dims. Raises
    TypeError for other kernels and ValueError for batches of kernels.
    """
    build = _BACK.get(type(module))
    if build is None:
        checks.fail(
            "from_gpytorch",
            "the kernel must be one that to_gpytorch makes",
            type(module).__qualname__,
            "Write the kernrl kernel by hand.",
            TypeError,
        )
    if len(module.batch_shape):
        checks.fail("from_gpytorch", "the kernel must not be a batch", tuple(module.batch_shape))
    kernel = build(module)
    dims = getattr(module, "active_dims", None)
    return kernel if dims is None else kernel.on([int(k) for k in dims])


def _number(value: torch.Tensor) -> Any:
    """A float, or one per column."""
    flat = np.asarray(value.detach().double().cpu()).reshape(-1)
    return float(flat[0]) if flat.size == 1 else flat


def _summed(module: Any) -> base.Kernel:
    parts = list(module.kernels)
    kinds = [type(part) for part in parts]
    if kinds == [gk.LinearKernel, gk.ConstantKernel]:
        return dot.Linear(_number(parts[0].variance), _number(parts[1].constant))
    return functools.reduce(base.Sum, map(from_gpytorch, parts))


def _multiplied(module: Any) -> base.Kernel:
    parts = list(module.kernels)
    slices: list[Any] = [getattr(part, "columns", None) for part in parts]
    if len(parts) == 2 and all(isinstance(columns, slice) for columns in slices):
        state, action = (from_gpytorch(part.kernel) for part in parts)
        return StateAction(state, action, n_action_columns=-slices[1].start)
    return functools.reduce(base.Product, map(from_gpytorch, parts))


def _power(module: Any) -> base.Kernel:
    offset = _number(module.offset)
    return dot.Polynomial(int(module.power), 0.0 if offset <= 1e-12 else offset)


_BACK: dict[type, Callable[[Any], base.Kernel]] = {
    gk.RBFKernel: lambda m: stationary.RBF(_number(m.lengthscale)),
    gk.MaternKernel: lambda m: stationary.Matern(_number(m.lengthscale), nu=m.nu),
    gk.RQKernel: lambda m: stationary.RationalQuadratic(_number(m.lengthscale), _number(m.alpha)),
    gk.PeriodicKernel: lambda m: stationary.Periodic(
        _number(m.lengthscale.sqrt()), _number(m.period_length)
    ),
    _CityBlock: lambda m: stationary.Laplacian(_number(m.lengthscale)),
    gk.LinearKernel: lambda m: dot.Linear(_number(m.variance)),
    gk.PolynomialKernel: _power,
    _Equal: lambda m: base.Delta(),
    gk.AdditiveKernel: _summed,
    gk.ProductKernel: _multiplied,
    gk.ScaleKernel: lambda m: base.Scaled(from_gpytorch(m.base_kernel), _number(m.outputscale)),
    _Columns: lambda m: base.OnDimensions(from_gpytorch(m.kernel), m.columns),
}


# ---------------------------------------------------------------- gradients

# Field -> (the module's raw parameter, the power of the field that it is).
_RAW: dict[type, dict[str, tuple[str, int]]] = {
    stationary.RBF: {"length_scale": ("raw_lengthscale", 1)},
    stationary.Matern: {"length_scale": ("raw_lengthscale", 1)},
    stationary.Laplacian: {"length_scale": ("raw_lengthscale", 1)},
    stationary.RationalQuadratic: {
        "length_scale": ("raw_lengthscale", 1),
        "mixture": ("raw_alpha", 1),
    },
    stationary.Periodic: {
        "length_scale": ("raw_lengthscale", 2),
        "period": ("raw_period_length", 1),
    },
    dot.Polynomial: {"offset": ("raw_offset", 1)},
    base.Scaled: {"factor": ("raw_outputscale", 1)},
}


def differentiate(
    kernel: base.Kernel, x: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], dict[str, np.ndarray]]]:
    """K(x, x), and the way from ∂f/∂K to ∂f/∂log θ by torch's autograd: see kernels.gradients."""
    module = to_gpytorch(kernel)
    points = torch.tensor(x, dtype=torch.float64)
    matrix = module(points).to_dense()
    handles = list(_handles(kernel, module, ""))

    def pull_back(g: np.ndarray) -> dict[str, np.ndarray]:
        raw = [getattr(owner, attribute) for _, owner, attribute, _ in handles]
        if not raw:
            return {}
        by_raw = torch.autograd.grad(
            matrix, raw, torch.tensor(g), retain_graph=True, allow_unused=True
        )
        return {
            name: _by_logarithm(kernel, name, owner, attribute, power, slope)
            for (name, owner, attribute, power), slope in zip(handles, by_raw, strict=True)
        }

    return kernel(x), pull_back


def _handles(kernel: Any, module: Any, prefix: str) -> Iterator[tuple[str, Any, str, int]]:
    """(name, owner, raw parameter, power) of every free parameter of the kernel."""
    if isinstance(kernel, dot.Linear):
        linear = module.kernels[0] if kernel.offset else module
        yield prefix + "variance", linear, "raw_variance", 1
        if kernel.offset:
            yield prefix + "offset", module.kernels[1], "raw_constant", 1
    for field, (attribute, power) in _RAW.get(type(kernel), {}).items():
        if np.all(np.asarray(getattr(kernel, field)) > 0):
            yield prefix + field, module, attribute, power
    for name, inner in _children(kernel, module).items():
        yield from _handles(getattr(kernel, name), inner, f"{prefix}{name}__")


def _children(kernel: Any, module: Any) -> dict[str, Any]:
    if isinstance(kernel, base.Scaled):
        return {"kernel": module.base_kernel}
    if isinstance(kernel, base.OnDimensions):
        return {"kernel": module.kernel}
    if isinstance(kernel, StateAction):
        state, action = module.kernels
        return {"state_kernel": state.kernel, "action_kernel": action.kernel}
    if isinstance(kernel, base.Sum | base.Product):
        return dict(zip(("left", "right"), module.kernels, strict=True))
    return {}


def _by_logarithm(
    kernel: base.Kernel, name: str, owner: Any, attribute: str, power: int, by_raw: Any
) -> np.ndarray:
    """∂f/∂log θ from ∂f/∂raw, where θ^power = transform(raw)."""
    shape = np.shape(kernel.get_params()[name])
    if by_raw is None:
        return np.zeros(shape)
    raw = getattr(owner, attribute)
    value = owner.constraint_for_parameter_name(attribute).transform(raw)
    (slope,) = torch.autograd.grad(value.sum(), raw)
    by_log = np.asarray((power * value * by_raw / slope).detach()).reshape(-1)
    return np.asarray(by_log.sum()) if shape == () else by_log.reshape(shape)
