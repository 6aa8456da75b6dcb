"""Nyström features: m landmarks stand for the data."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone

from kernrl import arrays, checks
from kernrl.approx.landmarks import SELECTORS, select
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram, matvec, rows

Array = Any


class Nystroem(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features φ with φ(x)ᵀφ(y) = k_m(x)ᵀ K_mm⁺ k_m(y): the kernel, seen through m landmarks.

    φ(x) = S^(−½)Uᵀ k_m(x) with K_mm = U S Uᵀ (Williams & Seeger 2001). The features are whitened:
    a ridge ‖w‖² on their weights is the RKHS norm of the function, and sums of φφᵀ are well
    conditioned even in float32. With all rows as landmarks, ΦΦᵀ is the Gram matrix itself.

    kernel: None takes the kernel of the estimator the features are given to.
    n_components: landmarks m, at most the rows of X; fewer are taken where these span the rest.
    landmarks: how they are chosen, see `approx.landmarks`; rng: a seed or a Generator for it.

    Eigenvalues of K_mm at rounding are dropped (below m·eps₆₄·λ_max, or below √m·eps·mean(diag) for
    the data's own eps: there, S^(−½) would only amplify the rounding of k_m(x)), so transform gives
    r ≤ m columns. Learnt: kernel_ (every length scale a number), landmarks_ (m, d),
    indices_ (m,), whitener_ (m, r), n_features_ = r, n_features_in_ = d.

    fit costs what the selector costs plus m³; transform n·m·(d + r), in tiles: nothing of size
    n×m is made besides the result.

    >>> from kernrl.kernels.stationary import RBF
    >>> x = np.linspace(0, 1, 50)[:, None]
    >>> features = Nystroem(RBF(0.5), n_components=10, rng=0).fit(x)
    >>> phi = features.transform(x)
    >>> bool(np.abs(phi @ phi.T - RBF(0.5)(x)).max() < 1e-6)
    True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        n_components: int = 500,
        landmarks: str = "rpcholesky",
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.n_components = n_components
        self.landmarks = landmarks
        self.rng = rng

    def fit(self, X: Array, y: object = None) -> Self:  # (n, d)
        """Choose the landmarks among the rows of X; y is ignored."""
        checks.choice("Nystroem", "landmarks", self.landmarks, SELECTORS)
        m = checks.integer("Nystroem", "n_components", self.n_components, at_least=1)
        kernel = required_kernel(self)
        X = rows("Nystroem", "X", X)
        n = X.shape[0]
        checks.not_empty("Nystroem", "X", X)
        if m > n:
            cure = f"Pass n_components={n} or more data."
            checks.fail("Nystroem", "n_components must be at most n", f"{m} of {n}", cure)
        generator = arrays.rng(self.rng)
        self.kernel_ = kernel.resolve(X, generator)
        self.indices_ = select(self.landmarks, self.kernel_, X, m, generator)
        xp = arrays.namespace(X)
        self.landmarks_ = xp.take(X, arrays.like(self.indices_, X, xp.int64), axis=0)
        self.whitener_ = arrays.like(_whitener(self.kernel_, self.landmarks_), X)
        self.n_features_in_, self.n_features_ = int(X.shape[1]), int(self.whitener_.shape[1])
        return self

    def transform(self, X: Array) -> Array:  # (n, d) -> (n, r)
        """Φ = K_nm U S^(−½), in the library of X and the wider dtype of X and the landmarks."""
        checks.fitted(self, "whitener_")
        X = fitting_rows(self, X)
        dtype = arrays.namespace(X).result_type(X, arrays.moved(self.landmarks_, X))
        Z = arrays.like(self.landmarks_, X, dtype)
        return matvec(self.kernel_, X, Z, arrays.like(self.whitener_, X, dtype))

    def with_kernel(self, kernel: Kernel) -> Nystroem:
        """An unfitted copy that uses `kernel`, unless it was given a kernel of its own."""
        return clone(self).set_params(kernel=kernel if self.kernel is None else self.kernel)

    @property
    def _n_features_out(self) -> int:
        return self.n_features_


def required_kernel(features: Any) -> Kernel:
    """The kernel of a feature map, which has to have one by the time it is fitted."""
    owner = type(features).__name__
    if features.kernel is None:
        cure = "Pass kernel=…, or hand it to an estimator that has one, as its features."
        checks.fail(owner, "a kernel is needed to fit", "None", cure)
    if not isinstance(features.kernel, Kernel):
        checks.fail(owner, "kernel must be a kernel", repr(features.kernel), error=TypeError)
    return features.kernel


def fitting_rows(features: Any, X: Array) -> Array:
    """X as rows with as many columns as the features were fitted on."""
    owner = type(features).__name__
    X = rows(owner, "X", X)
    if X.shape[1] != features.n_features_in_:
        rule = f"X must have the {features.n_features_in_} columns it was fitted on"
        checks.fail(owner, rule, X.shape[1])
    return X


def _whitener(kernel: Kernel, landmarks: Array) -> np.ndarray:  # (m, d) -> (m, r)
    """U S^(−½), always in float64 on the host."""
    z = np.asarray(arrays.host(landmarks), dtype=np.float64)
    k_mm = gram(kernel, z)
    values, vectors = np.linalg.eigh(k_mm)
    m = z.shape[0]
    rounding = m * np.finfo(np.float64).eps * values[-1]
    noise = math.sqrt(m) * arrays.epsilon(landmarks) * float(np.mean(np.diagonal(k_mm)))
    kept = values > max(rounding, noise)
    kept[-1] = True  # a kernel that vanishes on every landmark keeps one (zero) feature
    values = np.maximum(values[kept], np.finfo(np.float64).tiny)
    return vectors[:, kept] / np.sqrt(values)
