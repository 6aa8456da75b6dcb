"""The iterative solution against LU: same weights, no n×n, a residual that is told and believed."""

import dataclasses

import numpy as np
import pytest
from tolerances import tolerance

from kernrl import arrays, checks
from kernrl.approx.nystroem import Nystroem
from kernrl.data import parquet
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern
from kernrl.value import iterative
from kernrl.value.iterative import SystemOperator, landmark_inverse, solve
from kernrl.value.lstd import KLSTD, KLSTDQ
from kernrl.value.system import solve_exact, state_rows


def walk(n=200, d=2, seed=0):
    """Three episodes: one ends in a terminal state, one is cut, one is open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, d)).cumsum(axis=0) * 0.2
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[n // 2] = True, True
    actions = rng.integers(2, size=n)
    return Transitions(
        x[:-1], np.sin(x[:-1, 0]), x[1:], terminated, truncated=truncated, actions=actions
    )


def dense(kernel, rows, gamma, ridge, decay=0.0):
    """The matrix, column by column of the operator."""
    operator = SystemOperator(kernel, rows, gamma, ridge, decay)
    return np.column_stack([operator @ e for e in np.eye(len(rows))])


class TestOperator:
    @pytest.mark.parametrize("decay", [0.0, 0.7])
    def test_is_the_matrix_that_lu_solves(self, decay):
        rows = state_rows(walk(60))
        matrix = dense(Matern(1.0), rows, 0.9, 1e-3, decay)
        operator = SystemOperator(Matern(1.0), rows, 0.9, 1e-3, decay)
        expected = np.linalg.solve(matrix, operator.traced(rows.rewards))
        np.testing.assert_allclose(
            solve_exact(Matern(1.0), rows, 0.9, 1e-3, decay, owner="test"),
            expected,
            **tolerance("closed form"),
        )

    @pytest.mark.parametrize("decay", [0.0, 0.7])
    def test_with_all_landmarks_the_preconditioner_is_the_inverse(self, decay):
        rows = state_rows(walk(60))
        operator = SystemOperator(Laplacian(1.0), rows, 0.9, 1e-3, decay)
        apply = landmark_inverse(Laplacian(1.0), operator, 60, owner="test")
        product = np.column_stack([operator @ apply(e) for e in np.eye(60)])
        np.testing.assert_allclose(product, np.eye(60), **tolerance("iterative"))

    def test_the_preconditioner_saves_products(self):
        rows = state_rows(walk())
        operator = SystemOperator(RBF(1.0), rows, 0.99, 1e-5)
        apply = landmark_inverse(RBF(1.0), operator, 100, owner="test")
        _, without = iterative._gmres(lambda v: operator @ v, rows.rewards)
        _, within = iterative._gmres(lambda v: operator @ apply(v), rows.rewards)
        assert within < 10 and without > 3 * within


class TestSolve:
    @pytest.mark.parametrize("kernel", [RBF(1.0), Matern(0.7, nu=1.5), Laplacian(0.5)])
    @pytest.mark.parametrize("gamma", [0.9, 0.999])
    @pytest.mark.parametrize("decay", [0.0, 0.8])
    def test_same_values_as_lu(self, kernel, gamma, decay, monkeypatch):
        monkeypatch.setattr(iterative, "MOST_LANDMARKS", 60)
        t = walk()
        made = (KLSTD(kernel, gamma, 1e-4, None, decay, solver=s) for s in ("direct", "iterative"))
        direct, iterated = (td.fit(t) for td in made)
        assert iterated.solver_.method == "iterative" and iterated.solver_.landmarks == 60
        assert iterated.solver_.residual <= 2e-8 and iterated.solver_.converged
        v = direct.predict(t.states)
        gap = np.abs(iterated.predict(t.states) - v).max() / np.abs(v).max()
        assert gap < tolerance("iterative")["rtol"]

    def test_residual_is_that_of_the_system_written_out(self):
        rows = state_rows(walk())
        w, report = solve(RBF(1.0), rows, 0.9, 1e-4, solver="iterative", owner="test")
        matrix = dense(RBF(1.0), rows, 0.9, 1e-4)
        residual = np.linalg.norm(rows.rewards - matrix @ w) / np.linalg.norm(rows.rewards)
        assert report.residual == pytest.approx(residual, rel=1e-3)
        assert 2 < report.products < 100

    def test_pairs(self):
        t = walk()
        kernel = StateAction(Matern(1.0), Delta())

        def policy(s):
            return np.column_stack((np.full(len(s), 0.3), np.full(len(s), 0.7)))

        made = (KLSTDQ(kernel, policy, 0.9, solver=s) for s in ("direct", "iterative"))
        direct, iterated = (td.fit(t).predict(t.states, t.actions) for td in made)
        np.testing.assert_allclose(iterated, direct, **tolerance("iterative"))

    def test_auto_is_lu_below_the_crossover_and_an_iteration_above(self, monkeypatch):
        t = walk(120)
        assert KLSTD(RBF(1.0)).fit(t).solver_ == iterative.DIRECT
        monkeypatch.setattr(iterative, "CROSSOVER", 100)
        assert KLSTD(RBF(1.0)).fit(t).solver_.method == "iterative"
        assert KLSTD(RBF(1.0), ridge=0.0, gamma=0.5).fit(t[:5]).solver_.method == "direct"

    def test_auto_iterates_where_the_matrix_does_not_fit(self, monkeypatch):
        t = walk(1000)
        monkeypatch.setattr(arrays, "available_bytes", lambda x: 1.6e7)  # 24n² are 2.4e7
        td = KLSTD(RBF(1.0)).fit(t)
        assert td.solver_.method == "iterative" and td.solver_.landmarks < 317
        with pytest.raises(MemoryError, match="KLSTD: the exact system of 1000 rows must fit"):
            KLSTD(RBF(1.0), solver="direct").fit(t)
        monkeypatch.setattr(arrays, "available_bytes", lambda x: 1e6)
        with pytest.raises(MemoryError, match=r"1000 rows must fit in .* GiB, got .* needed"):
            KLSTD(RBF(1.0)).fit(t)

    def test_a_missed_tolerance_is_told_or_mended(self, monkeypatch):
        t = walk()
        monkeypatch.setattr(iterative, "MAX_PRODUCTS", 1)
        monkeypatch.setattr(iterative, "RESTART", 2)
        monkeypatch.setattr(iterative, "MOST_LANDMARKS", 5)
        with pytest.warns(checks.ConditionWarning, match=r"relative residual of .*Raise ridge"):
            td = KLSTD(Laplacian(0.3), 0.99, 1e-6, solver="iterative").fit(t)
        assert not td.solver_.converged and td.solver_.residual > 1e-6
        monkeypatch.setattr(iterative, "CROSSOVER", 10)
        mended = KLSTD(Laplacian(0.3), 0.99, 1e-6).fit(t)
        assert mended.solver_ == iterative.DIRECT
        direct = KLSTD(Laplacian(0.3), 0.99, 1e-6, solver="direct").fit(t)
        np.testing.assert_array_equal(mended.weights_, direct.weights_)

    def test_same_bits_twice(self):
        t = walk(150)
        fits = [KLSTD(RBF(1.0), solver="iterative").fit(t).weights_ for _ in range(2)]
        np.testing.assert_array_equal(*fits)

    def test_rewards_of_zero(self):
        t = walk(50).replace(rewards=np.zeros(50))
        td = KLSTD(RBF(1.0), solver="iterative").fit(t)
        assert td.solver_.residual == 0.0 and not td.weights_.any()

    @pytest.mark.parametrize("library", ["torch", "array_api_strict"])
    def test_other_libraries(self, library):
        lib = pytest.importorskip(library)
        t = walk(80)
        moved = Transitions(
            **{k: None if v is None else lib.asarray(np.array(v)) for k, v in t.columns.items()}
        )
        here, there = (KLSTD(RBF(1.0), 0.9, solver="iterative").fit(x) for x in (t, moved))
        assert type(there.weights_) is type(moved.states)
        np.testing.assert_allclose(
            here.predict(t.states),
            np.asarray(there.predict(moved.states)),
            **tolerance("iterative"),
        )


def test_bad_choices():
    with pytest.raises(ValueError, match=r"KLSTD: solver must be one of auto, direct, iterative"):
        KLSTD(RBF(), solver="lu").fit(walk(10))
    with pytest.raises(ValueError, match=r"KLSTD: ridge must be above 0 for the iterative"):
        KLSTD(RBF(), ridge=0.0, solver="iterative").fit(walk(10))


def test_the_report_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        iterative.DIRECT.method = "other"


# ---------------------------------------------------------------- larger than memory


@pytest.mark.parametrize("features", [None, Nystroem(n_components=20, rng=0)])
def test_a_folder_of_parquet_files_is_one_fit(tmp_path, features):
    t = walk(90)
    for k in range(3):
        t[30 * k : 30 * (k + 1)].to_parquet(tmp_path / f"part-{k}.parquet")
    td = KLSTD(RBF(1.0), 0.9, features=features)
    whole = td.fit(t[:90]).predict(t.states)
    chunked = td.fit(parquet.chunks(tmp_path, n_rows=70))
    assert chunked.n_transitions_ == 90
    np.testing.assert_allclose(chunked.predict(t.states), whole, **tolerance("closed form"))
