"""The head and the row op in one: against the two apart, in tiles, threads and dtypes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from head_cases import case, same
from tolerances import tolerance

from kernrl.deep_alignment.ops import linear_sums
from kernrl.deep_alignment.ops.linear_logprobs import linear_token_logprobs
from kernrl.deep_alignment.ops.logprobs import token_logprobs


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 ids and chunks of at most 5 tokens: the sums of even a small case are joined."""
    monkeypatch.setattr(linear_sums, "CPU_COLUMNS", 4)
    monkeypatch.setattr(linear_sums, "CPU_ROWS", 5)
    monkeypatch.setattr(linear_sums, "SMALL", 0)


# ---------------------------------------------------------------- one op or two


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
def test_equal_to_the_logits_held(shape, with_mask, chunk_size, threads, rng, small_tiles):
    hidden, weight, bias, ids, mask = case(rng, shape)
    mask = mask if with_mask else None
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        same(
            lambda h, w, b: linear_token_logprobs(
                h, w, ids, bias=b, temperature=0.7, mask=mask, chunk_size=chunk_size
            ),
            lambda h, w, b: token_logprobs(h @ w.T + b, ids, temperature=0.7, mask=mask),
            5,
            (hidden, weight, bias),
        )
    finally:
        torch.set_num_threads(before)


def test_at_the_sizes_it_chooses_itself(rng):
    """Several tiles and chunks of the default sizes, in float32, on two threads."""
    hidden, weight, _, ids, mask = case(rng, (1500,), 8, 1100, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        same(
            lambda h, w: linear_token_logprobs(h, w, ids, mask=mask),
            lambda h, w: token_logprobs(h @ w.T, ids, mask=mask),
            6,
            (hidden, weight),
            rtol=tolerance("float32")["rtol"],
            atol=1e3 * tolerance("float32")["atol"],  # dW sums 900 tokens
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 1, 2)])
def test_gradcheck(outputs, rng, small_tiles):
    hidden, weight, bias, ids, mask = case(rng, (2, 3), 3, 9)

    def some(h, w, b):
        stats = linear_token_logprobs(h, w, ids, bias=b, temperature=0.7, mask=mask)
        return tuple(stats[k] for k in outputs)

    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(some, inputs)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:])
def test_only_gradients_that_are_needed_are_computed(wanted, rng, small_tiles, monkeypatch):
    """A frozen weight costs no dW: of the four products of a chunk, one or two are left out."""
    hidden, weight, bias, ids, _ = case(rng, (4,), 6, 4)  # one tile, one chunk
    products = []
    plain = linear_sums._multiply
    monkeypatch.setattr(
        linear_sums, "_multiply", lambda *a, **k: products.append(1) or plain(*a, **k)
    )
    inputs = [
        x.requires_grad_(want) for x, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    linear_token_logprobs(hidden, weight, ids, bias=bias).logprob.sum().backward()
    assert len(products) == 2 + wanted[0] + wanted[1]
    assert [x.grad is not None for x in inputs] == list(wanted)
    plain_inputs = [x.detach().requires_grad_() for x in inputs]
    h, w, b = plain_inputs
    token_logprobs(h @ w.T + b, ids).logprob.sum().backward()
    for got, want in zip(inputs, plain_inputs, strict=True):
        if got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, **tolerance("algebra"))


def test_without_gradients_there_is_one_product(rng, small_tiles, monkeypatch):
    hidden, weight, _, ids, _ = case(rng, (4,), 6, 4)
    products = []
    plain = linear_sums._multiply
    monkeypatch.setattr(
        linear_sums, "_multiply", lambda *a, **k: products.append(1) or plain(*a, **k)
    )
    assert not linear_token_logprobs(hidden, weight, ids).logprob.requires_grad
    assert len(products) == 1


