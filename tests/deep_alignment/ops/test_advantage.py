"""GAE against its definition as a double sum; ends, cuts and garbage rows; whitening."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import advantage_sums
from tolerances import tolerance

from kernrl.deep_alignment.ops.advantage import gae, whiten
from kernrl.deep_alignment.ops.scan import reverse_scan


def batch(rng, b=4, t=33):
    """Rewards, V, V', terminated, truncated, mask: ends of both kinds, some entries masked."""
    numbers = [rng.normal(size=(b, t)) for _ in range(3)]
    flags = [rng.random((b, t)) < 0.1 for _ in range(2)]
    return [torch.from_numpy(x) for x in (*numbers, *flags, rng.random((b, t)) < 0.9)]


def compare(got, expected, name="algebra"):
    for mine, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), reference, **tolerance(name))


# ---------------------------------------------------------------- the scan


@pytest.mark.parametrize("t", [0, 1, 2, 3, 4, 5, 31, 32, 33, 100])
def test_scan_is_the_recurrence(t, rng):
    decay, x = torch.from_numpy(rng.random((3, t))), torch.from_numpy(rng.normal(size=(3, t)))
    expected, carry = np.zeros((3, t)), np.zeros(3)
    for i in reversed(range(t)):
        carry = expected[:, i] = x.numpy()[:, i] + decay.numpy()[:, i] * carry
    before = decay.clone(), x.clone()
    got = reverse_scan(decay, x)
    np.testing.assert_allclose(got.numpy(), expected, **tolerance("algebra"))
    assert torch.equal(decay, before[0]), "the input is left alone"
    assert torch.equal(x, before[1])


@pytest.mark.parametrize("rate", [0.9, 0.99, 1.0])
def test_scan_stays_accurate_in_float32_over_long_rows(rate, rng):
    decay = torch.full((2, 10_000), rate)
    x = torch.from_numpy(rng.normal(size=(2, 10_000)))
    exact = reverse_scan(decay.double(), x)
    got = reverse_scan(decay, x.float())
    scale = exact.abs().max().item()
    torch.testing.assert_close(got.double() / scale, exact / scale, **tolerance("float32"))


# ---------------------------------------------------------------- GAE


@pytest.mark.parametrize("t", [1, 2, 3, 7, 33, 64, 65])
@pytest.mark.parametrize(("gamma", "trace_decay"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0, 1)])
def test_gae_is_its_definition(t, gamma, trace_decay, rng):
    data = batch(rng, t=t)
    *five, mask = data
    got = gae(*five, gamma=gamma, trace_decay=trace_decay, mask=mask)
    columns = [x.numpy() for x in five]
    compare(got, advantage_sums.gae(*columns, gamma, trace_decay, mask.numpy()))
    everything = np.ones(mask.shape, dtype=bool)
    got = gae(*five, gamma=gamma, trace_decay=trace_decay)
    compare(got, advantage_sums.gae(*columns, gamma, trace_decay, everything))


def test_lambda_zero_is_the_td_error_and_lambda_one_the_return(rng):
    rewards, values, *_ = batch(rng)
    following = torch.cat([values[:, 1:], torch.zeros(4, 1, dtype=values.dtype)], dim=1)
    never = torch.zeros(rewards.shape, dtype=torch.bool)
    one_step, _ = gae(rewards, values, following, never, gamma=0.9, trace_decay=0.0)
    torch.testing.assert_close(one_step, rewards + 0.9 * following - values)
    _, returns = gae(rewards, values, following, never, gamma=1.0, trace_decay=1.0)
    expected = rewards.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns, expected, **tolerance("algebra"))


def test_a_time_limit_bootstraps_and_a_terminal_state_does_not():
    one = torch.ones(1, 1)
    yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    settings = {"gamma": 0.5, "trace_decay": 0.9}
    assert gae(one, one, 10 * one, no, yes, **settings)[1].item() == 6.0
    assert gae(one, one, 10 * one, yes, no, **settings)[1].item() == 1.0


def test_terminated_and_truncated_is_terminated(rng):
    rewards, values, following, terminated, _, _ = batch(rng)
    settings = {"gamma": 0.9, "trace_decay": 0.8}
    alone = gae(rewards, values, following, terminated, **settings)
    both = gae(rewards, values, following, terminated, terminated, **settings)
    for mine, other in zip(alone, both, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_the_value_past_a_terminal_state_is_not_read(junk, rng):
    """(1 − terminated) · V' would be 0 · inf = NaN."""
    rewards, values, following, terminated, truncated, _ = batch(rng)
    assert terminated.any()
    settings = {"gamma": 0.9, "trace_decay": 0.8}
    clean = gae(rewards, values, following, terminated, truncated, **settings)
    following = following.masked_fill(terminated, junk)
    dirty = gae(rewards, values, following, terminated, truncated, **settings)
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine, other)


def test_a_reset_row_of_a_vector_env_changes_nothing(rng):
    """NEXT_STEP autoreset: the row after an end is garbage; without it the result is the same."""
    rewards, values, following, *_ = batch(rng, b=1, t=10)
    terminated = torch.zeros(1, 10, dtype=torch.bool)
    truncated = terminated.clone()
    terminated[0, 3] = truncated[0, 7] = True
    settings = {"gamma": 0.9, "trace_decay": 0.8}
    expected = gae(rewards, values, following, terminated, truncated, **settings)
    rows = [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9]
    real = torch.ones(1, 12, dtype=torch.bool)
    real[0, [4, 9]] = False
    numbers = [x[:, rows].masked_fill(~real, torch.nan) for x in (rewards, values, following)]
    flags = [x[:, rows] & real for x in (terminated, truncated)]
    got = gae(*numbers, *flags, mask=real, **settings)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[real][None], other, **tolerance("algebra"))
        assert torch.equal(mine[~real], torch.zeros(2, dtype=mine.dtype))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_an_empty_batch_stays_empty(shape):
    x, no = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for out in gae(x, x, x, no, gamma=0.9, trace_decay=0.9):
        assert out.shape == shape


