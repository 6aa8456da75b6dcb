"""What policy_loss takes beside its kind: far bounds, weights, entropy, VESPO's shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.aggregate import MODES, aggregate
from kernrl.deep_alignment.ops.importance import importance_weights, off_policy_mask
from kernrl.deep_alignment.ops.policy import KINDS, policy_loss


@pytest.fixture
def batch(rng):
    """ℓ, ℓ_old, A, mask with wide ratios; one row masked."""
    new = -rng.exponential(size=(6, 9)) - 0.1
    old = new + rng.normal(scale=1.0, size=new.shape)
    mask = rng.random(new.shape) < 0.7
    mask[1] = False
    tensors = [torch.from_numpy(x) for x in (new, old, rng.normal(size=new.shape))]
    return *tensors, torch.from_numpy(mask)


def gradient(loss, of):
    (slope,) = torch.autograd.grad(loss, of)
    return slope


# ---------------------------------------------------------------- two-sided δ and dual clip


@pytest.mark.parametrize("delta", [1.2, 1.5, 4.0])
def test_two_sided_is_its_definition(delta, batch):
    """−min(min(ρ, δ) A, clip(ρ) A)."""
    new, old, adv, mask = batch
    new.requires_grad_()
    loss, metrics = policy_loss(new, old, adv, mask, two_sided=delta, aggregate="none")
    slope = gradient(loss.sum(), new)
    for i, keep in np.ndenumerate(mask.numpy()):
        if not keep:
            assert loss[i] == slope[i] == 0
            continue
        rho, a = math.exp(new[i].item() - old[i].item()), adv[i].item()
        first, second = min(rho, delta) * a, min(max(rho, 0.8), 1.2) * a
        np.testing.assert_allclose(loss[i].item(), -min(first, second), **tolerance("algebra"))
        free = rho < 1.2 if a > 0 else 0.8 < rho < delta
        expected = -rho * a if free else 0.0
        np.testing.assert_allclose(slope[i].item(), expected, **tolerance("algebra"))
    assert 0 < metrics["two_sided_fraction"] < 1


@pytest.mark.parametrize("kind", ["clip", "gspo", "gspo-token"])
def test_two_sided_above_the_clip_range_is_the_dual_clip(kind, batch):
    new, old, adv, mask = batch
    one, seen = policy_loss(new, old, adv, mask, kind=kind, two_sided=1.3)
    other, metrics = policy_loss(new, old, adv, mask, kind=kind, dual_clip=1.3)
    assert torch.equal(one, other)
    assert seen["two_sided_fraction"] == metrics["dual_clip_fraction"] > 0
    assert not torch.equal(one, policy_loss(new, old, adv, mask, kind=kind)[0])


def test_two_sided_cuts_an_overflowing_ratio():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = policy_loss(new, torch.tensor([-200.0]), -torch.ones(1), two_sided=3.0)
    loss.backward()
    assert loss.item() == 3.0
    assert new.grad.item() == 0.0


# ---------------------------------------------------------------- VESPO


@pytest.mark.parametrize(
    ("delta", "expected"), [(-1e3, 0.0), (1e3, 0.0), (torch.inf, 0.0), (0.0, 1.0)]
)
def test_vespo_fades_at_both_ends_without_overflow(delta, expected):
    new = torch.zeros(1, 2, requires_grad=True)
    loss, _ = policy_loss(new, torch.full((1, 2), -delta), torch.ones(1, 2), kind="vespo")
    slope = gradient(loss, new)
    assert torch.equal(slope, torch.full((1, 2), -expected / 2))


def test_vespo_peaks_at_k_over_lambda(rng):
    """φ' = 0 at w = k/λ; the larger of the two sides has k > λ for bad samples."""
    w = torch.linspace(0.05, 4.0, 200, dtype=torch.float64)[:, None]
    adv = torch.ones_like(w)
    for sign, peak in ((1.0, 1.6 / 0.8), (-1.0, 0.5 / 1.0)):
        new = w.log().requires_grad_()
        loss, _ = policy_loss(
            new, torch.zeros_like(w), sign * adv, kind="vespo",
            gamma_weights=((1.6, 0.8), (0.5, 1.0)), aggregate="none",
        )  # fmt: skip
        phi = -sign * gradient(loss.sum(), new)
        assert abs(w[phi.argmax()].item() - peak) < 0.03


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("how", [*MODES, "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_multiplies_every_token(kind, how, batch, rng):
    new, old, adv, mask = batch
    weight = torch.from_numpy(rng.exponential(size=new.shape))
    plain, _ = policy_loss(new, old, adv, mask, kind=kind, aggregate="none")
    got, _ = policy_loss(new, old, adv, mask, kind=kind, weight=weight, aggregate=how)
    torch.testing.assert_close(got, aggregate(plain * weight, mask, how), **tolerance("algebra"))


def test_a_weight_is_a_constant_and_not_read_where_masked(batch):
    new, old, adv, mask = batch
    new.requires_grad_()
    weight = torch.ones_like(adv).masked_fill(~mask, torch.nan).requires_grad_()
    loss, _ = policy_loss(new, old, adv, mask, weight=weight)
    slope, none = torch.autograd.grad(loss, (new, weight), allow_unused=True)
    assert none is None
    expected = gradient(policy_loss(new, old, adv, mask)[0], new)
    assert torch.equal(slope, expected)


def test_a_weight_per_sequence_is_spread_over_its_tokens(batch, rng):
    new, old, adv, mask = batch
    weight = torch.from_numpy(rng.exponential(size=(6, 1)))
    one, _ = policy_loss(new, old, adv, mask, weight=weight)
    other, _ = policy_loss(new, old, adv, mask, weight=weight.expand(6, 9))
    assert torch.equal(one, other)


def test_decoupled_ppo_is_the_behaviour_weight_on_the_proximal_ratio(batch, rng):
    """Hilton et al. (2022): w = π_prox/π_behav outside, clip(π/π_prox) inside."""
    new, proximal, adv, mask = batch
    sampler = proximal + torch.from_numpy(rng.normal(scale=0.3, size=new.shape))
    weight, _ = importance_weights(proximal, sampler, mask, how="none")
    got, _ = policy_loss(new, proximal, adv, mask, weight=weight)
    total = 0.0
    for n, p, b, a in zip(*(x[mask].tolist() for x in (new, proximal, sampler, adv)), strict=True):
        rho = math.exp(n - p)
        total -= math.exp(p - b) * min(rho * a, min(max(rho, 0.8), 1.2) * a)
    np.testing.assert_allclose(got.item(), total / mask.sum().item(), **tolerance("algebra"))


def test_without_clipping_the_two_weights_are_one_importance_ratio(batch, rng):
    """w · ρ = π/π_behav: unclipped, decoupling changes nothing."""
    new, proximal, adv, mask = batch
    sampler = proximal + torch.from_numpy(rng.normal(scale=0.3, size=new.shape))
    weight, _ = importance_weights(proximal, sampler, mask, how="none")
    wide = {"clip": (1.0, 1e9)}
    one, _ = policy_loss(new, proximal, adv, mask, weight=weight, **wide)
    other, _ = policy_loss(new, sampler, adv, mask, **wide)
    torch.testing.assert_close(one, other, **tolerance("algebra"))


def test_off_policy_mask_drops_the_loss_of_a_drifted_bad_sequence(batch):
    new, old, adv, mask = batch
    keep = off_policy_mask(new, old, adv, mask, limit=0.1)
    assert 0 < keep[mask].mean() < 1
    got, _ = policy_loss(new, old, adv, mask, weight=keep, aggregate="none")
    plain, _ = policy_loss(new, old, adv, mask, aggregate="none")
    assert torch.equal(got, torch.where(keep == 1, plain, torch.zeros_like(plain)))


# ---------------------------------------------------------------- entropy


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_the_entropy_bonus_is_a_term_of_every_token(how, batch, rng):
    new, old, adv, mask = batch
    entropy = torch.from_numpy(rng.exponential(size=new.shape)).requires_grad_()
    plain, _ = policy_loss(new, old, adv, mask, aggregate=how)
    loss, metrics = policy_loss(
        new, old, adv, mask, entropy=entropy, entropy_bonus=0.3, aggregate=how
    )
    bonus = 0.3 * aggregate(entropy, mask, how)
    torch.testing.assert_close(loss, plain - bonus, **tolerance("algebra"))
    slope = gradient(loss, entropy)
    torch.testing.assert_close(slope, -gradient(bonus, entropy), **tolerance("algebra"))
    torch.testing.assert_close(metrics["entropy"], entropy[mask].mean().detach())
    assert not metrics["entropy"].requires_grad


def test_entropy_alone_is_only_watched_and_not_read_where_masked(batch):
    new, old, adv, mask = batch
    entropy = torch.ones_like(new).masked_fill(~mask, torch.nan)
    loss, metrics = policy_loss(new, old, adv, mask, entropy=entropy)
    assert torch.equal(loss, policy_loss(new, old, adv, mask)[0])
    assert metrics["entropy"] == 1.0


def test_the_bonus_is_not_weighted(batch):
    """A weight corrects for the sampler; the entropy is the policy's own."""
    new, old, adv, mask = batch
    entropy = torch.ones_like(new)
    loss, _ = policy_loss(
        new, old, adv, mask, weight=torch.zeros_like(new), entropy=entropy, entropy_bonus=0.5
    )
    assert loss.item() == -0.5


# ---------------------------------------------------------------- effective sample size


def test_ess_is_one_on_policy_and_one_over_n_for_one_giant():
    new = torch.zeros(1, 4)
    assert policy_loss(new, None, new)[1]["ess"] == 1.0
    old = torch.tensor([[-300.0, 0.0, 0.0, 0.0]])  # ρ = e^300 overflows float32
    assert policy_loss(new, old, new)[1]["ess"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"two_sided": 1.1},
            "policy_loss: two_sided must be a finite number at least 1.2, got 1.1",
        ),
        (
            {"two_sided": 3.0, "dual_clip": 3.0},
            "policy_loss: dual_clip and two_sided both bound the loss of A < 0, got both. Leave",
        ),
        (
            {"two_sided": 3.0, "kind": "cispo"},
            "policy_loss: two_sided belongs to kind clip, gspo, gspo-token, got kind='cispo'",
        ),
        (
            {"kind": "vespo", "gamma_weights": ((0.0, 1.0), (1.0, 1.0))},
            "policy_loss: gamma_weights k must be a finite number above 0.0, got 0.0",
        ),
        (
            {"kind": "vespo", "gamma_weights": ((1.0, 1.0), (1.0, -1.0))},
            "policy_loss: gamma_weights λ must be a finite number above 0.0, got -1.0",
        ),
        (
            {"weight": torch.ones(3)},
            r"policy_loss: weight must have the shape of logprob \(2, 3\), got \(3,\)",
        ),
        (
            {"entropy_bonus": 0.1},
            "policy_loss: entropy_bonus needs entropy, got None. Pass the entropy of every token",
        ),
        (
            {"entropy": torch.ones(3, 2)},
            r"policy_loss: entropy must have the shape of logprob \(2, 3\), got \(3, 2\)",
        ),
    ],
)
def test_errors_say_what_must_hold(arguments, text):
    with pytest.raises(ValueError, match=text):
        policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), **arguments)
