"""An online dictionary: the few points whose kernel functions span what has been seen."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone

from kernrl import arrays, checks
from kernrl.approx.growing import GrowingCholesky
from kernrl.approx.nystroem import fitting_rows, required_kernel
from kernrl.kernels.base import Kernel
from kernrl.kernels.gram import gram, matvec, rows

Array = Any

# A point whose residual is below this part of k(x, x) is never admitted, whatever the rule: the
# factor of the atoms' Gram matrix would lose half of its digits.
DEPENDENT = 1e-8
BLOCK = 512  # rows that `fit` holds against the dictionary at once
REFACTOR_EVERY = 1000  # removals after which the factor is made afresh, long before it drifts

ADMIT = ("ald", "all")
PRUNE = ("komp", "leverage", "oldest")


class Admission(NamedTuple):
    """What became of an offered point x."""

    index: int | None  # of its atom, if admitted
    admitted: bool
    coefficients: np.ndarray  # (m,): k(x, ·) ≈ Σ aⱼ k(zⱼ, ·); a unit vector if admitted
    residual: float  # δ = ‖k(x, ·) − Σ aⱼ k(zⱼ, ·)‖² over the atoms before x came


class Trimmed(NamedTuple):
    """What `trim` left."""

    weights: np.ndarray  # (m',) or (m', k), re-projected
    removed: list[int]  # in order, each an index into the dictionary of its moment
    error: float  # ‖change of Σ wⱼ k(zⱼ, ·)‖ in the RKHS


class Dictionary(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Atoms z₁ … z_m, the Cholesky factor of their Gram matrix, and who may join or must leave.

    A new x has the residual δ = k(x,x) − k_D(x)ᵀK_DD⁻¹k_D(x): its squared distance from the span
    of the atoms (approximate linear dependence; Engel, Mannor & Meir 2004), and the square of the
    Cholesky pivot it would bring.

    admit: "ald" admits x if δ > threshold·k(x, x), so that threshold is relative, in [0, 1);
    "all" admits whatever is not linearly dependent (δ > 1e-8·k(x, x)).
    max_size: atoms at most. With prune=None a full dictionary admits nothing more; with a rule,
    `offer` goes on admitting and `trim` brings the size back.
    prune: who leaves. "oldest"; "leverage", the atom that the others represent best (smallest
    residual 1/[K⁻¹]ⱼⱼ); "komp", the one whose removal changes Σ wⱼ k(zⱼ, ·) least, by
    wⱼ²/[K⁻¹]ⱼⱼ (kernel orthogonal matching pursuit; Koppel et al., arXiv 1709.04221).

    The weights belong to the caller. Online: `offer`, `remove`, `trim`. In batch: `fit` offers all
    rows in order, `transform` gives whitened features L⁻¹k_D(x), as Nystroem does with the atoms
    as landmarks. Learnt: atoms_ (m, d), factor_ (GrowingCholesky), kernel_, n_features_in_ = d,
    n_features_ = m. `offer` costs O(md + m²), a removal O(m²). Float64, on the host.

    >>> from kernrl.kernels.stationary import RBF
    >>> dictionary = Dictionary(RBF(1.0), threshold=0.01)
    >>> [dictionary.offer([x]).admitted for x in (0.0, 0.01, 3.0)]
    [True, False, True]
    >>> dictionary.atoms_
    array([[0.],
           [3.]])
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        admit: str = "ald",
        threshold: float = 1e-3,
        prune: str | None = None,
        max_size: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.admit = admit
        self.threshold = threshold
        self.prune = prune
        self.max_size = max_size

    # ---------------------------------------------------------------- one point at a time

    def offer(self, x: Array) -> Admission:  # (d,)
        """Admit x or represent it by the atoms. O(md + m²)."""
        half, residual, index = self._consider(x)
        if index is None:
            return Admission(None, False, self.factor_.finish_solve(half), max(residual, 0.0))
        coefficients = np.zeros(index + 1)
        coefficients[index] = 1.0
        return Admission(index, True, coefficients, residual)

    def offer_whitened(self, x: Array) -> np.ndarray:  # (d,) -> (m,)
        """Admit x or not, and give φ(x) = L⁻¹k_D(x) as `transform` does: one solve, not two."""
        half, residual, index = self._consider(x)
        return half if index is None else np.append(half, math.sqrt(residual))

    def settled(self, X: Array) -> np.ndarray | None:  # (n, d) -> (n, m)
        """φ(x) of all rows at once, or None if one of them would be admitted. O(nm(m + d))."""
        if not self.size:
            return None
        half = self.factor_.lower_solve(gram(self.kernel_, self.atoms_, X))
        residual = self.kernel_.diagonal(X) - np.sum(half * half, axis=0)
        new = residual > self._least * self.kernel_.diagonal(X)
        return None if np.any(new) and not self._is_closed() else half.T

    def representation(self, j: int) -> np.ndarray:  # -> (m − 1,)
        """a with k(zⱼ, ·) ≈ Σ_{i≠j} aᵢ k(zᵢ, ·), the projection on the other atoms. O(m²)."""
        column = self._inverse_column(j)
        return -np.delete(column, j) / column[j]

    def remove(self, j: int, weights: Array | None = None) -> np.ndarray | None:
        """Take atom j out; weights (m,) or (m, k) come back projected on the others. O(m²).

        w_Y = K_YY⁻¹K_YD w = w_Y + wⱼ a, with a the representation of atom j.
        """
        weights = None if weights is None else self._weights(weights)
        share = self.representation(j)
        self._take_out(j)
        return None if weights is None else _projected(weights, j, share)

    def removal_costs(self, weights: Array) -> np.ndarray:  # (m,) or (m, k) -> (m,)
        """wⱼ²/[K⁻¹]ⱼⱼ, the squared RKHS norm of the change of Σ wⱼ k(zⱼ, ·) if atom j goes."""
        weights = self._weights(weights)
        squares = weights**2 if weights.ndim == 1 else np.sum(weights**2, axis=1)
        return squares / self.factor_.inverse_diagonal()

    def trim(self, weights: Array, budget: float = 0.0) -> Trimmed:
        """Remove atoms by the rule: while there are too many, and with "komp" while it is cheap.

        "komp" removes the cheapest atom as long as the RKHS norm of the whole change stays within
        `budget`: since each projection is orthogonal to the next, squared changes add up. A budget
        of 0 removes atoms of weight zero only.
        """
        weights, removed, spent = self._weights(weights), [], 0.0
        limit = checks.real("Dictionary", "budget", budget, at_least=0.0) ** 2
        while self.size and self.prune is not None:
            j, cost = self._next_to_go(weights)
            crowded = self.max_size is not None and self.size > self.max_size
            if not crowded and not (self.prune == "komp" and spent + cost <= limit):
                break
            projected = self.remove(j, weights)
            assert projected is not None  # weights were given
            weights, spent = projected, spent + cost
            removed.append(j)
        return Trimmed(weights, removed, math.sqrt(spent))

    # ---------------------------------------------------------------- all rows at once

    def fit(self, X: Array, y: object = None) -> Self:  # (n, d)
        """Start over and offer the rows in order; a full dictionary admits nothing more.

        The atoms are those of n calls of `offer`, found block by block: O(nm(m + d)).
        """
        X = rows("Dictionary", "X", X)
        checks.not_empty("Dictionary", "X", X)
        self.kernel_ = required_kernel(self).resolve(X, rng=0)  # the same rows, the same atoms
        X = np.asarray(arrays.host(X), dtype=np.float64)
        self.reset(np.zeros((0, X.shape[1])))
        for start in range(0, X.shape[0], BLOCK):
            self._offer_block(X[start : start + BLOCK])
        return self

    def transform(self, X: Array) -> Array:  # (n, d) -> (n, m)
        """Whitened features k_D(x)ᵀL⁻ᵀ: ΦΦᵀ = K_nD K_DD⁻¹ K_Dn. In the library and dtype of X."""
        checks.fitted(self, "factor_")
        X = fitting_rows(self, X)
        if self._whitener is None:
            identity = np.eye(self.size)
            self._whitener = arrays.solve_triangular(self.factor_.lower, identity).T
        Z = arrays.like(self.atoms_, X)
        return matvec(self.kernel_, X, Z, arrays.like(self._whitener, X))

    def represent(self, X: Array) -> np.ndarray:  # (n, d) -> (n, m)
        """Coefficients A = K_nD K_DD⁻¹, a row for each x: k(x, ·) ≈ Σ aⱼ k(zⱼ, ·)."""
        checks.fitted(self, "factor_")
        X = np.asarray(arrays.host(fitting_rows(self, X)), dtype=np.float64)
        return self.factor_.solve(gram(self.kernel_, self.atoms_, X)).T

    def with_kernel(self, kernel: Kernel) -> Dictionary:
        """An empty copy that uses `kernel`, unless it was given a kernel of its own."""
        return clone(self).set_params(kernel=kernel if self.kernel is None else self.kernel)

    # ---------------------------------------------------------------- state

    def reset(self, atoms: Array) -> Self:  # (m, d)
        """Start over with these atoms; (0, d) for none. O(m³)."""
        self._validate()
        atoms = np.array(arrays.host(atoms), dtype=np.float64)
        checks.ndim("Dictionary", "atoms", atoms, 2, "(m, d)")
        if not hasattr(self, "kernel_"):
            self.kernel_ = required_kernel(self)
        self.kernel_._require_resolved()
        self.n_features_in_ = int(atoms.shape[1])
        # A row for each coordinate: sums over coordinates then run along memory, 3 times faster.
        self._shape, self._size = (self.n_features_in_,), len(atoms)
        self._buffer = atoms.T.copy()
        self.factor_ = GrowingCholesky(gram(self.kernel_, atoms) if self.size else None)
        self._least = max(self.threshold if self.admit == "ald" else 0.0, DEPENDENT)
        self._removals, self._whitener = 0, None
        return self

    @property
    def atoms_(self) -> np.ndarray:  # (m, d)
        """The atoms in order of admission."""
        checks.fitted(self, "factor_")
        return self._buffer[:, : self.size].T

    @property
    def size(self) -> int:
        """The number of atoms m; 0 before the first point."""
        return getattr(self, "_size", 0)

    @property
    def n_features_(self) -> int:
        """What transform gives: one feature for each atom."""
        checks.fitted(self, "factor_")
        return self._size

    @property
    def n_components(self) -> int:
        """Features at most: max_size, or the atoms there are if it is None."""
        return self.size if self.max_size is None else self.max_size

    @property
    def _n_features_out(self) -> int:
        return self.n_features_

    def drift(self) -> float:
        """max |LLᵀ − K_DD| / mean k(z, z): rounding if all is well. O(m³)."""
        return self.factor_.drift(gram(self.kernel_, self.atoms_)) if self.size else 0.0

    def refactor(self) -> float:
        """Make the factor afresh from the atoms; returns the jitter it needed. O(m³)."""
        self._removals, self._whitener = 0, None
        return self.factor_.refactor(gram(self.kernel_, self.atoms_)) if self.size else 0.0

    # ---------------------------------------------------------------- how it is done

    def _validate(self) -> None:
        checks.choice("Dictionary", "admit", self.admit, ADMIT)
        if self.prune is not None:
            checks.choice("Dictionary", "prune", self.prune, PRUNE)
        checks.real("Dictionary", "threshold", self.threshold, at_least=0.0, below=1.0)
        if self.max_size is not None:
            checks.integer("Dictionary", "max_size", self.max_size, at_least=1)

    def _consider(self, x: Array) -> tuple[np.ndarray, float, int | None]:
        """L⁻¹k_D(x) and δ over the atoms before x came, and the index of x if it was admitted."""
        x = np.asarray(x, dtype=np.float64)
        if not hasattr(self, "factor_"):
            self.reset(np.zeros((0, x.size)))
        if x.shape != self._shape:
            checks.fail("Dictionary", f"x must have shape {self._shape}", checks.shape(x))
        if not math.isfinite(float(x @ x)):
            checks.finite("Dictionary", "x", x, unit="column", cure="Drop or repair the point.")
        own = self._own(x)
        half = self.factor_.half_solve(self.kernel_.row(x, self.atoms_))
        residual = own - float(half @ half)
        if residual <= self._least * own or self._is_closed():
            return half, residual, None
        return half, residual, self._admit(x, half, residual, own)

    def _own(self, x: np.ndarray) -> float:
        """k(x, x), without the checks of `kernel.diagonal`."""
        return float(self.kernel_._diagonal(np, x[None, :])[0])

    def _is_closed(self) -> bool:
        return self.prune is None and self.max_size is not None and self.size >= self.max_size

    def _admit(self, x: np.ndarray, half: np.ndarray, residual: float, own: float) -> int:
        self.factor_.append_half(half, residual, own)
        if self.size == self._buffer.shape[1]:
            room = np.zeros((self.n_features_in_, max(32, self.size)))
            self._buffer = np.concatenate((self._buffer, room), axis=1)
        self._buffer[:, self.size] = x
        self._size, self._whitener = self._size + 1, None
        return self._size - 1

    def _take_out(self, j: int) -> None:
        self.factor_.remove(j)
        self._buffer[:, j : self.size - 1] = self._buffer[:, j + 1 : self.size]
        self._size, self._removals, self._whitener = self._size - 1, self._removals + 1, None
        if self._removals >= REFACTOR_EVERY:
            self.refactor()

    def _offer_block(self, block: np.ndarray) -> None:
        """Admit rows in order. Residuals only fall as atoms join, so one pass rejects for good."""
        own = np.asarray(self.kernel_.diagonal(block))
        m, b = self.size, block.shape[0]
        halves = np.zeros((m + b, b))  # L⁻¹k_D(x), one column for each row of the block
        if m:
            columns = gram(self.kernel_, self.atoms_, block)
            halves[:m] = arrays.solve_triangular(self.factor_.lower, columns)
        residual = own - np.sum(halves[:m] ** 2, axis=0)
        among, limit = None, self._least * own
        while not self._is_full() and np.any(left := residual > limit):
            among = gram(self.kernel_, block) if among is None else among
            i, m = int(np.argmax(left)), self.size
            row = (among[i] - halves[:m, i] @ halves[:m]) / math.sqrt(residual[i])
            self._admit(block[i], halves[:m, i].copy(), float(residual[i]), float(own[i]))
            halves[m] = row
            residual -= row**2
            residual[: i + 1] = 0.0

    def _is_full(self) -> bool:
        return self.max_size is not None and self.size >= self.max_size

    def _next_to_go(self, weights: np.ndarray) -> tuple[int, float]:
        costs = self.removal_costs(weights)
        if self.prune == "oldest":
            j = 0
        elif self.prune == "leverage":
            j = int(np.argmax(self.factor_.inverse_diagonal()))
        else:
            j = int(np.argmin(costs))
        return j, float(costs[j])

    def _inverse_column(self, j: int) -> np.ndarray:
        rule = f"an atom must be within 0 … {self.size - 1}" if self.size else "it has no atom"
        checks.require(0 <= j < self.size, "Dictionary", rule, j)
        unit = np.zeros(self.size)
        unit[j] = 1.0
        return self.factor_.solve(unit)

    def _weights(self, weights: Array) -> np.ndarray:
        checks.fitted(self, "factor_")
        weights = np.asarray(weights, dtype=np.float64)
        if weights.ndim not in (1, 2) or weights.shape[0] != self.size:
            rule = f"weights must have one row for each of the {self.size} atoms"
            checks.fail("Dictionary", rule, checks.shape(weights))
        return weights


def _projected(weights: np.ndarray, j: int, share: np.ndarray) -> np.ndarray:
    kept, gone = np.delete(weights, j, axis=0), weights[j]
    return kept + (share * gone if weights.ndim == 1 else np.outer(share, gone))
