"""Running sums and their solution: projections in mid-stream, and how few inverses are made."""

import numpy as np
import pytest
from tolerances import tolerance

from kernrl import linalg
from kernrl.value.running import Block, StaleInverse, Sums, WindowSums


def block(n, m, seed):
    rng = np.random.default_rng(seed)
    starts = rng.random(n) < 0.2
    starts[0] = False  # each block continues the one before
    return Block(rng.normal(size=(n, m)), rng.normal(size=(n, m)), rng.normal(size=n), starts)


def stacked(a, b):
    return Block(*(np.concatenate(pair) for pair in zip(a, b, strict=True)))


@pytest.mark.parametrize("make", [lambda: Sums(0.6, 0.9), lambda: WindowSums(0.6, 25)])
def test_a_projection_in_mid_stream_is_one_of_all_rows_before(make):
    first, then = block(20, 6, 0), block(15, 4, 1)
    projection = np.random.default_rng(2).normal(size=(4, 6))
    split, whole = make(), make()
    split.add(first)
    split.project(projection)
    split.add(then)
    phi, difference = first.phi @ projection.T, first.difference @ projection.T
    whole.add(stacked(Block(phi, difference, first.rewards, first.starts), then))
    np.testing.assert_allclose(split.matrix, whole.matrix, **tolerance("closed form"))
    np.testing.assert_allclose(split.target, whole.target, **tolerance("closed form"))
    assert split.n == pytest.approx(whole.n)


@pytest.mark.parametrize("make", [lambda: Sums(0.6, 0.9), lambda: WindowSums(0.6, 25)])
def test_features_that_join_were_zero_before(make):
    first, then = block(20, 4, 0), block(15, 6, 1)
    split, whole = make(), make()
    split.add(first)
    split.add(then)
    phi, difference = (np.pad(x, ((0, 0), (0, 2))) for x in first[:2])
    whole.add(stacked(Block(phi, difference, first.rewards, first.starts), then))
    np.testing.assert_allclose(split.matrix, whole.matrix, **tolerance("closed form"))
    np.testing.assert_allclose(split.target, whole.target, **tolerance("closed form"))


class TestStaleInverse:
    @pytest.fixture
    def made(self, monkeypatch):
        calls, honest = [], linalg.solve
        monkeypatch.setattr(linalg, "solve", lambda *a, **k: calls.append(1) or honest(*a, **k))
        return calls

    def system(self, m=12):
        rng = np.random.default_rng(0)
        return rng.normal(size=(m, m)) + 5 * np.eye(m), rng.normal(size=m), rng

    def test_small_changes_need_no_inverse(self, made):
        a, b, rng = self.system()
        solver = StaleInverse()
        for _ in range(20):
            x = solver.solve(a, b, owner="test")
            np.testing.assert_allclose(a @ x, b, **tolerance("closed form"))
            a = a + 1e-3 * rng.normal(size=a.shape)
        assert len(made) == 1

    def test_a_border_needs_no_inverse(self, made):
        a, b, _ = self.system()
        solver = StaleInverse()
        for m in (7, 8, 12):
            x = solver.solve(a[:m, :m], b[:m], owner="test")
            np.testing.assert_allclose(a[:m, :m] @ x, b[:m], **tolerance("closed form"))
        assert len(made) == 1

    def test_another_system_gets_its_own(self, made):
        a, b, rng = self.system()
        solver = StaleInverse()
        solver.solve(a, b, owner="test")
        other = rng.normal(size=a.shape) * 100
        x = solver.solve(other, b, owner="test")
        np.testing.assert_allclose(other @ x, b, **tolerance("closed form"))
        assert len(made) == 2

    def test_a_singular_border_falls_back(self, made):
        solver = StaleInverse()
        solver.solve(np.eye(1), np.ones(1), owner="test")
        a = np.array([[1.0, 1.0], [1.0, 1.0]])
        with pytest.raises(ValueError, match="test: the system must not be singular"):
            solver.solve(a, np.array([1.0, 2.0]), owner="test")
