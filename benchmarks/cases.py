"""What is timed, and against whom. A peer that is no dependency is timed where installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import gymnasium as gym
import numpy as np

from benchmarks import gptd, kernels, ops
from benchmarks.timing import Case
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.collect import Sampler
from kernrl.data.transitions import Transitions
from kernrl.kernels.gram import gram
from kernrl.kernels.stationary import RBF
from kernrl.value.lstd import KLSTD


def rows(n: int, d: int) -> np.ndarray:
    """n standard normal rows, the same in every run."""
    return np.random.default_rng(0).standard_normal((n, d))


def gram_matrix() -> Case:
    """An RBF Gram matrix, 4000 × 4000 in ten dimensions, float64."""
    import gpytorch
    import torch
    from sklearn.metrics.pairwise import rbf_kernel

    x, y = rows(4000, 10), rows(8000, 10)[4000:]
    peer = gpytorch.kernels.RBFKernel()
    peer.lengthscale = 1.5
    a, b = torch.from_numpy(x), torch.from_numpy(y)

    def by_gpytorch() -> None:
        with torch.no_grad():
            peer.double()(a, b).to_dense()

    return Case(
        "RBF Gram matrix 4000 × 4000, d = 10",
        len(x) * len(y),
        "entries",
        {
            "kernrl": lambda: gram(RBF(1.5), x, y),
            "scikit-learn": lambda: rbf_kernel(x, y, gamma=0.5 / 1.5**2),
            "gpytorch": by_gpytorch,
        },
    )


def nystroem() -> Case:
    """Nyström features: 300 uniform landmarks of 20 000 rows, fitted and applied."""
    from sklearn.kernel_approximation import Nystroem as Peer

    x = rows(20_000, 8)
    ours = Nystroem(RBF(2.0), 300, landmarks="uniform", rng=0)
    peer = Peer(gamma=0.5 / 2.0**2, n_components=300, random_state=0)
    return Case(
        "Nyström features 20 000 → 300, d = 8",
        len(x),
        "rows",
        {"kernrl": lambda: ours.fit(x).transform(x), "scikit-learn": lambda: peer.fit_transform(x)},
    )


def random_features() -> Case:
    """1 000 random Fourier features of 20 000 rows, independent frequencies."""
    from sklearn.kernel_approximation import RBFSampler

    x = rows(20_000, 8)
    ours = RandomFeatures(RBF(2.0), 1000, method="iid", rng=0)
    peer = RBFSampler(gamma=0.5 / 2.0**2, n_components=1000, random_state=0)
    return Case(
        "random features 20 000 → 1 000, d = 8",
        len(x),
        "rows",
        {"kernrl": lambda: ours.fit(x).transform(x), "scikit-learn": lambda: peer.fit_transform(x)},
    )


def lstd() -> Case:
    """KLSTD on 20 000 transitions with 300 landmarks, against the textbook in NumPy."""
    x = rows(20_001, 8)
    states, following = x[:-1], x[1:]
    rewards, ended = states[:, 0].copy(), np.zeros(20_000, bool)
    data = Transitions(states, rewards, following, ended)
    features = Nystroem(RBF(2.0), 300, landmarks="uniform", rng=0)

    def textbook() -> None:
        z = states[np.random.default_rng(0).choice(len(states), 300, replace=False)]

        def k(a: np.ndarray) -> np.ndarray:
            sq = (a**2).sum(1)[:, None] - 2 * a @ z.T + (z**2).sum(1)
            return np.exp(-0.5 * sq / 2.0**2)

        phi, ahead = k(states), k(following)
        a = phi.T @ (phi - 0.99 * ahead) + len(states) * 1e-3 * k(z)
        np.linalg.solve(a, phi.T @ rewards)

    return Case(
        "KLSTD 20 000 transitions, 300 landmarks",
        len(data),
        "transitions",
        {"kernrl": lambda: KLSTD(RBF(2.0), features=features).fit(data), "NumPy": textbook},
    )


def stepping() -> Case:
    """20 000 random steps of CartPole: what the sampler costs over a bare loop."""
    n = 20_000

    def sampler() -> None:
        with Sampler("CartPole-v1", seed=0) as world:
            actions = np.random.default_rng(0).integers(2, size=(n, 1))
            for action in actions:
                world.step(action)

    def bare() -> None:
        env = gym.make("CartPole-v1")
        env.reset(seed=0)
        for action in np.random.default_rng(0).integers(2, size=n):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return Case("CartPole-v1 stepping", n, "steps", {"kernrl": sampler, "gymnasium": bare})


def ppo() -> Case:
    """PPO's defaults on CartPole for ten rollouts, one torch thread."""
    from kernrl.deep.ppo import PPO

    n = 20_480
    contenders: dict[str, Callable[[], object]] = {
        "kernrl": lambda: PPO(rng=0).fit("CartPole-v1", n)
    }
    if importlib.util.find_spec("stable_baselines3") is not None:
        import torch
        from stable_baselines3 import PPO as Peer

        torch.set_num_threads(1)
        contenders["stable-baselines3"] = lambda: Peer("MlpPolicy", "CartPole-v1").learn(n)
    return Case("PPO CartPole-v1, 20 480 steps", n, "steps", contenders, repeats=1)


CASES = (
    gram_matrix,
    nystroem,
    random_features,
    lstd,
    *kernels.CASES,
    *gptd.CASES,
    *ops.CASES,
    stepping,
    ppo,
)


def cases(only: str = "") -> Iterator[Case]:
    """The cases whose module or function name contains `only`, built one at a time."""
    return (make() for make in CASES if only in f"{make.__module__}.{make.__name__}")
