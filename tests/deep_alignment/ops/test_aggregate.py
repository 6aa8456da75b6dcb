"""Aggregation against loops; what a fully masked row, an empty batch and a window of batches do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.aggregate import MODES, aggregate


def by_loops(x: np.ndarray, mask: np.ndarray, how: str) -> float:
    rows = [[v for v, keep in zip(r, m, strict=True) if keep] for r, m in zip(x, mask, strict=True)]
    full = [r for r in rows if r]
    if not full:
        return 0.0
    if how == "token-mean":
        return sum(map(sum, full)) / sum(map(len, full))
    if how == "seq-mean-token-mean":
        return sum(sum(r) / len(r) for r in full) / len(full)
    if how == "seq-mean-token-sum":
        return sum(map(sum, full)) / len(full)
    assert how == "constant"
    return sum(map(sum, full)) / x.size


@pytest.fixture
def batch(rng):
    """Five sequences of seven tokens; the third is fully masked, the fourth not at all."""
    x, mask = rng.normal(size=(5, 7)), rng.random((5, 7)) < 0.6
    mask[2], mask[3] = False, True
    return torch.from_numpy(x), torch.from_numpy(mask)


@pytest.mark.parametrize("how", MODES)
def test_every_mode_matches_a_loop(how, batch):
    x, mask = batch
    expected = by_loops(x.numpy(), mask.numpy(), how)
    np.testing.assert_allclose(aggregate(x, mask, how).item(), expected, **tolerance("algebra"))
    everything = np.ones(x.shape, dtype=bool)
    expected = by_loops(x.numpy(), everything, how)
    for unmasked in (None, torch.from_numpy(everything)):
        got = aggregate(x, unmasked, how).item()
        np.testing.assert_allclose(got, expected, **tolerance("algebra"))


@pytest.mark.parametrize("how", MODES)
def test_a_fully_masked_row_changes_no_mean_over_sequences(how, batch):
    x, mask = batch
    kept = [0, 1, 3, 4]
    shorter = aggregate(x[kept], mask[kept], how).item()
    scale = 5 / 4 if how == "constant" else 1.0  # the constant counts every row there is
    got = scale * aggregate(x, mask, how).item()
    np.testing.assert_allclose(got, shorter, **tolerance("algebra"))


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (0, 0)])
def test_nothing_counts_gives_zero_with_zero_gradient(how, shape):
    x = torch.ones(shape, requires_grad=True)
    masks = [torch.zeros(shape, dtype=torch.bool)] + [None] * (x.numel() == 0)
    for mask in masks:
        loss = aggregate(x, mask, how)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(x.grad, torch.zeros(shape))


@pytest.mark.parametrize("how", [*MODES, "none"])
def test_what_is_masked_reaches_neither_value_nor_gradient(how, batch):
    x, mask = batch
    x = x.masked_fill(~mask, torch.nan).requires_grad_()
    total = aggregate(x, mask, how).sum()
    total.backward()
    assert torch.isfinite(total)
    assert torch.equal(x.grad == 0, ~mask)


def test_none_keeps_tokens_apart(batch):
    x, mask = batch
    assert torch.equal(aggregate(x, mask, "none"), torch.where(mask, x, 0.0))


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_with_the_window_as_denominator_add_up(how, as_tensor, batch):
    x, mask = batch
    sequences = mask.any(-1).sum().item()
    whole = {"token-mean": mask.sum().item(), "constant": x.numel()}.get(how, sequences)
    denominator = torch.tensor(float(whole)) if as_tensor else whole
    parts = [aggregate(x[r], mask[r], how, denominator) for r in (slice(0, 2), slice(2, 5))]
    expected = aggregate(x, mask, how).item()
    np.testing.assert_allclose(sum(parts).item(), expected, **tolerance("algebra"))


@pytest.mark.parametrize("how", MODES)
def test_gradcheck(how, batch):
    x, mask = batch
    assert torch.autograd.gradcheck(lambda y: aggregate(y, mask, how), x.requires_grad_())


def test_numbers_serve_as_mask_and_half_precision_is_summed_in_float32(batch):
    x, mask = batch
    expected = aggregate(x, mask)
    assert torch.equal(aggregate(x, mask.long()), expected)
    assert torch.equal(aggregate(x, mask.double()), expected)
    ones = torch.ones(1, 4097, dtype=torch.bfloat16)  # bfloat16 cannot even count to 257
    assert aggregate(ones, None, "seq-mean-token-sum").item() == 4097.0


def test_one_axis_is_enough_where_there_are_no_sequences():
    x = torch.tensor([1.0, 2.0, 6.0])
    assert aggregate(x, None).item() == aggregate(x, None, "constant").item() == 3.0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"how": "token-men"},
            ValueError,
            r"aggregate: how must be one of constant, none, seq-mean-token-mean, "
            r"seq-mean-token-sum, token-mean, got 'token-men'. Did you mean 'token-mean'\?",
        ),
        (
            {"mask": torch.ones(3, 2, dtype=torch.bool)},
            ValueError,
            r"aggregate: mask must have the shape of x \(2, 3\), got \(3, 2\)\.",
        ),
        ({"mask": [True]}, TypeError, "aggregate: mask must be a torch tensor, got list"),
        (
            {"x": torch.ones(2, 3, dtype=torch.int64)},
            TypeError,
            r"aggregate: x must be a floating-point tensor, got dtype torch.int64",
        ),
        ({"x": np.ones((2, 3))}, TypeError, "aggregate: x must be a torch tensor, got ndarray"),
        (
            {"x": torch.ones(3), "mask": None, "how": "seq-mean-token-sum"},
            ValueError,
            r"aggregate: how='seq-mean-token-sum' needs tensors of shape \(b, t\), got \(3,\)",
        ),
        ({"denominator": 0}, ValueError, "denominator must be a finite number above 0.0, got 0"),
        (
            {"how": "none", "denominator": 2.0},
            ValueError,
            "how='none' divides by nothing, so denominator must be None, got 2.0",
        ),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {"x": torch.ones(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)} | arguments
    with pytest.raises(error, match=text):
        aggregate(**given)


def test_a_mask_on_another_device_is_refused():
    mask = torch.ones(2, 3, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"mask must be on the device of x \(cpu\), got meta"):
        aggregate(torch.ones(2, 3), mask)
