"""Dense, tiled and matrix-free Gram agree, on odd sizes, on every thread count."""

import time

import numpy as np
import pytest
from tolerances import tolerance

from kernrl.kernels import gram as module
from kernrl.kernels.gram import GramOperator, gram, matvec
from kernrl.kernels.stationary import RBF, Matern


def plain(x, y, scale):
    """The formula with a Python double loop."""
    return np.array([[np.exp(-0.5 * np.sum((a - b) ** 2) / scale**2) for b in y] for a in x])


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (255, 3), (256, 300), (257, 259), (600, 1)])
def test_odd_sizes(n, m):
    rng = np.random.default_rng(n)
    x, y, w = rng.normal(size=(n, 3)), rng.normal(size=(m, 3)), rng.normal(size=(m, 2))
    dense = gram(RBF(1.3), x, y)
    np.testing.assert_allclose(dense[:3, :3], plain(x[:3], y[:3], 1.3), **tolerance("closed form"))
    np.testing.assert_allclose(matvec(RBF(1.3), x, y, w), dense @ w, **tolerance("algebra"))
    np.testing.assert_allclose(
        matvec(RBF(1.3), x, y, w[:, 0]), dense @ w[:, 0], **tolerance("algebra")
    )
    operator = GramOperator(RBF(1.3), x, y)
    np.testing.assert_allclose(operator.rmatvec(x[:, 0]), dense.T @ x[:, 0], **tolerance("algebra"))


def test_empty():
    assert gram(RBF(), np.ones((0, 3)), np.ones((4, 3))).shape == (0, 4)
    assert gram(RBF(), np.ones((4, 3)), np.ones((0, 3))).shape == (4, 0)


def test_one_dimensional_input_is_a_column():
    np.testing.assert_array_equal(gram(RBF(), [0.0, 1.0]), gram(RBF(), [[0.0], [1.0]]))


def test_thread_count_does_not_change_a_bit(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1000, 4)), rng.normal(size=(300, 4))
    results = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results.append(gram(Matern(1.0), x, y))
    np.testing.assert_array_equal(*results)


def test_symmetric_diagonal_is_exact_in_every_tile():
    x = np.random.default_rng(0).normal(size=(700, 5)).astype(np.float32) * 100
    np.testing.assert_array_equal(np.diagonal(gram(RBF(0.1), x)), np.ones(700, np.float32))


def test_device_tiles_are_joined(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(module, "DEVICE_TILE", 50)
    x = torch.randn(33, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tiled, whole = gram(RBF(), x, x[:7]), gram(RBF(), x.numpy(), x[:7].numpy())
    np.testing.assert_allclose(tiled.numpy(), whole, **tolerance("closed form"))


def test_torch_gradient_reaches_the_inputs():
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:3] + 0.3
    for kernel in (RBF(0.8), Matern(0.8, nu=2.5)):
        assert torch.autograd.gradcheck(lambda a, k=kernel: gram(k, a, y), x.requires_grad_(True))


def test_mixed_precision_and_libraries():
    x = np.ones((2, 2), np.float32)
    assert gram(RBF(), x, x.astype(np.float64)).dtype == np.float64
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="arrays: all arrays must come from one library"):
        gram(RBF(), x, torch.ones(2, 2))


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match=r"GramOperator: w must have 4 rows, got \(3,\)"):
        matvec(RBF(), np.ones((2, 1)), np.ones((4, 1)), np.ones(3))


def test_ordered_results_come_in_order_and_errors_come_out(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def late(start):  # the earlier, the slower
        time.sleep(0.02 if start % 20 == 0 else 0.0)
        return start

    assert list(module.ordered(late, 95, 10)) == list(range(0, 95, 10))
    assert list(module.ordered(late, 0, 10)) == []

    def fails(start):
        if start == 30:
            raise ZeroDivisionError
        return start

    with pytest.raises(ZeroDivisionError):
        list(module.ordered(fails, 95, 10))