def test_a_tied_weight_gets_both_gradients(rng, small_tiles):
    """The embedding of the tokens and the head are one parameter."""
    _, weight, _, ids, mask = case(rng, (4, 5), 6, 11)

    def model(head):
        def stats(w):
            hidden = torch.tanh(w[ids])
            return head(hidden, w)

        return stats

    same(
        model(lambda h, w: linear_token_logprobs(h, w, ids, mask=mask)),
        model(lambda h, w: token_logprobs(h @ w.T, ids, mask=mask)),
        7,
        (weight,),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_and_summed_in_float32(dtype, rng, small_tiles):
    """Against float64 on the same numbers: only inputs and final gradients are ever rounded."""
    hidden, weight, bias, ids, _ = case(rng, (50,), 40, 30, dtype)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    stats = linear_token_logprobs(*leaves[:2], ids, bias=leaves[2])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = token_logprobs(exact[0] @ exact[1].T + exact[2], ids)
    for got, want in zip(stats, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, **tolerance("float32"))
    (stats.logprob - 0.1 * stats.entropy).sum().backward()
    (wanted.logprob - 0.1 * wanted.entropy).sum().backward()
    for got, want in zip(leaves, exact, strict=True):
        assert got.grad.dtype == dtype
        limits = tolerance("algebra", dtype)
        torch.testing.assert_close(got.grad.double(), want.grad, **limits)


# ---------------------------------------------------------------- traps


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_tokens_enter_no_product(junk, rng, small_tiles):
    hidden, weight, bias, ids, mask = case(rng, (4, 5))
    clean = linear_token_logprobs(hidden, weight, ids, bias=bias, mask=mask)
    dirty = hidden.masked_fill(~mask[..., None], junk).requires_grad_()
    leaves = [dirty, weight.requires_grad_(), bias.requires_grad_()]
    stats = linear_token_logprobs(dirty, weight, ids.masked_fill(~mask, -100), bias=bias, mask=mask)
    sum(x.sum() for x in stats).backward()
    for got, want in zip(stats, clean, strict=True):
        assert torch.equal(got, want)
        assert torch.equal(got.detach()[~mask], torch.zeros(int((~mask).sum()), dtype=got.dtype))
    assert torch.equal(dirty.grad[~mask], torch.zeros_like(dirty.grad[~mask]))
    assert all(bool(x.grad.isfinite().all()) for x in leaves)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 3)])
def test_an_empty_or_fully_masked_batch(shape, rng):
    hidden, weight, bias, ids, _ = case(rng, shape)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    mask = torch.zeros(shape, dtype=torch.bool)
    stats = linear_token_logprobs(hidden, weight, ids - 100, bias=bias, mask=mask)
    sum(x.sum() for x in stats).backward()
    assert all(torch.equal(x, torch.zeros(shape, dtype=x.dtype)) for x in stats)
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in leaves)


