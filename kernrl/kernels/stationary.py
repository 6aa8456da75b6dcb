"""Kernels of a distance: RBF, Matérn, Laplacian, rational quadratic, periodic."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from kernrl import arrays, checks
from kernrl.kernels.base import Filler, Kernel, Section
from kernrl.kernels.distances import (
    Distance,
    direct,
    expanded,
    gaussian,
    manhattan,
    median_distance,
)

Array = Any
LengthScale = Any  # float, (d,) array-like, or "median"


@dataclass(frozen=True, eq=False)
class Stationary(Kernel):
    """k(x, y) = f(‖(x − y)/ℓ‖²): a subclass gives f as `of_squared_distance`.

    A scalar length_scale is isotropic; a (d,) array gives one scale per input (ARD);
    "median" is the median distance between distinct rows of the data, resolved at fit time.
    """

    length_scale: LengthScale = 1.0

    # f has an infinite slope at 0 (Matérn 1/2), so rounding in the expanded |x|² + |y|² − 2xy
    # would show as its square root: such kernels sum (x − y)² directly.
    _rough = False
    _gaussian = False  # f(sq) = exp(−sq/2), which `distances.gaussian` makes in fewer passes

    def of_squared_distance(self, xp: Any, sq: Array) -> Array:  # (n, m) -> (n, m), may reuse sq
        """f(sq), with sq already scaled by ℓ²."""
        raise NotImplementedError

    def _validate(self) -> None:
        owner = type(self).__name__
        if isinstance(self.length_scale, str):
            checks.choice(owner, "a length_scale given by name", self.length_scale, ("median",))
            return
        try:
            scales = np.asarray(arrays.host(self.length_scale), dtype=np.float64)
        except (TypeError, ValueError):
            scales = np.asarray(np.nan)
        if scales.ndim > 1 or scales.size == 0 or not np.all(np.isfinite(scales) & (scales > 0)):
            checks.fail(
                owner,
                "length_scale must be positive and finite: a number, one number per column, "
                "or 'median'",
                self.length_scale,
            )

    def _inverse_scale(self, z: Array) -> Array | float:  # () or (d,)
        scales = np.asarray(arrays.host(self.length_scale), dtype=np.float64)
        if scales.ndim == 0:
            return 1.0 / float(scales)
        if scales.shape[0] != z.shape[1]:
            checks.fail(
                type(self).__name__,
                f"length_scale must have one entry per column ({z.shape[1]})",
                f"{scales.shape[0]} entries",
            )
        return arrays.like(1.0 / scales, z)

    def _warp(self, xp: Any, x: Array, inverse_scale: Array | float) -> Array:  # (n, d) -> (n, d')
        """Map centred rows to the space where the scaled distance is Euclidean."""
        return x * inverse_scale

    def _section(self, xp: Any, z: Array) -> Section:
        return self._values(xp, z)

    def _filler(self, z: np.ndarray) -> Filler:
        values = self._values(np, z)

        def fill(x: np.ndarray, out: np.ndarray) -> None:
            made = values(x, out)
            if made is not out:
                out[...] = made

        return fill

    def _values(self, xp: Any, z: Array) -> Distance:
        """k(x, z) of tiles x, in the memory given where f works in place."""
        # Centring first keeps float32 exact on offset data: only differences matter to f.
        centre = xp.mean(z, axis=0) if z.shape[0] else xp.zeros_like(z[0:0, :].sum(axis=0))
        inverse_scale = self._inverse_scale(z)
        make = gaussian if self._gaussian else direct if self._rough else expanded
        form = make(xp, self._warp(xp, z - centre, inverse_scale))

        def values(x: Array, out: Array = None) -> Array:
            x = self._warp(xp, xp.astype(x, z.dtype, copy=False) - centre, inverse_scale)
            made = form(x, out)
            return made if self._gaussian else self.of_squared_distance(xp, made)

        return values

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point, by direct differences: exact and without a preparation."""
        xp = arrays.namespace(z)
        difference = self._warp_difference(xp, z - x, self._inverse_scale(z))
        return self.of_squared_distance(xp, xp.sum(difference * difference, axis=-1))

    def _warp_difference(self, xp: Any, delta: Array, inverse_scale: Array | float) -> Array:
        return delta * inverse_scale

    def _diagonal(self, xp: Any, x: Array) -> Array:
        return xp.ones(x.shape[0], dtype=x.dtype, device=arrays.device(x))

    def resolve(self, x: Array, rng: arrays.Seed = None) -> Kernel:
        """This kernel with length_scale="median" replaced by its number on the rows x."""
        if self.is_resolved:
            return self
        unit = dataclasses.replace(self, length_scale=1.0)
        distance = median_distance(type(self).__name__, unit._pairwise, x, arrays.rng(rng))
        return dataclasses.replace(self, length_scale=distance)

    def _pairwise(self, x: np.ndarray) -> np.ndarray:  # (n, d) -> (n, n) unscaled distances
        centred = self._warp(np, x - x.mean(axis=0), 1.0)
        return np.asarray(np.sqrt(direct(np, centred)(centred)))

    def spectral_frequencies(self, normal: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Frequencies ω of the kernel's spectral density, so that k(x, y) = E cos(ωᵀ(x − y)).

        normal (D, d) holds rows distributed (marginally) as standard normal, uniform (D,) numbers
        in (0, 1) for the radial mixture. Rahimi & Recht (2007), thm. 1.
        """
        checks.fail(
            type(self).__name__,
            "random features need a continuous spectral density",
            None,
            "Use Nystroem for this kernel.",
            TypeError,
        )

    def _scaled_frequencies(self, unit: np.ndarray) -> np.ndarray:  # (D, d) -> (D, d)
        self._require_resolved()
        return np.asarray(unit * self._inverse_scale(unit))


class RBF(Stationary):
    """Squared-exponential kernel, k(x, y) = exp(−½ ‖(x − y)/ℓ‖²).

    Rasmussen & Williams (2006), eqs. 4.9 and 5.1. RationalQuadratic with mixture → ∞.

    >>> import numpy as np
    >>> float(RBF(2.0)(np.array([[0.0]]), np.array([[2.0]]))[0, 0].round(4))
    0.6065
    """

    _gaussian = True

    def of_squared_distance(self, xp: Any, sq: Array) -> Array:
        sq *= -0.5
        return arrays.exp_in_place(sq)

    def spectral_frequencies(self, normal: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """ω ~ N(0, ℓ⁻²I)."""
        return self._scaled_frequencies(normal)


@dataclass(frozen=True, eq=False)
class Matern(Stationary):
    """Matérn kernel of smoothness ν ∈ {1/2, 3/2, 5/2}, with r = ‖(x − y)/ℓ‖.

    ν = 1/2: exp(−r); 3/2: (1 + √3 r) exp(−√3 r); 5/2: (1 + √5 r + 5r²/3) exp(−√5 r).
    Rasmussen & Williams (2006), eqs. 4.14 and 4.17. ν → ∞ is RBF.
    """

    nu: float = 1.5

    def _validate(self) -> None:
        super()._validate()
        if self.nu not in (0.5, 1.5, 2.5):
            checks.fail("Matern", "nu must be one of 0.5, 1.5, 2.5", repr(self.nu))

    @property
    def _rough(self) -> bool:  # type: ignore[override]  # depends on nu, a class constant elsewhere
        return self.nu == 0.5

    def of_squared_distance(self, xp: Any, sq: Array) -> Array:
        r = xp.sqrt(2.0 * self.nu * sq)
        if self.nu == 0.5:
            return xp.exp(-r)
        polynomial = 1.0 + r if self.nu == 1.5 else 1.0 + r + r * r / 3.0
        return polynomial * xp.exp(-r)

    def spectral_frequencies(self, normal: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """ω = z √(2ν/χ²₂ᵥ)/ℓ: a multivariate t with 2ν degrees of freedom."""
        chi_square = 2.0 * special.gammaincinv(self.nu, uniform)
        return self._scaled_frequencies(normal * np.sqrt(2.0 * self.nu / chi_square)[:, None])


@dataclass(frozen=True, eq=False)
class RationalQuadratic(Stationary):
    """k(x, y) = (1 + r²/(2α))^(−α) with r = ‖(x − y)/ℓ‖ and α the mixture.

    A gamma mixture of RBFs over ℓ⁻². Rasmussen & Williams (2006), eq. 4.19.
    """

    mixture: float = 1.0

    def _validate(self) -> None:
        super()._validate()
        checks.real("RationalQuadratic", "mixture", self.mixture, above=0.0)

    def of_squared_distance(self, xp: Any, sq: Array) -> Array:
        # exp(−α log1p(·)): (1 + small)**(−large α) would lose the digits that make the RBF limit.
        return arrays.exp_in_place(-self.mixture * xp.log1p(sq / (2.0 * self.mixture)))

    def spectral_frequencies(self, normal: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """ω = z √τ/ℓ with τ ~ Gamma(α, rate α)."""
        tau = special.gammaincinv(self.mixture, uniform) / self.mixture
        return self._scaled_frequencies(normal * np.sqrt(tau)[:, None])


@dataclass(frozen=True, eq=False)
class Periodic(Stationary):
    """k(x, y) = exp(−2 Σ_k sin²(π (x_k − y_k)/p_k)/ℓ_k²).

    MacKay (1998); Rasmussen & Williams (2006), eq. 4.31. It is the RBF kernel after wrapping each
    column on a circle, u(x) = (cos 2πx/p, sin 2πx/p), since ‖u(x) − u(y)‖² = 4 sin²(π(x − y)/p).
    """

    period: Any = 1.0
    _gaussian = True

    def _validate(self) -> None:
        super()._validate()
        periods = np.asarray(self.period, dtype=np.float64)
        if periods.ndim > 1 or not np.all(np.isfinite(periods) & (periods > 0)):
            checks.fail("Periodic", "period must be positive and finite", self.period)

    def _warp(self, xp: Any, x: Array, inverse_scale: Array | float) -> Array:
        angle = x * arrays.like(2.0 * math.pi / np.asarray(self.period, dtype=np.float64), x)
        return xp.concat((xp.cos(angle) * inverse_scale, xp.sin(angle) * inverse_scale), axis=1)

    def _warp_difference(self, xp: Any, delta: Array, inverse_scale: Array | float) -> Array:
        half = delta * arrays.like(math.pi / np.asarray(self.period, dtype=np.float64), delta)
        return 2.0 * xp.sin(half) * inverse_scale

    def of_squared_distance(self, xp: Any, sq: Array) -> Array:
        sq *= -0.5
        return arrays.exp_in_place(sq)


class Laplacian(Stationary):
    """k(x, y) = exp(−Σ_k |x_k − y_k|/ℓ_k): the city-block exponential.

    Rahimi & Recht (2007), table 1; scikit-learn's `laplacian_kernel` with gamma = 1/ℓ. In one
    dimension it is Matérn 1/2; in more it is not, since that one takes the Euclidean distance.
    """

    def _section(self, xp: Any, z: Array) -> Section:
        inverse_scale = self._inverse_scale(z)
        distance = manhattan(xp, z * inverse_scale)

        def tile(x: Array) -> Array:
            total = distance(xp.astype(x, z.dtype, copy=False) * inverse_scale)
            return arrays.exp_in_place(-total)

        return tile

    def _filler(self, z: np.ndarray) -> Filler:
        return Kernel._filler(self, z)  # Stationary's is of Euclidean distances

    def row(self, x: Array, z: Array) -> Array:  # (d,), (m, d) -> (m,)
        """k(x, z_j) for one point."""
        xp = arrays.namespace(z)
        return xp.exp(-xp.sum(xp.abs(z - x) * self._inverse_scale(z), axis=-1))

    def _pairwise(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(manhattan(np, x)(x))

    def spectral_frequencies(self, normal: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """ω_k ~ Cauchy(0, 1/ℓ_k), independent per column: tan(π(Φ(z) − ½))."""
        return self._scaled_frequencies(np.tan(np.pi * (special.ndtr(normal) - 0.5)))
