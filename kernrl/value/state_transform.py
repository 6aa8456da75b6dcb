"""scikit-learn's transformers of states as the first steps of a pipeline on transitions."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin, clone

from kernrl import arrays, checks
from kernrl.data.transitions import Transitions
from kernrl.value.estimator import points, transitions

Array = Any


class StateTransform(TransformerMixin, BaseEstimator):
    """A transformer of states, fitted on s and applied to s and s' alike: (s, s') ↦ (T(s), T(s')).

    transformer: anything with fit and transform on rows, StandardScaler() say; cloned, never
    changed. `transform` takes transitions, for fit and score, or states (n, d), for predict, so
    that a pipeline of it and an estimator of V is an estimator of V, which grid searches can tune.
    Rewards, actions, flags and episodes stay. On the host, in NumPy.

    Learnt: transformer_.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import MinMaxScaler
    >>> from kernrl.kernels.base import Delta
    >>> from kernrl.value.lstd import KLSTD
    >>> t = Transitions([[0.0], [8.0]], [0.0, 1.0], [[8.0], [8.0]], [False, True])
    >>> model = make_pipeline(StateTransform(MinMaxScaler()), KLSTD(Delta(), 0.5, ridge=0.0))
    >>> model.fit(t).predict([[0.0], [8.0]])
    array([0.5, 1. ])
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def fit(self, X: Transitions, y: None = None) -> Self:
        """Fit a clone of the transformer on the states."""
        t = transitions("StateTransform", X)
        if not (hasattr(self.transformer, "fit") and hasattr(self.transformer, "transform")):
            rule = "transformer must have fit and transform"
            cure = "Pass StandardScaler(), say."
            checks.fail("StateTransform", rule, repr(self.transformer), cure, TypeError)
        self.n_features_in_ = int(t.states.shape[1])
        self.transformer_ = clone(self.transformer).fit(arrays.host(t.states))
        return self

    def transform(self, X: Transitions | Array) -> Transitions | np.ndarray:
        """Transitions with both kinds of states transformed, or transformed states (n, d')."""
        checks.fitted(self, "transformer_")
        if not isinstance(X, Transitions):
            return self._transformed(points("StateTransform", X))
        here, ahead = (self._transformed(x) for x in (X.states, X.next_states))
        host = {k: None if x is None else arrays.host(x) for k, x in X.columns.items()}
        return Transitions(**{**host, "states": here, "next_states": ahead})

    def _transformed(self, x: Array) -> np.ndarray:  # (n, d) -> (n, d')
        width = int(x.shape[1])
        if width != self.n_features_in_:
            rule = f"states must have {self.n_features_in_} columns"
            checks.fail("StateTransform", rule, width)
        return np.asarray(self.transformer_.transform(arrays.host(x)))
