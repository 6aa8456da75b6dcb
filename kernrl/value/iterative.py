"""The exact system at any n: by LU where it pays and fits, else by an iteration that stores no n×n.

GMRES (Saad & Schultz, 1986) on (Tᵀ(K − γK') + nλI) w = Tᵀr, the matrix made in tiles and thrown
away. GMRES and not BiCGStab: a product costs (1 + actions)·n² kernel values and two more vectors
nothing, so what counts is the number of products, which GMRES makes smallest.

The preconditioner is the landmark form of the same system, as FALKON's is of kernel ridge
regression (Rudi, Carratino & Rosasco, 2017): with Φ and Φ' the Nyström features of z and of what
follows, U = Tᵀ(Φ − γΦ') and σ = nλ,

    (UΦᵀ + σI)⁻¹ = (I − U(ΦᵀU + σI)⁻¹Φᵀ) / σ.

It acts from the right, so that the residual the iteration watches is the system's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernrl import arrays, checks, linalg
from kernrl.approx.nystroem import Nystroem
from kernrl.kernels.gram import GramOperator
from kernrl.value.representers import wide
from kernrl.value.system import Rows, direct_bytes, discounted_ahead, ridged, solve_exact

Array = Any

SOLVERS = ("auto", "direct", "iterative")
TOLERANCE = 1e-8  # of ‖b − Aw‖ / ‖b‖: the error it leaves in V is far below that of any data
RESTART = 50  # directions GMRES keeps: 8·50·n bytes
MAX_PRODUCTS = 500
MOST_LANDMARKS = 2000
# Rows from which "auto" iterates. Measured on two busy cores, d = 3, γ = 0.99, RBF and λ = 1e-3:
# n = 2000 LU 1.6 s, iteration 4 s; 4000: 7 s and 5 s; 8000: 45 s and 23 s. Kernels whose spectrum
# outlasts the landmarks (Matérn 3/2 at λ = 1e-6) need 45–75 products, 60 s at 4000: LU's n³ meets
# that near 10 000.
CROSSOVER = 8000


@dataclass(frozen=True)
class SolverReport:
    """How a system was solved.

    residual: ‖b − Aw‖ / ‖b‖ as computed at the end; None where LU solved it, whose residual is
    rounding unless a ConditionWarning says otherwise. products: matrix–vector products used.
    landmarks: size of the preconditioner.
    """

    method: str  # "direct" or "iterative"
    residual: float | None = None
    products: int = 0
    landmarks: int = 0
    converged: bool = True


DIRECT = SolverReport("direct")


def solve(
    kernel: Any,
    rows: Rows,
    gamma: float,
    ridge: float,
    trace_decay: float = 0.0,
    *,
    solver: str = "auto",
    owner: str,
) -> tuple[Array, SolverReport]:  # -> (n,)
    """w = (Tᵀ(K − γK') + nλI)⁻¹ Tᵀr and how it was found.

    "direct" is LU. "iterative" needs ridge > 0; it warns when TOLERANCE is missed. "auto" is LU
    below CROSSOVER rows, above it the iteration where ridge > 0, and LU again where the iteration
    misses its tolerance and n×n fits. What does not fit in memory is refused with the number.
    """
    checks.choice(owner, "solver", solver, SOLVERS)
    n = len(rows)
    fits = direct_bytes(n) <= arrays.available_bytes(rows.points)
    if solver == "direct" or (solver == "auto" and fits and (n < CROSSOVER or ridge == 0)):
        return solve_exact(kernel, rows, gamma, ridge, trace_decay, owner=owner), DIRECT
    if ridge == 0:
        rule = f"ridge must be above 0 for the iterative solution of {n} rows"
        checks.fail(owner, rule, 0, "Raise ridge, or pass features=Nystroem(n_components=1000).")
    weights, report = _iterate(kernel, rows, gamma, ridge, trace_decay, owner)
    if report.converged:
        return weights, report
    if solver == "auto" and fits:
        return solve_exact(kernel, rows, gamma, ridge, trace_decay, owner=owner), DIRECT
    checks.warn(
        owner,
        f"the iterative solver stopped at a relative residual of {report.residual:.1e}, above "
        f"{TOLERANCE:.0e}",
        "Raise ridge, pass features=Nystroem(n_components=1000), or solver='direct'.",
        checks.ConditionWarning,
    )
    return weights, report


class SystemOperator:
    """x ↦ (Tᵀ(K − γK') + nλI)x without the matrix: tiles only, float64. O((1 + a) n²) work."""

    def __init__(
        self, kernel: Any, rows: Rows, gamma: float, ridge: float, trace_decay: float = 0.0
    ) -> None:
        self.rows = double = wide(rows)
        self.gamma, self.decay = gamma, gamma * trace_decay
        self.shift = len(rows) * ridge
        self.here = GramOperator(kernel, double.points)
        self.ahead = [(c, GramOperator(kernel, z, double.points)) for c, z in double.following]

    def __matmul__(self, x: Array) -> Array:  # (n,) -> (n,)
        out = self.here @ x
        for weights, gram in self.ahead:
            out = out - self.gamma * weights * (gram @ x)
        return self.traced(out) + self.shift * x

    def traced(self, x: Array) -> Array:  # (n,) or (n, k) -> same
        """Tᵀx."""
        if not self.decay:
            return x
        flat = x[:, None] if x.ndim == 1 else x
        return arrays.namespace(x).reshape(
            discounted_ahead(flat, self.rows.starts, self.decay), x.shape
        )


def landmark_inverse(
    kernel: Any, operator: SystemOperator, n_landmarks: int, *, owner: str
) -> Callable[[Array], Array]:  # -> ((n,) -> (n,))
    """v ↦ (UΦᵀ + σI)⁻¹v. Making it costs O(n m²), applying it O(n m); it keeps 16 n m bytes."""
    rows, shift = operator.rows, operator.shift
    features = Nystroem(kernel, n_landmarks, rng=0).fit(rows.points)
    phi = features.transform(rows.points)
    ahead = sum(c[:, None] * features.transform(z) for c, z in rows.following)
    u = operator.traced(phi - operator.gamma * ahead)
    del ahead
    xp = arrays.namespace(phi)
    inner = ridged(xp.matmul(phi.T, u), shift)
    eye = xp.eye(inner.shape[0], dtype=inner.dtype, device=arrays.device(inner))
    inverse = linalg.solve(inner, eye, owner=owner)  # m×m, applied some dozens of times
    return lambda v: (v - xp.matmul(u, xp.matmul(inverse, xp.matmul(phi.T, v)))) / shift


def _iterate(
    kernel: Any, rows: Rows, gamma: float, ridge: float, trace_decay: float, owner: str
) -> tuple[Array, SolverReport]:
    n = len(rows)
    m = _landmarks(owner, n, arrays.available_bytes(rows.points))
    operator = SystemOperator(kernel, rows, gamma, ridge, trace_decay)
    precondition = landmark_inverse(kernel, operator, m, owner=owner)
    target = operator.traced(operator.rows.rewards)
    y, products = _gmres(lambda v: operator @ precondition(v), target)
    weights = precondition(y)
    xp = arrays.namespace(weights)
    size = float(xp.linalg.vector_norm(target))
    left = float(xp.linalg.vector_norm(target - operator @ weights))
    residual = left / size if size > 0 else left
    converged = residual <= 2 * TOLERANCE  # the recursion's own residual drifts a little
    return weights, SolverReport("iterative", residual, products + 1, m, converged)


def _gmres(product: Callable[[Array], Array], target: Array) -> tuple[Array, int]:
    """SciPy's GMRES on the host; the products run where `target` lives."""
    from scipy.sparse.linalg import LinearOperator, gmres

    count = 0

    def on_host(v: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return np.asarray(arrays.host(product(arrays.like(v, target))))

    n = int(target.shape[0])
    y, _ = gmres(
        LinearOperator((n, n), matvec=on_host, dtype=np.float64),
        arrays.host(target),
        rtol=TOLERANCE,
        atol=0.0,
        restart=min(RESTART, n),
        maxiter=max(1, MAX_PRODUCTS // RESTART),
    )
    return arrays.like(y, target), count


def _landmarks(owner: str, n: int, available: float) -> int:
    """m ≈ 10√n for the preconditioner, fewer where memory asks for it."""
    wanted = min(n, MOST_LANDMARKS, max(100, math.ceil(10 * math.sqrt(n))))
    vectors = RESTART + 10
    cure = "Pass features=Nystroem(n_components=1000), which needs memory for m×m only."
    least = min(n, 100)
    checks.memory(
        owner, f"the exact system of {n} rows", _bytes(n, least, vectors), available, cure
    )
    while _bytes(n, wanted, vectors) > available / 2 and wanted > least:
        wanted = max(least, wanted // 2)
    return wanted


def _bytes(n: int, m: int, vectors: int) -> float:
    """Φ, U and two temporaries of their size, GMRES' directions, and the m×m matrices."""
    return 8.0 * (4.0 * n * m + n * vectors + 4.0 * m * m)
