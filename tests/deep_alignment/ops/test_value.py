"""The value loss against scalar code, its gradient, and the rounding trap of value clipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import policy_terms
from tolerances import tolerance

from kernrl.deep_alignment.ops.value import value_loss


@pytest.fixture
def batch(rng):
    """v, v_old, R, mask: v on both sides of v_old ± 0.2 and of R; one row fully masked."""
    value = rng.normal(size=(6, 9))
    old = value + rng.normal(scale=0.4, size=value.shape)
    returns = value + rng.normal(scale=0.5, size=value.shape)
    mask = rng.random(value.shape) < 0.7
    mask[1] = False
    return *map(torch.from_numpy, (value, old, returns)), torch.from_numpy(mask)


def by_tokens(value, old, returns, mask, clip):
    pairs = [
        policy_terms.value(v, o, r, clip) if keep else (0.0, 0.0)
        for v, o, r, keep in zip(
            *(x.flatten().tolist() for x in (value, old, returns, mask)), strict=True
        )
    ]
    return torch.tensor(pairs, dtype=value.dtype).T.reshape(2, *value.shape)


@pytest.mark.parametrize("clip", [None, 0.0, 0.2, 10.0])
def test_value_and_gradient_match_scalar_code(clip, batch):
    value, old, returns, mask = batch
    value.requires_grad_()
    loss, _ = value_loss(value, old, returns, mask, clip=clip, aggregate="none")
    loss.sum().backward()
    expected, slope = by_tokens(value.detach(), old, returns, mask, clip)
    torch.testing.assert_close(loss.detach(), expected, **tolerance("algebra"))
    torch.testing.assert_close(value.grad, slope, **tolerance("algebra"))


@pytest.mark.parametrize("huber", [None, 0.3])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradcheck(clip, huber, batch):
    value, old, returns, mask = batch
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, clip=clip, huber=huber)[0],
        value.requires_grad_(),
    )


def test_huber_is_linear_beyond_delta(batch):
    value, _, returns, mask = batch
    loss, _ = value_loss(value, None, returns, mask, huber=0.3, aggregate="none")
    e = (value - returns).abs()
    expected = torch.where(e <= 0.3, 0.5 * e**2, 0.3 * (e - 0.15)).masked_fill(~mask, 0.0)
    torch.testing.assert_close(loss, expected, **tolerance("algebra"))


def test_inside_the_clip_range_rounding_costs_no_gradient():
    """v_old + (v − v_old) differs from v by rounding; the larger square must not win there."""
    generator = torch.Generator().manual_seed(0)
    value = 0.01 * torch.randn(10_000, generator=generator)
    old = value + 0.1 * torch.randn(10_000, generator=generator).clamp(-1, 1)
    returns = value + torch.randn(10_000, generator=generator)
    assert (old + (value - old) != value).any()
    value.requires_grad_()
    value_loss(value, old, returns, clip=0.2, aggregate="none")[0].sum().backward()
    assert torch.equal(value.grad, value.detach() - returns)


def test_the_half_is_inside():
    loss, _ = value_loss(torch.tensor([3.0]), None, torch.tensor([1.0]))
    assert loss.item() == 2.0


def test_metrics_match_numpy(batch):
    value, old, returns, mask = batch
    value.requires_grad_()
    _, metrics = value_loss(value, old, returns, mask, clip=0.2)
    keep = mask.numpy()
    error = (value.detach() - returns).numpy()[keep]
    _, slope = by_tokens(value.detach(), old, returns, mask, 0.2)
    expected = {
        "error": error.mean(),
        "absolute_error": np.abs(error).mean(),
        "clip_fraction": np.mean(slope.numpy()[keep] == 0),
    }
    assert 0 < expected["clip_fraction"] < 1
    assert metrics.keys() == expected.keys()
    for name, number in metrics.items():
        assert not number.requires_grad
        np.testing.assert_allclose(number.item(), expected[name], **tolerance("algebra"))


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_whatever_stands_in_a_masked_entry_is_not_read(clip, junk, batch):
    *tensors, mask = batch
    clean, _ = value_loss(*tensors, mask, clip=clip)
    dirty = [x.masked_fill(~mask, junk) for x in tensors]
    dirty[0].requires_grad_()
    loss, metrics = value_loss(*dirty, mask, clip=clip)
    loss.backward()
    assert torch.equal(loss.detach(), clean)
    assert torch.equal(dirty[0].grad[~mask], torch.zeros_like(dirty[0].grad[~mask]))
    assert all(torch.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counts_gives_zeros(shape):
    value = torch.ones(shape, requires_grad=True)
    off = torch.zeros(shape, dtype=torch.bool)
    loss, metrics = value_loss(value, torch.zeros(shape), torch.zeros(shape), off, clip=0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(value.grad, torch.zeros(shape))
    assert {number.item() for number in metrics.values()} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"value": torch.zeros(2, 3, dtype=torch.int32)},
            TypeError,
            "value_loss: value must be a floating-point tensor, got dtype torch.int32",
        ),
        (
            {"returns": torch.zeros(3)},
            ValueError,
            r"value_loss: returns must have the shape of value \(2, 3\), got \(3,\)\.",
        ),
        (
            {"clip": -0.1},
            ValueError,
            "value_loss: clip must be a finite number at least 0.0, got -0.1",
        ),
        (
            {"clip": 0.1, "old_value": None},
            ValueError,
            "value_loss: clip needs old_value, got None. Pass the values at sampling time, or",
        ),
        ({"huber": 0}, ValueError, "value_loss: huber must be a finite number above 0.0, got 0"),
        ({"aggregate": "sum"}, ValueError, "aggregate: how must be one of"),
        ({"impl": "triton"}, NotImplementedError, "value_loss: impl='triton' is not in this"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {name: torch.zeros(2, 3) for name in ("value", "old_value", "returns")}
    with pytest.raises(error, match=text):
        value_loss(**given | arguments)
