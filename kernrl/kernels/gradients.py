"""Gradients of a function of the Gram matrix with respect to a kernel's parameters.

For a scalar f(K) with G = ∂f/∂K, the derivative by a parameter θ is Σ_ij G_ij ∂K_ij/∂θ. That sum is
taken in row tiles for all length scales together: with z the scaled rows and W = G ∘ (−2f'(sq)),

    ∂f/∂log ℓ_k = Σ_ij W_ij (z_ik − z_jk)² = 2 Σ_i z_ik² (W1)_i − 2 (zᵀWz)_kk,

one product W[z, 1], and no ∂K/∂θ is ever formed. G is taken to be symmetric. All parameters are
positive and optimised by their logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone

from kernrl.kernels import base, dot, stationary
from kernrl.kernels.base import Kernel
from kernrl.kernels.distances import direct, expanded
from kernrl.kernels.gram import TILE_ROWS, parallel_rows
from kernrl.kernels.state_action import StateAction

Array = np.ndarray
Gradients = dict[str, Array]  # parameter name -> ∂f/∂log θ, of the parameter's shape
PullBack = Callable[[Array], Gradients]  # (n, n) G -> Gradients

FIELDS: dict[type, tuple[str, ...]] = {
    stationary.RBF: ("length_scale",),
    stationary.Matern: ("length_scale",),
    stationary.Laplacian: ("length_scale",),
    stationary.RationalQuadratic: ("length_scale", "mixture"),
    stationary.Periodic: ("length_scale", "period"),
    dot.Linear: ("variance", "offset"),
    dot.Polynomial: ("offset",),
    base.Scaled: ("factor",),
}


class Parameter(NamedTuple):
    """One free parameter of a kernel."""

    name: str  # as get_params names it
    value: Array  # () or (d,)
    spread: Array | None  # of a length scale: the standard deviation of what it divides


class Evaluation(NamedTuple):
    """K(x, x) and the way back from ∂f/∂K to the parameters."""

    matrix: Array  # (n, n)
    pull_back: PullBack


def free_parameters(kernel: Kernel, x: Array, prefix: str = "") -> Iterator[Parameter]:
    """Every positive parameter of a resolved kernel, outermost first; offsets of 0 stay 0."""
    for field in FIELDS.get(type(kernel), ()):
        value = np.array(getattr(kernel, field), dtype=np.float64)
        if np.all(value > 0):
            divides = field == "length_scale" and not isinstance(kernel, stationary.Periodic)
            yield Parameter(prefix + field, value, _spread(x, value) if divides else None)
    for name, part in _parts(kernel):
        yield from free_parameters(part, kernel._columns_of(name, x), f"{prefix}{name}__")


def _spread(x: Array, scale: Array) -> Array:  # (n, d), () or (d,) -> like scale
    """Standard deviations of the columns, 1 where there is none to compare with."""
    spread = np.std(x, axis=0)
    typical = spread if scale.ndim else np.sqrt(np.mean(spread**2))
    return np.where(typical > 0, typical, 1.0)


def with_parameters(kernel: Kernel, values: dict[str, Array]) -> Kernel:
    """A new kernel with these parameters; the old one stays as it is."""
    new: Kernel = clone(kernel)
    plain = {k: float(v) if np.ndim(v) == 0 else np.array(v) for k, v in values.items()}
    return new.set_params(**plain)


def with_ard(kernel: Kernel, x: Array) -> Kernel:
    """A new kernel with one length scale per column wherever there was one for all."""
    wide = {
        p.name: np.full(_width(kernel, x, p.name), float(p.value))
        for p in free_parameters(kernel, x)
        if p.name.split("__")[-1] == "length_scale" and p.value.ndim == 0
    }
    return with_parameters(kernel, wide)


def evaluate(kernel: Kernel, x: Array) -> Evaluation:
    """K(x, x) and its pull-back: by formulas where every part has them, else by autograd.

    x: (n, d) float64. Raises TypeError for kernels that GPyTorch cannot stand in for.
    """
    if has_formula(kernel):
        return _evaluate(kernel, x)
    from kernrl.kernels.gpytorch_bridge import differentiate  # late: it loads torch

    return Evaluation(*differentiate(kernel, x))


def has_formula(kernel: Kernel) -> bool:
    """Whether every part of the kernel has an analytic gradient here."""
    return type(kernel) in RULES and all(has_formula(part) for _, part in _parts(kernel))


def _parts(kernel: Kernel) -> list[tuple[str, Kernel]]:
    fields = kernel.get_params(deep=False)
    return [(name, part) for name, part in fields.items() if isinstance(part, Kernel)]


def _width(kernel: Kernel, x: Array, name: str) -> int:
    """How many columns the kernel sees that owns the parameter `name`."""
    head, _, rest = name.partition("__")
    if not rest:
        return int(x.shape[1])
    return _width(getattr(kernel, head), kernel._columns_of(head, x), rest)


# ---------------------------------------------------------------- the rules, one a kernel


def _evaluate(kernel: Kernel, x: Array) -> Evaluation:
    return RULES[type(kernel)](kernel, x)


def _prefixed(name: str, gradients: Gradients, factor: float = 1.0) -> Gradients:
    return {f"{name}__{k}": factor * v for k, v in gradients.items()}


def _stationary(kernel: Any, x: Array) -> Evaluation:
    kernel._require_resolved()
    z = (x - np.mean(x, axis=0)) * kernel._inverse_scale(x)
    distance = (direct if kernel._rough else expanded)(np, z)
    n = len(z)
    matrix = np.empty((n, n))
    # RBF's slope is its value; the others keep theirs, for an exp costs more than the memory.
    slope = matrix if type(kernel) is stationary.RBF else np.empty((n, n))

    def work(start: int) -> None:
        tile = slice(start, min(start + TILE_ROWS, n))
        sq = distance(z[tile])
        sq[np.arange(len(sq)), np.arange(tile.start, tile.stop)] = 0.0
        SLOPES[type(kernel)](kernel, sq, matrix[tile], slope[tile])

    parallel_rows(work, n, TILE_ROWS, n * n)

    def pull_back(g: Array) -> Gradients:
        by_column = _weighted_spread(g, slope, z)
        scalar = np.ndim(kernel.length_scale) == 0
        gradients = {"length_scale": np.sum(by_column) if scalar else by_column}
        if isinstance(kernel, stationary.RationalQuadratic):
            gradients["mixture"] = _by_mixture(g, matrix, slope, kernel.mixture)
        return gradients

    return Evaluation(matrix, pull_back)


def _weighted_spread(g: Array, slope: Array, z: Array) -> Array:  # -> (d,)
    """Σ_ij G_ij S_ij (z_ik − z_jk)² for symmetric G and S, in tiles."""
    n, d = z.shape
    right = np.concatenate((z, np.ones((n, 1))), axis=1)
    sums = np.zeros((-(-n // TILE_ROWS), d))

    def work(start: int) -> None:
        tile = slice(start, min(start + TILE_ROWS, n))
        product = (g[tile] * slope[tile]) @ right
        left = z[tile]
        sums[start // TILE_ROWS] = np.sum(left * (left * product[:, d:] - product[:, :d]), axis=0)

    parallel_rows(work, n, TILE_ROWS, n * n)
    total: Array = 2.0 * np.sum(sums, axis=0)
    return total


def _rbf(kernel: Any, sq: Array, value: Array, slope: Array) -> None:
    np.multiply(sq, -0.5, out=sq)
    np.exp(sq, out=value)


def _matern(kernel: Any, sq: Array, value: Array, slope: Array) -> None:
    r = np.sqrt(2.0 * kernel.nu * sq)
    decay = np.exp(-r)
    if kernel.nu == 0.5:  # f' is infinite at 0, where z_i = z_j takes its weight away
        value[...] = decay
        np.divide(decay, r, out=slope, where=r > 0)
        slope[r == 0] = 0.0
    elif kernel.nu == 1.5:
        np.multiply(1.0 + r, decay, out=value)
        np.multiply(decay, 3.0, out=slope)
    else:
        np.multiply(1.0 + r + r * r / 3.0, decay, out=value)
        np.multiply(5.0 / 3.0 * (1.0 + r), decay, out=slope)


def _rational_quadratic(kernel: Any, sq: Array, value: Array, slope: Array) -> None:
    u = sq / (2.0 * kernel.mixture)
    np.exp(-kernel.mixture * np.log1p(u), out=value)
    np.divide(value, 1.0 + u, out=slope)


def _by_mixture(g: Array, value: Array, slope: Array, mixture: float) -> Array:
    """Σ G ∘ α f (u/(1 + u) − log(1 + u)), with 1 + u = value/slope."""
    inverse = np.divide(slope, value, out=np.zeros_like(value), where=value > 0)
    bracket = 1.0 - inverse + np.log(np.where(inverse > 0, inverse, 1.0))
    return np.asarray(mixture * np.vdot(g, value * bracket))


SLOPES: dict[type, Callable[[Any, Array, Array, Array], None]] = {  # f(sq) and −2f'(sq), per tile
    stationary.RBF: _rbf,
    stationary.Matern: _matern,
    stationary.RationalQuadratic: _rational_quadratic,
}


def _linear(kernel: Any, x: Array) -> Evaluation:
    def pull_back(g: Array) -> Gradients:
        gradients = {"variance": np.asarray(kernel.variance * np.vdot(x, g @ x))}
        if kernel.offset > 0:
            gradients["offset"] = np.asarray(kernel.offset * np.sum(g))
        return gradients

    return Evaluation(kernel(x), pull_back)


def _polynomial(kernel: Any, x: Array) -> Evaluation:
    def pull_back(g: Array) -> Gradients:
        if not kernel.offset > 0:
            return {}
        slope = kernel.degree * (x @ x.T + kernel.offset) ** (kernel.degree - 1)
        return {"offset": np.asarray(kernel.offset * np.vdot(g, slope))}

    return Evaluation(kernel(x), pull_back)


def _scaled(kernel: Any, x: Array) -> Evaluation:
    inner, factor = _evaluate(kernel.kernel, x), float(kernel.factor)

    def pull_back(g: Array) -> Gradients:  # linear in G, so the factor may come last
        own = {"factor": np.asarray(factor * np.vdot(g, inner.matrix))}
        return own | _prefixed("kernel", inner.pull_back(g), factor)

    return Evaluation(factor * inner.matrix, pull_back)


def _sum(kernel: Any, x: Array) -> Evaluation:
    left, right = _evaluate(kernel.left, x), _evaluate(kernel.right, x)

    def pull_back(g: Array) -> Gradients:
        return _prefixed("left", left.pull_back(g)) | _prefixed("right", right.pull_back(g))

    return Evaluation(left.matrix + right.matrix, pull_back)


def _product_of(names: tuple[str, str], left: Evaluation, right: Evaluation) -> Evaluation:
    def pull_back(g: Array) -> Gradients:
        first = _prefixed(names[0], left.pull_back(g * right.matrix))
        return first | _prefixed(names[1], right.pull_back(g * left.matrix))

    return Evaluation(left.matrix * right.matrix, pull_back)


def _product(kernel: Any, x: Array) -> Evaluation:
    return _product_of(("left", "right"), _evaluate(kernel.left, x), _evaluate(kernel.right, x))


def _state_action(kernel: Any, x: Array) -> Evaluation:
    names = ("state_kernel", "action_kernel")
    parts = [_evaluate(getattr(kernel, k), kernel._columns_of(k, x)) for k in names]
    return _product_of(names, *parts)


def _on_dimensions(kernel: Any, x: Array) -> Evaluation:
    inner = _evaluate(kernel.kernel, kernel._columns_of("kernel", x))
    return Evaluation(inner.matrix, lambda g: _prefixed("kernel", inner.pull_back(g)))


RULES: dict[type, Callable[[Any, Array], Evaluation]] = {
    **dict.fromkeys(SLOPES, _stationary),
    dot.Linear: _linear,
    dot.Polynomial: _polynomial,
    base.Delta: lambda kernel, x: Evaluation(kernel(x), lambda g: {}),
    base.Scaled: _scaled,
    base.Sum: _sum,
    base.Product: _product,
    base.OnDimensions: _on_dimensions,
    StateAction: _state_action,
}
