"""C7: how fast KLSTD learns, against the rate of kernel TD (Duan, Wang & Wainwright, 2024)."""

from dataclasses import dataclass

import numpy as np
import pytest

from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.lstd import KLSTD

# At γ = 0.9 the first mode alone, a parametric error, would hide the rate at these n.
GAMMA, SPREAD, NOISE = 0.5, 0.1, 0.5
MODES = np.arange(1, 60)


@dataclass(frozen=True, eq=False)
class Sobolev(Kernel):
    """1 + Σ_j 2cos(2πj(x − y))/(2πj)² = 1 + B₂(|x − y|)/2 on the circle: one square derivative."""

    def _section(self, xp, z):
        def tile(x):
            u = xp.abs(x[:, 0, None] - z[None, :, 0])
            return 1.0 + (u * u - u + 1 / 6) / 2

        return tile

    def _diagonal(self, xp, x):
        return xp.full((x.shape[0],), 1.0 + 1 / 12, dtype=x.dtype)


def cosines(x):  # (n,) -> (n, j): orthonormal in the uniform distribution
    return np.sqrt(2) * np.cos(2 * np.pi * MODES * np.asarray(x)[:, None])


REWARD = MODES**-2.0
VALUE = REWARD / (1 - GAMMA * np.exp(-2 * np.pi**2 * SPREAD**2 * MODES**2))


def squared_errors(n, ridges, seed):
    """Mean squared error of V on a grid, for each ridge; states uniform, x' = x + 0.1ξ mod 1."""
    rng = np.random.default_rng(seed)
    x = rng.random(n)
    after = (x + SPREAD * rng.normal(size=n)) % 1.0
    rewards = cosines(x) @ REWARD + NOISE * rng.normal(size=n)
    t = Transitions(x, rewards, after, np.zeros(n))
    grid = np.linspace(0, 1, 200, endpoint=False)
    v = cosines(grid) @ VALUE
    return [
        np.mean((KLSTD(Sobolev(), GAMMA, r, solver="direct").fit(t).predict(grid) - v) ** 2)
        for r in ridges
    ]


def test_the_kernel_is_its_series():
    x = np.linspace(0, 0.97, 23)
    j = np.arange(1, 200_000)
    u = x[7] - x[2]
    series = 1 + np.sum(2 * np.cos(2 * np.pi * j * u) / (2 * np.pi * j) ** 2)
    assert Sobolev()(x[:, None])[7, 2] == pytest.approx(series, abs=1e-6)


@pytest.mark.slow
def test_the_rate_of_the_smoothness_of_the_rewards():
    """Rewards r_j = j⁻² have 1.5 derivatives: the error falls like n^(−3/4); best λ, 8 seeds."""
    sizes = np.array([100, 200, 400, 800, 1600])
    errors = []
    for n in sizes:
        ridges = np.geomspace(2e-4, 3e-3, 5) * (n / 100) ** -0.5
        table = np.mean([squared_errors(n, ridges, seed) for seed in range(8)], axis=0)
        assert 0 < np.argmin(table) < 4, "the best ridge lies within the grid"
        errors.append(np.min(table))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -0.95 < slope < -0.65  # 1/n, a parametric rate, and n^(−1/2) lie outside
