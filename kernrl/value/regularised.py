"""Regularised LSTD in an RKHS: the Bellman backup is regressed first, then its fixed point.

For a candidate Q the backup h_Q is a ridge regression of r + γQ(z'), and Q̂ is the function nearest
to its own regressed backup:

    h_Q = argmin_h (1/n) Σ (h(z_i) − r_i − γQ(z'_i))² + λ_h ‖h‖²
    Q̂   = argmin_Q (1/n) Σ (Q(z_i) − h_Q(z_i))² + λ_Q ‖Q‖²

Farahmand, Ghavamzadeh, Szepesvári & Mannor (2008; 2016). With E = K(K + nλ_h I)⁻¹ the residual is
Q(Z) − E r − γE Q(Z'), linear in Q, so Q̂ is a ridge regression with the representers
f_i = k(z_i, ·) − γ Σ_j E_ij k(z'_j, ·): an (n, n) symmetric system, though Q̂ lives on Z and Z'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernrl import arrays, checks, linalg
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram
from kernrl.value.estimator import KernelEstimator, points
from kernrl.value.pair_rows import pair_rows, points_of_pairs
from kernrl.value.system import FeatureSystem, Rows, ridged, state_rows

Array = Any

# Part of the trace of K above which a ridge leaves a Cholesky smoother eight digits.
FAITHFUL = 1e-8


class _Nested:
    """The nested problem on any rows: RegularisedLSTD and RegularisedLSTDQ say which."""

    _owner: str
    kernel_: Kernel
    gamma: float
    ridge: float
    backup_ridge: float | None

    def _check(self) -> None:
        super()._check()
        if self.backup_ridge is not None:
            checks.real(self._owner, "backup_ridge", self.backup_ridge, at_least=0.0)

    @property
    def _ridges(self) -> tuple[float, float]:
        """λ_Q and λ_h."""
        return self.ridge, self.ridge if self.backup_ridge is None else self.backup_ridge

    def _solve_rows(self, rows: Rows) -> None:
        solution = solve_nested(self.kernel_, rows, self.gamma, *self._ridges, owner=self._owner)
        self.support_, self.weights_ = solution

    def _system_of(self, features: Any) -> FeatureSystem:
        return NestedSystem(features, self.gamma)

    def _solve_system(self, system: FeatureSystem) -> None:
        assert isinstance(system, NestedSystem)
        self.weights_ = system.solve_nested(*self._ridges, owner=self._owner)


class RegularisedLSTD(_Nested, KernelEstimator):
    """Regularised LSTD for V: nested ridge regressions on the Bellman backup and on V.

    V̂(s) = Σ_i β_i [k(s, s_i) − γ Σ_j E_ij m_j k(s, s'_j)], β = (FK̃Fᵀ + nλ_Q I)⁻¹ E r, with K̃ the
    Gram matrix of states and next states, F = [I, −γE M] and E = K(K + nλ_h I)⁻¹; m = 0 where
    terminated. Farahmand, Ghavamzadeh, Szepesvári & Mannor (2008; 2016).
    λ_h → 0 on distinct states is regularised Bellman residual minimisation (equal states average);
    in the feature form λ_Q = 0 is KLSTD with the ridge λ_h.

    kernel, gamma, features, device: KLSTD's. ridge: λ_Q ≥ 0; backup_ridge: λ_h ≥ 0, None for
    λ_Q's. Both are multiplied by n inside.
    Cost: O(n³) and 6 n² numbers; with features O(n m²) and O(m²).

    Learnt: weights_ and support_ (2n,), (2n, d) in the exact form, weights_ (m,) with features.

    >>> from kernrl.data.transitions import Transitions
    >>> from kernrl.kernels.base import Delta
    >>> t = Transitions([[0.0], [1.0]], [0.0, 1.0], [[1.0], [1.0]], [False, True])
    >>> RegularisedLSTD(Delta(), gamma=0.5, ridge=1e-12).fit(t).predict([[0.0], [1.0]]).round(6)
    array([0.5, 1. ])
    """

    def __init__(
        self,
        kernel: Kernel,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        backup_ridge: float | None = None,
        features: Any = None,
        device: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.ridge = ridge
        self.backup_ridge = backup_ridge
        self.features = features
        self.device = device

    _rows = staticmethod(state_rows)

    def predict(self, states: Array) -> Array:  # (n, d) -> (n,)
        """V(s) for each row, in the library of `states`; O(nm), tiles only."""
        checks.fitted(self, "weights_")
        return self._values(points(self._owner, states))


class RegularisedLSTDQ(_Nested, KernelEstimator):
    """Regularised LSTD for Q^π, π fixed: RegularisedLSTD on pairs z = (s, a).

    Its k(z'_j, ·) is Σ_a π(a|s'_j) k((s'_j, a), ·). Farahmand, Ghavamzadeh, Szepesvári & Mannor
    (2008; 2016), the evaluation step of their regularised policy iteration.

    kernel: on rows (s, a), see StateAction. policy: as in KLSTDQ; None takes `next_actions`.
    The other parameters are RegularisedLSTD's.
    """

    def __init__(
        self,
        kernel: Kernel,
        policy: Any = None,
        gamma: float = 0.99,
        ridge: float = 1e-3,
        backup_ridge: float | None = None,
        features: Any = None,
        device: str = "auto",
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        self.gamma = gamma
        self.ridge = ridge
        self.backup_ridge = backup_ridge
        self.features = features
        self.device = device

    def _rows(self, t: Any) -> Rows:
        return pair_rows(self._owner, self.policy, t)

    def predict(self, states: Array, actions: Array = None) -> Array:  # (n, d), (n[, p]) -> (n,)
        """Q(s, a) for each row; without `actions`, `states` holds rows (s, a) already."""
        checks.fitted(self, "weights_")
        return self._values(points_of_pairs(self._owner, states, actions))


class NestedSolution(NamedTuple):
    """A function Σ_j w_j k(z_j, ·) on the rows' points and those that follow them."""

    support: Array  # (n(1 + t), d)
    weights: Array  # (n(1 + t),)


def solve_nested(
    kernel: Kernel, rows: Rows, gamma: float, ridge: float, backup_ridge: float, *, owner: str
) -> NestedSolution:
    """The minimiser of the nested problem, in float64: two Cholesky factors of (n, n), O(n³).

    The inner products of the f_i are K − γ(EK' + K'ᵀE) + γ²EK''E. By Fᵀ(FK̃Fᵀ + cI)⁻¹ =
    (FᵀFK̃ + cI)⁻¹Fᵀ this is the (2n, 2n) unsymmetric system of the joint Gram matrix at an eighth
    of its cost, and positive definite.
    """
    n, z = len(rows), rows.points
    cure = "Pass features=Nystroem(n_components=1000), which needs memory for m×m only."
    checks.memory(
        owner, f"the nested system of {n} rows", 48.0 * n * n, arrays.available_bytes(z), cure
    )
    xp = arrays.namespace(z)
    z, following = _wide(xp, z), [(_wide(xp, c), _wide(xp, x)) for c, x in rows.following]
    k = gram(kernel, z)
    smooth = smoother(k, n * backup_ridge, owner)
    ahead = sum(c[:, None] * gram(kernel, x, z) for c, x in following)  # K'
    cross = smooth(ahead)  # EK'
    # EK''E by smoothing (EK'')ᵀ, E being symmetric.
    twice = smooth(xp.matrix_transpose(smooth(_between(kernel, following))))
    products = k - 2.0 * gamma * cross + gamma**2 * twice  # and its transpose, halved
    products = (products + xp.matrix_transpose(products)) / 2
    outer = linalg.cholesky(ridged(products, n * ridge), owner=owner).lower
    beta = linalg.solve_cholesky(outer, smooth(_wide(xp, rows.rewards)))
    behind = -gamma * smooth(beta)
    return NestedSolution(
        xp.concat([z, *(x for _, x in following)], axis=0),
        xp.concat([beta, *(c * behind for c, _ in following)]),
    )


def smoother(k: Array, amount: float, owner: str) -> Callable[[Array], Array]:
    """x ↦ K(K + amount·I)⁻¹x by Cholesky; where amount is lost in K's rounding, by eigenvectors.

    Then eigenvalues below rounding count as 0: the limit amount → 0 is the projection on K's
    range, which averages over equal states.
    """
    xp = arrays.namespace(k)
    total = float(xp.sum(xp.linalg.diagonal(k)))
    if amount > FAITHFUL * total:
        lower = linalg.cholesky(ridged(k, amount), owner=owner).lower
        return lambda x: k @ linalg.solve_cholesky(lower, x)
    eigenvalues, vectors = xp.linalg.eigh(k)
    kept = eigenvalues > k.shape[0] * arrays.epsilon(k) * total
    shrink = xp.where(kept, eigenvalues / (eigenvalues + amount), xp.zeros_like(eigenvalues))
    shrink = xp.where(kept, shrink, xp.zeros_like(shrink))
    left = vectors * shrink[None, :]
    return lambda x: left @ (xp.matrix_transpose(vectors) @ x)


class NestedSystem(FeatureSystem):
    """Streams rows into A = Σ φ(φ − γφ')ᵀ, G = Σ φφᵀ and b = Σ φr; O(n m²), O(m²) memory.

    With S = G + nλ_h I, V = φᵀθ and B = S⁻¹(A + nλ_h I), the residual Φθ − h_V(Z) is Φ(Bθ − S⁻¹b),
    so θ = (BᵀGB + nλ_Q I)⁻¹ BᵀG S⁻¹b.
    """

    gram: Array | None = None  # (m, m)

    def _accumulate(self, phi: Array, difference: Array, rewards: Array, starts: Array) -> None:
        super()._accumulate(phi, difference, rewards, starts)
        xp = arrays.namespace(phi)
        gram = _wide(xp, xp.matmul(phi.T, phi))
        self.gram = gram if self.gram is None else self.gram + gram

    def solve_nested(self, ridge: float, backup_ridge: float, *, owner: str) -> Array:  # -> (m,)
        """θ by two Cholesky factors, O(m³)."""
        assert self.gram is not None and self.matrix is not None, "solve before add"
        xp = arrays.namespace(self.gram)
        gram = (self.gram + xp.matrix_transpose(self.gram)) / 2
        inner = linalg.cholesky(ridged(gram, self.n * backup_ridge), owner=owner).lower
        backup = linalg.solve_cholesky(inner, ridged(self.matrix, self.n * backup_ridge))
        weighted = xp.matrix_transpose(backup) @ gram  # BᵀG
        products = weighted @ backup
        products = (products + xp.matrix_transpose(products)) / 2
        outer = linalg.cholesky(ridged(products, self.n * ridge), owner=owner).lower
        target = weighted @ linalg.solve_cholesky(inner, self.target)
        return linalg.solve_cholesky(outer, target)


def _between(kernel: Kernel, following: list[tuple[Array, Array]]) -> Array:  # -> (n, n)
    """K''_ij = Σ_ts c_ti c_sj k(z'_ti, z'_sj)."""
    return sum(
        c[:, None] * gram(kernel, x, y) * b[None, :] for c, x in following for b, y in following
    )


def _wide(xp: Any, x: Array) -> Array:
    return xp.astype(x, xp.float64, copy=False)
