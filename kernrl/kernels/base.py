"""What a kernel is: a frozen dataclass with one formula, an algebra, scikit-learn parameters."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kernrl import arrays, checks
from kernrl.kernels import gram as _gram

Array = Any
Section = Callable[[Array], Array]  # (b, d) -> (b, m)
Filler = Callable[[np.ndarray, np.ndarray], None]  # (b, d), (b, m) that is overwritten


@dataclass(frozen=True, eq=False)
class Kernel:
    """A positive semi-definite function k(x, y) of two rows.

    A subclass gives `_section(xp, z)` (its formula against fixed columns z) and `_diagonal(xp, x)`.
    Calling the kernel makes the (n, m) matrix; `section(z)` prepares it against z once, for tiles.
    Fields are scikit-learn parameters: `clone`, `get_params` and nested `set_params` work.
    """

    def _section(self, xp: Any, z: Array) -> Section:  # (m, d) -> ((b, d) -> (b, m))
        raise NotImplementedError

    def _diagonal(self, xp: Any, x: Array) -> Array:  # (n, d) -> (n,)
        raise NotImplementedError

    def _filler(self, z: np.ndarray) -> Filler:  # (m, d)
        """`_section` on NumPy into given memory; a kernel that can work in it says how."""
        section = self._section(np, z)

        def fill(x: np.ndarray, out: np.ndarray) -> None:
            out[...] = section(x)

        return fill

    def _validate(self) -> None:
        """Check the fields; called on construction and after set_params."""

    def __post_init__(self) -> None:
        self._validate()

    def __call__(self, x: Array, y: Array | None = None) -> Array:  # (n, d), (m, d) -> (n, m)
        """The Gram matrix K_ij = k(x_i, y_j); with y None, K(x, x) with an exact diagonal."""
        return _gram.gram(self, x, y)

    def diagonal(self, x: Array) -> Array:  # (n, d) -> (n,)
        """k(x_i, x_i) without the matrix."""
        x = _gram.rows(type(self).__name__, "x", x)
        return self._diagonal(arrays.namespace(x), x)

    def section(self, z: Array) -> Section:  # (m, d) -> ((b, d) -> (b, m))
        """The kernel prepared against fixed columns z: a function of tiles of rows.

        Tiles are cast to z's dtype; no validation happens per tile.
        """
        self._require_resolved()
        z = _gram.rows(type(self).__name__, "z", z)
        return self._section(arrays.namespace(z), z)

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point: the hot path of online methods, without validation."""
        return self._section(arrays.namespace(z), z)(x[None, :])[0, :]

    # ---------------------------------------------------------------- data-dependent parameters

    def resolve(self, x: Array, rng: arrays.Seed = None) -> Kernel:
        """This kernel with every "median" length scale replaced by its number on the rows x."""
        generator = arrays.rng(rng)
        new = {
            f.name: value.resolve(self._columns_of(f.name, x), generator)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Kernel)
        }
        return dataclasses.replace(self, **new) if new else self

    def _columns_of(self, name: str, x: Array) -> Array:
        """The columns that the sub-kernel in field `name` sees."""
        return x

    @property
    def is_resolved(self) -> bool:
        """True if no length scale still waits for data."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return all(v.is_resolved for v in values if isinstance(v, Kernel)) and not any(
            isinstance(v, str) and v == "median" for v in values
        )

    def _require_resolved(self) -> None:
        checks.require(
            self.is_resolved,
            type(self).__name__,
            "length_scale='median' must be resolved on data before the kernel is evaluated",
            None,
            "Call kernel.resolve(X), or hand the kernel to an estimator, whose fit does it.",
        )

    # ---------------------------------------------------------------- algebra

    def __add__(self, other: Kernel) -> Kernel:
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: Kernel | float) -> Kernel:
        if isinstance(other, Kernel):
            return Product(self, other)
        if isinstance(other, numbers.Real):
            return Scaled(self, float(other))
        return NotImplemented

    __rmul__ = __mul__

    def on(self, dims: Sequence[int]) -> Kernel:
        """This kernel on the given columns only."""
        return OnDimensions(self, dims)

    def to_gpytorch(self) -> Any:
        """The same kernel as a `gpytorch.kernels.Kernel` with equal values; no "median" left."""
        from kernrl.kernels.gpytorch_bridge import to_gpytorch

        self._require_resolved()
        return to_gpytorch(self)

    # ---------------------------------------------------------------- scikit-learn parameters

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Fields by name; with deep, those of sub-kernels as `name__field`."""
        params: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = params[f.name] = getattr(self, f.name)
            if deep and isinstance(value, Kernel):
                params |= {f"{f.name}__{k}": v for k, v in value.get_params().items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set fields in place, as scikit-learn's grid search does on its clone; returns self."""
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in params.items():
            head, _, rest = name.partition("__")
            checks.choice(type(self).__name__, "a parameter", head, known)
            if rest:
                getattr(self, head).set_params(**{rest: value})
            else:
                object.__setattr__(self, head, value)
        self._validate()
        return self


def _require_kernel(owner: str, name: str, value: object) -> None:
    checks.require(
        isinstance(value, Kernel), owner, f"{name} must be a kernel", repr(value), error=TypeError
    )


@dataclass(frozen=True, eq=False)
class _Pair(Kernel):
    left: Kernel
    right: Kernel

    def _validate(self) -> None:
        _require_kernel(type(self).__name__, "left", self.left)
        _require_kernel(type(self).__name__, "right", self.right)


class Sum(_Pair):
    """k(x, y) = k₁(x, y) + k₂(x, y). Rasmussen & Williams (2006), §4.2.4."""

    def _section(self, xp: Any, z: Array) -> Section:
        left, right = self.left._section(xp, z), self.right._section(xp, z)
        return lambda x: left(x) + right(x)

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point."""
        return self.left.row(x, z) + self.right.row(x, z)

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return self.left._diagonal(xp, x) + self.right._diagonal(xp, x)


class Product(_Pair):
    """k(x, y) = k₁(x, y) · k₂(x, y). Rasmussen & Williams (2006), §4.2.4."""

    def _section(self, xp: Any, z: Array) -> Section:
        left, right = self.left._section(xp, z), self.right._section(xp, z)
        return lambda x: left(x) * right(x)

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point."""
        return self.left.row(x, z) * self.right.row(x, z)

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return self.left._diagonal(xp, x) * self.right._diagonal(xp, x)


@dataclass(frozen=True, eq=False)
class Scaled(Kernel):
    """k(x, y) = factor · k₁(x, y), factor > 0: a prior variance."""

    kernel: Kernel
    factor: float = 1.0

    def _validate(self) -> None:
        _require_kernel("Scaled", "kernel", self.kernel)
        checks.real("Scaled", "factor", self.factor, above=0.0)

    def _section(self, xp: Any, z: Array) -> Section:
        inner = self.kernel._section(xp, z)
        return lambda x: float(self.factor) * inner(x)

    def _filler(self, z: np.ndarray) -> Filler:
        inner = self.kernel._filler(z)

        def fill(x: np.ndarray, out: np.ndarray) -> None:
            inner(x, out)
            out *= float(self.factor)

        return fill

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point."""
        return float(self.factor) * self.kernel.row(x, z)

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return float(self.factor) * self.kernel._diagonal(xp, x)


@dataclass(frozen=True, eq=False)
class OnDimensions(Kernel):
    """k(x, y) = k₁(x[dims], y[dims]): a kernel on some columns."""

    kernel: Kernel
    dims: Sequence[int] = field(default_factory=list)

    def _validate(self) -> None:
        _require_kernel("OnDimensions", "kernel", self.kernel)
        checks.require(
            len(self.dims) > 0 and all(isinstance(k, int | np.integer) for k in self.dims),
            "OnDimensions",
            "dims must be a non-empty list of column numbers",
            self.dims,
        )

    def _pick(self, xp: Any, x: Array) -> Array:
        worst = max(self.dims, key=abs)
        checks.require(
            -x.shape[1] <= min(self.dims) and max(self.dims) < x.shape[1],
            "OnDimensions",
            f"dims must lie within the {x.shape[1]} columns",
            worst,
        )
        index = np.asarray(self.dims, dtype=np.int64) % x.shape[1]
        return xp.take(x, arrays.like(index, x, xp.int64), axis=1)

    def _columns_of(self, name: str, x: Array) -> Array:
        return self._pick(arrays.namespace(x), x)

    def _section(self, xp: Any, z: Array) -> Section:
        inner = self.kernel._section(xp, self._pick(xp, z))
        return lambda x: inner(self._pick(xp, x))

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point."""
        xp = arrays.namespace(z)
        return self.kernel.row(self._pick(xp, x[None, :])[0, :], self._pick(xp, z))

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return self.kernel._diagonal(xp, self._pick(xp, x))


@dataclass(frozen=True, eq=False)
class Delta(Kernel):
    """k(x, y) = 1[x = y]: the tabular kernel; KLSTD with it is tabular LSTD."""

    def _section(self, xp: Any, z: Array) -> Section:
        def tile(x: Array) -> Array:
            equal = xp.ones((x.shape[0], z.shape[0]), dtype=xp.bool, device=arrays.device(z))
            for k in range(z.shape[1]):
                equal = equal & (x[:, k, None] == z[None, :, k])
            return xp.astype(equal, z.dtype)

        return tile

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return xp.ones(x.shape[0], dtype=x.dtype, device=arrays.device(x))
