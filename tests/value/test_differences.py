"""H by differences against H entry by entry."""

import numpy as np
import pytest
from reference.gp import dense_h
from tolerances import tolerance

from kernrl.data.transitions import Transitions
from kernrl.value import differences as module
from kernrl.value.differences import differences


def rows(n=20, seed=0):
    """Terminated, truncated, broken off by a jump, a single row, and open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2))
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[[3, 12]], truncated[[7, 8]] = True, True
    after = x[1:].copy()
    after[15] += 1.0
    return Transitions(x[:-1], rng.normal(size=n), after, terminated, truncated=truncated)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("tile", [3, 64])
def test_products(gamma, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_ROWS", tile)
    t = rows()
    h, points = dense_h(t, gamma)
    made = differences(t, gamma)
    np.testing.assert_array_equal(made.points, points)
    rng = np.random.default_rng(1)
    (n, p), tight = h.shape, tolerance("algebra")
    x, y = rng.normal(size=(p, 4)), rng.normal(size=(n, 4))
    k, m = (a + a.T for a in (rng.normal(size=(p, p)), rng.normal(size=(n, n))))
    np.testing.assert_allclose(made.apply(x), h @ x, **tight)
    np.testing.assert_allclose(made.apply(x[:, 0]), h @ x[:, 0], **tight)
    np.testing.assert_allclose(made.spread(y), h.T @ y, **tight)
    np.testing.assert_allclose(made.spread(y[:, 0]), h.T @ y[:, 0], **tight)
    np.testing.assert_allclose(made.congruence(k), h @ k @ h.T, **tight)
    np.testing.assert_allclose(made.spread_both(m), h.T @ m @ h, **tight)
    v = x[:, 1]
    np.testing.assert_allclose(made.spread_both(m, minus=v), h.T @ m @ h - np.outer(v, v), **tight)
    for correlated, expected in ((True, h @ h.T), (False, np.eye(n))):
        s = np.zeros((n, n))
        made.add_noise(s, 0.3, correlated)
        np.testing.assert_allclose(s, 0.3 * expected, **tight)


def test_every_cut_can_be_healed():
    """Rows cut anywhere and joined again are the rows; ended episodes stay ended."""
    t = rows()
    whole = differences(t, 0.9)
    for cut in range(1, 20):
        head = differences(t[:cut], 0.9)
        joined = head.joined(differences(t[cut:], 0.9, head.end))
        for name in ("points", "here", "discount", "starts", "rewards"):
            np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), name)
        ended = t.terminated[cut - 1] or t.truncated[cut - 1]
        assert (head.end is None) == bool(ended)


def test_a_restart_in_the_terminal_state_is_no_continuation():
    x = np.zeros((1, 2))
    for flags in ({"terminated": [True]}, {"terminated": [False], "truncated": [True]}):
        head = differences(Transitions(x, [1.0], x, **flags), 0.9)
        assert differences(rows(), 0.9, head.end).starts[0]
    head = differences(Transitions(x, [1.0], rows().states[:1], [False]), 0.9)
    assert not differences(rows(), 0.9, head.end).starts[0]
    assert differences(rows(seed=1), 0.9, head.end).starts[0]


def test_all_terminated_is_square():
    t = rows()[:4]
    assert len(differences(t, 0.9).points) == 4
    assert np.linalg.det(dense_h(t, 0.9)[0]) == pytest.approx(1.0)
