"""Every policy loss against token loops, its gradient against the closed form, and the traps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import policy_terms
from tolerances import tolerance

from kernrl.deep_alignment.ops.policy import KINDS, SEQUENCE_KINDS, policy_loss

TOKEN_KINDS = [kind for kind in KINDS if kind not in SEQUENCE_KINDS]
# A weight or a ratio behind a stop-gradient: the derivative is not that of the value.
STOPPED = ("cispo", "gspo-token", "vespo")


def batch(rng, shape=(6, 9), spread=0.4, per_sequence=False, dtype=torch.float64):
    """ℓ, ℓ_old, A, mask with ratios on both sides of the clip range and one masked row."""
    new = -rng.exponential(size=shape) - 0.1
    old = new + rng.normal(scale=spread, size=shape)
    adv = rng.normal(size=(shape[0], 1) if per_sequence else shape)
    mask = rng.random(shape) < 0.7
    mask[:, 0] = True
    mask[1] = False
    tensors = [torch.tensor(x, dtype=dtype) for x in (new, old, adv)]
    return *tensors, torch.from_numpy(mask)


def by_tokens(function, new, old, adv, mask, clip):
    """The reference on each sequence's counting tokens; zeros elsewhere."""
    loss, gradient = torch.zeros_like(new), torch.zeros_like(new)
    for row in range(len(new)):
        keep = mask[row]
        if keep.any():
            columns = [x[row][keep].tolist() for x in (new, old, adv.expand_as(new))]
            values, slopes = function(*columns, *clip)
            loss[row, keep] = torch.tensor(values, dtype=new.dtype)
            gradient[row, keep] = torch.tensor(slopes, dtype=new.dtype)
    return loss, gradient


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.3), (0.0, 0.0), (0.9, 4.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_match_the_closed_forms(kind, clip, per_sequence, rng):
    new, old, adv, mask = batch(rng, per_sequence=per_sequence)
    new.requires_grad_()
    loss, _ = policy_loss(new, old, adv, mask, kind=kind, clip=clip, aggregate="none")
    loss.sum().backward()
    expected, slope = by_tokens(policy_terms.KINDS[kind], new.detach(), old, adv, mask, clip)
    torch.testing.assert_close(loss.detach(), expected, **tolerance("algebra"))
    torch.testing.assert_close(new.grad, slope, **tolerance("algebra"))


def test_the_reference_batches_do_clip_on_both_sides(rng):
    new, old, adv, mask = batch(rng)
    _, metrics = policy_loss(new, old, adv, mask)
    assert metrics["clip_fraction_low"] > 0.05
    assert metrics["clip_fraction_high"] > 0.05


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "constant"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STOPPED])
def test_gradcheck(kind, how, rng):
    new, old, adv, mask = batch(rng, shape=(3, 5))
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, adv, mask, kind=kind, aggregate=how)[0],
        new.requires_grad_(),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_sampling_policy_every_gradient_is_the_score_times_advantage(kind, rng):
    """At ρ = 1 all kinds are REINFORCE: −A per token, spread over the sequence for its ratio."""
    new, _, adv, mask = batch(rng, per_sequence=True)
    new.requires_grad_()
    loss, metrics = policy_loss(new, None, adv, mask, kind=kind, aggregate="seq-mean-token-mean")
    loss.backward()
    n = mask.sum(-1, keepdim=True).clamp(min=1)
    expected = torch.where(mask, -adv / n, 0.0) / mask.any(-1).sum()
    torch.testing.assert_close(new.grad, expected, **tolerance("algebra"))
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["kl_k1"] == metrics["kl_k3"] == 0.0


def test_gspo_gradient_of_a_sequence_is_ratio_times_advantage_over_length(rng):
    new, old, adv, mask = batch(rng, spread=0.01, per_sequence=True)
    new.requires_grad_()
    policy_loss(new, old, adv, mask, kind="gspo", aggregate="seq-mean-token-mean")[0].backward()
    n = mask.sum(-1, keepdim=True).clamp(min=1)
    s = (torch.where(mask, new.detach() - old, 0.0).sum(-1, keepdim=True) / n).exp()
    expected = torch.where(mask, -adv * s / n, 0.0) / mask.any(-1).sum()
    torch.testing.assert_close(new.grad, expected, **tolerance("algebra"))


