"""Random Fourier features: a shift-invariant kernel as an average of waves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from scipy import special
from scipy.stats import qmc
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone

from kernrl import arrays, checks
from kernrl.approx.nystroem import fitting_rows, required_kernel
from kernrl.kernels import base
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import parallel_rows, rows
from kernrl.kernels.state_action import StateAction

Array = Any

TILE_ROWS = 512


class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features φ with E φ(x)ᵀφ(y) = k(x, y), from frequencies of k's own spectral density.

    φ(x) = √(2v/D) [cos(ωⱼᵀ(x − c)), sin(ωⱼᵀ(x − c))]_{j ≤ D/2}, v = k(x, x): Rahimi & Recht
    (2007) in the form without phases (Sutherland & Schneider 2015), where φ(x)ᵀφ(x) = v exactly.
    The centre c changes no inner product; it keeps the angles small, hence right in float32.

    kernel: RBF, Matern, Laplacian or RationalQuadratic, or made of these by +, *, a factor, `on` or
    StateAction; None takes the kernel of the estimator the features are given to.
    n_components: D, the number of features, even.
    method: "iid", independent frequencies; "orthogonal", in blocks of d orthogonal directions,
    each with the norm of a Gaussian vector so that every frequency keeps its distribution (Yu et
    al. 2016; without those norms the kernel would be another one); "qmc", scrambled Sobol points
    through the inverse distribution (Yang et al. 2014), best when d is small.

    Learnt: kernel_, frequencies_ (d, D/2), centre_ (d,), variance_ = v, n_features_ = D,
    n_features_in_ = d. The error is O(1/√D) for "iid", at most that for the others.
    Cost of transform: O(ndD).

    >>> from kernrl.kernels.stationary import RBF
    >>> x = np.linspace(0, 1, 20)[:, None]
    >>> phi = RandomFeatures(RBF(0.5), n_components=4000, rng=0).fit_transform(x)
    >>> bool(np.abs(phi @ phi.T - RBF(0.5)(x)).max() < 0.1)
    True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        n_components: int = 1000,
        method: str = "orthogonal",
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.n_components = n_components
        self.method = method
        self.rng = rng

    def fit(self, X: Array, y: object = None) -> Self:  # (n, d)
        """Draw the frequencies; X gives d, the centre, and the median length scale if asked for."""
        checks.choice("RandomFeatures", "method", self.method, POINTS)
        count = checks.integer("RandomFeatures", "n_components", self.n_components, at_least=2)
        cure = f"Pass n_components={count + 1}: features come as cosine and sine."
        checks.require(count % 2 == 0, "RandomFeatures", "n_components must be even", count, cure)
        kernel = required_kernel(self)
        X = rows("RandomFeatures", "X", X)
        checks.not_empty("RandomFeatures", "X", X)
        generator = arrays.rng(self.rng)
        self.kernel_ = kernel.resolve(X, generator)
        d = int(X.shape[1])
        points = POINTS[self.method](count // 2, dimensions(self.kernel_, d), generator)
        frequencies, self.variance_ = spectrum(self.kernel_, d, points)
        self.frequencies_ = arrays.like(frequencies.T, X)
        self.centre_ = arrays.namespace(X).mean(X, axis=0)
        self.n_features_in_, self.n_features_ = d, count
        return self

    def transform(self, X: Array) -> Array:  # (n, d) -> (n, D)
        """Φ in the library of X and the wider dtype of X and the fitted data."""
        checks.fitted(self, "frequencies_")
        X = fitting_rows(self, X)
        xp = arrays.namespace(X)
        dtype = xp.result_type(X, arrays.moved(self.frequencies_, X))
        X = xp.astype(X, dtype, copy=False)
        frequencies = arrays.like(self.frequencies_, X)
        centre, scale = (
            arrays.like(self.centre_, X),
            math.sqrt(2 * self.variance_ / self.n_features_),
        )
        if arrays.is_numpy(xp):
            return _tiled(X, frequencies, centre, scale)
        angle = (X - centre) @ frequencies
        return scale * xp.concat((xp.cos(angle), xp.sin(angle)), axis=1)

    def with_kernel(self, kernel: Kernel) -> RandomFeatures:
        """An unfitted copy that uses `kernel`, unless it was given a kernel of its own."""
        return clone(self).set_params(kernel=kernel if self.kernel is None else self.kernel)

    @property
    def _n_features_out(self) -> int:
        return self.n_features_


def _tiled(x: np.ndarray, frequencies: np.ndarray, centre: np.ndarray, scale: float) -> np.ndarray:
    """Row tiles on the thread pool: the angles stay in cache between product, cos and sin."""
    n, half = x.shape[0], frequencies.shape[1]
    out = np.empty((n, 2 * half), dtype=x.dtype)

    def work(start: int) -> None:
        tile = out[start : start + TILE_ROWS]
        angle = (x[start : start + TILE_ROWS] - centre) @ frequencies
        np.cos(angle, out=tile[:, :half])
        np.sin(angle, out=tile[:, half:])
        tile *= scale

    parallel_rows(work, n, TILE_ROWS, 8 * n * half)  # a sine costs about eight Gram entries
    return out


# ---------------------------------------------------------------- uniform points of three kinds


class _Points:
    """`count` points to be shaped into frequencies: `normal(d)` rows and a `uniform()` column.

    Each call takes fresh coordinates, so that the parts of a compound kernel are independent.
    """

    def __init__(self, count: int, total: int, rng: np.random.Generator) -> None:
        self.count, self.rng = count, rng

    def normal(self, d: int) -> np.ndarray:  # (count, d), each row standard normal
        return self.rng.standard_normal((self.count, d))

    def uniform(self) -> np.ndarray:  # (count,) in the open interval (0, 1)
        return _open(self.rng.random(self.count))


class _Orthogonal(_Points):
    """Rows in blocks of d orthogonal ones: a Haar rotation times norms of Gaussian vectors."""

    def normal(self, d: int) -> np.ndarray:
        blocks = -(-self.count // d)
        q, r = np.linalg.qr(self.rng.standard_normal((blocks, d, d)))
        q = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]  # Haar, not QR's own choice
        norms = np.linalg.norm(self.rng.standard_normal((self.count, d)), axis=1)
        return q.reshape(-1, d)[: self.count] * norms[:, None]


class _Sobol(_Points):
    """One scrambled Sobol sequence; its first coordinates, the most even ones, go first."""

    def __init__(self, count: int, total: int, rng: np.random.Generator) -> None:
        super().__init__(count, total, rng)
        engine = qmc.Sobol(total, scramble=True, seed=rng)
        # A power of two is drawn and cut: its beginning is as even, and scipy warns otherwise.
        points = engine.random_base2(max(0, math.ceil(math.log2(count))))
        self._left = _open(points[:count])

    def _take(self, k: int) -> np.ndarray:
        taken, self._left = self._left[:, :k], self._left[:, k:]
        return taken

    def normal(self, d: int) -> np.ndarray:
        return special.ndtri(self._take(d))

    def uniform(self) -> np.ndarray:
        return self._take(1)[:, 0]


POINTS: dict[str, Callable[[int, int, np.random.Generator], _Points]] = {
    "iid": _Points,
    "orthogonal": _Orthogonal,
    "qmc": _Sobol,
}


def _open(u: np.ndarray) -> np.ndarray:
    """Strictly inside (0, 1), where inverse distribution functions are finite."""
    return np.clip(u, 2.0**-40, 1 - 2.0**-40)


# ---------------------------------------------------------------- spectra of compound kernels


def spectrum(kernel: Kernel, d: int, points: _Points) -> tuple[np.ndarray, float]:
    """Frequencies (count, d) and mass v, so that k(x, y) = v·E cos(ωᵀ(x − y)) (Bochner).

    A factor scales the mass; a product adds independent frequencies, or puts those of state and
    action side by side; a sum draws from one part or the other in proportion to their masses;
    `on` puts zeros in the columns it does not see.
    """
    if isinstance(kernel, base.Scaled):
        frequencies, mass = spectrum(kernel.kernel, d, points)
        return frequencies, mass * float(kernel.factor)
    if isinstance(kernel, base.OnDimensions):
        inner, mass = spectrum(kernel.kernel, len(kernel.dims), points)
        frequencies = np.zeros((points.count, d))
        for column, k in enumerate(kernel.dims):  # the same column may be seen twice
            frequencies[:, k] += inner[:, column]
        return frequencies, mass
    if isinstance(kernel, StateAction):
        state, mass_state = spectrum(kernel.state_kernel, d - kernel.n_action_columns, points)
        action, mass_action = spectrum(kernel.action_kernel, kernel.n_action_columns, points)
        return np.concatenate((state, action), axis=1), mass_state * mass_action
    if isinstance(kernel, base.Product | base.Sum):
        left, mass_left = spectrum(kernel.left, d, points)
        right, mass_right = spectrum(kernel.right, d, points)
        if isinstance(kernel, base.Product):
            return left + right, mass_left * mass_right
        mass = mass_left + mass_right
        return np.where((points.uniform() < mass_left / mass)[:, None], left, right), mass
    _require_spectrum(kernel)
    return kernel.spectral_frequencies(points.normal(d), points.uniform()), 1.0


def dimensions(kernel: Kernel, d: int) -> int:
    """How many coordinates of a point `spectrum` takes."""
    if isinstance(kernel, base.Scaled):
        return dimensions(kernel.kernel, d)
    if isinstance(kernel, base.OnDimensions):
        return dimensions(kernel.kernel, len(kernel.dims))
    if isinstance(kernel, StateAction):
        state = dimensions(kernel.state_kernel, d - kernel.n_action_columns)
        return state + dimensions(kernel.action_kernel, kernel.n_action_columns)
    if isinstance(kernel, base.Product | base.Sum):
        parts = dimensions(kernel.left, d) + dimensions(kernel.right, d)
        return parts + isinstance(kernel, base.Sum)
    return d + 1


def _require_spectrum(kernel: Kernel) -> None:
    if not hasattr(kernel, "spectral_frequencies"):
        checks.fail(
            "RandomFeatures",
            "kernel must be shift-invariant (RBF, Matern, Laplacian, RationalQuadratic, or made "
            "of these)",
            type(kernel).__name__,
            "Use Nystroem for this kernel.",
            TypeError,
        )
