"""ShrinkingCovariance against the dense matrix."""

import numpy as np
import pytest
from tolerances import tolerance

from kernrl.value.shrinking import PENDING, ShrinkingCovariance


@pytest.mark.parametrize("count", [0, 1, PENDING - 1, PENDING, 3 * PENDING + 5])
def test_products_roots_and_growth(count):
    rng = np.random.default_rng(0)
    dense, made = np.eye(6), ShrinkingCovariance(np.eye(6))
    for i in range(count):
        if i == count // 2:
            made.grow()
            dense = np.pad(dense, (0, 1))
            dense[-1, -1] = 1.0
        y = rng.normal(size=len(dense))
        image = dense @ y
        np.testing.assert_allclose(made.image(y), image, **tolerance("algebra"))
        u = image / np.sqrt(0.5 + y @ image)
        made.subtract(u)
        dense = dense - np.outer(u, u)
    np.testing.assert_allclose(np.triu(made.upper), np.triu(dense), **tolerance("algebra"))
    phi = rng.normal(size=(4, len(dense)))
    np.testing.assert_allclose(
        made.quadratic(phi), np.diagonal(phi @ dense @ phi.T), **tolerance("algebra")
    )
    root = made.square_root()
    np.testing.assert_allclose(root @ root.T, dense, **tolerance("closed form"))
