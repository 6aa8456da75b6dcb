"""Where the terminal reward goes under every padding, and the price of length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.rewards import overlong_penalty, shape_rewards
from kernrl.deep_alignment.ops.sequences import length_mask


def by_loop(rewards, kl, mask, beta, clip):
    out = np.zeros(mask.shape)
    for row in range(len(mask)):
        kept = np.flatnonzero(mask[row])
        for t in kept:
            out[row, t] = -beta * kl[row, t]
        if len(kept):
            out[row, kept[-1]] += (
                rewards[row] if clip is None else np.clip(rewards[row], -clip, clip)
            )
    return out


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rewards_match_a_loop(beta, clip, rng):
    rewards, kl = rng.normal(scale=2.0, size=7), rng.normal(size=(7, 9))
    mask = rng.random((7, 9)) < 0.5
    mask[3] = False
    tensors = (torch.from_numpy(x) for x in (rewards, kl, mask))
    got = shape_rewards(*tensors, beta=beta, clip=clip)
    np.testing.assert_allclose(
        got.numpy(), by_loop(rewards, kl, mask, beta, clip), **tolerance("algebra")
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_score_stands_on_the_last_real_token_on_either_padding(side):
    mask = length_mask(torch.tensor([1, 3, 4]), 4, side=side)
    got = shape_rewards(torch.tensor([1.0, 2.0, 3.0]), None, mask)
    last = [0, 2, 3] if side == "right" else [3, 3, 3]
    expected = torch.zeros(3, 4)
    expected[torch.arange(3), last] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(got, expected)


def test_an_end_token_equal_to_the_padding_keeps_its_reward():
    """pad == eos: the mask comes from the length, so the reward stands on the real end."""
    lengths = torch.tensor([3])  # two tokens and the end of sequence, then padding of the same id
    got = shape_rewards(torch.tensor([7.0]), torch.zeros(1, 5), length_mask(lengths, 5))
    assert got.tolist() == [[0.0, 0.0, 7.0, 0.0, 0.0]]


def test_without_a_mask_the_last_token_is_the_last_column():
    got = shape_rewards(torch.tensor([7.0, 8.0]), torch.zeros(2, 3))
    assert got.tolist() == [[0.0, 0.0, 7.0], [0.0, 0.0, 8.0]]


def test_rewards_per_token_stay_where_they_are(rng):
    rewards, kl = (torch.from_numpy(rng.normal(size=(2, 4))) for _ in range(2))
    mask = torch.tensor([[True, True, False, True], [False] * 4])
    got = shape_rewards(rewards, kl, mask, beta=0.1, clip=0.5)
    expected = torch.where(mask, rewards.clamp(-0.5, 0.5) - 0.1 * kl, 0.0)
    assert torch.equal(got, expected)
    assert torch.equal(shape_rewards(rewards, None), rewards)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_masked_entries_are_not_read(junk):
    mask = torch.tensor([[True, False], [False, False]])
    kl = torch.ones(2, 2).masked_fill(~mask, junk)
    got = shape_rewards(torch.tensor([1.0, junk]), kl, mask, beta=0.5)
    assert got.tolist() == [[0.5, 0.0], [0.0, 0.0]]


def test_a_flood_of_divergence_is_not_clipped_with_the_score():
    got = shape_rewards(torch.tensor([9.0]), torch.tensor([[4.0, 4.0]]), beta=1.0, clip=2.0)
    assert got.tolist() == [[-4.0, -2.0]]


def test_no_gradient_flows_and_half_precision_is_raised():
    kl = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    got = shape_rewards(torch.ones(1, dtype=torch.float16), kl, beta=0.1)
    assert got.dtype == torch.float32
    assert not got.requires_grad


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_batch_stays_empty(shape):
    for mask in (None, torch.zeros(shape, dtype=torch.bool)):
        assert shape_rewards(torch.zeros(shape[0]), torch.zeros(shape), mask).shape == shape


def test_overlong_penalty_is_a_ramp():
    lengths = torch.tensor([0, 12, 13, 14, 16, 17, 100])
    got = overlong_penalty(lengths, limit=16, buffer=4)
    assert got.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: shape_rewards(torch.zeros(3), torch.zeros(2, 4)),
            ValueError,
            r"shape_rewards: rewards must have shape \(2,\), one a sequence, got \(3,\)",
        ),
        (
            lambda: shape_rewards(torch.zeros(2, 3), torch.zeros(2, 4)),
            ValueError,
            r"shape_rewards: rewards must have shape \(2,\) or \(2, 4\), got \(2, 3\)",
        ),
        (
            lambda: shape_rewards(torch.zeros(2), None),
            ValueError,
            r"one of rewards, kl and mask must be a tensor of shape \(b, t\), got \(2,\)",
        ),
        (
            lambda: shape_rewards(torch.zeros(2), torch.zeros(2, 4), torch.ones(2, 3)),
            ValueError,
            r"shape_rewards: mask must have the shape of the tokens \(2, 4\), got \(2, 3\)",
        ),
        (
            lambda: shape_rewards(torch.zeros(2), torch.zeros(2, 4), beta=-0.1),
            ValueError,
            "shape_rewards: beta must be a finite number at least 0.0, got -0.1",
        ),
        (
            lambda: shape_rewards(torch.zeros(2), torch.zeros(2, 4), clip=0.0),
            ValueError,
            "shape_rewards: clip must be a finite number above 0.0, got 0.0",
        ),
        (
            lambda: shape_rewards(torch.zeros(2), torch.zeros(2, 4), impl="triton"),
            NotImplementedError,
            "shape_rewards: impl='triton' is not in this version",
        ),
        (
            lambda: overlong_penalty(torch.zeros(2).long(), limit=4, buffer=5),
            ValueError,
            "overlong_penalty: buffer must be an integer of at least 1 and at most 4, got 5",
        ),
        (
            lambda: overlong_penalty(torch.zeros(2), limit=4, buffer=2),
            TypeError,
            "overlong_penalty: lengths must be a tensor of whole numbers, got dtype torch.float32",
        ),
    ],
)
def test_errors_say_what_must_hold(call, error, text):
    with pytest.raises(error, match=text):
        call()
