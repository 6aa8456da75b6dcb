"""Kernel matrices and the two large solves, beside scikit-learn, torch and KeOps.

Figures: benchmarks/README.md. Memory is what the process' peak grows by, measured in a process of
its own by `python -m benchmarks.kernels CASE LIBRARY`, so that contenders do not share a peak.
"""

from __future__ import annotations

import importlib.util
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.timing import Case
from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.gram import gram, matvec
from kernrl.kernels.stationary import RBF
from kernrl.value.lstd import KLSTD

SCALE = 2.0
SKLEARN_GAMMA = 0.5 / SCALE**2
RIDGE = 1e-6  # times n: scikit-learn's alpha


def rows(n: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """n standard normal rows in eight dimensions."""
    return np.random.default_rng(seed).standard_normal((n, 8), dtype=np.float32).astype(dtype)


def gram_float32() -> Case:
    """An RBF Gram matrix 8000 × 2000, d = 8, float32."""
    import torch
    from sklearn.metrics.pairwise import rbf_kernel

    x, z = rows(8000), rows(2000, seed=1)
    a, b = torch.from_numpy(x), torch.from_numpy(z)
    return Case(
        "RBF Gram matrix 8000 × 2000, d = 8, float32",
        len(x) * len(z),
        "entries",
        {
            "kernrl": lambda: gram(RBF(SCALE), x, z),
            "scikit-learn": lambda: rbf_kernel(x, z, gamma=SKLEARN_GAMMA),
            "torch": lambda: torch.cdist(a, b).pow_(2).mul_(-SKLEARN_GAMMA).exp_(),
        },
        repeats=15,
    )


def gram_vector() -> Case:
    """K(x, z) w for 8000 × 2000 pairs, nothing stored."""
    x, z = rows(8000), rows(2000, seed=1)
    w = np.random.default_rng(2).standard_normal(2000, dtype=np.float32)
    contenders: dict[str, Callable[[], object]] = {"kernrl": lambda: matvec(RBF(SCALE), x, z, w)}
    if importlib.util.find_spec("pykeops") is None:
        print("  pykeops: not timed, since it is not installed")
    else:
        from pykeops.numpy import LazyTensor

        distance = ((LazyTensor(x[:, None]) - LazyTensor(z[None])) ** 2).sum(-1)
        contenders["pykeops"] = lambda: (-SKLEARN_GAMMA * distance).exp() @ w[:, None]
    return Case(
        "RBF Gram · vector 8000 × 2000, d = 8, float32, nothing stored",
        len(x) * len(z),
        "pairs",
        contenders,
        repeats=15,
    )


def _regression(dtype: Any, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows and noisy targets to learn from, rows and true values to be judged on."""

    def truth(x: np.ndarray) -> np.ndarray:
        return np.sin(x[:, 0]) + 0.5 * np.cos(2 * x[:, 1]) * x[:, 2]

    x, test = rows(n, dtype), rows(5000, dtype, seed=1)
    noise = 0.1 * np.random.default_rng(2).standard_normal(n)
    return x, (truth(x) + noise).astype(dtype), test, truth(test)


def _ridge(dtype: Any, n: int = 100_000, m: int = 1000) -> Case:
    """Kernel ridge regression: KLSTD at γ = 0 is that, so the comparison is of equals.

    Raises where the two do not predict equally well.
    """
    from sklearn.kernel_approximation import Nystroem as Peer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline

    x, y, test, truth = _regression(dtype, n)
    data = Transitions(x, y, x, np.ones(n, bool))
    features = Nystroem(RBF(SCALE), m, landmarks="uniform", rng=0)
    reached: dict[str, float] = {}

    def judged(name: str, predicted: np.ndarray) -> None:
        reached[name] = float(np.sqrt(np.mean((predicted - truth) ** 2)))
        if max(reached.values()) > 1.05 * min(reached.values()):
            raise AssertionError(f"different errors: {reached}")

    def ours() -> None:
        model = KLSTD(RBF(SCALE), gamma=0.0, ridge=RIDGE, features=features).fit(data)
        judged("kernrl", model.predict(test))

    def theirs() -> None:
        maps = Peer(gamma=SKLEARN_GAMMA, n_components=m, random_state=0)
        model = make_pipeline(maps, Ridge(alpha=RIDGE * n, fit_intercept=False)).fit(x, y)
        judged("scikit-learn", model.predict(test))

    return Case(
        f"Nyström ridge {n} rows, {m} landmarks, d = 8, {np.dtype(dtype)}",
        n,
        "rows",
        {"kernrl": ours, "scikit-learn": theirs},
        repeats=3,
    )


def ridge_float64() -> Case:
    """Nyström kernel ridge in float64."""
    return _ridge(np.float64)


def ridge_float32() -> Case:
    """Nyström kernel ridge in float32."""
    return _ridge(np.float32)


def _lstd(n: int) -> Case:
    states = rows(n)
    following = 0.9 * states + 0.3 * rows(n, seed=1)
    data = Transitions(states, states[:, 0].copy(), following, np.arange(n) % 200 == 199)
    features = Nystroem(RBF(SCALE), 1000, landmarks="uniform", rng=0)
    return Case(
        f"KLSTD {n} transitions, 1000 landmarks, d = 8, float32 tiles",
        n,
        "transitions",
        {"kernrl": lambda: KLSTD(RBF(SCALE), features=features).fit(data)},
        repeats=1,
    )


def lstd_hundred_thousand() -> Case:
    """KLSTD on 100 000 transitions: a third and a tenth of the next two, if time is linear."""
    return _lstd(100_000)


def lstd_three_hundred_thousand() -> Case:
    """KLSTD on 300 000 transitions."""
    return _lstd(300_000)


def lstd_million() -> Case:
    """KLSTD on a million transitions, 1000 landmarks."""
    return _lstd(1_000_000)


CASES = (
    gram_float32,
    gram_vector,
    ridge_float64,
    ridge_float32,
    lstd_hundred_thousand,
    lstd_three_hundred_thousand,
    lstd_million,
)


def _peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """One contender of one case once, in this process: seconds, CPU seconds, growth of the peak."""
    case = {make.__name__: make for make in CASES}[sys.argv[1]]()
    small = {
        "ridge_float64": _ridge(np.float64, 4000, 50),
        "ridge_float32": _ridge(np.float32, 4000, 50),
    }
    warm = small.get(sys.argv[1], _lstd(4000)).contenders.get(sys.argv[2])
    if warm is not None:
        warm()  # imports and thread pools are not the case's memory
    before, wall, cpu = _peak(), time.perf_counter(), time.process_time()
    case.contenders[sys.argv[2]]()
    print(
        f"{case.name} | {sys.argv[2]} | {time.perf_counter() - wall:.3f} s | "
        f"{time.process_time() - cpu:.3f} CPU s | {_peak() - before:.0f} MB more"
    )


if __name__ == "__main__":
    main()
