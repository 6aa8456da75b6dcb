"""The posterior of V = m + φᵀw, w ~ N(0, I), given r = HV + N: Bayesian linear regression.

With y the rows of HΦ, whitened by the noise,

    P = (I + YᵀY/σ²)⁻¹,  w = PYᵀρ/σ²,   V(x) | r ~ N(m + φ(x)ᵀw, φ(x)ᵀPφ(x) + ε(x)).

It is GPTD with the Gram matrix ΦΦᵀ. For features that project the kernel on atoms or landmarks,
φ(x) = L⁻¹k_D(x), that Gram is A K_DD Aᵀ (Engel's sparse form), and ε(x) = k(x, x) − φ(x)ᵀφ(x) is
the part of the prior that they cannot see; for random features ε = 0.

White noise needs no whitening. With noise on the returns Σ = σ²HHᵀ is tridiagonal and its factor
has a closed form: at position j of an episode (from 0), with G_j = Σ_{i≤j} γ^{2i},

    y = v/(G_j e),   v = G_j h + γ v_before,   e² = G_{j+1}/G_j, or 1/G_j on a terminal row,

h the row of HΦ. So both noise models are one regression, and one recursion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kernrl import arrays, linalg
from kernrl.approx.dictionary import Dictionary
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram
from kernrl.value.differences import Differences
from kernrl.value.gptd_exact import gaussian, symmetric_inverse
from kernrl.value.shrinking import PENDING, ShrinkingCovariance
from kernrl.value.system import BLOCK_ROWS, eligibility

Array = Any


class WeightPosterior:
    """GPTD in m features. O(n m²) to make, O(m²) a further row, no n×n anywhere."""

    def __init__(
        self,
        features: Any,
        kernel: Kernel,
        noise: float,
        correlated: bool,
        mean: float,
        gamma: float,
    ) -> None:
        self.features, self.kernel = features, kernel
        self.noise, self.correlated, self.mean, self.gamma = noise, correlated, mean, gamma
        self.grows = isinstance(features, Dictionary)
        self.projects = self.grows or hasattr(features, "landmarks_")
        m = int(features.n_features_)
        self.weights = np.zeros(m)
        self.spread = ShrinkingCovariance(np.eye(m))  # P
        self.log_likelihood = 0.0
        self._root: Array | None = np.eye(m)  # lower C with CCᵀ = P⁻¹, while no row has changed P
        self._here = np.zeros(0)  # φ of the open end
        self.end: Array | None = None  # its state (d,)
        self._trace, self._return, self._mass = np.zeros(m), 0.0, 1.0  # v, its reward, G_j

    @property
    def support(self) -> Array | None:
        """The atoms or landmarks that the features are made of, if any."""
        return self.features.atoms_ if self.grows else getattr(self.features, "landmarks_", None)

    # ---------------------------------------------------------------- all rows at once

    def absorb(self, chunks: Any) -> None:
        """All rows of the chunks on a fresh posterior, by one m×m factorisation."""
        m = len(self.weights)
        precision, target = np.zeros((m, m)), np.zeros(m)
        quadratic, determinant, n = 0.0, 0.0, 0
        for rows in chunks:
            for block in _blocks(rows, BLOCK_ROWS):
                y, rho, scale = self._whiten(block, self.features.transform(block.points))
                precision += y.T @ y
                target += y.T @ rho
                quadratic += float(rho @ rho)
                determinant += float(np.sum(np.log(scale)))
                n += len(rho)
            self.end = rows.end
        precision = np.eye(m) + precision / self.noise
        self._root, _ = linalg.cholesky(precision, owner="GPTD")
        half = arrays.solve_triangular(self._root, target / self.noise)
        self.weights = arrays.solve_triangular(self._root, half, transposed=True)
        self.spread = ShrinkingCovariance(symmetric_inverse(self._root))
        determinant += float(np.sum(np.log(np.diagonal(self._root))))
        determinant += 0.5 * n * math.log(2.0 * math.pi * self.noise)
        self.log_likelihood = -0.5 * (quadratic / self.noise - float(half @ half)) - determinant

    def _whiten(self, rows: Differences, phi: Array) -> tuple[Array, Array, Array]:
        """Y (n, m), ρ (n,) and the e (n,) of a block that may continue the one before."""
        h = rows.apply(np.column_stack((phi, np.full(len(phi), self.mean))))
        h[:, -1] = rows.rewards - h[:, -1]  # the reward is whitened as one more column
        self._here = phi[-1]
        if not self.correlated:
            return h[:, :-1], h[:, -1], np.ones(len(rows))
        mass = self._masses(rows)
        before = np.zeros(h.shape[1])  # the dictionary may have grown since
        before[: self._trace.size], before[-1] = self._trace, self._return
        v, last = eligibility(mass[:, None] * h, rows.starts, self.gamma, before)
        e = np.sqrt(np.where(rows.discount > 0, 1.0 + self.gamma**2 * mass, 1.0) / mass)
        self._trace, self._return, self._mass = last[:-1], float(last[-1]), float(mass[-1])
        y = v / (mass * e)[:, None]
        return y[:, :-1], y[:, -1], e

    def _masses(self, rows: Differences) -> Array:  # -> (n,)
        """G_j of every row."""
        ones = np.ones((len(rows), 1))
        if not rows.starts[0]:
            ones[0] += self.gamma**2 * self._mass
        return eligibility(ones, rows.starts, self.gamma**2)[0][:, 0]

    # ---------------------------------------------------------------- more rows

    def extend(self, rows: Differences) -> None:
        """Add rows one after the other. O(m²) each."""
        for block in _blocks(rows, PENDING):
            phi = self._features_of_all(block) if len(block) > 1 else None
            if phi is None:
                self._one_by_one(block)
                continue
            y, rho, e = self._whiten(block, phi)
            for i, image in enumerate(self.spread.images(y)):
                self._condition(y[i], float(rho[i]), float(e[i]), image)
        self.end = rows.end

    def _features_of_all(self, rows: Differences) -> Array | None:
        """Φ of a block; None if a state of it may join the dictionary."""
        if self.grows:
            return self.features.settled(rows.points)
        return np.asarray(self.features.transform(rows.points))

    def _one_by_one(self, rows: Differences) -> None:
        centred = rows.rewards - self.mean * (1.0 - rows.discount)
        for i, point in enumerate(rows.here.tolist()):
            if rows.starts[i]:
                self.begin(rows.points[point])
            discount = float(rows.discount[i])
            ahead = rows.points[point + 1] if discount else None
            self.step(float(centred[i]), ahead, discount)

    def begin(self, state: Array) -> None:  # (d,)
        """An episode begins here."""
        self._here = self._features_of(state)
        self._trace, self._return, self._mass = np.zeros(0), 0.0, 0.0

    def step(self, reward: float, next_state: Array | None, discount: float) -> None:
        """The next row: r − m(1 − γ), and s' (d,) with γ, or None with 0. O(m²)."""
        ahead = self._features_of(next_state) if next_state is not None else np.zeros(0)
        h = np.zeros(self.weights.size)  # the dictionary may have grown
        h[: self._here.size] = self._here
        h[: ahead.size] -= discount * ahead
        e = 1.0
        if self.correlated:
            h, reward, e = self._decorrelated(h, reward, discount)
        self._condition(h, reward, e)
        self._here = ahead

    def _decorrelated(
        self, h: Array, residual: float, discount: float
    ) -> tuple[Array, float, float]:
        mass = self._mass = 1.0 + self.gamma**2 * self._mass
        v = mass * h
        v[: self._trace.size] += self.gamma * self._trace
        self._trace = v
        self._return = mass * residual + self.gamma * self._return
        e = math.sqrt((1.0 + self.gamma**2 * mass if discount else 1.0) / mass)
        return v / (mass * e), self._return / (mass * e), e

    def _condition(self, y: Array, rho: float, e: float, before: Array | None = None) -> None:
        """Condition on one whitened reward: with s = σ² + yᵀPy,

        w += Py(ρ − yᵀw)/s,  P −= Py(Py)ᵀ/s,  and log p gains log N(ρ; yᵀw, s).
        """
        if y.size:  # 0 while a kernel is 0 at every point so far
            image = self.spread.image(y, before)
            s = self.noise + max(float(y @ image), 0.0)
            error = rho - float(y @ self.weights)
            self.weights = self.weights + (error / s) * image
            self.spread.subtract(image / math.sqrt(s))
            self._root = None
        else:
            s, error = self.noise, rho
        self.log_likelihood -= 0.5 * (error**2 / s + math.log(2.0 * math.pi * s)) + math.log(e)

    def _features_of(self, x: Array) -> Array:  # (d,) -> (m,)
        """φ(x); a dictionary may admit x, which adds a weight that nothing is known of."""
        if not self.grows:
            return np.asarray(self.features.transform(x[None, :])[0])
        phi = self.features.offer_whitened(x)
        if phi.size > self.weights.size:
            self.spread.grow()
            self.weights, self._root = np.append(self.weights, 0.0), None
        return phi

    # ---------------------------------------------------------------- what it says of V

    def values(self, x: Array) -> Array:  # (q, d) -> (q,)
        """Posterior mean."""
        return self.mean + self.features.transform(x) @ self.weights

    def variances(self, x: Array) -> Array:  # (q, d) -> (q,)
        """Posterior variance, before rounding below 0 is clipped. O(m²q)."""
        out = np.empty(len(x))
        for start in range(0, len(x), BLOCK_ROWS):
            tile = slice(start, start + BLOCK_ROWS)
            phi = self.features.transform(x[tile])
            out[tile] = self._variance_of(phi)
            if self.projects:
                own = self.kernel.diagonal(x[tile])
                unseen = np.maximum(own - np.sum(phi * phi, axis=1), 0.0)
                out[tile] = np.minimum(out[tile] + unseen, own)
        return out

    def _variance_of(self, phi: Array) -> Array:  # (q, m) -> (q,)
        """φᵀPφ: by a triangular solve after a fit, by P itself after steps."""
        if self._root is not None:
            return np.sum(self._half(phi) ** 2, axis=1)
        return self.spread.quadratic(phi)

    def covariance(self, x: Array) -> Array:  # (q, d) -> (q, q)
        """Posterior covariance."""
        phi = self.features.transform(x)
        half = self._half(phi)
        unseen = gram(self.kernel, x) - phi @ phi.T if self.projects else 0.0
        return half @ half.T + unseen

    def draws(self, x: Array, n: int, rng: np.random.Generator) -> Array:  # -> (n, q)
        """Joint draws of V at x: of the weights, and, O(q³), of what they cannot see."""
        phi = self.features.transform(x)
        out = self.values(x) + rng.standard_normal((n, len(self.weights))) @ self._half(phi).T
        if self.projects:
            out += gaussian(gram(self.kernel, x) - phi @ phi.T, n, rng)
        return out

    def _half(self, phi: Array) -> Array:  # (q, m) -> (q, m)
        """F with FFᵀ = ΦPΦᵀ."""
        if self._root is not None:
            return arrays.solve_triangular(self._root, phi.T).T
        return phi @ self.spread.square_root()


def _blocks(rows: Differences, size: int) -> Iterator[Differences]:
    """The same rows, `size` at a time, each block with the points it touches."""
    for start in range(0, len(rows), size):
        chosen = slice(start, min(start + size, len(rows)))
        here, discount = rows.here[chosen], rows.discount[chosen]
        last = int(here[-1]) + 1 + int(discount[-1] > 0)
        yield Differences(
            rows.points[here[0] : last],
            here - here[0],
            discount,
            rows.starts[chosen],
            rows.rewards[chosen],
            rows.is_open,
        )
