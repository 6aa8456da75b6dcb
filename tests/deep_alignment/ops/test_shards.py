"""A vocabulary in parts: merged, it is the whole, in values and in every part's gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from head_cases import case, same
from tolerances import tolerance

from kernrl.deep_alignment.ops.linear_logprobs import (
    ShardPartials,
    linear_token_logprobs,
    merge_partials,
    shard_partials,
)
from kernrl.deep_alignment.ops.logprobs import token_logprobs


def shards(hidden, weight, bias, ids, cuts, **options) -> list[ShardPartials]:
    return [
        shard_partials(hidden, weight[i:j], ids, vocab_start=i, bias=bias[i:j], **options)
        for i, j in itertools.pairwise(cuts)
    ]


@pytest.mark.parametrize("cuts", [(0, 11), (0, 5, 11), (0, 1, 2, 9, 11)])
def test_merged_shards_are_the_whole(cuts, rng):
    hidden, weight, bias, ids, mask = case(rng)
    options = {"temperature": 0.7, "mask": mask}
    same(
        lambda h, w, b: merge_partials(shards(h, w, b, ids, cuts, **options)[::-1]),
        lambda h, w, b: linear_token_logprobs(h, w, ids, bias=b, **options),
        9,
        (hidden, weight, bias),
    )


def test_gradcheck_through_shards(rng):
    hidden, weight, bias, ids, mask = case(rng, (2, 3), 3, 7)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: merge_partials(shards(h, w, b, ids, (0, 2, 7), mask=mask)), inputs
    )


def test_each_device_needs_gradients_through_its_own_part_only(rng):
    """What a rank sees after a gather without gradient: others' partials are constants."""
    hidden, weight, bias, ids, mask = case(rng)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    whole = linear_token_logprobs(hidden, weight, ids, bias=bias, mask=mask)
    want = torch.autograd.grad(sum(x.sum() for x in whole), leaves)
    total = [torch.zeros_like(x) for x in leaves]
    for rank in range(3):
        parts = shards(hidden, weight, bias, ids, (0, 3, 7, 11), mask=mask)
        seen = [
            p if k == rank else ShardPartials(*(x.detach() for x in p)) for k, p in enumerate(parts)
        ]
        loss = sum(x.sum() for x in merge_partials(seen))
        for sum_so_far, part in zip(total, torch.autograd.grad(loss, leaves), strict=True):
            sum_so_far += part  # hidden: the all-reduce of the caller; weight, bias: disjoint rows
    for got, expected in zip(total, want, strict=True):
        torch.testing.assert_close(got, expected, **tolerance("algebra"))


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float64).min / 4, -1e9])
def test_a_shard_that_is_far_below_or_banned_adds_nothing(lowest, rng):
    """Padding of the vocabulary fills the last shard; 0 · ∞ must not come of it."""
    hidden, weight, bias, ids, _ = case(rng)
    bias[7:] = lowest
    ids = ids % 7
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    merged = merge_partials(shards(hidden, weight, bias, ids, (0, 3, 7, 11)))
    wanted = token_logprobs(hidden @ weight[:7].T + bias[:7], ids)
    for got, want in zip(merged, wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra"))
    grads = [
        torch.autograd.grad(s.logprob.sum() + s.entropy.sum(), leaves) for s in (merged, wanted)
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra"))


def test_a_row_banned_everywhere_is_nan_and_its_lse_minus_infinity(rng):
    hidden, weight, bias, ids, _ = case(rng)
    merged = merge_partials(shards(hidden, weight, bias - math.inf, ids, (0, 3, 11)))
    assert merged.logprob.isnan().all() and merged.entropy.isnan().all()
    assert (merged.lse == -math.inf).all()


def test_the_maximum_is_a_constant_to_autograd(rng):
    hidden, weight, _, ids, _ = case(rng)
    part = shard_partials(hidden.requires_grad_(), weight, ids, vocab_start=0)
    assert [x.requires_grad for x in part] == [False, True, True, True, False]


def test_errors_of_shards():
    hidden, weight, ids = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="shard_partials: vocab_start must be an integer of at"):
        shard_partials(hidden, weight, ids, vocab_start=-1)
    with pytest.raises(TypeError, match="shard_partials: hidden must have the dtype of weight"):
        shard_partials(hidden.double(), weight, ids, vocab_start=0)
    with pytest.raises(ValueError, match="merge_partials: there must be at least one part"):
        merge_partials([])
