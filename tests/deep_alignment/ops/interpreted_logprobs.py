"""The row op's Triton kernels, run by Triton's interpreter on the CPU.

Not collected by name: test_triton_logprobs.py runs this file in a process of its own, because the
interpreter must be asked for (TRITON_INTERPRET=1) before Triton is imported.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from tolerances import tolerance

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_logprobs.py in its own process", allow_module_level=True)

from kernrl.deep_alignment.ops._triton import logprobs as kernels
from kernrl.deep_alignment.ops.linear_logprobs import (
    linear_token_logprobs,
    merge_partials,
    shard_partials,
)
from kernrl.deep_alignment.ops.logprobs import TokenStats, token_logprobs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, of NaN


def tokens(rng, shape, v, dtype=torch.float32):
    logits = torch.tensor(rng.normal(scale=3.0, size=(*shape, v))).to(dtype)
    ids = torch.as_tensor(rng.integers(v, size=shape))
    return logits, ids, torch.as_tensor(rng.random(shape) < 0.6)


def both(logits, ids, mask, temperature, rng, outputs=(0, 1, 2)):
    """Results and gradients of both forms; `outputs` are the results a loss depends on."""
    upstream = [torch.as_tensor(rng.normal(size=ids.shape)).float() for _ in outputs]
    found = []
    for impl in ("triton", "torch"):
        z = logits.detach().requires_grad_()
        stats = token_logprobs(z, ids, temperature=temperature, mask=mask, impl=impl)
        (slope,) = torch.autograd.grad([stats[k] for k in outputs], z, upstream)
        found.append(([x.detach() for x in stats], slope))
    return found


def agree(logits, ids, mask, temperature, rng, **more):
    (got, slope), (want, expected) = both(logits, ids, mask, temperature, rng, **more)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, **tolerance("float32"), equal_nan=True)
    assert slope.dtype == logits.dtype
    limits = tolerance("algebra", slope.dtype)
    torch.testing.assert_close(slope, expected, **limits, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("masked", [False, True])
def test_odd_sizes_and_dtypes(v, dtype, masked, rng, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 64)  # up to four tiles, the last one not full
    logits, ids, mask = tokens(rng, (3, 5), v, dtype)
    agree(logits, ids, mask if masked else None, 0.7, rng)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 1, 3)])
def test_any_leading_shape(shape, rng):
    logits, ids, mask = tokens(rng, shape, 33)
    agree(logits, ids, mask, 1.0, rng)


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 2)])
def test_each_gradient_alone(outputs, rng, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    logits, ids, mask = tokens(rng, (6,), 50)
    agree(logits, ids, mask, 1.3, rng, outputs=outputs)


def test_the_block_it_chooses_itself(rng):
    logits, ids, _ = tokens(rng, (3,), 2 * kernels.BLOCK + 5)
    agree(logits, ids, None, 1.0, rng)


@pytest.mark.parametrize("leading", [1, 16, 40])
def test_a_leading_block_of_minus_infinity(leading, rng, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    logits, ids, _ = tokens(rng, (4,), 50)
    logits[:, :leading] = -math.inf
    agree(logits, ids % (50 - leading) + leading, None, 0.7, rng)
    agree(logits, ids * 0, None, 0.7, rng)  # and chosen: ℓ = −∞


def test_a_row_of_nothing_but_minus_infinity(rng):
    logits, ids, _ = tokens(rng, (3,), 6)
    logits[1] = -math.inf
    stats = token_logprobs(logits, ids, impl="triton")
    assert stats.logprob.isnan().tolist() == stats.entropy.isnan().tolist() == [False, True, False]
    assert stats.lse[1] == -math.inf


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9])
def test_logits_banned_by_a_large_number(lowest, rng, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    logits, ids, _ = tokens(rng, (3,), 40)
    logits[:, :18] = lowest
    agree(logits, ids * 0 + 20, None, 1.0, rng)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_masked_row_is_not_read_and_gets_zeros(junk, rng):
    logits, ids, mask = tokens(rng, (4, 5), 9)
    dirty, odd = logits.masked_fill(~mask[..., None], junk), ids.masked_fill(~mask, -100)
    agree(dirty, odd, mask, 1.0, rng)
    (_, slope), _ = both(dirty, odd, mask, 1.0, rng)
    assert torch.equal(slope[~mask], torch.zeros_like(slope[~mask]))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_empty_batch(shape):
    logits = torch.zeros((*shape, 4), requires_grad=True)
    stats = token_logprobs(logits, torch.zeros(shape, dtype=torch.int64), impl="triton")
    stats.logprob.sum().backward()
    assert stats.logprob.shape == shape
    assert logits.grad.shape == logits.shape


def test_an_id_outside_the_vocabulary_is_nan_and_reads_nothing(rng):
    logits, _, _ = tokens(rng, (3,), 5)
    stats = token_logprobs(logits, torch.tensor([2, 5, -100]), impl="triton")
    assert stats.logprob.isnan().tolist() == [False, True, True]
    assert stats.entropy.isfinite().all()


def test_strides(rng):
    logits, ids, mask = tokens(rng, (3, 6), 9)
    agree(logits[:, :-1], ids[:, 1:], mask[:, 1:], 0.5, rng)
    agree(logits.transpose(0, 1), ids.T, mask.T, 0.5, rng)
    agree(logits[..., ::2], ids // 2, mask, 0.5, rng)
    agree(logits[None, :, :-1].expand(2, 3, 5, 9), ids[None, :, 1:].expand(2, 3, 5), None, 1.0, rng)


def test_a_row_has_the_same_bits_wherever_it_stands(rng, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 64)
    logits, ids, _ = tokens(rng, (6,), 150)
    kept = torch.tensor([True, False, True, True, False, True])
    whole = token_logprobs(logits, ids, impl="triton")
    masked = token_logprobs(logits, ids, mask=kept, impl="triton")
    packed = token_logprobs(logits.flip(0)[None], ids.flip(0)[None], impl="triton")
    alone = [token_logprobs(logits[k], ids[k], impl="triton") for k in range(6)]
    for name in TokenStats._fields:
        want = getattr(whole, name)
        assert torch.equal(getattr(masked, name)[kept], want[kept])
        assert torch.equal(getattr(packed, name)[0].flip(0), want)
        assert torch.equal(torch.stack([getattr(x, name) for x in alone]), want)


def test_the_head_uses_the_same_kernels(rng):
    tensors = [torch.tensor(rng.normal(size=s)).float() for s in ((4, 5, 6), (70, 6), (70,))]
    ids = torch.as_tensor(rng.integers(70, size=(4, 5)))
    mask = torch.as_tensor(rng.random((4, 5)) < 0.6)
    found = []
    for impl in ("triton", "torch"):
        h, w, b = (x.clone().requires_grad_() for x in tensors)
        options = {"temperature": 0.7, "mask": mask, "chunk_size": 3, "impl": impl}
        stats = linear_token_logprobs(h, w, ids, bias=b, **options)
        parts = [
            shard_partials(h, w[i:j], ids, vocab_start=i, bias=b[i:j], **options)
            for i, j in ((0, 11), (11, 70))
        ]
        loss = sum((x * x).sum() for x in (*stats, *merge_partials(parts)))
        found.append((*(x.detach() for x in stats), *torch.autograd.grad(loss, (h, w, b))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **tolerance("float32"))


def test_float64_is_refused():
    with pytest.raises(TypeError, match="impl='triton' takes float32, bfloat16 and float16, got"):
        token_logprobs(torch.zeros(2, 3).double(), torch.zeros(2).long(), impl="triton")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_selected_log_probabilities(dtype, rng):
    """Liger's Triton kernel in the same interpreter; it skips the last position of a sequence."""
    liger = pytest.importorskip("liger_kernel.ops.grpo_loss", reason="Liger is not installed")
    logits, ids, mask = tokens(rng, (2, 5), 300, dtype)
    want = liger.fused_selective_log_softmax(logits, ids[:, :-1], 0.7, mask[:, :-1].int())
    got = token_logprobs(
        logits[:, :-1], ids[:, :-1], temperature=0.7, mask=mask[:, :-1], impl="triton"
    )
    torch.testing.assert_close(got.logprob, want, **tolerance("float32"))


@pytest.mark.peers
def test_liger_linear_cross_entropy(rng):
    """Liger's fused head in the same interpreter, value and gradients."""
    liger = pytest.importorskip(
        "liger_kernel.ops.fused_linear_cross_entropy", reason="Liger is not installed"
    )
    tensors = [torch.tensor(rng.normal(size=s)).float() for s in ((12, 8), (70, 8))]
    ids = torch.as_tensor(rng.integers(70, size=12))
    a, b = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    found = liger.LigerFusedLinearCrossEntropyFunction.apply(
        *a, ids, None, None, -100, 0.0, 0.0, "sum"
    )
    want = found[0] if isinstance(found, tuple) else found
    want.backward()
    got = -linear_token_logprobs(*b, ids, impl="triton").logprob.sum()
    got.backward()
    torch.testing.assert_close(got, want, **tolerance("float32"))
    for mine, theirs in zip(b, a, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance("float32"))
