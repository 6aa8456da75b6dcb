"""KL estimates and which gradient each has, by exact enumeration of a seven-way softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.kl import ESTIMATORS, AdaptiveKL, full_kl, k3, kl_penalty

ALGEBRA = tolerance("algebra")


# ---------------------------------------------------------------- the gradient identities


@pytest.fixture
def softmax(rng):
    """Logits z with gradient, log q of a reference and log π_old of a sampler, seven ways each."""
    z, ref, old = (torch.from_numpy(rng.normal(size=7)) for _ in range(3))
    return z.requires_grad_(), ref.log_softmax(0), old.log_softmax(0)


def expected_gradient(weights, values, z):
    """Σᵢ wᵢ ∂vᵢ/∂z: what averaging the loss over samples from w differentiates to."""
    (gradient,) = torch.autograd.grad((weights.detach() * values).sum(), z, retain_graph=True)
    return gradient


def reverse_gradient(z, log_q):
    log_p = z.log_softmax(0)
    return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), z)[0]


def forward_gradient(z, log_q):
    return torch.autograd.grad((log_q.exp() * (log_q - z.log_softmax(0))).sum(), z)[0]


def test_the_two_directions_differ_here(softmax):
    z, log_q, _ = softmax
    gap = (reverse_gradient(z, log_q) - forward_gradient(z, log_q)).abs().max()
    assert gap > 0.05


def test_k1_in_a_loss_has_no_gradient(softmax):
    z, log_q, _ = softmax
    log_p = z.log_softmax(0)
    values = kl_penalty(log_p, log_q, estimator="k1")
    got = expected_gradient(log_p.exp(), values, z)
    torch.testing.assert_close(got, torch.zeros_like(got), **ALGEBRA)


@pytest.mark.parametrize("estimator", ["k2", "k3+", "ratio-k3"])
def test_these_have_the_gradient_of_the_reverse_kl(estimator, softmax):
    z, log_q, _ = softmax
    log_p = z.log_softmax(0)
    got = expected_gradient(log_p.exp(), kl_penalty(log_p, log_q, estimator=estimator), z)
    torch.testing.assert_close(got, reverse_gradient(z, log_q), **ALGEBRA)


def test_k3_in_a_loss_has_the_gradient_of_the_forward_kl(softmax):
    z, log_q, _ = softmax
    log_p = z.log_softmax(0)
    got = expected_gradient(log_p.exp(), kl_penalty(log_p, log_q, estimator="k3"), z)
    torch.testing.assert_close(got, forward_gradient(z, log_q), **ALGEBRA)


def test_k1_in_a_reward_has_the_gradient_of_the_reverse_kl_and_k3_has_neither(softmax):
    z, log_q, _ = softmax
    log_p = z.log_softmax(0)
    gradients = {}
    for estimator in ("k1", "k3"):
        reward = kl_penalty(log_p, log_q, estimator=estimator).detach()
        gradients[estimator] = expected_gradient(log_p.exp(), reward * log_p, z)
    reverse, forward = reverse_gradient(z, log_q), forward_gradient(z, log_q)
    torch.testing.assert_close(gradients["k1"], reverse, **ALGEBRA)
    for other in (reverse, forward):
        assert (gradients["k3"] - other).abs().max() > 0.05


def test_ratio_k3_has_the_gradient_of_the_reverse_kl_off_policy(softmax):
    z, log_q, log_old = softmax
    log_p = z.log_softmax(0)
    values = kl_penalty(log_p, log_q, estimator="ratio-k3", old_logprob=log_old)
    got = expected_gradient(log_old.exp(), values, z)
    torch.testing.assert_close(got, reverse_gradient(z, log_q), **ALGEBRA)
    mean = (log_old.exp() * values).sum()
    torch.testing.assert_close(mean, (log_p.exp() * (log_p - log_q)).sum(), **ALGEBRA)


def test_a_detached_ratio_turns_k3_to_the_forward_and_k2_to_the_reverse_kl(softmax):
    z, log_q, log_old = softmax
    log_p = z.log_softmax(0)
    ratio = (log_p - log_old).exp().detach()
    for estimator, truth in (("k3", forward_gradient), ("k2", reverse_gradient)):
        values = ratio * kl_penalty(log_p, log_q, estimator=estimator)
        got = expected_gradient(log_old.exp(), values, z)
        torch.testing.assert_close(got, truth(z, log_q), **ALGEBRA)


def test_k1_and_k3_are_unbiased_and_k2_is_not(softmax):
    z, log_q, _ = softmax
    log_p = z.detach().log_softmax(0)
    kl = (log_p.exp() * (log_p - log_q)).sum().item()
    means = {
        name: (log_p.exp() * kl_penalty(log_p, log_q, estimator=name)).sum().item()
        for name in ESTIMATORS
    }
    for name in ("k1", "k3", "k3+", "ratio-k3"):
        np.testing.assert_allclose(means[name], kl, **ALGEBRA)
    assert abs(means["k2"] - kl) > 0.01


# ---------------------------------------------------------------- values and closed forms

SLOPES = {
    "k1": (lambda d: -d, lambda d, r: 1.0),
    "k2": (lambda d: d * d / 2, lambda d, r: -d),
    "k3": (lambda d: math.exp(d) - d - 1, lambda d, r: 1 - math.exp(d)),
    "k3+": (lambda d: math.exp(d) - d - 1, lambda d, r: -d),
    "ratio-k3": (lambda d: math.exp(d) - d - 1, lambda d, r: -r * d),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_match_the_closed_forms(estimator, rng):
    new, ref, old = (torch.from_numpy(-rng.exponential(size=(4, 5))) for _ in range(3))
    mask = torch.from_numpy(rng.random((4, 5)) < 0.7)
    given = {"old_logprob": old} if estimator == "ratio-k3" else {}
    new.requires_grad_()
    got = kl_penalty(new, ref, mask, estimator=estimator, **given)
    (slope,) = torch.autograd.grad(got.sum(), new)
    value_of, slope_of = SLOPES[estimator]
    for i, keep in np.ndenumerate(mask.numpy()):
        d, ratio = ref[i].item() - new[i].item(), math.exp(new[i].item() - old[i].item())
        value = value_of(d) * (ratio if given else 1.0)
        expected = (value, slope_of(d, ratio)) if keep else (0.0, 0.0)
        np.testing.assert_allclose((got[i].item(), slope[i].item()), expected, **ALGEBRA)


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "k3+"])
def test_gradcheck(estimator, rng):
    """k3+ is left out: by design its gradient is not that of its value."""
    new, ref, old = (torch.from_numpy(-rng.exponential(size=(3, 4))) for _ in range(3))
    given = {"old_logprob": old} if estimator == "ratio-k3" else {}
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, ref, estimator=estimator, **given), new.requires_grad_()
    )


@pytest.mark.parametrize("d", [1e-6, 1e-4, 1e-3, -1e-4, 0.1, -2.0])
def test_expm1_keeps_small_differences_in_float32_with_their_gradient(d):
    new = torch.tensor([-d], requires_grad=True)
    value = kl_penalty(new, torch.zeros(1), estimator="k3")
    value.backward()
    exact = np.float64(-new.item())
    relative = tolerance("float32") | {"atol": 0}
    np.testing.assert_allclose(value.item(), np.expm1(exact) - exact, **relative)
    np.testing.assert_allclose(new.grad.item(), -np.expm1(exact), **relative)


def test_ratio_k3_without_old_is_on_policy_with_the_gradient_of_the_ratio(rng):
    new, ref = (torch.from_numpy(-rng.exponential(size=5)) for _ in range(2))
    new.requires_grad_()
    values = [
        kl_penalty(new, ref, estimator="ratio-k3", old_logprob=old) for old in (None, new.detach())
    ]
    assert torch.equal(*values)
    slopes = [torch.autograd.grad(value.sum(), new)[0] for value in values]
    assert torch.equal(*slopes)
    assert torch.equal(values[0], k3(ref - new))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_mask_before_exp(junk, estimator, rng):
    new, ref = (torch.from_numpy(-rng.exponential(size=(2, 3))) for _ in range(2))
    mask = torch.tensor([[True, False, True], [False, False, False]])
    clean = kl_penalty(new, ref, mask, estimator=estimator)
    dirty = [x.masked_fill(~mask, junk) for x in (new, ref)]
    dirty[0].requires_grad_()
    got = kl_penalty(*dirty, mask, estimator=estimator)
    got.sum().backward()
    assert torch.equal(got.detach(), clean)
    assert not got[~mask].any()
    assert torch.isfinite(dirty[0].grad).all()
    assert not dirty[0].grad[~mask].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_bound_the_value_is_held_and_the_gradient_zero(estimator):
    new = torch.tensor([-100.0, 0.0, -0.5], requires_grad=True)
    ref = torch.tensor([0.0, -100.0, 0.0])
    got = kl_penalty(new, ref, estimator=estimator, bound=2.0)
    expected = kl_penalty(torch.tensor([-2.0, 0.0, -0.5]), torch.tensor([0.0, -2.0, 0.0]),
                          estimator=estimator)  # fmt: skip
    assert torch.equal(got.detach(), expected)
    got.sum().backward()
    if estimator == "ratio-k3":  # its ratio is not held
        assert new.grad[2] != 0.0
    else:
        assert new.grad[:2].tolist() == [0.0, 0.0]
        assert new.grad[2] != 0.0


def test_the_reference_is_a_constant_and_half_precision_is_raised():
    ref = torch.tensor([-1.0], requires_grad=True)
    got = kl_penalty(torch.tensor([-1.5], dtype=torch.bfloat16, requires_grad=True), ref)
    assert got.dtype == torch.float32
    got.sum().backward()
    assert ref.grad is None


def test_an_empty_batch_stays_empty():
    assert kl_penalty(torch.zeros(0, 3), torch.zeros(0, 3), estimator="k3").shape == (0, 3)
    assert full_kl(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"estimator": "k4"},
            ValueError,
            r"kl_penalty: estimator must be one of k1, k2, k3, k3\+, ratio-k3, got 'k4'\.",
        ),
        (
            {"old_logprob": torch.zeros(3), "estimator": "k3"},
            ValueError,
            "kl_penalty: old_logprob belongs to estimator='ratio-k3', got estimator='k3'. Leave",
        ),
        (
            {"bound": 0.0},
            ValueError,
            "kl_penalty: bound must be a finite number above 0.0, got 0.0",
        ),
        (
            {"ref_logprob": torch.zeros(2)},
            ValueError,
            r"kl_penalty: ref_logprob must have the shape of logprob \(3,\), got \(2,\)",
        ),
        (
            {"logprob": torch.zeros(3).long()},
            TypeError,
            "kl_penalty: logprob must be a floating-point tensor",
        ),
        ({"impl": "triton"}, NotImplementedError, "kl_penalty: impl='triton' is not in this"),
    ],
)
def test_penalty_errors(arguments, error, text):
    given = {"logprob": torch.zeros(3), "ref_logprob": torch.zeros(3)}
    with pytest.raises(error, match=text):
        kl_penalty(**given | arguments)


# ---------------------------------------------------------------- the whole vocabulary


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_kl_matches_scipy_and_gradcheck(direction, temperature, rng):
    from scipy.special import rel_entr, softmax

    z, ref = rng.normal(scale=2.0, size=(2, 3, 7)), rng.normal(scale=2.0, size=(2, 3, 7))
    p, q = softmax(z / temperature, -1), softmax(ref / temperature, -1)
    expected = rel_entr(*((p, q) if direction == "reverse" else (q, p))).sum(-1)
    settings = {"direction": direction, "temperature": temperature}
    tensors = torch.from_numpy(z).requires_grad_(), torch.from_numpy(ref)
    got = full_kl(*tensors, **settings)
    np.testing.assert_allclose(got.detach().numpy(), expected, **ALGEBRA)
    assert torch.autograd.gradcheck(lambda x: full_kl(x, tensors[1], **settings), tensors[0])


def test_the_estimates_agree_with_the_full_sum(softmax):
    z, log_q, _ = softmax
    got = full_kl(z, log_q)
    torch.testing.assert_close(
        torch.autograd.grad(got, z)[0], reverse_gradient(z, log_q), **ALGEBRA
    )
    got = full_kl(z, log_q, direction="forward")
    torch.testing.assert_close(
        torch.autograd.grad(got, z)[0], forward_gradient(z, log_q), **ALGEBRA
    )


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_tokens_at_minus_infinity_in_both_are_as_if_they_were_not_there(direction, rng):
    """A leading −inf block, a trailing one and a gap: value and gradient of the rest alone."""
    z, ref = (torch.from_numpy(rng.normal(size=(4, 5))) for _ in range(2))
    columns = [2, 3, 5, 6, 8]
    wide = [torch.full((4, 10), -torch.inf, dtype=z.dtype) for _ in range(2)]
    for long, short in zip(wide, (z, ref), strict=True):
        long[:, columns] = short
    z.requires_grad_(), wide[0].requires_grad_()
    rest, got = full_kl(z, ref, direction=direction), full_kl(*wide, direction=direction)
    torch.testing.assert_close(got, rest, **ALGEBRA)
    got.sum().backward(), rest.sum().backward()
    torch.testing.assert_close(wide[0].grad[:, columns], z.grad, **ALGEBRA)
    assert wide[0].grad.isfinite().all()
    assert wide[0].grad.count_nonzero() == z.numel()


def test_full_kl_where_support_is_lost():
    """p = 0 costs nothing in the reverse direction and everything in the forward one."""
    z, ref = torch.tensor([0.0, 0.0, -torch.inf]), torch.zeros(3)
    np.testing.assert_allclose(full_kl(z, ref).item(), math.log(1.5), **tolerance("float32"))
    assert full_kl(z, ref, direction="forward").item() == torch.inf
    assert full_kl(ref, z).item() == torch.inf


def test_full_kl_of_equal_rows_is_zero_and_never_negative(rng):
    z = torch.from_numpy(rng.normal(size=(50, 1000))).float()
    assert not full_kl(z, z).any()
    assert (full_kl(z, z + 1e-4 * torch.randn(50, 1000)) >= 0).all()


def test_masked_rows_are_not_read(rng):
    z, ref = (torch.from_numpy(rng.normal(size=(3, 4, 5))) for _ in range(2))
    mask = torch.from_numpy(rng.random((3, 4)) < 0.6)
    clean = full_kl(z, ref)
    dirty = [x.masked_fill(~mask[..., None], torch.nan) for x in (z, ref)]
    dirty[0].requires_grad_()
    got = full_kl(*dirty, mask)
    got.sum().backward()
    assert torch.equal(got.detach(), clean.masked_fill(~mask, 0.0))
    assert not dirty[0].grad[~mask].any()
    assert dirty[0].grad[mask].all()


def test_full_kl_of_bfloat16_is_summed_in_float32():
    z = torch.randn(2, 9, dtype=torch.bfloat16, requires_grad=True)
    got = full_kl(z, torch.zeros(2, 9, dtype=torch.bfloat16))
    assert got.dtype == torch.float32
    got.sum().backward()
    assert z.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"direction": "back"}, "full_kl: direction must be one of forward, reverse, got 'back'"),
        ({"temperature": 0.0}, "full_kl: temperature must be a finite number above 0.0, got 0.0"),
        (
            {"ref_logits": torch.zeros(2, 4)},
            r"full_kl: ref_logits must have the shape of logits \(2, 3\), got \(2, 4\)",
        ),
        (
            {"logits": torch.zeros(2, 0), "ref_logits": torch.zeros(2, 0)},
            r"full_kl: logits must have shape \(..., v\), v ≥ 1, got \(2, 0\)",
        ),
        ({"mask": torch.ones(3)}, r"full_kl: mask must have the shape of .* \(2,\), got \(3,\)"),
    ],
)
def test_full_kl_errors(arguments, text):
    given = {"logits": torch.zeros(2, 3), "ref_logits": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=text):
        full_kl(**given | arguments)


# ---------------------------------------------------------------- the controller


def test_the_controller_moves_towards_its_target_and_no_faster_than_its_clip():
    start = AdaptiveKL(0.2, target=6.0, horizon=1000)
    assert start.updated(6.0, 100) == start
    np.testing.assert_allclose(start.updated(6.6, 100).coefficient, 0.2 * 1.01)
    np.testing.assert_allclose(start.updated(60.0, 100).coefficient, 0.2 * 1.02)
    np.testing.assert_allclose(start.updated(0.0, 100).coefficient, 0.2 * 0.98)
    assert start.coefficient == 0.2


def test_the_controller_settles_where_the_divergence_is_on_target():
    """A divergence that falls as 1/β has its fixed point at KL = target."""
    controller = AdaptiveKL(1.0, target=2.0, horizon=100)
    for _ in range(300):
        controller = controller.updated(1.0 / controller.coefficient, 50)
    np.testing.assert_allclose(controller.coefficient, 0.5, **tolerance("iterative"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AdaptiveKL(-0.1), "AdaptiveKL: coefficient must be a finite number at least 0.0"),
        (lambda: AdaptiveKL(0.1, target=0.0), "AdaptiveKL: target must be a finite number above"),
        (lambda: AdaptiveKL(0.1, horizon=0.0), "AdaptiveKL: horizon must be a finite number"),
        (lambda: AdaptiveKL(0.1).updated(float("nan"), 1), "AdaptiveKL: kl must be a finite"),
        (lambda: AdaptiveKL(0.1).updated(1.0, -1), "AdaptiveKL: n must be an integer of at least"),
        (
            lambda: AdaptiveKL(0.1, horizon=10).updated(1.0, 51),
            "AdaptiveKL: n must be at most horizon/clip = 50, or β turns sign, got 51. Raise",
        ),
    ],
)
def test_controller_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
