"""Kernels on state-action pairs z = (s, a)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernrl import checks
from kernrl.kernels.base import Delta, Kernel, Section

Array = Any


@dataclass(frozen=True, eq=False)
class StateAction(Kernel):
    """k((s, a), (s', a')) = k_s(s, s') · k_a(a, a'), with the action in the last columns.

    With the Delta action kernel and a discrete action in one column this is one independent block
    per action: exactly 0 across actions. (An RBF over LSPI's block-stacked vectors is not: it gives
    exp(−(|s|² + |s'|²)/2ℓ²) across actions, which nearly merges them near the origin.)
    Engel, Mannor & Meir (2005), §4. `n_action_columns` is the action's width.

    >>> import numpy as np
    >>> from kernrl.kernels.stationary import RBF
    >>> z = np.array([[0.1, 0.1, 0.0], [0.1, 0.1, 1.0]])
    >>> StateAction(RBF(1.0))(z)
    array([[1., 0.],
           [0., 1.]])
    """

    state_kernel: Kernel
    action_kernel: Kernel = field(default_factory=Delta)
    n_action_columns: int = 1

    def _validate(self) -> None:
        for name in ("state_kernel", "action_kernel"):
            value = getattr(self, name)
            checks.require(
                isinstance(value, Kernel),
                "StateAction",
                f"{name} must be a kernel",
                repr(value),
                error=TypeError,
            )
        checks.integer("StateAction", "n_action_columns", self.n_action_columns, at_least=1)

    def split(self, z: Array) -> tuple[Array, Array]:  # (n, d + p) -> (n, d), (n, p)
        """The state columns and the action columns of z."""
        checks.require(
            z.shape[1] > self.n_action_columns,
            "StateAction",
            f"rows must hold a state and {self.n_action_columns} action columns",
            f"{z.shape[1]} columns",
        )
        cut = z.shape[1] - self.n_action_columns
        return z[:, :cut], z[:, cut:]

    def _columns_of(self, name: str, x: Array) -> Array:
        return self.split(x)[name == "action_kernel"]

    def _section(self, xp: Any, z: Array) -> Section:
        state, action = self.split(z)
        of_state = self.state_kernel._section(xp, state)
        of_action = self.action_kernel._section(xp, action)

        def tile(x: Array) -> Array:
            s, a = self.split(x)
            return of_state(s) * of_action(a)

        return tile

    def row(self, x: Array, z: Array) -> Array:  # (d + p,), (m, d + p) -> (m,)
        """k(x, z_j) for one pair."""
        cut = z.shape[1] - self.n_action_columns
        of_state = self.state_kernel.row(x[:cut], z[:, :cut])
        return of_state * self.action_kernel.row(x[cut:], z[:, cut:])

    def _diagonal(self, xp: Any, x: Array) -> Array:
        state, action = self.split(x)
        return self.state_kernel._diagonal(xp, state) * self.action_kernel._diagonal(xp, action)
