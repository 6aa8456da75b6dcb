"""TD(λ), V-trace, Retrace and packed rows against their definitions as double sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import advantage_sums
from tolerances import tolerance

from kernrl.deep_alignment.ops.advantage import gae
from kernrl.deep_alignment.ops.sequences import next_values, segment_ids
from kernrl.deep_alignment.ops.traces import retrace, td_lambda, vtrace

RATES = [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)]
SEGMENTS = [False, True]


@pytest.fixture
def batch(rng):
    """Rewards, V, V', log-ratios, both flags, mask and packed segments; one row masked."""
    shape = (4, 23)
    numbers = [torch.from_numpy(rng.normal(size=shape)) for _ in range(4)]
    flags = [torch.from_numpy(rng.random(shape) < 0.1) for _ in range(2)]
    mask = torch.from_numpy(rng.random(shape) < 0.7)
    mask[2] = False
    segments = torch.from_numpy((rng.random(shape) < 0.2).cumsum(-1))
    return *numbers, *flags, mask, segments


def arrays(*tensors):
    return [None if x is None else x.numpy() for x in tensors]


def close(got, expected):
    np.testing.assert_allclose(got.numpy(), expected, **tolerance("algebra"))


# ---------------------------------------------------------------- against the double loops


@pytest.mark.parametrize("packed", SEGMENTS)
@pytest.mark.parametrize(("gamma", "trace_decay"), RATES)
def test_gae_of_packed_rows_is_its_definition(gamma, trace_decay, packed, batch):
    r, v, ahead, _, end, stop, mask, segments = batch
    segments = segments if packed else None
    got = gae(r, v, ahead, end, stop, gamma=gamma, trace_decay=trace_decay, mask=mask,
              segments=segments)  # fmt: skip
    *columns, keep, ids = arrays(r, v, ahead, end, stop, mask, segments)
    expected = advantage_sums.gae(*columns, gamma, trace_decay, keep, ids)
    for mine, reference in zip(got, expected, strict=True):
        close(mine, reference)


@pytest.mark.parametrize("packed", SEGMENTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("gamma", "trace_decay"), RATES)
def test_td_lambda_is_the_mixture_of_n_step_returns(gamma, trace_decay, masked, packed, batch):
    r, _, ahead, _, end, stop, mask, segments = batch
    mask, segments = mask if masked else torch.ones_like(mask), segments if packed else None
    got = td_lambda(r, ahead, end, stop, gamma=gamma, trace_decay=trace_decay, segments=segments,
                    mask=mask if masked else None)  # fmt: skip
    *columns, keep, ids = arrays(r, ahead, end, stop, mask, segments)
    close(got, advantage_sums.td_lambda(*columns, gamma, trace_decay, keep, ids))


