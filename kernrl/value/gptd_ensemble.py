"""Several GPTD models in one, each weighted by how well it predicted the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from scipy.special import logsumexp
from sklearn.base import BaseEstimator

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.estimator import transitions
from kernrl.value.gptd import GPTD, query

Array = Any


class GPTDEnsemble(BaseEstimator):
    """One GPTD a kernel; V is their mixture, with weights ∝ p_j(r), the predictive likelihood.

    w_j ∝ w_j⁰ Π_t p_j(r_t | r_1 … r_{t−1}): the product is the marginal likelihood of the rewards,
    so after any number of rows the weights are the posterior of the kernels. With random features a
    row costs O(J m²), whatever came before (Lu & Giannakis 2021, OS-GPTD).

    kernels: J kernels on states. prior: J weights before data, uniform if None. The other
    parameters are those of every GPTD; features=None makes the exact forms, O(J n³).
    Learnt: estimators_ (J fitted GPTD), mixture_ (J,) weights that sum to 1,
    log_marginal_likelihood_ (of the mixture), n_transitions_.

    >>> from kernrl.kernels.stationary import RBF
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [2.0]], [False, True])
    >>> GPTDEnsemble([RBF(0.1), RBF(100.0)], gamma=0.5, noise=0.01).fit(t).mixture_.round(2)
    array([0.98, 0.02])
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        gamma: float = 0.99,
        noise: float = 0.1,
        noise_model: str = "returns",
        features: Any = None,
        mean: float = 0.0,
        prior: Array = None,
    ) -> None:
        self.kernels = kernels
        self.gamma = gamma
        self.noise = noise
        self.noise_model = noise_model
        self.features = features
        self.mean = mean
        self.prior = prior

    def fit(self, X: Transitions, y: None = None) -> Self:
        """Fit every model and weigh it."""
        transitions("GPTDEnsemble", X)
        self.estimators_ = self._fresh()
        return self._weigh([model.fit(X) for model in self.estimators_])

    def partial_fit(self, X: Transitions, y: None = None) -> Self:
        """Add rows to every model and weigh them anew: the same as one fit on all rows."""
        transitions("GPTDEnsemble", X)
        if not hasattr(self, "estimators_"):
            self.estimators_ = self._fresh()
        return self._weigh([model.partial_fit(X) for model in self.estimators_])

    def predict(self, states: Array, return_std: bool = False) -> Any:  # (q, d) -> (q,)
        """Mean of the mixture; its variance is that within the models plus that between them."""
        self._check_query(states)
        if not return_std:
            return self._mixed([model.predict(states) for model in self.estimators_])
        means, deviations = zip(
            *(model.predict(states, True) for model in self.estimators_), strict=True
        )
        xp, mean = arrays.namespace(means[0]), self._mixed(means)
        variance = self._mixed(
            [(m - mean) ** 2 + s**2 for m, s in zip(means, deviations, strict=True)]
        )
        return mean, xp.sqrt(variance)

    def sample(self, states: Array, n: int = 1, rng: arrays.Seed = None) -> Array:  # -> (n, q)
        """n joint draws of V: a model by its weight, then a function of it."""
        self._check_query(states)
        n = checks.integer("GPTDEnsemble", "n", n, at_least=1)
        generator = arrays.rng(rng)
        counts = generator.multinomial(n, self.mixture_)
        draws = [
            model.sample(states, int(k), generator)
            for model, k in zip(self.estimators_, counts, strict=True)
            if k
        ]
        xp = arrays.namespace(draws[0])
        order = arrays.like(generator.permutation(n), draws[0], xp.int64)
        return xp.take(xp.concat(draws, axis=0), order, axis=0)

    def score(self, X: Transitions, y: None = None) -> float:
        """−mean squared TD error of the mixture's mean."""
        return -float(np.mean(self.td_errors(X) ** 2))

    def td_errors(self, X: Transitions) -> np.ndarray:  # -> (n,)
        """δ_i = r_i + γV(s'_i) − V(s_i) of the mixture's mean, with V(s') = 0 where terminated."""
        checks.fitted(self, "mixture_")
        return np.asarray(self._mixed([model.td_errors(X) for model in self.estimators_]))

    # ---------------------------------------------------------------- its parts

    def _check_query(self, states: Array) -> None:
        checks.fitted(self, "mixture_")
        query("GPTDEnsemble", states, self.n_features_in_)

    def _fresh(self) -> list[GPTD]:
        if isinstance(self.kernels, Kernel) or not len(self.kernels):
            checks.fail("GPTDEnsemble", "kernels must be a list of kernels", repr(self.kernels))
        self._log_prior()
        return [
            GPTD(k, self.gamma, self.noise, self.noise_model, None, self.features, self.mean)
            for k in self.kernels
        ]

    def _log_prior(self) -> np.ndarray:  # (J,)
        count = len(self.kernels)
        if self.prior is None:
            return np.full(count, -np.log(count))
        prior = np.asarray(arrays.take("GPTDEnsemble", "prior", self.prior), dtype=np.float64)
        if prior.shape != (count,) or not np.all(np.isfinite(prior) & (prior > 0)):
            rule = f"prior must hold {count} positive weights"
            checks.fail("GPTDEnsemble", rule, self.prior)
        return np.asarray(np.log(prior / np.sum(prior)))

    def _weigh(self, models: list[GPTD]) -> Self:
        likelihoods = np.array([model.log_marginal_likelihood_ for model in models])
        joint = self._log_prior() + likelihoods
        self.log_marginal_likelihood_ = float(logsumexp(joint))
        self.mixture_ = np.exp(joint - self.log_marginal_likelihood_)
        self.n_transitions_ = models[0].n_transitions_
        self.n_features_in_ = models[0].n_features_in_
        return self

    def _mixed(self, parts: Sequence[Array]) -> Array:
        return sum(float(w) * part for w, part in zip(self.mixture_, parts, strict=True))
