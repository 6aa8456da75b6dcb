"""The row op against plain Python, its gradient, its bits, and the traps by name."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from reference import token_rows
from tolerances import tolerance

from kernrl.deep_alignment.ops import rows
from kernrl.deep_alignment.ops.logprobs import TokenStats, token_logprobs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tokens(rng, shape=(3, 5), v=7, dtype=torch.float64, spread=3.0):
    """logits (..., v), ids and a mask with counting and masked entries."""
    logits = torch.tensor(rng.normal(scale=spread, size=(*shape, v)), dtype=dtype)
    ids = torch.as_tensor(rng.integers(v, size=shape))
    mask = torch.as_tensor(rng.random(shape) < 0.6)
    return logits, ids, mask


def by_rows(logits, ids, mask, temperature, upstream):
    """The reference on each counting row, zeros elsewhere: three results and the gradient."""
    results = torch.zeros((3, *ids.shape), dtype=torch.float64)
    slopes = torch.zeros(logits.shape, dtype=torch.float64)
    for at in itertools.product(*map(range, ids.shape)):
        if mask is None or mask[at]:
            row, y = logits[at].tolist(), int(ids[at])
            stats = token_rows.stats(row, y, temperature)
            results[(slice(None), *at)] = torch.tensor(stats, dtype=torch.float64)
            g = tuple(float(x[at]) for x in upstream)
            slopes[at] = slopes.new_tensor(token_rows.gradient(row, y, temperature, g))
    return results, slopes


def pulled_back(stats: TokenStats, upstream) -> None:
    torch.autograd.backward(list(stats), [g.to(stats.lse.dtype) for g in upstream])


def check(logits, ids, mask, temperature, rng, name="algebra"):
    upstream = [torch.as_tensor(rng.normal(size=ids.shape)) for _ in range(3)]
    logits = logits.detach().requires_grad_()
    stats = token_logprobs(logits, ids, temperature=temperature, mask=mask)
    pulled_back(stats, upstream)
    expected, slopes = by_rows(logits.detach().double(), ids, mask, temperature, upstream)
    for got, want in zip(stats, expected, strict=True):
        assert got.dtype == rows.accumulation(logits)
        torch.testing.assert_close(got.detach().double(), want, **tolerance(name, got.dtype))
    assert logits.grad.dtype == logits.dtype
    torch.testing.assert_close(
        logits.grad.double(), slopes, **tolerance(name, str(logits.dtype).removeprefix("torch."))
    )


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "v"), [((), 5), ((4,), 1), ((3, 5), 7), ((2, 1, 3), 33)])
def test_values_and_gradients_match_plain_python(shape, v, masked, temperature, rng):
    logits, ids, mask = tokens(rng, shape, v)
    check(logits, ids, mask if masked else None, temperature, rng)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_summed_in_float32_or_float64(dtype, rng):
    logits, ids, mask = tokens(rng, (6, 4), 301, dtype)
    check(logits, ids, mask, 0.7, rng)


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(outputs, masked, rng):
    logits, ids, mask = tokens(rng)

    def some(z):
        stats = token_logprobs(z, ids, temperature=0.7, mask=mask if masked else None)
        return tuple(stats[k] for k in outputs)

    assert torch.autograd.gradcheck(some, logits.requires_grad_())


def test_many_blocks_and_threads_are_one_sum(rng, monkeypatch):
    """Small blocks, so that rows come in many of them and on several threads."""
    logits, ids, mask = tokens(rng, (9, 11), 50)
    logits[2, :, 30] = -math.inf  # one block needs the careful product
    monkeypatch.setattr(rows, "BLOCK", 128)
    before = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            check(logits, ids, mask, 1.3, rng)
            check(logits, ids, None, 1.3, rng)
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- strides, memory, bits


def test_slices_and_transposes_are_read_where_they_lie(rng):
    logits, ids, mask = tokens(rng, (3, 6), 9)
    check(logits[:, :-1], ids[:, 1:], mask[:, 1:], 0.5, rng)
    check(logits.transpose(0, 1), ids.T, mask.T, 0.5, rng)
    check(logits.transpose(0, 2), ids.new_zeros(9, 6), None, 0.5, rng)
    check(logits[::2, ::2, ::2], ids[::2, ::2] // 2, None, 0.5, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bytes_a_row_are_kept(dtype, rng):
    """Beside the inputs, which exist anyway: lse and H, both also results."""
    logits, ids, mask = tokens(rng, (4, 8), 64, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_logprobs(logits.requires_grad_(), ids, mask=mask)
    inputs = {x.data_ptr() for x in (logits, ids, mask)}
    own = [x for x in kept if x.data_ptr() not in inputs]
    assert sum(x.numel() * x.element_size() for x in own) == 8 * ids.numel()


@pytest.mark.parametrize("v", [3, 257, 40_000])  # the last is more than torch sums on one thread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_wherever_it_stands(v, dtype, rng):
    logits, ids, _ = tokens(rng, (7,), v, dtype)
    logits[3, : v // 2] = -math.inf
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = token_logprobs(logits, ids, temperature=0.9)
        with_gradient = token_logprobs(logits.clone().requires_grad_(), ids, temperature=0.9)
        kept = torch.tensor([False, True, False, True, True, False, True])
        masked = token_logprobs(logits, ids, temperature=0.9, mask=kept)
        packed = token_logprobs(logits.flip(0)[None], ids.flip(0)[None], temperature=0.9)
        by_itself = [token_logprobs(logits[k], ids[k], temperature=0.9) for k in range(7)]
        torch.set_num_threads(1)
        alone = [token_logprobs(logits[k], ids[k], temperature=0.9) for k in range(7)]
        pairs = [token_logprobs(logits[k:][:2], ids[k:][:2], temperature=0.9) for k in range(6)]
    finally:
        torch.set_num_threads(before)
    for name in TokenStats._fields:
        want = getattr(whole, name)
        assert torch.equal(getattr(with_gradient, name).detach(), want)
        assert torch.equal(getattr(masked, name)[kept], want[kept])
        assert torch.equal(getattr(packed, name)[0].flip(0), want)
        assert torch.equal(torch.stack([getattr(x, name) for x in by_itself]), want)
        assert torch.equal(torch.stack([getattr(x, name) for x in alone]), want)
        assert torch.equal(torch.stack([getattr(x, name)[0] for x in pairs]), want[:6])


def test_the_first_ratio_is_exactly_one(rng):
    """Old log-probabilities without gradient, a padded batch; new ones with, unpadded."""
    logits, ids, _ = tokens(rng, (4, 9), 1000, torch.float32)
    with torch.no_grad():
        padded = torch.cat((logits, logits), 1)
        mask = torch.arange(18).expand(4, 18) < 9
        old = token_logprobs(padded, torch.cat((ids, ids), 1), mask=mask).logprob[:, :9]
    new = token_logprobs(logits.requires_grad_(), ids).logprob
    assert torch.equal((new - old).exp(), torch.ones(4, 9))


# ---------------------------------------------------------------- traps by name


@pytest.mark.parametrize("leading", [1, 6, 4096 + 5])
def test_a_leading_block_of_minus_infinity(leading, rng):
    logits, ids, _ = tokens(rng, (3,), leading + 8)
    logits[:, :leading] = -math.inf
    check(logits, ids % 8 + leading, None, 0.7, rng)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -1e30, -1e6])
def test_logits_banned_by_a_large_number(lowest, rng):
    logits, ids, _ = tokens(rng, (3,), 8)
    logits[:, 2:5] = lowest
    check(logits, ids * 0 + 1, None, 1.0, rng)
    stats = token_logprobs(logits.float(), ids * 0 + 1)
    assert all(bool(x.isfinite().all()) for x in stats)


def test_a_selected_token_at_minus_infinity(rng):
    """ℓ = −∞ with a finite gradient; entropy and lse as ever."""
    logits, ids, _ = tokens(rng, (4,), 6)
    logits[torch.arange(4), ids] = -math.inf
    check(logits, ids, None, 0.7, rng)


def test_a_row_of_nothing_but_minus_infinity_is_nan_as_in_torch(rng):
    logits, ids, _ = tokens(rng, (3,), 6)
    logits[1] = -math.inf
    logits.requires_grad_()
    stats = token_logprobs(logits, ids)
    plain = logits.log_softmax(-1)[range(3), ids]
    assert plain.isnan().tolist() == stats.logprob.isnan().tolist() == [False, True, False]
    assert stats.lse[1] == logits.logsumexp(-1)[1] == -math.inf
    assert stats.entropy.isnan().tolist() == [False, True, False]
    stats.logprob.sum().backward()
    assert logits.grad[1].isnan().all() and logits.grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_masked_row_is_not_read_and_gets_zeros(junk, dtype, rng):
    logits, ids, mask = tokens(rng, (5, 6), 7, dtype)
    clean = token_logprobs(logits, ids, mask=mask)
    dirty = logits.masked_fill(~mask[..., None], junk).requires_grad_()
    stats = token_logprobs(dirty, ids.masked_fill(~mask, -100), mask=mask)
    pulled_back(stats, [torch.ones(5, 6)] * 3)
    for got, want in zip(stats, clean, strict=True):
        assert torch.equal(got.detach(), want)
        assert torch.equal(got.detach()[~mask], torch.zeros(int((~mask).sum()), dtype=got.dtype))
    assert torch.equal(dirty.grad[~mask], torch.zeros_like(dirty.grad[~mask]))
    assert dirty.grad[mask].isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 3)])
def test_an_empty_or_fully_masked_batch(shape):
    logits = torch.full((*shape, 4), math.nan, requires_grad=True)
    ids = torch.full(shape, -100)
    stats = token_logprobs(logits, ids, mask=torch.zeros(shape, dtype=torch.bool))
    sum(x.sum() for x in stats).backward()
    assert all(torch.equal(x.detach(), torch.zeros(shape)) for x in stats)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_sequence_of_65536_tokens(rng):
    logits, ids, _ = tokens(rng, (1, 65_536), 5, torch.float32)
    stats = token_logprobs(logits, ids)
    want = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(stats.logprob.double(), want, **tolerance("float32"))


def test_large_logits_lose_nothing_to_their_size(rng):
    """H = log s − t/s, and ℓ = (z_y − m) − log s: neither subtracts numbers as large as m."""
    logits, ids, _ = tokens(rng, (5,), 9, torch.float32)
    near = token_logprobs(logits, ids)
    moved = (logits * 1024).round() / 1024  # such that adding 4096 is exact
    near, far = token_logprobs(moved, ids), token_logprobs(moved + 4096, ids)
    assert torch.equal(near.logprob, far.logprob)
    assert torch.equal(near.entropy, far.entropy)


def test_bfloat16_logits_are_not_rounded_again(rng):
    logits, ids, _ = tokens(rng, (64,), 500, torch.bfloat16)
    exact = logits.double().log_softmax(-1)[range(64), ids]
    got = token_logprobs(logits, ids).logprob
    torch.testing.assert_close(got.double(), exact, **tolerance("float32"))
    plain = logits.log_softmax(-1)[range(64), ids]
    assert (plain.double() - exact).abs().max() > 100 * (got.double() - exact).abs().max()


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int16])
def test_ids_of_any_integer_kind(kind, rng):
    logits, ids, _ = tokens(rng)
    assert torch.equal(token_logprobs(logits, ids.to(kind))[0], token_logprobs(logits, ids)[0])


# ---------------------------------------------------------------- autograd and the compiler


def test_gradients_of_gradients_are_refused(rng):
    logits, ids, _ = tokens(rng)
    loss = token_logprobs(logits.requires_grad_(), ids).logprob.sum()
    (slope,) = torch.autograd.grad(loss, logits, create_graph=True)
    text = "token_logprobs: gradients of gradients are not supported. Take the loss's gradient"
    with pytest.raises(NotImplementedError, match=text):
        slope.sum().backward()


def test_inference_mode(rng, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 16)
    logits, ids, mask = tokens(rng, (20,), 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            inside = token_logprobs(logits.clone(), ids, mask=mask)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(inside.logprob, token_logprobs(logits, ids, mask=mask).logprob)


def test_the_op_keeps_torchs_rules_for_operators(rng):
    """Schema, fake kernel, autograd registration and symbolic shapes, as torch itself checks."""
    logits, ids, mask = tokens(rng)
    arguments = (logits.requires_grad_(), ids, mask, 0.7, "torch")
    torch.library.opcheck(torch.ops.kernrl.token_logprobs.default, arguments)


def loss(logits, ids, mask):
    stats = token_logprobs(logits * 2, ids, temperature=0.7, mask=mask)
    return (stats.logprob - 0.1 * stats.entropy + 0.01 * stats.lse**2).sum()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_takes_it_whole(backend, rng):
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for shape in ((3, 5), (4, 6)):  # the second size makes shapes symbolic
        logits, ids, mask = tokens(rng, shape, dtype=torch.float32)
        slopes = []
        for function in (loss, compiled):
            z = logits.clone().requires_grad_()
            value = function(z, ids, mask)
            value.backward()
            slopes.append((value.detach(), z.grad))
        torch.testing.assert_close(slopes[1], slopes[0], **tolerance("float32"))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"logits": torch.zeros(2, 3, 4, dtype=torch.int64)},
            TypeError,
            r"token_logprobs: logits must be a floating-point tensor, got dtype torch.int64\.",
        ),
        (
            {"logits": [[0.0]]},
            TypeError,
            "token_logprobs: logits must be a torch tensor, got list. Convert it first",
        ),
        (
            {"logits": torch.zeros(2, 3, 0)},
            ValueError,
            r"logits must have shape \(..., v\) with v > 0, got \(2, 3, 0\)\.",
        ),
        (
            {"logits": torch.zeros(3, 2, 4)},
            ValueError,
            r"ids must have the shape of logits without its last axis \(3, 2\), got \(2, 3\)\.",
        ),
        ({"ids": torch.zeros(2, 3)}, TypeError, "ids must be integers, got dtype torch.float32"),
        (
            {"ids": torch.zeros(2, 3, dtype=torch.bool)},
            TypeError,
            "ids must be integers, got dtype torch.bool",
        ),
        ({"ids": [1, 2]}, TypeError, "ids must be a torch tensor, got list"),
        (
            {"ids": torch.tensor([[0, 1, 2], [3, 4, 0]])},
            ValueError,
            r"ids must be in \[0, 4\) where the mask is True, got 4 at token 4\. Mask the",
        ),
        (
            {"ids": torch.tensor([[0, 1, -100], [3, 0, 0]])},
            ValueError,
            r"got -100 at token 2\. Mask the positions that do not count, for example with",
        ),
        (
            {"ids": torch.zeros(2, 3, dtype=torch.int64, device="meta")},
            ValueError,
            r"ids must be on the device of logits \(cpu\), got meta",
        ),
        (
            {"mask": torch.ones(3, dtype=torch.bool)},
            ValueError,
            r"mask must have the shape of ids \(2, 3\), got \(3,\)",
        ),
        ({"temperature": 0.0}, ValueError, "temperature must be a finite number above 0.0, got 0"),
        ({"temperature": -1}, ValueError, "temperature must be a finite number above 0.0, got -1"),
        ({"temperature": math.nan}, ValueError, "temperature must be a finite number above 0.0"),
        (
            {"impl": "cuda"},
            ValueError,
            "token_logprobs: impl must be one of auto, torch, triton, got 'cuda'",
        ),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {"logits": torch.zeros(2, 3, 4), "ids": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(error, match=text):
        token_logprobs(**given | arguments)


def test_a_masked_id_out_of_range_names_the_first_that_counts():
    ids, mask = torch.tensor([-100, 0, 9]), torch.tensor([False, True, True])
    with pytest.raises(ValueError, match="got 9 at token 2"):
        token_logprobs(torch.zeros(3, 4), ids, mask=mask)


def test_triton_on_the_cpu_says_why_not():
    with pytest.raises((ValueError, ImportError), match=r"token_logprobs: impl='triton' needs "):
        token_logprobs(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), impl="triton")


# ---------------------------------------------------------------- peers


@pytest.mark.peers
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trl_log_probabilities_and_entropy(temperature, rng):
    """TRL's form for the CPU, which is torch's own operations one by one, with gradients."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from trl.trainer import utils

    print("trl", trl.__version__)
    logits, ids, mask = tokens(rng, (4, 9), 301, torch.float32)
    weights = torch.as_tensor(rng.normal(size=(2, 4, 9))).float()
    found = []
    for peer in (False, True):
        z = logits.clone().requires_grad_()
        options = {"temperature": temperature}
        if peer:
            pair = utils.selective_log_softmax_and_entropy(z, ids, row_mask=mask, **options)
        else:
            pair = token_logprobs(z, ids, mask=mask, **options)[:2]
        (slope,) = torch.autograd.grad([x.where(mask, 0.0) for x in pair], z, list(weights))
        found.append([*(x.detach().where(mask, 0.0) for x in pair), slope])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **tolerance("float32"))
    alone = utils.selective_log_softmax(logits, ids, temperature=temperature).where(mask, 0.0)
    torch.testing.assert_close(found[0][0], alone, **tolerance("float32"))


@pytest.mark.peers
def test_torch_cross_entropy_in_float64(rng):
    """No other package: torch's own fused loss, with its ignored index."""
    logits, ids, mask = tokens(rng, (40,), 301)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    target = ids.masked_fill(~mask, -100)
    want = torch.nn.functional.cross_entropy(a, target, reduction="sum")
    got = -token_logprobs(b, target, mask=mask).logprob.sum()
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, **tolerance("algebra"))
    torch.testing.assert_close(b.grad, a.grad, **tolerance("algebra"))
