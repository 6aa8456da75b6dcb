"""Kernel and noise of a GPTD model by the marginal likelihood of its rewards.

The rewards do not move with the policy or the value function, so unlike a Gaussian process fitted
to TD targets this never chases its own bootstrapping. L-BFGS-B over the logarithms of all
parameters, inside a box that the data set, from several starts; the objective is in `likelihood`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from kernrl import arrays, checks
from kernrl.data.returns import discounted
from kernrl.data.transitions import Transitions
from kernrl.kernels import gradients
from kernrl.kernels.base import Kernel
from kernrl.kernels.gradients import Parameter
from kernrl.value.differences import Differences, differences
from kernrl.value.estimator import transitions
from kernrl.value.gptd_exact import require_memory
from kernrl.value.likelihood import REFUSED, Objective

Array = Any

# The search box, as factors of what the data show: a length scale against the spread of its
# columns, the prior variance (and shapes) and the noise against the mean square of the returns.
LENGTH_BOX, VARIANCE_BOX, SHAPE_BOX, NOISE_BOX = (1e-4, 1e4), (1e-6, 1e6), (1e-3, 1e3), (1e-9, 1e3)
# Where restarts begin, by the same measures.
LENGTH_START, VARIANCE_START, NOISE_START = (0.1, 10.0), (0.1, 10.0), (1e-4, 1.0)


class Likelihood(NamedTuple):
    """The best of all starts."""

    kernel: Kernel
    noise: float
    log_marginal_likelihood: float  # without the curb
    n_evaluations: int  # of all starts
    at_bound: tuple[str, ...]  # parameters that ended at the edge of the search box
    starts: tuple[float, ...]  # what each start reached: log likelihood minus curb


def maximise_likelihood(
    estimator: Any,
    X: Transitions,
    *,
    ard: bool = False,
    n_restarts: int = 0,
    rng: arrays.Seed = None,
    fixed: Sequence[str] = (),
    curb: bool = True,
    max_iter: int = 200,
) -> Likelihood:
    """Kernel and noise that make the rewards most likely under a GPTD's model, in its exact form.

    estimator: a GPTD, fitted or not; it is not changed. ard: give every length scale that is one
    number one per column. n_restarts: starts besides the estimator's own parameters, drawn
    log-uniformly around the scale of the data; the best of all is returned. fixed: parameters that
    stay, as get_params names them, "noise" among them. curb: add a penalty that is flat in any
    sensible region and stops a length scale from growing without end where a column does not
    matter, and the noise from vanishing.
    Every positive number in the kernel is a parameter; without a factor (2.0 * kernel) the prior
    variance stays 1. Warns if a parameter ends at the edge of the search box.
    O(n³) a trial, about 50n² bytes. Kernels without analytic gradients go through GPyTorch's
    kernels and torch's autograd, but never its solvers.

    >>> from kernrl.kernels.stationary import RBF
    >>> from kernrl.value.gptd import GPTD
    >>> x = np.linspace(0, 3, 40)
    >>> t = Transitions(x[:-1], np.sin(2 * x[:-1]), x[1:], np.arange(39) == 38)
    >>> start = GPTD(1.0 * RBF(1.0), gamma=0.5, noise=0.1)
    >>> best = maximise_likelihood(start, t)
    >>> bool(best.log_marginal_likelihood > start.fit(t).log_marginal_likelihood_ + 50)
    True
    """
    owner = "maximise_likelihood"
    rows = differences(transitions(owner, X), estimator.gamma)
    kernel = estimator.kernel.resolve(rows.points, rng=0)
    if ard:
        kernel = gradients.with_ard(kernel, rows.points)
    return search(
        rows, kernel, float(estimator.noise), estimator.noise_model, float(estimator.mean),
        n_restarts=n_restarts, rng=rng, fixed=fixed, curb=curb, max_iter=max_iter, owner=owner,
    )  # fmt: skip


def search(
    rows: Differences,
    kernel: Kernel,
    noise: float,
    noise_model: str,
    mean: float,
    *,
    n_restarts: int = 0,
    rng: arrays.Seed = None,
    fixed: Sequence[str] = (),
    curb: bool = True,
    max_iter: int = 200,
    owner: str = "maximise_likelihood",
) -> Likelihood:
    """`maximise_likelihood` on prepared rows and a resolved kernel."""
    require_memory(owner, rows)
    space = Space(owner, kernel, noise, rows, fixed)
    objective = Objective(rows, kernel, space, noise_model == "returns", mean, curb)
    generator = arrays.rng(rng)
    best, reached = None, []
    for begin in [space.initial, *(space.draw(generator) for _ in range(n_restarts))]:
        run = minimize(
            objective, begin, jac=True, method="L-BFGS-B", bounds=space.bounds,
            options={"maxiter": max_iter},
        )  # fmt: skip
        reached.append(-float(run.fun))
        if best is None or run.fun < best.fun:
            best = run
    return _concluded(owner, objective, best, tuple(reached))


def _concluded(
    owner: str, objective: Objective, best: Any, reached: tuple[float, ...]
) -> Likelihood:
    if not best.fun < REFUSED:
        cure = "Start from another kernel or a larger noise."
        checks.fail(owner, "the likelihood must be finite at some start", "none", cure)
    space, values = objective.space, objective.space.values(best.x)
    at_bound = space.at_bound(best.x)
    if at_bound:
        checks.warn(
            owner,
            f"{', '.join(at_bound)} ended at the edge of the search box",
            "Hold it by fixed=…, or give the data another scale.",
        )
    kernel, noise = objective.model(values)
    likelihood = -float(objective(best.x)[0]) + objective.last_curb
    return Likelihood(kernel, noise, likelihood, objective.n_evaluations - 1, at_bound, reached)


class Space:
    """The free parameters as one vector of logarithms, with its box."""

    def __init__(
        self, owner: str, kernel: Kernel, noise: float, rows: Differences, fixed: Sequence[str]
    ) -> None:
        self.noise, scale = noise, _return_scale(rows)
        every = [*gradients.free_parameters(kernel, rows.points)]
        every.append(Parameter("noise", np.asarray(noise), None))
        for name in fixed:
            checks.choice(owner, "a fixed parameter", name, (p.name for p in every))
        self.parameters = [p for p in every if p.name not in fixed]
        if not self.parameters:
            checks.fail(owner, "at least one parameter must be free", "none")
        boxes = [_box(p, scale) for p in self.parameters]
        self.bounds = [tuple(np.log(b)) for p, box in zip(self.parameters, boxes, strict=True)
                       for b in _each(p, box[0])]  # fmt: skip
        self._begin = np.log([b for p, box in zip(self.parameters, boxes, strict=True)
                              for b in _each(p, box[1])])  # fmt: skip
        low, high = np.transpose(self.bounds)
        self.initial = np.clip(np.log(self._flat([p.value for p in self.parameters])), low, high)

    def draw(self, rng: np.random.Generator) -> Array:
        """A start drawn log-uniformly, within a factor or so of the scale of the data."""
        low, high = self._begin.T
        return low + (high - low) * rng.random(len(low))

    def values(self, theta: Array) -> dict[str, Array]:
        """Parameters by name."""
        flat, out, start = np.exp(theta), {}, 0
        for p in self.parameters:
            out[p.name] = flat[start : start + p.value.size].reshape(p.value.shape)
            start += p.value.size
        return out

    def gradient(self, by_name: dict[str, Array]) -> Array:
        """Derivatives by name as one vector; those of fixed parameters drop out."""
        return self._flat([by_name[p.name] for p in self.parameters])

    def at_bound(self, theta: Array) -> tuple[str, ...]:
        """Names of the parameters with an entry at the edge."""
        low, high = np.transpose(self.bounds)
        entries = np.repeat(
            np.arange(len(self.parameters)), [p.value.size for p in self.parameters]
        )
        touched = set(entries[(theta <= low) | (theta >= high)].tolist())
        return tuple(p.name for k, p in enumerate(self.parameters) if k in touched)

    @staticmethod
    def _flat(parts: list[Array]) -> Array:
        return np.concatenate([np.ravel(part) for part in parts])


def _return_scale(rows: Differences) -> float:
    """Mean square of the discounted returns: the size of V² that the rewards suggest."""
    gamma = float(np.max(rows.discount))
    square = float(np.mean(discounted(rows.rewards, gamma, rows.starts) ** 2))
    return square if square > 0 else 1.0


def _box(p: Parameter, scale: float) -> tuple[Array, Array]:
    """(low, high) of the search and of restarts, each (2,) or (2, d)."""
    if p.spread is not None:
        return np.multiply.outer(LENGTH_BOX, p.spread), np.multiply.outer(LENGTH_START, p.spread)
    if p.name == "noise":
        return scale * np.asarray(NOISE_BOX), scale * np.asarray(NOISE_START)
    if p.name.split("__")[-1] in ("factor", "variance"):
        return scale * np.asarray(VARIANCE_BOX), scale * np.asarray(VARIANCE_START)
    box = np.multiply.outer(SHAPE_BOX, p.value)
    return box, np.multiply.outer((0.3, 3.0), p.value)


def _each(p: Parameter, box: Array) -> Array:  # -> (size, 2)
    """One (low, high) an entry."""
    shape = (2, *p.value.shape)
    wide = np.broadcast_to(box.reshape(2, *box.shape[1:]), shape)
    return wide.reshape(2, -1).T
