"""Minibatches cover a rollout exactly once a pass; explained variance against its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep.rollout import Rollout


def rollout(n):
    rows = torch.arange(float(n))
    return Rollout(rows[:, None], rows[:, None].long(), rows, rows + 1, rows + 2, rows + 3)


@pytest.mark.parametrize(("n", "batch_size", "sizes"), [
    (256, 256, [256]), (257, 256, [129, 128]), (128, 64, [64, 64]), (1, 64, [1]),
    (10, 4, [4, 3, 3]),
])  # fmt: skip
def test_a_pass_sees_every_row_once_in_equal_parts(n, batch_size, sizes, rng):
    parts = list(rollout(n).minibatches(batch_size, rng))
    assert [len(part.value) for part in parts] == sizes
    for part in parts:
        for column, shift in ((part.value, 1), (part.advantage, 2), (part.returns, 3)):
            assert torch.equal(column - shift, part.logprob), "rows stay together"
        assert torch.equal(part.actions[:, 0].float(), part.inputs[:, 0])
    assert torch.equal(
        torch.cat([part.logprob for part in parts]).sort().values, torch.arange(float(n))
    )


def test_the_order_comes_from_the_generator():
    orders = [
        next(rollout(50).minibatches(50, np.random.default_rng(seed))).logprob for seed in (1, 1, 2)
    ]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_explained_variance_matches_numpy(rng):
    value, returns = torch.from_numpy(rng.normal(size=(2, 30)))
    data = rollout(30)._replace(value=value, returns=returns)
    expected = 1 - np.var((returns - value).numpy()) / np.var(returns.numpy())
    np.testing.assert_allclose(data.explained_variance(), expected, **tolerance("algebra"))
    assert data._replace(returns=torch.ones(30)).explained_variance() is None
