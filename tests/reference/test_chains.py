"""The oracles themselves against published numbers."""

import numpy as np
import pytest
from reference.chains import Chain, boyan


def test_fifty_state_chain():
    q = Chain(50, [10, 41]).optimal()
    v = q.max(axis=1)
    assert v[[0, 49]] == pytest.approx(1.533288, abs=1e-6)
    assert v[[9, 40]] == pytest.approx(4.800190, abs=1e-6)
    assert v[[24, 25]] == pytest.approx(0.710313, abs=1e-6)
    right = np.r_[1:10, 26:41]
    left = np.r_[11:26, 42:51]
    assert (q[right - 1].argmax(1) == 1).all() and (q[left - 1].argmax(1) == 0).all()


def test_twenty_state_chain():
    q = Chain(20, [1, 20]).optimal()
    v = q.max(axis=1)
    assert v[[0, 4, 9]] == pytest.approx([9.022624, 5.401948, 2.882027], abs=1e-6)
    assert np.abs(q[:, 0] - q[:, 1]).min() == pytest.approx(0.256, abs=1e-3)


def test_boyan_rows_satisfy_its_values():
    s, r, s2, end = boyan()
    v = -2.0 * (12 - np.arange(13))
    target = r + np.where(end, 0.0, v[s2])
    for state in range(13):
        assert target[s == state].mean() == pytest.approx(v[state])