def test_gspo_token_has_the_value_of_gspo(rng):
    new, old, adv, mask = batch(rng)
    one, _ = policy_loss(new, old, adv, mask, kind="gspo")
    other, _ = policy_loss(new, old, adv, mask, kind="gspo-token")
    torch.testing.assert_close(one, other, **tolerance("algebra"))


@pytest.mark.parametrize("c", [1.5, 3.0])
def test_dual_clip_bounds_the_loss_of_bad_actions(c, rng):
    new, old, adv, mask = batch(rng, spread=1.2)
    new.requires_grad_()
    loss, metrics = policy_loss(new, old, adv, mask, dual_clip=c, aggregate="none")
    loss.sum().backward()

    def reference(*arguments):
        return policy_terms.dual_clip(*arguments, c)

    expected, slope = by_tokens(reference, new.detach(), old, adv, mask, (0.2, 0.2))
    torch.testing.assert_close(loss.detach(), expected, **tolerance("algebra"))
    torch.testing.assert_close(new.grad, slope, **tolerance("algebra"))
    far = mask & (adv < 0) & ((new.detach() - old).exp() > c)
    assert far.any()
    expected = far.sum().item() / mask.sum().item()
    np.testing.assert_allclose(
        metrics["dual_clip_fraction"].item(), expected, **tolerance("algebra")
    )


def test_sapo_takes_its_temperatures_by_the_sign_of_the_advantage(rng):
    new, old, adv, mask = batch(rng)
    taus = (0.5, 3.0)
    loss, _ = policy_loss(new, old, adv, mask, kind="sapo", gate_temperature=taus, aggregate="none")

    def reference(*arguments):
        return policy_terms.sapo(*arguments, taus)

    expected, _ = by_tokens(reference, new, old, adv, mask, (0.2, 0.2))
    torch.testing.assert_close(loss, expected, **tolerance("algebra"))


@given(
    delta=st.floats(-5, 5),
    advantage=st.floats(-3, 3),
    low=st.floats(0, 1),
    high=st.floats(0, 3),
)
def test_clip_is_pessimistic(delta, advantage, low, high):
    """The clipped loss is never below the plain one: it bounds the objective from below."""
    new, old, adv = (torch.tensor([x], dtype=torch.float64) for x in (delta, 0.0, advantage))
    clipped, _ = policy_loss(new, old, adv, clip=(low, high))
    plain = -math.exp(delta) * advantage
    assert clipped.item() >= plain - tolerance("algebra")["atol"]


def test_one_number_clips_both_sides_and_a_pair_each_its_own(rng):
    new, old, adv, mask = batch(rng)
    both, _ = policy_loss(new, old, adv, mask, clip=0.15)
    assert torch.equal(both, policy_loss(new, old, adv, mask, clip=(0.15, 0.15))[0])
    assert not torch.equal(both, policy_loss(new, old, adv, mask, clip=(0.15, 0.3))[0])


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_a_flat_batch_of_rows_is_a_batch_of_tokens(kind, rng):
    new, old, adv, mask = batch(rng)
    flat, _ = policy_loss(new[mask], old[mask], adv[mask], kind=kind)
    whole, _ = policy_loss(new, old, adv, mask, kind=kind)
    torch.testing.assert_close(flat, whole, **tolerance("algebra"))


# ---------------------------------------------------------------- metrics


def test_metrics_match_numpy_and_carry_no_gradient(rng):
    new, old, adv, mask = batch(rng)
    new.requires_grad_()
    _, metrics = policy_loss(new, old, adv, mask, clip=(0.1, 0.3))
    keep = mask.numpy()
    d, a = (new.detach() - old).numpy()[keep], adv.numpy()[keep]
    rho = np.exp(d)
    expected = {
        "clip_fraction_low": np.mean((rho < 0.9) & (a < 0)),
        "clip_fraction_high": np.mean((rho > 1.3) & (a > 0)),
        "kl_k1": np.mean(-d),
        "kl_k3": np.mean(np.expm1(d) - d),
        "ratio_min": rho.min(),
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "ess": rho.sum() ** 2 / (rho.size * (rho**2).sum()),
    }
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert not value.requires_grad
        np.testing.assert_allclose(value.item(), expected[name], **tolerance("algebra"))


