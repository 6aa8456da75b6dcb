"""What online estimators on a dictionary share: states offered as they come, one episode at a time.

φ(s) = L⁻¹k_D(s) with L Lᵀ = K_DD: coordinates of the projection of k(s, ·) on the atoms. An atom
that joins adds a coordinate, in which every function of before is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone

from kernrl import arrays, checks
from kernrl.approx.dictionary import Dictionary
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Kernel
from kernrl.value.estimator import points
from kernrl.value.system import state_rows, values

Array = Any


class Online:
    """Estimators of V that learn row by row on the host: RecursiveKLSTD, KernelTD."""

    kernel: Kernel
    device = "cpu"
    _owner: str
    n_features_in_: int
    features_: Any
    kernel_: Kernel
    support_: np.ndarray | None
    weights_: np.ndarray
    _next: np.ndarray | None

    _rows = staticmethod(state_rows)

    def predict(self, states: Array) -> Array:  # (q, d) -> (q,)
        """V(s) for each row, in the library of `states`; O(qm)."""
        checks.fitted(self, "weights_")
        return self._values(points(self._owner, states))

    def _values(self, z: Array) -> Array:  # (q, d) -> (q,)
        self._check_width(z)
        features = None if self._grows else self.features_  # weights on a dictionary are on atoms
        return values(self.kernel_, features, self.support_, self.weights_, z)

    def _check_width(self, states: Array) -> None:
        width = int(states.shape[1])
        if width != self.n_features_in_:
            checks.fail(self._owner, f"states must have {self.n_features_in_} columns", width)

    def _prepare_features(self, features: Any, states: np.ndarray) -> None:
        """An empty dictionary, or a feature map fitted on `states`."""
        self.n_features_in_, self.n_transitions_ = int(states.shape[1]), 0
        kernel = features.kernel or self.kernel
        self.kernel_ = kernel.resolve(states, rng=0)  # the same rows, the same kernel
        self._grows = isinstance(features, Dictionary)
        if self._grows:
            self.features_ = clone(features).set_params(kernel=self.kernel_)
            self.features_.reset(states[:0])
        else:
            self.features_ = features.with_kernel(self.kernel_).fit(states)
        self._next = None
        self._latest: tuple[bytes, np.ndarray] | None = None  # the last s' and its φ

    def _offered(self, x: np.ndarray) -> np.ndarray:
        """φ(x), x offered to the dictionary; the s' before is the s of now, and known."""
        key = x.tobytes()
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self.features_.offer_whitened(x)
        return self._latest[1]

    def _trimmed(self, weights: np.ndarray, budget: float = 0.0) -> np.ndarray | None:
        """Prune the dictionary by its rule: the map (m', m) of φ onto the atoms left, or None.

        φ of the projection is L'⁻¹ K_{kept,D} L⁻ᵀ φ, and K L⁻ᵀ = L.
        """
        dictionary, old = self.features_, self.features_.factor_.lower
        kept = list(range(dictionary.size))
        removed = dictionary.trim(weights, budget).removed
        for j in removed:
            del kept[j]
        if not removed:
            return None
        self._latest = None
        if not kept:
            return np.zeros((0, old.shape[0]))
        return arrays.solve_triangular(dictionary.factor_.lower, old[kept])


def on_host(t: Transitions) -> Transitions:
    """The rows of V as float64 NumPy arrays; t itself where they are."""
    if isinstance(t.states, np.ndarray) and t.states.dtype == t.next_states.dtype == np.float64:
        return t
    states, following = (np.asarray(arrays.host(x), np.float64) for x in (t.states, t.next_states))
    return Transitions(
        states,
        np.asarray(arrays.host(t.rewards), np.float64),
        following,
        arrays.host(t.terminated),
        truncated=arrays.host(t.truncated),
        episode=arrays.host(t.episode),
    )
