"""A greedy policy in kernel features: what least-squares policy iteration hands out and saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernrl.control.states import StateScaler
from kernrl.value.system import predictor


class GreedyPolicy:
    """Q(s, ·) = φ(s)ᵀW, or φ(s, a)ᵀw for pair features, and the scaling in front of it.

    weights: (a, m) with one block per action; (m,) for features of rows (s, action number).
    """

    def __init__(
        self, scaler: StateScaler, features: Any, weights: np.ndarray, n_actions: int
    ) -> None:
        # One memory layout, so that a policy read from a file answers with the same bits.
        for name, x in _learnt(features, np.ndarray).items():
            setattr(features, name, np.ascontiguousarray(x))
        weights = np.ascontiguousarray(weights)
        self.scaler, self.features, self.weights = scaler, features, weights
        self.n_actions = n_actions
        self.pairs = weights.ndim == 1
        columns = weights[:, None] if self.pairs else np.ascontiguousarray(weights.T)
        self._predict = predictor(features, columns)

    def q(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, a)
        """Q of every action."""
        z = self.scaler.transform(observations)
        if not self.pairs:
            return self._predict(z)
        return np.concatenate([self._predict(with_action(z, a)) for a in range(self.n_actions)], 1)

    def act(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        """Greedy action numbers from 0, ties to the lowest."""
        return np.argmax(self.q(observations), axis=1)

    # ---------------------------------------------------------------- files

    def state(self) -> dict[str, np.ndarray]:
        """Every learnt array."""
        arrays = {f"scaler.{name}": x for name, x in self.scaler.state().items()}
        arrays |= {f"features.{name}": x for name, x in _learnt(self.features, np.ndarray).items()}
        return {**arrays, "weights": self.weights}

    def meta(self) -> dict[str, Any]:
        """What is no array: the features' parameters, with their resolved kernel, and numbers."""
        return {"features": self.features, "numbers": _learnt(self.features, int | float)}

    @staticmethod
    def restored(
        state: dict[str, np.ndarray], meta: dict[str, Any], n_actions: int
    ) -> GreedyPolicy:
        """The policy that `state` and `meta` describe."""
        features = meta["features"]
        features.kernel_ = features.kernel
        for name, value in {**_under("features.", state), **meta["numbers"]}.items():
            setattr(features, name, value)
        scaler = StateScaler().restore(_under("scaler.", state))
        return GreedyPolicy(scaler, features, state["weights"], n_actions)


class MeanPolicy:
    """Greedy in the mean Q of several policies: what they agree on stays, their errors average.

    Anschel, Baram & Shimkin (2017) average the last networks of DQN for the same reason.
    """

    def __init__(self, members: Sequence[GreedyPolicy]) -> None:
        self.members = tuple(members)

    def q(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b, a)
        """Mean Q of every action."""
        total = self.members[0].q(observations)
        for member in self.members[1:]:
            total = total + member.q(observations)
        return total / len(self.members)

    def act(self, observations: np.ndarray) -> np.ndarray:  # (b, …) -> (b,)
        """Greedy action numbers from 0, ties to the lowest."""
        return np.argmax(self.q(observations), axis=1)

    def state(self) -> dict[str, np.ndarray]:
        """Every learnt array, by member."""
        states = enumerate(member.state() for member in self.members)
        return {f"{k}.{name}": x for k, state in states for name, x in state.items()}

    def meta(self) -> dict[str, Any]:
        """What is no array, by member."""
        return {"members": [member.meta() for member in self.members]}

    @staticmethod
    def restored(state: dict[str, np.ndarray], meta: dict[str, Any], n_actions: int) -> MeanPolicy:
        """The policy that `state` and `meta` describe."""
        return MeanPolicy(
            [
                GreedyPolicy.restored(_under(f"{k}.", state), member, n_actions)
                for k, member in enumerate(meta["members"])
            ]
        )


def with_action(z: np.ndarray, action: int | np.ndarray) -> np.ndarray:  # (n, d) -> (n, d + 1)
    """Rows (s, action number)."""
    return np.column_stack((z, np.broadcast_to(np.asarray(action, dtype=np.float64), len(z))))


def _learnt(features: Any, kind: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(features).items() if k.endswith("_") and isinstance(v, kind)}


def _under(prefix: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