def test_banned_ids_through_the_bias(rng, small_tiles):
    """Whole tiles of −∞, the first among them, and one chosen id among the banned."""
    hidden, weight, bias, ids, _ = case(rng, (6,), 5, 13)
    bias[:5], bias[9:] = -math.inf, -1e30
    ids = ids * 0 + 6
    ids[2] = 1
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    stats = linear_token_logprobs(hidden, weight, ids, bias=bias)
    wanted = token_logprobs(hidden @ weight.T + bias, ids)
    assert stats.logprob[2] == -math.inf
    for got, want in zip(stats, wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra"))
    grads = [
        torch.autograd.grad([x[5] for x in s], leaves, [torch.ones(())] * 3, retain_graph=True)
        for s in (stats, wanted)
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra"))


def test_strided_inputs(rng, small_tiles):
    hidden, weight, _, ids, mask = case(rng, (4, 6), 6, 22)
    same(
        lambda h, w: linear_token_logprobs(h[:, :-1], w[::2], ids[:, 1:] // 2, mask=mask[:, 1:]),
        lambda h, w: token_logprobs(h[:, :-1] @ w[::2].T, ids[:, 1:] // 2, mask=mask[:, 1:]),
        8,
        (hidden, weight),
    )


MEMORY = """
import gc, torch
from kernrl.deep_alignment.ops.linear_logprobs import linear_token_logprobs

def field(name):
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith(name)) / 1024

torch.manual_seed(0)
hidden, ids = torch.randn(4096, 64, requires_grad=True), torch.randint(16000, (4096,))
weight = torch.randn(16000, 64, requires_grad=True)

def step(n):
    hidden.grad = weight.grad = None
    linear_token_logprobs(hidden[:n], weight, ids[:n]).logprob.sum().backward()

step(64)
hidden.grad = weight.grad = None
gc.collect()
before = field("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
step(4096)
print(field("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_the_logits_are_never_held():
    """They would be 250 MB; two gradients, twice dW's 4 MB, and the tiles are a tenth of that."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    if "Permission" in done.stderr:
        pytest.skip("this system does not let a process reset its peak of memory")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40


# ---------------------------------------------------------------- autograd and the compiler


def test_gradients_of_gradients_are_refused(rng):
    hidden, weight, _, ids, _ = case(rng)
    loss = linear_token_logprobs(hidden.requires_grad_(), weight, ids).logprob.sum()
    (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
    text = "linear_token_logprobs: gradients of gradients are not supported"
    with pytest.raises(NotImplementedError, match=text):
        slope.sum().backward()


def test_the_op_keeps_torchs_rules_for_operators(rng):
    hidden, weight, bias, ids, mask = case(rng, (5,))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    arguments = (*leaves, ids, mask, 0.7, 2, 0, 11, "torch")
    torch.library.opcheck(torch.ops.kernrl.linear_sums.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_takes_it_whole(backend, rng):
    torch.compiler.reset()

    def loss(hidden, weight, ids, mask):
        stats = linear_token_logprobs(hidden * 2, weight, ids, temperature=0.7, mask=mask)
        return (stats.logprob - 0.1 * stats.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for shape in ((3, 5), (4, 6)):
        hidden, weight, _, ids, mask = case(rng, shape, dtype=torch.float32)
        found = []
        for function in (loss, compiled):
            leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
            value = function(*leaves, ids, mask)
            found.append((value.detach(), *torch.autograd.grad(value, leaves)))
        torch.testing.assert_close(found[1], found[0], **tolerance("float32"))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"hidden": torch.zeros(2, 3, 4, dtype=torch.int64)},
            TypeError,
            "linear_token_logprobs: hidden must be a floating-point tensor, got dtype torch.int64",
        ),
        (
            {"weight": torch.zeros(7, 4, dtype=torch.int32)},
            TypeError,
            "weight must be a floating-point tensor, got dtype torch.int32",
        ),
        (
            {"weight": torch.zeros(7)},
            ValueError,
            r"weight must have shape \(v, h\) with v > 0, got \(7,\)\.",
        ),
        ({"weight": torch.zeros(0, 4)}, ValueError, r"with v > 0, got \(0, 4\)\."),
        (
            {"weight": torch.zeros(7, 5)},
            ValueError,
            r"hidden must have shape \(\.\.\., h\) with h = 5, as weight .* has, got \(2, 3, 4\)",
        ),
        (
            {"weight": torch.zeros(7, 4, dtype=torch.float64)},
            TypeError,
            r"hidden must have the dtype of weight \(torch.float64\), got torch.float32\. Convert",
        ),
        (
            {"weight": torch.zeros(7, 4, device="meta")},
            ValueError,
            r"hidden must be on the device of weight \(meta\), got cpu",
        ),
        (
            {"bias": torch.zeros(4)},
            ValueError,
            r"bias must have shape \(v,\) = \(7,\), got \(4,\)\.",
        ),
        ({"bias": torch.zeros(7).half()}, TypeError, "bias must have the dtype of weight"),
        (
            {"ids": torch.zeros(2, 4, dtype=torch.int64)},
            ValueError,
            r"ids must have the shape of hidden without its last axis \(2, 3\), got \(2, 4\)\.",
        ),
        (
            {"ids": torch.full((2, 3), 7)},
            ValueError,
            r"linear_token_logprobs: ids must be in \[0, 7\) where the mask is True, got 7 at",
        ),
        ({"temperature": 0}, ValueError, "temperature must be a finite number above 0.0, got 0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be an integer of at least 1, got 0"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be an integer of at least 1, got 2.0"),
        ({"impl": "cuda"}, ValueError, "impl must be one of auto, torch, triton, got 'cuda'"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {
        "hidden": torch.zeros(2, 3, 4),
        "weight": torch.zeros(7, 4),
        "ids": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(error, match=text):
        linear_token_logprobs(**given | arguments)


# ---------------------------------------------------------------- peers


@pytest.mark.peers
def test_torch_linear_cross_entropy(rng):
    peer = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if peer is None:
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    hidden, weight, bias, ids, mask = case(rng, (40,), 16, 301)
    target = ids.masked_fill(~mask, -100)
    a, b = ([x.clone().requires_grad_() for x in (hidden, weight, bias)] for _ in range(2))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8, chunking_method=None)
    want = peer(
        a[0], a[1], target, linear_bias=a[2], reduction="sum", ignore_index=-100, options=options
    )
    got = -linear_token_logprobs(b[0], b[1], target, bias=b[2], mask=mask).logprob.sum()
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, **tolerance("algebra"))
    for mine, theirs in zip(b, a, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance("algebra"))
