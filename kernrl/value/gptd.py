"""Gaussian-process temporal differences: V with its uncertainty, from r = HV + N."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator

from kernrl import arrays, checks
from kernrl.approx.dictionary import Dictionary
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value import hyperparameters
from kernrl.value.differences import Differences, differences
from kernrl.value.estimator import points, transitions
from kernrl.value.gptd_exact import ExactPosterior
from kernrl.value.gptd_weights import WeightPosterior

Array = Any

NOISE_MODELS = ("returns", "white")
# Variances below −this part of k(x, x) are more than rounding, and are warned about.
NEGATIVE = 1e-8


class GPTD(BaseEstimator):
    """The posterior of V ~ GP(mean, kernel) given rewards r_i = V(s_i) − γV(s'_i) + N_i.

    Terminated rows carry V(s_i) alone; truncated and still open episodes keep −γV(s'_i).
    noise_model "returns": N = HΔ with Δ ~ N(0, σ²) on every visited state, for stochastic
    transitions; on terminated episodes it is GP regression on the discounted returns (Engel, Mannor
    & Meir 2005). "white": N ~ N(0, σ²) on every reward, for deterministic ones (2003). The
    posterior's spread is what the data leave open about V *under this model*, not that of returns.

    kernel: on states; its size k(x, x) is the prior variance. gamma: discount in [0, 1].
    noise: σ² > 0. mean: of V before data; at 0, rewards that are all negative make unseen states
    look good.
    dictionary: a Dictionary for Engel's sparse form, on m atoms, O(n m²). features: RandomFeatures
    or Nystroem for a linear regression in m features, O(n m²). Neither: the exact form, O(n³) work,
    about 40n² bytes (stated before they are taken), O(n²) a prediction with its std.
    optimise: fit kernel and noise by `maximise_likelihood` first, O(n³) a trial, with n_restarts
    more starts from rng.

    `fit` also takes an iterable of chunks. An episode cut between chunks or between calls of
    `partial_fit` goes on if neither flag is set and the new rows begin at its next state.
    `partial_fit` is the exact recursion, O(n²) a row, O(m²) with features: it equals one fit.
    With a dictionary it is Engel's: a state keeps the atoms it was first represented by;
    `fit` represents all states by all atoms.

    Learnt: weights_, support_ (points, atoms or landmarks; None for random features), kernel_,
    noise_, features_, log_marginal_likelihood_ (of the rewards), n_transitions_. Host, float64.

    >>> from kernrl.kernels.stationary import RBF
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
    >>> value, std = GPTD(RBF(1.0), gamma=0.5, noise=0.01).fit(t).predict([[1.0], [9.0]], True)
    >>> value.round(2), std.round(2)
    (array([0.99, 0.  ]), array([0.1, 1. ]))
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        noise: float = 0.1,
        noise_model: str = "returns",
        dictionary: Dictionary | None = None,
        features: Any = None,
        mean: float = 0.0,
        optimise: bool = False,
        n_restarts: int = 0,
        rng: arrays.Seed = None,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.noise = noise
        self.noise_model = noise_model
        self.dictionary = dictionary
        self.features = features
        self.mean = mean
        self.optimise = optimise
        self.n_restarts = n_restarts
        self.rng = rng

    def fit(self, X: Transitions | Iterable[Transitions], y: None = None) -> Self:
        """Learn from transitions in time order, or from an iterable of chunks of them.

        Features are fitted on the first chunks that hold ten times n_components rows, a dictionary
        on the first chunk; the rest is added to them.
        """
        self._check()
        chunks = self._chunks(X)
        head = self._head(chunks)
        self._prepare(head)
        if self.dictionary is None and self.features is None:
            self._posterior = ExactPosterior(head, *self._model())
            return self._conclude(len(head))
        counted = _Counted(itertools.chain([head], chunks))
        self._posterior = WeightPosterior(self.features_, *self._model(), gamma=float(self.gamma))
        if self.dictionary is None:
            self._posterior.absorb(counted)
        else:
            self._posterior.absorb([next(counted)])
            for rows in counted:
                self._posterior.extend(rows)
        return self._conclude(counted.n)

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Add rows to the posterior one by one; the first call sets kernel and features."""
        known = hasattr(self, "_posterior")
        if not known:
            self._check()
        t = transitions(type(self).__name__, X)
        rows = differences(t, self.gamma, self._posterior.end if known else None)
        if known:
            self._require_columns(rows.points)
            self._posterior.extend(rows)
            return self._conclude(self.n_transitions_ + len(rows))
        self._prepare(rows, online=True)
        if self.features_ is None:
            self._posterior = ExactPosterior(rows, *self._model())
        else:
            self._posterior = WeightPosterior(
                self.features_, *self._model(), gamma=float(self.gamma)
            )
            self._posterior.extend(rows)
        return self._conclude(len(rows))

    def predict(self, states: Array, return_std: bool = False) -> Any:  # (q, d) -> (q,)
        """Posterior mean of V, with return_std also its standard deviation, noise not included."""
        x, host = self._query(states)
        mean = arrays.like(self._posterior.values(host), x)
        if not return_std:
            return mean
        return mean, arrays.like(self._deviations(host), x)

    def sample(self, states: Array, n: int = 1, rng: arrays.Seed = None) -> Array:  # -> (n, q)
        """n joint draws of V at the states: whole functions, for Thompson sampling."""
        x, host = self._query(states)
        n = checks.integer(type(self).__name__, "n", n, at_least=1)
        return arrays.like(self._posterior.draws(host, n, arrays.rng(rng)), x)

    def covariance(self, states: Array) -> Array:  # (q, d) -> (q, q)
        """Posterior covariance of V at the states."""
        x, host = self._query(states)
        return arrays.like(self._posterior.covariance(host), x)

    def score(self, X: Transitions, y: None = None) -> float:
        """−mean squared TD error, as of KLSTD: larger is better, comparable on the same data."""
        return -float(np.mean(self.td_errors(X) ** 2))

    def td_errors(self, X: Transitions) -> np.ndarray:  # -> (n,)
        """δ_i = r_i + γV(s'_i) − V(s_i), with V(s') = 0 where terminated."""
        checks.fitted(self, "weights_")
        rows = differences(transitions(type(self).__name__, X), self.gamma)
        self._require_columns(rows.points)
        errors: np.ndarray = rows.rewards - rows.apply(self._posterior.values(rows.points))
        return errors

    # ---------------------------------------------------------------- the parts of a fit

    def _check(self) -> None:
        owner = type(self).__name__
        if not isinstance(self.kernel, Kernel):
            checks.fail(owner, "kernel must be a kernel", repr(self.kernel), error=TypeError)
        checks.real(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        checks.real(owner, "noise", self.noise, above=0.0)
        checks.real(owner, "mean", self.mean)
        checks.choice(owner, "noise_model", self.noise_model, NOISE_MODELS)
        checks.integer(owner, "n_restarts", self.n_restarts, at_least=0)
        checks.features(owner, self.features)
        if self.dictionary is not None:
            _check_dictionary(owner, self.dictionary, self.features)

    def _chunks(self, X: Any) -> Iterator[Differences]:
        owner = type(self).__name__
        if not isinstance(X, Transitions | Iterable):
            transitions(owner, X)  # raises
        end, width = None, None
        for t in [X] if isinstance(X, Transitions) else X:
            rows = differences(transitions(owner, t), self.gamma, end)
            end, width = rows.end, width or rows.points.shape[1]
            if rows.points.shape[1] != width:
                checks.fail(owner, f"states must have {width} columns", rows.points.shape[1])
            yield rows

    def _head(self, chunks: Iterator[Differences]) -> Differences:
        """The first chunks joined: all of them in the exact form."""
        head = next(chunks, None)
        if head is None:
            owner = type(self).__name__
            checks.fail(owner, "there must be at least one chunk of transitions", "none")
        wanted = 10.0 * getattr(self.features, "n_components", 0)
        if self.features is None and self.dictionary is None:
            wanted = np.inf
        while len(head) < wanted and (more := next(chunks, None)) is not None:
            head = head.joined(more)
        return head

    def _prepare(self, rows: Differences, online: bool = False) -> None:
        """Kernel, noise and features from the first rows."""
        self.n_features_in_ = int(rows.points.shape[1])
        self.kernel_, self.noise_ = self.kernel.resolve(rows.points, rng=0), float(self.noise)
        if self.optimise:
            found = hyperparameters.search(
                rows, self.kernel_, self.noise_, self.noise_model, self.mean,
                n_restarts=self.n_restarts, rng=self.rng, owner=type(self).__name__,
            )  # fmt: skip
            self.kernel_, self.noise_ = found.kernel, found.noise
        given = self.dictionary if self.features is None else self.features
        self.features_ = None if given is None else given.with_kernel(self.kernel_)
        if online and self.dictionary is not None:
            self.features_.reset(rows.points[:0])
        elif given is not None:
            self.features_.fit(rows.points if self.features is None else rows.points[rows.here])

    def _model(self) -> tuple[Kernel, float, bool, float]:
        kernel = self.kernel_ if self.features_ is None else self.features_.kernel_
        return kernel, self.noise_, self.noise_model == "returns", float(self.mean)

    def _conclude(self, n: int) -> Self:
        self.n_transitions_ = n
        self.weights_ = self._posterior.weights
        self.log_marginal_likelihood_ = self._posterior.log_likelihood
        self.support_ = self._posterior.support
        return self

    # ---------------------------------------------------------------- the parts of a prediction

    def _query(self, states: Array) -> tuple[Array, np.ndarray]:
        checks.fitted(self, "weights_")
        return query(type(self).__name__, states, self.n_features_in_)

    def _require_columns(self, x: np.ndarray) -> None:
        if x.shape[1] != self.n_features_in_:
            rule = f"states must have {self.n_features_in_} columns"
            checks.fail(type(self).__name__, rule, x.shape[1])

    def _deviations(self, x: np.ndarray) -> np.ndarray:
        variances = self._posterior.variances(x)
        prior = np.asarray(self._posterior.kernel.diagonal(x))
        n_wrong = int(np.count_nonzero(variances < -NEGATIVE * prior))
        if n_wrong:
            checks.warn(
                type(self).__name__,
                f"{n_wrong} of {len(x)} variances were below 0 by more than rounding, "
                f"the least {np.min(variances):.1e}; they were set to 0",
                "Raise noise.",
                checks.ConditionWarning,
            )
        return np.sqrt(np.maximum(variances, 0.0))


def query(owner: str, states: Array, width: int) -> tuple[Array, np.ndarray]:
    """The states in their own library, and on the host in float64."""
    x = points(owner, states)
    if x.shape[1] != width:
        checks.fail(owner, f"states must have {width} columns", int(x.shape[1]))
    return x, np.asarray(arrays.host(x), dtype=np.float64)


class _Counted(Iterator[Differences]):
    """Chunks as they pass, and how many rows have."""

    def __init__(self, chunks: Iterator[Differences]) -> None:
        self.chunks, self.n = chunks, 0

    def __next__(self) -> Differences:
        rows = next(self.chunks)
        self.n += len(rows)
        return rows


def _check_dictionary(owner: str, dictionary: Any, features: Any) -> None:
    if not isinstance(dictionary, Dictionary):
        rule = "dictionary must be a Dictionary"
        checks.fail(owner, rule, repr(dictionary), error=TypeError)
    if features is not None:
        checks.fail(owner, "pass a dictionary or features, not both", "both")
    if dictionary.prune is not None:
        checks.fail(
            owner,
            "the dictionary must not prune: the posterior needs every atom it was told of",
            f"prune={dictionary.prune!r}",
            "Pass prune=None; max_size then closes the dictionary when it is full.",
        )
