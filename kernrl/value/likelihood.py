"""The marginal likelihood of a GPTD model's rewards, with its gradient.

    log p(r) = −½ zᵀS⁻¹z − ½ log|S| − (n/2) log 2π,   z = r − m H1,  S = HKHᵀ + Σ
    ∂ log p/∂K = HᵀMH,  M = ½(ααᵀ − S⁻¹),  α = S⁻¹z

One Cholesky factor and one inverse a trial give the likelihood and, through `kernels.gradients`,
all derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernrl import arrays, linalg
from kernrl.kernels import gradients
from kernrl.kernels.base import Kernel
from kernrl.value.differences import Differences
from kernrl.value.gptd_exact import reward_covariance, symmetric_inverse

Array = Any

# The curb: flat within a factor of CURB_LENGTH of the spread and a signal-to-noise ratio of
# CURB_RATIO, a wall beyond them (Deisenroth & Rasmussen 2011, in their published code).
CURB_LENGTH, CURB_RATIO, CURB_POWER = 1000.0, 500.0, 30
REFUSED = 1e25  # the objective where S is not positive definite: finite, for the line search


class Objective:
    """−log p(r) + curb and its gradient, as a function of log-parameters."""

    def __init__(
        self,
        rows: Differences,
        kernel: Kernel,
        space: Any,
        correlated: bool,
        mean: float,
        curb: bool,
    ) -> None:
        self.rows, self.kernel, self.space = rows, kernel, space
        self.correlated, self.curb = correlated, curb
        self.centred = rows.rewards - mean * (1.0 - rows.discount)
        self.n_evaluations, self.last_curb = 0, 0.0

    def model(self, values: dict[str, Array]) -> tuple[Kernel, float]:
        """Kernel and noise of these parameters."""
        inner = {k: v for k, v in values.items() if k != "noise"}
        kernel = gradients.with_parameters(self.kernel, inner)
        return kernel, float(values.get("noise", self.space.noise))

    def __call__(self, theta: Array) -> tuple[float, Array]:
        self.n_evaluations += 1
        values = self.space.values(theta)
        kernel, noise = self.model(values)
        k, pull_back = gradients.evaluate(kernel, self.rows.points)
        prior = float(np.mean(np.diagonal(k)))
        s = reward_covariance(self.rows, k, noise, self.correlated)
        try:
            lower, _ = linalg.cholesky(s, owner="maximise_likelihood")
        except ValueError:
            return REFUSED, np.zeros_like(theta)
        half = arrays.solve_triangular(lower, self.centred)
        value = 0.5 * float(half @ half) + float(np.sum(np.log(np.diagonal(lower))))
        value += 0.5 * len(half) * math.log(2.0 * math.pi)
        by_k, by_noise = self._gradients(lower, half)
        penalty, lengths, by_ratio = self._curb(values, prior / noise)
        by_k[np.diag_indices_from(by_k)] += by_ratio / (prior * len(by_k))
        found = pull_back(by_k) | {"noise": np.asarray(noise * by_noise - by_ratio)}
        found |= {name: found[name] + by for name, by in lengths.items()}
        self.last_curb = penalty
        return value + penalty, self.space.gradient(found)

    def _gradients(self, lower: Array, half: Array) -> tuple[Array, float]:
        """∂(−log p)/∂K = ½Hᵀ(S⁻¹ − ααᵀ)H, and by σ²: its trace, or that without H. 2n³/3."""
        alpha = arrays.solve_triangular(lower, half, transposed=True)
        inverse = symmetric_inverse(lower)
        by_s = float(np.trace(inverse)) - float(alpha @ alpha)
        by_k = self.rows.spread_both(inverse, minus=self.rows.spread(alpha))
        by_k *= 0.5
        return by_k, float(np.trace(by_k)) if self.correlated else 0.5 * by_s

    def _curb(
        self, values: dict[str, Array], ratio: float
    ) -> tuple[float, dict[str, Array], float]:
        """The penalty, its derivatives by log length scales, and by log(prior variance/noise)."""
        if not self.curb:
            return 0.0, {}, 0.0
        total, by_length = 0.0, {}
        for p in self.space.parameters:
            if p.spread is not None:
                inside = np.log(values[p.name] / p.spread) / math.log(CURB_LENGTH)
                total += float(np.sum(inside**CURB_POWER))
                slope = CURB_POWER * inside ** (CURB_POWER - 1) / math.log(CURB_LENGTH)
                by_length[p.name] = slope
        inside = 0.5 * math.log(ratio) / math.log(CURB_RATIO)
        by_ratio = 0.5 * CURB_POWER * inside ** (CURB_POWER - 1) / math.log(CURB_RATIO)
        return total + inside**CURB_POWER, by_length, by_ratio