@pytest.mark.parametrize("d", [1e-6, 1e-4, 1e-3, 0.1, 3.0, -1e-4, -3.0])
def test_small_differences_keep_their_kl_in_float32(d):
    """exp(d) − d − 1 in float32 is 0 at d = 1e-4, where the answer is 5e-9."""
    new = torch.tensor([d], dtype=torch.float32)
    _, metrics = policy_loss(new, torch.zeros(1), torch.ones(1))
    exact = np.expm1(np.float64(new.item())) - np.float64(new.item())
    np.testing.assert_allclose(metrics["kl_k3"].item(), exact, **tolerance("float32") | {"atol": 0})


# ---------------------------------------------------------------- traps


@pytest.mark.parametrize("kind", KINDS)
def test_mask_before_exp(kind):
    """A padded token with Δ = 198 gives 0 · inf = NaN in the gradient if masked after exp."""
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, adv = torch.tensor([[-1.0, -200.0]]), torch.ones(1, 2)
    loss, metrics = policy_loss(new, old, adv, torch.tensor([[True, False]]), kind=kind)
    loss.backward()
    assert torch.equal(new.grad, torch.tensor([[-1.0, 0.0]]))
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_in_a_masked_entry_is_not_read(kind, junk, rng):
    new, old, adv, mask = batch(rng)
    clean, clean_metrics = policy_loss(new, old, adv, mask, kind=kind)
    dirty = [x.masked_fill(~mask, junk) for x in (new, old, adv)]
    dirty[0].requires_grad_()
    loss, metrics = policy_loss(*dirty, mask, kind=kind)
    loss.backward()
    assert torch.equal(loss.detach(), clean)
    assert metrics == clean_metrics
    assert torch.equal(dirty[0].grad[~mask], torch.zeros_like(dirty[0].grad[~mask]))


@pytest.mark.parametrize("kind", ["clip", "sapo", "gspo", "gspo-token", "gmpo"])
def test_an_overflowing_ratio_that_is_cut_has_no_gradient(kind):
    """A counting token with A > 0 and ρ = inf is clipped: 0, where 0 · inf would give NaN."""
    new = torch.tensor([[0.0]], requires_grad=True)
    loss, _ = policy_loss(new, torch.tensor([[-200.0]]), torch.ones(1, 1), kind=kind)
    loss.backward()
    assert torch.isfinite(loss)
    assert new.grad.item() == 0.0


def test_dual_clip_cuts_an_overflowing_ratio():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = policy_loss(new, torch.tensor([-200.0]), -torch.ones(1), dual_clip=3.0)
    loss.backward()
    assert loss.item() == 3.0
    assert new.grad.item() == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_fully_masked_batch_gives_zeros(kind):
    new = torch.full((2, 3), -1.0, requires_grad=True)
    off = torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics = policy_loss(new, torch.zeros(2, 3), torch.ones(2, 3), off, kind=kind)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(new.grad, torch.zeros(2, 3))
    assert {value.item() for value in metrics.values()} == {0.0}


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_zeros(kind, shape):
    new = torch.zeros(shape, requires_grad=True)
    for mask in (None, torch.ones(shape, dtype=torch.bool)):
        loss, metrics = policy_loss(new, torch.zeros(shape), torch.zeros(shape), mask, kind=kind)
        loss.backward()
        assert loss.item() == 0.0
        assert {value.item() for value in metrics.values()} == {0.0}


def test_half_precision_is_raised_before_the_difference():
    new = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = policy_loss(new, torch.tensor([-1.1, -2.3]), torch.ones(2))
    loss.backward()
    assert loss.dtype == torch.float32
    assert new.grad.dtype == torch.bfloat16
    assert abs(metrics["ratio_min"].item() - math.exp(0.1)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_input(kind, rng):
    tensors = batch(rng)
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in tensors]
    assert not strided[0].is_contiguous()
    one, _ = policy_loss(*tensors, kind=kind)
    other, _ = policy_loss(*strided, kind=kind)
    torch.testing.assert_close(one, other, **tolerance("algebra"))