def test_a_fully_masked_row_gives_zeros(rng):
    *five, mask = batch(rng)
    mask[2] = False
    advantages, returns = gae(*five, gamma=0.9, trace_decay=0.9, mask=mask)
    assert not advantages[2].any()
    assert not returns[2].any()


def test_no_gradient_flows_and_half_precision_is_summed_in_float32():
    values = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    no = torch.zeros(1, 4, dtype=torch.bool)
    advantages, returns = gae(values, values, values, no, gamma=0.99, trace_decay=0.95)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"values": torch.zeros(2, 4)},
            ValueError,
            r"gae: values must have the shape of rewards \(2, 3\), got \(2, 4\)\.",
        ),
        (
            {"terminated": torch.zeros(3, 2)},
            ValueError,
            r"gae: terminated must have the shape of rewards \(2, 3\), got \(3, 2\)\.",
        ),
        (
            {"rewards": torch.zeros(2, 3, dtype=torch.int64)},
            TypeError,
            "gae: rewards must be a floating-point tensor, got dtype torch.int64",
        ),
        ({"rewards": np.zeros((2, 3))}, TypeError, "gae: rewards must be a torch tensor"),
        ({"terminated": [[0]]}, TypeError, "gae: terminated must be a torch tensor, got list"),
        (
            {"gamma": 1.5},
            ValueError,
            "gae: gamma must be a finite number at least 0.0 and at most 1.0, got 1.5",
        ),
        (
            {"trace_decay": -0.1},
            ValueError,
            "gae: trace_decay must be a finite number at least 0.0 and at most 1.0, got -0.1",
        ),
        ({"impl": "triton"}, NotImplementedError, "gae: impl='triton' is not in this version"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    names = ("rewards", "values", "next_values", "terminated")
    given = {name: torch.zeros(2, 3) for name in names} | {"gamma": 0.9, "trace_decay": 0.9}
    with pytest.raises(error, match=text):
        gae(**given | arguments)


# ---------------------------------------------------------------- whitening


def test_whiten_matches_numpy_over_the_mask(rng):
    x, mask = rng.normal(3.0, 2.0, size=(5, 7)), rng.random((5, 7)) < 0.6
    kept = x[mask]
    expected = np.where(mask, (x - kept.mean()) / (kept.std(ddof=1) + 1e-8), 0.0)
    got = whiten(torch.from_numpy(x), torch.from_numpy(mask))
    np.testing.assert_allclose(got.numpy(), expected, **tolerance("algebra"))
    got = whiten(torch.from_numpy(x), torch.from_numpy(mask), shift_mean=False)
    expected = np.where(mask, expected + kept.mean(), 0.0)
    np.testing.assert_allclose(got.numpy(), expected, **tolerance("algebra"))


def test_whiten_makes_mean_zero_and_deviation_one(rng):
    got = whiten(torch.from_numpy(rng.normal(1e3, 1e-2, size=1000)))
    np.testing.assert_allclose(got.mean().item(), 0.0, **tolerance("closed form"))
    np.testing.assert_allclose(got.std().item(), 1.0, **tolerance("iterative"))


@pytest.mark.parametrize("value", [0.1, 1e6, -3.0, 0.0])
@pytest.mark.parametrize("n", [1, 2, 8, 1000])
def test_equal_values_whiten_to_exact_zeros(n, value):
    """Eight rewards of 0.1 in float32 have σ = 8e-9: any eps of that size gives −0.4, not 0."""
    for dtype in (torch.float32, torch.float64):
        assert not whiten(torch.full((n,), value, dtype=dtype)).any()


def test_one_counting_element_whitens_to_zero_with_a_finite_gradient():
    x = torch.tensor([[1.0, 2.0], [5.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[False, False], [True, False]])
    out = whiten(x, mask)
    out.sum().backward()
    assert not out.any()
    assert not x.grad.any()


def test_equal_values_keep_their_mean_if_asked():
    x = torch.full((4,), 0.1)
    torch.testing.assert_close(whiten(x, shift_mean=False), x, **tolerance("float32"))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_whiten_of_nothing_is_nothing(shape):
    assert whiten(torch.zeros(shape)).shape == shape
    assert whiten(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)).shape == shape


def test_whiten_of_a_fully_masked_batch_is_zeros():
    x = torch.tensor([torch.nan, 1.0, torch.inf])
    assert torch.equal(whiten(x, torch.zeros(3, dtype=torch.bool)), torch.zeros(3))


def test_whiten_gradcheck(rng):
    x = torch.from_numpy(rng.normal(size=(3, 4))).requires_grad_()
    mask = torch.from_numpy(rng.random((3, 4)) < 0.7)
    assert torch.autograd.gradcheck(lambda y: whiten(y, mask), x)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": torch.zeros(3, dtype=torch.int64)}, TypeError, "whiten: x must be a floating-point"),
        ({"mask": torch.ones(2)}, ValueError, r"whiten: mask must have the shape of x \(3,\), got"),
        ({"eps": -1e-8}, ValueError, "whiten: eps must be a finite number at least 0.0, got -1e-0"),
        ({"impl": "triton"}, NotImplementedError, "whiten: impl='triton' is not in this version"),
    ],
)
def test_whiten_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        whiten(**{"x": torch.ones(3)} | arguments)