@pytest.mark.parametrize("packed", SEGMENTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize(("gamma", "trace_decay"), RATES)
def test_vtrace_is_its_definition(gamma, trace_decay, bounds, masked, packed, batch):
    *five, stop, mask, segments = batch
    mask, segments = mask if masked else torch.ones_like(mask), segments if packed else None
    rates = {"gamma": gamma, "trace_decay": trace_decay}
    limits = {"ratio_bound": bounds[0], "trace_bound": bounds[1]}
    got = vtrace(*five, stop, mask=mask if masked else None, segments=segments, **rates, **limits)
    *columns, keep, ids = arrays(*five, stop, mask, segments)
    expected = advantage_sums.vtrace(*columns, gamma, trace_decay, *bounds, keep, ids)
    for mine, reference in zip(got, expected, strict=True):
        close(mine, reference)


@pytest.mark.parametrize("packed", SEGMENTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("gamma", "trace_decay"), RATES)
def test_retrace_is_its_definition(gamma, trace_decay, masked, packed, batch):
    *five, stop, mask, segments = batch
    mask, segments = mask if masked else torch.ones_like(mask), segments if packed else None
    got = retrace(*five, stop, gamma=gamma, trace_decay=trace_decay,
                  mask=mask if masked else None, segments=segments)  # fmt: skip
    *columns, keep, ids = arrays(*five, stop, mask, segments)
    close(got, advantage_sums.retrace(*columns, gamma, trace_decay, keep, ids))


# ---------------------------------------------------------------- identities


def consistent(batch):
    """V' as the value of the next entry, and no ends: what ties the family together."""
    r, v, _, _, end, *_ = batch
    return r, v, next_values(v), torch.zeros_like(end)


def test_td_lambda_is_the_returns_of_gae(batch):
    r, v, ahead, no = consistent(batch)
    rates = {"gamma": 0.9, "trace_decay": 0.8}
    got = td_lambda(r, ahead, no, **rates)
    torch.testing.assert_close(got, gae(r, v, ahead, no, **rates)[1], **tolerance("algebra"))


def test_vtrace_on_policy_is_td_lambda(batch):
    r, v, ahead, no = consistent(batch)
    rates = {"gamma": 0.9, "trace_decay": 0.8}
    _, targets = vtrace(r, v, ahead, torch.zeros_like(r), no, **rates)
    torch.testing.assert_close(targets, td_lambda(r, ahead, no, **rates), **tolerance("algebra"))


def test_vtrace_without_trace_is_the_weighted_td_error(batch):
    r, v, ahead, log_ratio, end, stop, *_ = batch
    _, targets = vtrace(r, v, ahead, log_ratio, end, stop, gamma=0.9, trace_decay=0.0)
    delta = r + 0.9 * ahead.masked_fill(end, 0.0) - v
    expected = log_ratio.exp().clamp(max=1.0) * delta
    torch.testing.assert_close(targets - v, expected, **tolerance("algebra"))


def test_retrace_without_trace_is_expected_sarsa(batch):
    r, q, ahead, log_ratio, end, stop, *_ = batch
    got = retrace(r, q, ahead, log_ratio, end, stop, gamma=0.9, trace_decay=0.0)
    torch.testing.assert_close(got, r + 0.9 * ahead.masked_fill(end, 0.0), **tolerance("algebra"))


def test_retrace_does_not_weigh_its_own_first_action(batch):
    r, q, ahead, log_ratio, end, stop, *_ = batch
    other = log_ratio.clone()
    other[:, 0] += 5.0
    one, two = (retrace(r, q, ahead, x, end, stop, gamma=0.9) for x in (log_ratio, other))
    assert torch.equal(one, two)


def test_a_giant_ratio_is_truncated(batch):
    r, v, ahead, _, end, stop, *_ = batch
    giant, equal = torch.full_like(r, 1e3), torch.zeros_like(r)
    for one, two in zip(
        vtrace(r, v, ahead, giant, end, stop, gamma=0.9),
        vtrace(r, v, ahead, equal, end, stop, gamma=0.9),
        strict=True,
    ):
        assert torch.equal(one, two)
    assert torch.equal(
        retrace(r, v, ahead, giant, end, stop, gamma=0.9),
        retrace(r, v, ahead, equal, end, stop, gamma=0.9),
    )


# ---------------------------------------------------------------- traps

OPS = {
    "gae": lambda r, v, n, w, *rest, **k: gae(r, v, n, *rest, gamma=0.9, trace_decay=0.8, **k),
    "td_lambda": lambda r, v, n, w, *rest, **k: (
        td_lambda(r, n, *rest, gamma=0.9, trace_decay=0.8, **k),
    ),
    "vtrace": lambda *x, **k: vtrace(*x, gamma=0.9, **k),
    "retrace": lambda *x, **k: (retrace(*x, gamma=0.9, **k),),
}


@pytest.mark.parametrize("name", OPS)
def test_packed_rows_are_the_sequences_one_by_one(name, rng):
    """Lengths 3, 1, 5 and two of padding, from cu_seqlens: no trace crosses a boundary."""
    cu = torch.tensor([0, 3, 4, 9])
    columns = [torch.from_numpy(rng.normal(size=(1, 11))) for _ in range(4)]
    flags = [torch.from_numpy(rng.random((1, 11)) < 0.2) for _ in range(2)]
    ids = segment_ids(cu, 11)[None]
    real = ids < 3
    packed = OPS[name](*columns, *flags, mask=real, segments=ids)
    for i in range(3):
        part = slice(int(cu[i]), int(cu[i + 1]))
        alone = OPS[name](*(x[:, part] for x in (*columns, *flags)))
        for mine, other in zip(packed, alone, strict=True):
            torch.testing.assert_close(mine[:, part], other, **tolerance("algebra"))
    for mine in packed:
        assert not mine[~real].any()


@pytest.mark.parametrize("name", OPS)
def test_a_masked_entry_at_a_segment_end_does_not_let_the_trace_through(name, rng):
    """The mask carries a trace over what does not count; a boundary stops it there too."""
    columns = [torch.from_numpy(rng.normal(size=(1, 4))) for _ in range(4)]
    no = torch.zeros(1, 4, dtype=torch.bool)
    mask = torch.tensor([[True, False, True, True]])
    ids = torch.tensor([[0, 0, 1, 1]])
    one = OPS[name](*columns, no, no, mask=mask, segments=ids)
    columns[0][0, 2] += 100.0
    two = OPS[name](*columns, no, no, mask=mask, segments=ids)
    for mine, other in zip(one, two, strict=True):
        assert torch.equal(mine[0, :2], other[0, :2])
        assert mine[0, 2] != other[0, 2]


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", OPS)
def test_masked_entries_and_values_past_an_end_are_not_read(name, junk, batch):
    *columns, end, stop, mask, _ = batch
    clean = OPS[name](*columns, end, stop, mask=mask)
    dirty = [x.masked_fill(~mask, junk) for x in columns]
    dirty[2] = dirty[2].masked_fill(end, junk)
    for mine, other in zip(OPS[name](*dirty, end, stop, mask=mask), clean, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("name", OPS)
def test_an_empty_batch_stays_empty(name, shape):
    x, no = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for mask in (None, no):
        for out in OPS[name](x, x, x, x, no, no, mask=mask):
            assert out.shape == shape


@pytest.mark.parametrize("name", OPS)
def test_no_gradient_flows_and_half_precision_is_summed_in_float32(name):
    x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    no = torch.zeros(1, 4, dtype=torch.bool)
    for out in OPS[name](x, x, x, x, no):
        assert out.dtype == torch.float32
        assert not out.requires_grad


@pytest.mark.parametrize("t", [65_536])
def test_long_rows_keep_their_digits(t, rng):
    """65 536 tokens, undiscounted: the sum of the rewards to go."""
    r = torch.from_numpy(rng.normal(size=(1, t)))
    x, no = torch.zeros_like(r), torch.zeros(1, t, dtype=torch.bool)
    got = td_lambda(r, x, no, gamma=1.0, trace_decay=1.0)
    expected = r.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(got, expected, **tolerance("closed form"))


@pytest.mark.parametrize(
    ("call", "arguments", "error", "text"),
    [
        (vtrace, {"ratio_bound": 0.0}, ValueError, "vtrace: ratio_bound must be a finite number"),
        (vtrace, {"trace_bound": -1.0}, ValueError, "vtrace: trace_bound must be a finite number"),
        (
            vtrace,
            {"values": torch.zeros(2, 4)},
            ValueError,
            r"vtrace: values must have the shape of rewards \(2, 3\), got \(2, 4\)",
        ),
        (
            retrace,
            {"log_ratio": torch.zeros(3)},
            ValueError,
            r"retrace: log_ratio must have the shape of rewards \(2, 3\), got \(3,\)",
        ),
        (retrace, {"gamma": 1.5}, ValueError, "retrace: gamma must be a finite number at least"),
        (td_lambda, {"trace_decay": 2.0}, ValueError, "td_lambda: trace_decay must be a finite"),
        (
            td_lambda,
            {"segments": torch.zeros(2, 3)},
            TypeError,
            "td_lambda: segments must be a tensor of whole numbers, got dtype torch.float32",
        ),
        (
            td_lambda,
            {"segments": torch.zeros(3).long()},
            ValueError,
            r"td_lambda: segments must have the shape of rewards \(2, 3\), got \(3,\)",
        ),
        (td_lambda, {"impl": "triton"}, NotImplementedError, "td_lambda: impl='triton' is not in"),
    ],
)
def test_errors_say_what_must_hold(call, arguments, error, text):
    names = ["rewards", "next_values", "terminated"]
    if call is not td_lambda:
        names += ["log_ratio", "values" if call is vtrace else "action_values"]
    given = {name: torch.zeros(2, 3) for name in names} | {"gamma": 0.9, "trace_decay": 0.9}
    with pytest.raises(error, match=text):
        call(**given | arguments)