def test_the_sampling_time_tensors_are_constants(rng):
    new, old, adv, mask = batch(rng)
    old.requires_grad_(), adv.requires_grad_(), new.requires_grad_()
    policy_loss(new, old, adv, mask)[0].backward()
    assert old.grad is None
    assert adv.grad is None


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"kind": "clipp"},
            ValueError,
            "policy_loss: kind must be one of cispo, clip, gmpo, gspo, gspo-token, none, sapo, "
            r"vespo, got 'clipp'\. Did you mean 'clip'\?",
        ),
        (
            {"logprob": torch.zeros(2, 3, dtype=torch.int64)},
            TypeError,
            r"policy_loss: logprob must be a floating-point tensor, got dtype torch.int64\. "
            r"Convert it first, for example with x.float\(\)\.",
        ),
        (
            {"logprob": np.zeros((2, 3))},
            TypeError,
            "policy_loss: logprob must be a torch tensor, got ndarray. Convert it first",
        ),
        (
            {"old_logprob": torch.zeros(3, 2)},
            ValueError,
            r"policy_loss: old_logprob must have the shape of logprob \(2, 3\), got \(3, 2\)\.",
        ),
        (
            {"advantage": torch.zeros(2)},
            ValueError,
            r"policy_loss: advantage must have the shape of logprob \(2, 3\), got \(2,\)\.",
        ),
        (
            {"mask": torch.ones(2, dtype=torch.bool)},
            ValueError,
            r"policy_loss: mask must have the shape of logprob \(2, 3\), got \(2,\)\.",
        ),
        (
            {"clip": (-0.1, 0.2)},
            ValueError,
            r"policy_loss: clip low must be a finite number at least 0.0, got -0.1\.",
        ),
        (
            {"clip": -0.2},
            ValueError,
            "policy_loss: clip low must be a finite number at least 0.0, got -0.2",
        ),
        (
            {"clip": (0.1, 0.2, 0.3)},
            ValueError,
            r"policy_loss: clip must be one number or \(low, high\), got \(0.1, 0.2, 0.3\)",
        ),
        (
            {"dual_clip": 1.0},
            ValueError,
            "policy_loss: dual_clip must be a finite number above 1.0, got 1.0",
        ),
        (
            {"dual_clip": 3.0, "kind": "sapo"},
            ValueError,
            "policy_loss: dual_clip belongs to kind clip, gspo, gspo-token, got kind='sapo'. Leave",
        ),
        (
            {"kind": "sapo", "gate_temperature": (1.0, 0.0)},
            ValueError,
            "policy_loss: gate_temperature must be a finite number above 0.0, got 0.0",
        ),
        (
            {"aggregate": "mean"},
            ValueError,
            "aggregate: how must be one of constant, none, seq-mean-token-mean",
        ),
        (
            {"impl": "triton"},
            NotImplementedError,
            "policy_loss: impl='triton' is not in this version. Use impl='auto' or impl='torch'.",
        ),
        (
            {"impl": "cuda"},
            ValueError,
            "policy_loss: impl must be one of auto, torch, triton, got 'cuda'",
        ),
        (
            {"old_logprob": torch.zeros(2, 3, device="meta")},
            ValueError,
            r"policy_loss: old_logprob must be on the device of logprob \(cpu\), got meta",
        ),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {name: torch.zeros(2, 3) for name in ("logprob", "old_logprob", "advantage")}
    with pytest.raises(error, match=text):
        policy_loss(**given | arguments)


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
def test_sequence_kinds_need_a_time_axis(kind):
    text = rf"policy_loss: kind='{kind}' needs tensors of shape \(b, t\), got \(4,\)"
    with pytest.raises(ValueError, match=text):
        policy_loss(torch.zeros(4), torch.zeros(4), torch.zeros(4), kind=kind)
