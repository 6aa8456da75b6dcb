"""Landmark selectors against brute force: distributions, pivots, scores, ranks."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import array_api_strict
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from tolerances import tolerance

from kernrl.approx import landmarks
from kernrl.approx.landmarks import SELECTORS, leverage_scores, select
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Matern

SMALL = np.array([[0.0], [0.4], [1.0], [1.3], [3.0]])


def residual(gram: np.ndarray, index: np.ndarray) -> np.ndarray:
    """diag(K − K_:S K_SS⁻¹ K_S:), by solving."""
    columns = gram[:, index]
    return np.diag(gram) - np.sum(
        columns * np.linalg.solve(gram[np.ix_(index, index)], columns.T).T, 1
    )


# ---------------------------------------------------------------- what all five promise


@pytest.mark.parametrize("method", SELECTORS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_indices_are_distinct_reproducible_and_the_seeds_own(rng, method, dtype):
    x = rng.standard_normal((300, 3)).astype(dtype)
    kept = x.copy()
    first = select(method, RBF(1.0), x, 40, 5)
    assert first.dtype == np.int64
    assert first.shape == (40,)
    assert len(set(first)) == 40
    assert 0 <= first.min() <= first.max() < 300
    np.testing.assert_array_equal(select(method, RBF(1.0), x, 40, np.random.default_rng(5)), first)
    np.testing.assert_array_equal(x, kept)
    if method != "greedy":
        assert set(select(method, RBF(1.0), x, 40, 6)) != set(first)


@pytest.mark.parametrize("method", SELECTORS)
def test_all_array_libraries_choose_alike(rng, method):
    x = rng.standard_normal((200, 2))
    expected = select(method, Matern(1.0), x, 25, 3)
    for asarray in (torch.asarray, array_api_strict.asarray):
        np.testing.assert_array_equal(select(method, Matern(1.0), asarray(x), 25, 3), expected)


@pytest.mark.parametrize("method", SELECTORS)
def test_no_row_is_taken_twice_and_a_spanned_set_ends_the_search(rng, method):
    """Revisited states: 5 distinct rows, each 30 times, one of them 500 times."""
    distinct = rng.standard_normal((5, 2))
    x = rng.permutation(np.repeat(distinct, [30, 30, 500, 30, 30], axis=0))
    for m in (3, 5, 12):
        index = select(method, RBF(0.8), x, m, 1)
        assert len(np.unique(x[index], axis=0)) == len(index) == min(m, 5)


@pytest.mark.parametrize("method", SELECTORS)
def test_one_row_and_constant_rows(method):
    assert list(select(method, RBF(1.0), np.ones((1, 2)), 1, 0)) == [0]
    assert len(select(method, RBF(1.0), np.ones((9, 2)), 4, 0)) == 1


@pytest.mark.parametrize("method", ["rpcholesky", "greedy"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_as_many_landmarks_as_the_kernel_has_rank(rng, method, dtype):
    """A linear kernel with an offset on 3 columns has rank 4; more landmarks add nothing."""
    x = rng.standard_normal((80, 3)).astype(dtype)
    index = select(method, Linear(1.0, 0.5), x, 20, 2)
    assert len(index) == 4
    gram = Linear(1.0, 0.5)(x.astype(np.float64))
    np.testing.assert_allclose(residual(gram, index), 0.0, atol=tolerance("float32")["rtol"])


@pytest.mark.parametrize("method", SELECTORS)
def test_every_row_can_be_a_landmark(rng, method):
    x = rng.standard_normal((30, 4))
    assert set(select(method, Matern(0.5, 0.5), x, 30, 0)) == set(range(30))
    assert len(select(method, Delta(), x, 30, 0)) == 30


@pytest.mark.parametrize("method", SELECTORS)
def test_the_whole_gram_matrix_is_never_in_memory(rng, method):
    """n×n would be 800 MB; n×m is 4 MB."""
    x = rng.standard_normal((10_000, 3))
    tracemalloc.start()
    select(method, RBF(1.0), x, 50, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


@pytest.mark.parametrize("method", SELECTORS)
def test_a_subsample_stands_for_very_many_rows(monkeypatch, rng, method):
    monkeypatch.setattr(landmarks, "FACTOR_ENTRIES", 2000)
    x = rng.standard_normal((3000, 2))
    index = select(method, RBF(1.0), x, 20, 4)
    assert len(set(index)) == 20
    assert index.max() > 1000  # indices into all rows, not into the subsample of 100
    assert landmarks._candidates(3000, 20, rng).shape == (100,)
    assert landmarks._candidates(3000, 500, rng).shape == (2000,)  # never below 4 a landmark
    assert landmarks._candidates(100, 20, rng) is None


def test_rows_that_turn_out_to_be_spanned_are_not_proposed_for_ever(monkeypatch, rng):
    """Rounding may leave a residual in the running sum that the block, made afresh, denies."""
    calls, block = [], landmarks._PartialCholesky.block

    def denied(self, index):
        calls.append(1)
        assert len(calls) < 100
        return block(self, index) * (self.size < 5)

    monkeypatch.setattr(landmarks._PartialCholesky, "block", denied)
    assert 5 <= len(select("rpcholesky", RBF(0.3), rng.standard_normal((50, 2)), 30, 0)) < 30


def test_what_is_refused(rng):
    x = rng.standard_normal((6, 2))
    with pytest.raises(ValueError, match=re.escape("Did you mean 'kmeans++'?")):
        select("kmeans", RBF(1.0), x, 3)
    for method in SELECTORS:
        with pytest.raises(ValueError, match="landmarks: m must be at most n, got 7 of 6"):
            select(method, RBF(1.0), x, 7)
        with pytest.raises(ValueError, match="m must be an integer of at least 1, got 0"):
            select(method, RBF(1.0), x, 0)
        with pytest.raises(ValueError, match="x must have at least one row"):
            select(method, RBF(1.0), x[:0], 1)
        with pytest.raises(ValueError, match="every x must be finite, got nan at row 2"):
            select(method, RBF(1.0), np.array([[0.0], [1.0], [np.nan]]), 1)


# ---------------------------------------------------------------- distributions


def sequences(method, kernel, m, draws):
    """How often each ordered choice of m of the five points occurs."""
    rng = np.random.default_rng(11)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        key = tuple(int(i) for i in select(method, kernel, SMALL, m, rng))
        counts[key] = counts.get(key, 0) + 1
    return counts


def assert_distributed(counts, probability, m):
    """Chi-square over all ordered choices; those expected less than 5 times are pooled."""
    draws = sum(counts.values())
    keys = list(itertools.permutations(range(5), m))
    expected = np.array([probability(key) for key in keys]) * draws
    np.testing.assert_allclose(np.sum(expected), draws, **tolerance("closed form"))
    seen = np.array([counts.get(key, 0) for key in keys], dtype=float)
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert scipy.stats.chisquare(seen[kept], expected[kept]).pvalue > 1e-3


def product_of_steps(weights):
    """P(s₁ … s_m) from the weights of every row given the rows before."""

    def probability(key):
        total = 1.0
        for k, i in enumerate(key):
            w = weights(np.asarray(key[:k], dtype=int))
            total *= w[i] / w.sum()
        return total

    return probability


def test_rpcholesky_draws_from_the_conditional_residuals():
    """All 60 ordered triples of 5 points against the Schur complements, solved one by one."""
    gram = RBF(1.0)(SMALL)

    def weights(chosen):
        w = residual(gram, chosen) if chosen.size else np.diag(gram).copy()
        w[chosen] = 0.0
        return w

    assert_distributed(sequences("rpcholesky", RBF(1.0), 3, 4000), product_of_steps(weights), 3)


def test_kmeans_plus_plus_draws_by_squared_distance_in_feature_space():
    gram = RBF(1.0)(SMALL)
    squared = np.diag(gram)[:, None] + np.diag(gram) - 2 * gram

    def weights(chosen):
        return np.min(squared[:, chosen], axis=1) if chosen.size else np.ones(5)

    assert_distributed(sequences("kmeans++", RBF(1.0), 3, 4000), product_of_steps(weights), 3)


def test_uniform_is_uniform():
    counts = sequences("uniform", RBF(1.0), 2, 4000)
    assert_distributed(counts, lambda key: 1 / 20, 2)


def test_rounds_of_one_and_rounds_of_many_have_one_distribution(monkeypatch):
    """Rejection must not change the law: acceptance is tried with 8 proposals and with 64."""
    gram = Matern(1.0, 1.5)(SMALL)
    propose = landmarks._propose
    monkeypatch.setattr(landmarks, "_propose", lambda w, m, rng: propose(w, 640, rng))

    def weights(chosen):
        w = residual(gram, chosen) if chosen.size else np.diag(gram).copy()
        w[chosen] = 0.0
        return w

    counts = sequences("rpcholesky", Matern(1.0, 1.5), 3, 3000)
    assert_distributed(counts, product_of_steps(weights), 3)


# ---------------------------------------------------------------- greedy and leverage


@pytest.mark.parametrize("kernel", [RBF(0.7), Matern(1.0, 0.5), Linear(1.0, 1.0)])
def test_greedy_takes_lapacks_pivots(rng, kernel):
    """dpstrf, the pivoted Cholesky of LAPACK, on the whole matrix."""
    x = rng.standard_normal((150, 2))
    _, pivots, rank, _ = scipy.linalg.lapack.dpstrf(kernel(x), lower=1)
    m = min(rank, 60)
    np.testing.assert_array_equal(select("greedy", kernel, x, m), pivots[:m] - 1)


def test_greedy_needs_the_round_to_end_when_the_best_row_was_not_prepared(rng):
    """Two far clusters of unequal spread: the largest residuals lie all in one of them."""
    x = np.concatenate((rng.normal(0, 3.0, (200, 1)), rng.normal(50, 0.3, (200, 1))))
    _, pivots, _, _ = scipy.linalg.lapack.dpstrf(RBF(0.5)(x), lower=1)
    np.testing.assert_array_equal(select("greedy", RBF(0.5), x, 20), pivots[:20] - 1)


def test_leverage_scores_of_all_rows_are_the_definition(rng):
    x = rng.standard_normal((40, 2))
    gram = RBF(1.0)(x)
    for ridge in (1e-3, 0.1, 10.0):
        expected = np.diag(gram @ np.linalg.inv(gram + ridge * np.eye(40)))
        scores = leverage_scores(RBF(1.0), x, ridge)
        np.testing.assert_allclose(scores, expected, **tolerance("closed form"))


def test_leverage_scores_from_a_weighted_sample_are_near_the_exact_ones(rng):
    x = rng.standard_normal((1500, 2))
    exact = leverage_scores(RBF(0.7), x, 1.0)
    sample = rng.choice(1500, 500, replace=False)
    near = leverage_scores(RBF(0.7), x, 1.0, x[sample], np.full(500, 3.0))
    assert np.all(near > 0.5 * exact)
    assert np.sum(near) < 1.5 * np.sum(exact)


def test_leverage_finds_the_few_rows_that_are_unlike_the_rest():
    """Six outliers of 2006 rows, 30 landmarks: uniform finds 0.09 of them on average."""
    rng = np.random.default_rng(2)
    x = np.concatenate((rng.normal(0, 0.3, (2000, 2)), 10 * np.eye(2)[[0, 1, 0, 1, 0, 1]]))
    x[-6:] += np.arange(6)[:, None] * 3.0
    found = [np.sum(select("leverage", RBF(1.0), x, 30, seed) >= 2000) for seed in range(8)]
    assert np.mean(found) > 2


@pytest.mark.parametrize("method", ["kmeans++", "rpcholesky", "leverage"])
def test_a_better_choice_than_uniform_on_unbalanced_data(method):
    """Nine tenths of the rows in one corner: the trace that m landmarks leave, over ten seeds."""
    rng = np.random.default_rng(0)
    x = np.concatenate((rng.normal(0, 0.1, (900, 2)), rng.uniform(-3, 3, (100, 2))))
    gram = RBF(0.7)(x)
    left = {
        name: np.mean([residual(gram, select(name, RBF(0.7), x, 40, s)).sum() for s in range(10)])
        for name in ("uniform", method)
    }
    assert left[method] < 0.7 * left["uniform"]
