"""Kernels of an inner product: linear and polynomial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernrl import checks
from kernrl.kernels.base import Kernel, Section

Array = Any


def _product(xp: Any, z: Array) -> Section:
    right = z.T
    return lambda x: xp.matmul(xp.astype(x, z.dtype, copy=False), right)


@dataclass(frozen=True, eq=False)
class Linear(Kernel):
    """k(x, y) = variance · xᵀy + offset. Rasmussen & Williams (2006), §4.2.2.

    With features as inputs, KLSTD on it is linear LSTD (offset = a bias feature).
    """

    variance: float = 1.0
    offset: float = 0.0

    def _validate(self) -> None:
        checks.real("Linear", "variance", self.variance, above=0.0)
        checks.real("Linear", "offset", self.offset, at_least=0.0)

    def _section(self, xp: Any, z: Array) -> Section:
        product = _product(xp, z)
        return lambda x: float(self.variance) * product(x) + float(self.offset)

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return float(self.variance) * xp.sum(x * x, axis=1) + float(self.offset)


@dataclass(frozen=True, eq=False)
class Polynomial(Kernel):
    """k(x, y) = (xᵀy + offset)^degree. Rasmussen & Williams (2006), §4.2.2.

    degree = 2 with offset > 0 represents every quadratic: the Q* of a linear-quadratic problem.
    """

    degree: int = 2
    offset: float = 1.0

    def _validate(self) -> None:
        checks.integer("Polynomial", "degree", self.degree, at_least=1)
        checks.real("Polynomial", "offset", self.offset, at_least=0.0)

    def _section(self, xp: Any, z: Array) -> Section:
        product = _product(xp, z)
        return lambda x: (product(x) + float(self.offset)) ** int(self.degree)

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return (xp.sum(x * x, axis=1) + float(self.offset)) ** int(self.degree)
