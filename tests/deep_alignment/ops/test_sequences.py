"""Masks from lengths, sums per sequence, packed ids and next values against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import advantage_sums
from tolerances import tolerance

from kernrl.deep_alignment.ops.sequences import (
    last_counting,
    length_mask,
    next_values,
    segment_ids,
    sequence_logprobs,
)


@pytest.mark.parametrize("side", ["left", "right"])
def test_length_mask_counts_from_its_side(side):
    got = length_mask(torch.tensor([0, 2, 5, 9]), 5, side=side).numpy()
    for row, n in enumerate([0, 2, 5, 5]):
        real = np.arange(5) < n if side == "right" else np.arange(5) >= 5 - n
        np.testing.assert_array_equal(got[row], real)


def test_the_mask_does_not_ask_for_an_id():
    """pad == eos: the real end of sequence keeps its place in the mask."""
    eos = pad = 7
    ids = torch.tensor([[3, eos, pad, pad], [3, 4, 5, 6]])
    mask = length_mask(torch.tensor([2, 4]), 4)
    assert mask.sum(-1).tolist() == [2, 4]
    assert (ids != pad).sum(-1).tolist() == [1, 4]


@pytest.mark.parametrize("ends", [[0], [0, 4], [0, 1, 1, 3], [0, 2, 4]])
def test_segment_ids_number_the_tokens(ends):
    expected = [i for i, n in enumerate(np.diff(ends)) for _ in range(n)]
    expected += [len(ends) - 1] * (4 - len(expected))
    assert segment_ids(torch.tensor(ends, dtype=torch.int32), 4).tolist() == expected


@pytest.mark.parametrize("tail_weight", [0.0, 0.3, 1.0])
def test_sequence_logprobs_match_a_loop(tail_weight, rng):
    logprob = torch.from_numpy(-rng.exponential(size=(5, 8)))
    mask = torch.from_numpy(rng.random((5, 8)) < 0.6)
    shared = torch.tensor([0, 2, 3, 5, 8])
    logprob.requires_grad_()
    got, lengths = sequence_logprobs(logprob, mask, shared_length=shared, tail_weight=tail_weight)
    (slope,) = torch.autograd.grad(got.sum(), logprob)
    for row in range(5):
        kept = np.flatnonzero(mask[row].numpy())
        weights = [1.0 if i < shared[row] else tail_weight for i in range(len(kept))]
        total = sum(w * logprob[row, t].item() for w, t in zip(weights, kept, strict=True))
        np.testing.assert_allclose(got[row].item(), total, **tolerance("algebra"))
        assert lengths[row] == len(kept)
        assert slope[row, kept].tolist() == weights
        assert not slope[row, ~mask[row]].any()


def test_sequence_logprobs_of_plain_rows_is_a_sum(rng):
    logprob = torch.from_numpy(rng.normal(size=(3, 4)))
    got, lengths = sequence_logprobs(logprob)
    assert torch.equal(got, logprob.sum(-1))
    assert lengths.tolist() == [4, 4, 4]


def test_whatever_stands_in_a_masked_entry_is_not_read():
    logprob = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
    got, lengths = sequence_logprobs(logprob, torch.tensor([[True, False, False]]))
    got.sum().backward()
    assert (got.item(), lengths.item()) == (-1.0, 1)
    assert logprob.grad.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_next_values_match_a_loop(masked, packed, rng):
    values = torch.from_numpy(rng.normal(size=(6, 9)))
    mask = torch.from_numpy(rng.random((6, 9)) < (0.6 if masked else 2.0))
    mask[1] &= not masked
    bootstrap = torch.from_numpy(rng.normal(size=6))
    segments = torch.from_numpy((rng.random((6, 9)) < 0.3).cumsum(-1)) if packed else None
    got = next_values(
        values.masked_fill(~mask, torch.nan), mask if masked else None, bootstrap=bootstrap,
        segments=segments,
    )  # fmt: skip
    ids = None if segments is None else segments.numpy()
    expected = advantage_sums.next_values(values.numpy(), mask.numpy(), bootstrap.numpy(), ids)
    np.testing.assert_array_equal(got.numpy(), expected)
    column = next_values(values, mask, bootstrap=bootstrap[:, None], segments=segments)
    assert torch.equal(column, got)


def test_next_values_carry_over_a_tools_tokens():
    values = torch.tensor([[1.0, torch.nan, torch.nan, 4.0]])
    mask = torch.tensor([[True, False, False, True]])
    assert next_values(values, mask).tolist() == [[4.0, 4.0, 4.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_batch_stays_empty(shape):
    x = torch.zeros(shape)
    assert next_values(x, x != 0, bootstrap=torch.zeros(shape[0])).shape == shape
    assert sequence_logprobs(x)[0].shape == shape[:1]
    assert length_mask(torch.zeros(shape[0], dtype=torch.long), shape[1]).shape == shape


def test_last_counting_marks_one_entry_a_row(rng):
    mask = torch.from_numpy(rng.random((20, 6)) < 0.3)
    got = last_counting(mask, mask).numpy()
    for row in range(20):
        kept = np.flatnonzero(mask[row].numpy())
        assert np.flatnonzero(got[row]).tolist() == kept[-1:].tolist()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: length_mask(torch.ones(2), 3),
            TypeError,
            "length_mask: lengths must be a tensor of whole numbers, got dtype torch.float32. Conv",
        ),
        (
            lambda: length_mask(torch.ones(2, 2).long(), 3),
            ValueError,
            r"length_mask: lengths must have shape \(b,\), got \(2, 2\)",
        ),
        (
            lambda: length_mask(torch.ones(2).long(), 3, side="lef"),
            ValueError,
            "length_mask: side must be one of left, right, got 'lef'. Did you mean 'left'",
        ),
        (
            lambda: segment_ids([0, 1], 3),
            TypeError,
            "segment_ids: cu_seqlens must be a torch tensor, got list",
        ),
        (
            lambda: segment_ids(torch.zeros(0).long(), 3),
            ValueError,
            r"segment_ids: cu_seqlens must have shape \(k \+ 1,\), got \(0,\)",
        ),
        (
            lambda: sequence_logprobs(torch.zeros(2, 3), tail_weight=0.5),
            ValueError,
            "sequence_logprobs: tail_weight needs shared_length, got None. Pass the shorter",
        ),
        (
            lambda: sequence_logprobs(torch.zeros(2, 3), shared_length=torch.ones(3).long()),
            ValueError,
            r"sequence_logprobs: shared_length must have shape \(2,\), got \(3,\)",
        ),
        (
            lambda: sequence_logprobs(torch.zeros(3)),
            ValueError,
            r"sequence_logprobs: logprob needs tensors of shape \(b, t\), got \(3,\)",
        ),
        (
            lambda: next_values(torch.zeros(2, 3), bootstrap=torch.zeros(3)),
            ValueError,
            r"next_values: bootstrap must have the shape of values \(2, 3\), got \(3,\)",
        ),
    ],
)
def test_errors_say_what_must_hold(call, error, text):
    with pytest.raises(error, match=text):
        call()
