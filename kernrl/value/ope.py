"""What a policy is worth, from data of another: one call, one number, one interval.

Every method here is a statistic of sums over episodes, so that a bootstrap over episodes is a
matrix product followed by one small solve a resample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from scipy.special import ndtr
from scipy.stats import t as student

from kernrl import arrays, checks
from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta, Kernel
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value.estimator import transitions as checked
from kernrl.value.importance import WEIGHTED, weighted_statistic
from kernrl.value.system_sums import RIDGES, SOLUTIONS, system_statistic

Array = Any
Statistic = Callable[[np.ndarray], np.ndarray]  # (b, units) counts -> (b,) values

FEWEST_EPISODES = 3  # as for the runs of an experiment
MANY_EPISODES = 10  # from here on quantiles of the bootstrap distribution beat its spread
DEFAULT_LANDMARKS = 200


@dataclass(frozen=True)
class Estimate:
    """The value of a policy with its interval, how both were made, and from how many units.

    low and high are None where no interval was asked for.

    >>> print(Estimate(2.0, 1.5, 2.5, "lstdq, bootstrap t over episodes", 8, 0.95))
    2 in [1.5, 2.5] (95 %, lstdq, bootstrap t over episodes, n = 8)
    """

    value: float
    low: float | None
    high: float | None
    method: str
    n: int
    level: float | None = 0.95

    def __str__(self) -> str:
        if self.low is None or self.level is None:
            return f"{self.value:.4g} ({self.method}, n = {self.n})"
        percent = f"{100 * self.level:.3g} %"
        inside = f"[{self.low:.4g}, {self.high:.4g}]"
        return f"{self.value:.4g} in {inside} ({percent}, {self.method}, n = {self.n})"


def estimate_return(
    transitions: Transitions,
    policy: Any,
    *,
    method: str = "lstdq",
    kernel: Kernel | None = None,
    gamma: float = 0.99,
    ridge: float | None = None,
    features: Any = None,
    initial_states: Array = None,
    behaviour: Any = None,
    level: float | None = 0.95,
    n_resamples: int = 500,
    rng: arrays.Seed = None,
) -> Estimate:
    """The expected discounted return of `policy` from its initial states, with an interval.

    method: with a kernel, "lstdq" (KLSTDQ), "fqe" (KernelFQE), "mql" (MQL) or "mwl" (MWL), in
    their feature form: E Q(s₀, π), or Σ w r / n(1 − γ). By importance sampling of whole episodes,
    with ρ the products of π(a|s) / b(a|s): "is" mean ρ_T Σ γᵗr_t; "pdis" mean Σ γᵗρ_t r_t; "wis"
    Σ ρG / Σ ρ, biased and calmer. Precup, Sutton & Singh (2000); Uehara, Huang & Jiang (2020).

    policy: None (next_actions of the data), a callable s ↦ actions or probabilities (n, a), or an
    object with `predict`. kernel: on rows (s, a); None is an RBF with the median length scale on
    states, times Delta on discrete actions or the same RBF on others. ridge: None is 1e-5, and
    1e-10 for mql and mwl. features: None is Nystroem with 200 landmarks, or all rows if fewer,
    which is then the exact form. initial_states: (k, d), every one as likely; None is the states
    that the episodes of the data start from. behaviour: what took the data's actions, as
    probabilities of those (n,) or a callable s ↦ (n, a); for is, pdis and wis only.

    The interval is a bootstrap over episodes: they are drawn with replacement, kernel, landmarks
    and given initial states stay, and the method is solved again on each of `n_resamples` draws.
    Under 10 episodes value ± t·√(n/(n−1))·(spread of the draws), from there on quantiles of the
    draws, widened as in Hesterberg (2015). It covers the noise of the data, not the bias of
    ridge, kernel or missing actions; of these a warning tells. Where sums of all episodes would not
    fit, neighbouring episodes are drawn together in groups; `Estimate.method` and `n` say so.
    level=None: no interval. Raises under 3 episodes. rng=None is seed 0: the same data, the same
    numbers. Cost: O(n m²) once, and m³ a draw.

    >>> from kernrl.data.transitions import Transitions
    >>> rng = np.random.default_rng(0)
    >>> s, a = rng.normal(size=(40, 1)), rng.integers(2, size=40)
    >>> t = Transitions(s, s[:, 0] + a, s, np.ones(40), actions=a)  # forty episodes of one step
    >>> right = lambda states: np.ones(len(states), dtype=int)
    >>> estimate = estimate_return(t, right, initial_states=[[0.0]], ridge=1e-6)
    >>> round(estimate.value, 2), estimate.n
    (1.0, 40)
    """
    owner = "estimate_return"
    t = checked(owner, transitions)
    checks.choice(owner, "method", method, (*SOLUTIONS, *WEIGHTED))
    gamma = checks.real(owner, "gamma", gamma, at_least=0.0, at_most=1.0)
    if t.actions is None:
        checks.fail(owner, "the transitions must have actions", "none")
    _check_interval(owner, t, level, n_resamples)
    generator = arrays.rng(0 if rng is None else rng)
    if method in WEIGHTED:
        statistic, n, unit = weighted_statistic(
            owner, t, policy, behaviour, initial_states, method, gamma
        )
    else:
        kernel = _default_kernel(t) if kernel is None else kernel
        if features is None:
            seed = arrays.fresh_seed(generator)
            features = Nystroem(n_components=min(len(t), DEFAULT_LANDMARKS), rng=seed)
        ridge = checks.real(owner, "ridge", RIDGES[method] if ridge is None else ridge, at_least=0)
        statistic, n, unit = system_statistic(
            owner, t, policy, kernel, features, initial_states, method, gamma, ridge
        )
    value = float(statistic(np.ones((1, n)))[0])
    if not np.isfinite(value):
        _no_value(owner, method)
    if level is None:
        return Estimate(value, None, None, method, n, None)
    draws = _resample(statistic, n, n_resamples, generator)
    low, high, how = _interval(value, draws, n, level)
    return Estimate(value, low, high, f"{method}, {how} over {unit}", n, level)


def _no_value(owner: str, method: str) -> NoReturn:
    if method in WEIGHTED:
        rule = "the policy must be able to make one of the episodes at least"
        checks.fail(owner, rule, "weights that are all 0", "Use a method with a kernel.")
    cure = "Raise ridge, lower gamma, or use method='lstdq'."
    checks.fail(owner, "the iteration of fqe must contract", "one that diverges", cure)


def _check_interval(owner: str, t: Transitions, level: float | None, n_resamples: int) -> None:
    if level is None:
        return
    checks.real(owner, "level", level, above=0.0, below=1.0)
    checks.integer(owner, "n_resamples", n_resamples, at_least=100)
    n = int(np.count_nonzero(arrays.host(t.episode_starts)))
    if n < FEWEST_EPISODES:
        cure = "Pass level=None for the value alone, or more episodes."
        checks.fail(owner, f"an interval needs at least {FEWEST_EPISODES} episodes", n, cure)


def _default_kernel(t: Transitions) -> Kernel:
    xp = arrays.namespace(t.actions)
    width = 1 if t.actions.ndim == 1 else int(t.actions.shape[1])
    continuous = xp.isdtype(t.actions.dtype, "real floating")
    return StateAction(RBF("median"), RBF("median") if continuous else Delta(), width)


def _resample(
    statistic: Statistic, n: int, n_resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """The statistic of `n_resamples` draws of n units out of n."""
    counts = generator.multinomial(n, np.full(n, 1.0 / n), size=n_resamples)
    # Hundreds of small solves: the threads of BLAS would spend their time waiting for each other.
    with warnings.catch_warnings(), arrays.single_threaded_blas():
        warnings.simplefilter("ignore", checks.ConditionWarning)  # the value itself has warned
        return statistic(counts.astype(np.float64))


def _interval(value: float, draws: np.ndarray, n: int, level: float) -> tuple[float, float, str]:
    """A draw without a value (an iteration that diverged on it) lies beyond both ends."""
    quantile = float(student.ppf((1 + level) / 2, n - 1) * np.sqrt(n / (n - 1)))
    if n < MANY_EPISODES:
        half = quantile * float(draws.std()) if np.all(np.isfinite(draws)) else np.inf
        return value - half, value + half, "bootstrap t"
    lost = ~np.isfinite(draws)
    low = np.quantile(np.where(lost, -np.inf, draws), ndtr(-quantile), method="lower")
    high = np.quantile(np.where(lost, np.inf, draws), ndtr(quantile), method="higher")
    return float(low), float(high), "bootstrap, expanded percentile"
