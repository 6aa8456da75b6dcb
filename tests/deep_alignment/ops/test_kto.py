"""KTO against scalar code, its reference point, one-sided batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.kto import kto_loss

ALGEBRA = tolerance("algebra")


@pytest.fixture
def batch(rng):
    """ℓ with gradient, ℓ_ref and labels of nine answers; five mismatched pairs, their mean > 0."""
    ref = torch.from_numpy(-rng.exponential(10.0, size=9))
    logprob = (ref + torch.from_numpy(rng.normal(scale=3.0, size=9))).requires_grad_()
    good = torch.from_numpy(rng.random(9) < 0.5)
    other = torch.from_numpy(rng.normal(size=5))
    return logprob, ref, good, (other + 0.8, other + torch.from_numpy(rng.normal(0, 0.1, 5)))


def scalar(logprob, ref, good, kappa, beta, weights):
    """(loss, ∂/∂ℓ) of one answer."""
    r = beta * (logprob - ref)
    x = r - beta * kappa if good else beta * kappa - r
    p = 1 / (1 + math.exp(-x))
    slope = weights[0 if good else 1] * beta * p * (1 - p)
    return weights[0 if good else 1] * (1 - p), -slope if good else slope


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.4)])
@pytest.mark.parametrize("beta", [0.1, 0.6])
def test_value_and_gradient_match_the_closed_form(beta, weights, batch):
    logprob, ref, good, mismatched = batch
    loss, metrics = kto_loss(
        logprob, ref, good, mismatched=mismatched, beta=beta, desirable_weight=weights[0],
        undesirable_weight=weights[1], aggregate="none",
    )  # fmt: skip
    (slope,) = torch.autograd.grad(loss.sum(), logprob)
    kappa = np.mean(mismatched[0].numpy() - mismatched[1].numpy())
    assert kappa > 0.5
    np.testing.assert_allclose(metrics["kl"].item(), kappa, **ALGEBRA)
    rows = zip(logprob.tolist(), ref.tolist(), good.tolist(), strict=True)
    expected = np.array([scalar(*row, kappa, beta, weights) for row in rows])
    np.testing.assert_allclose(loss.detach().numpy(), expected[:, 0], **ALGEBRA)
    np.testing.assert_allclose(slope.numpy(), expected[:, 1], **ALGEBRA)


def test_gradcheck(batch):
    logprob, ref, good, mismatched = batch
    assert torch.autograd.gradcheck(
        lambda x: kto_loss(x, ref, good, mismatched=mismatched, beta=0.3)[0], logprob
    )


def test_the_reference_point_is_a_constant(batch):
    logprob, ref, good, mismatched = batch
    policy = mismatched[0].requires_grad_()
    loss, _ = kto_loss(logprob, ref, good, mismatched=(policy, mismatched[1]))
    assert torch.autograd.grad(loss, policy, allow_unused=True) == (None,)


def test_a_given_reference_point_is_the_computed_one(batch):
    logprob, ref, good, mismatched = batch
    one, metrics = kto_loss(logprob, ref, good, mismatched=mismatched)
    for kl in (metrics["kl"], metrics["kl"].item()):
        assert torch.equal(one, kto_loss(logprob, ref, good, kl=kl)[0])


@pytest.mark.parametrize("kl", [-0.7, torch.tensor(-0.7)])
def test_a_negative_estimate_is_held_at_zero(kl, batch):
    logprob, ref, good, mismatched = batch
    zero, metrics = kto_loss(logprob, ref, good, kl=kl)
    assert metrics["kl"] == 0.0
    assert torch.equal(zero, kto_loss(logprob, ref, good, kl=0.0)[0])
    turned = mismatched[1], mismatched[0]
    assert torch.equal(zero, kto_loss(logprob, ref, good, mismatched=turned)[0])


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_label_alone(label, batch):
    logprob, ref, _, mismatched = batch
    labels = torch.full((9,), label)
    loss, metrics = kto_loss(logprob, ref, labels, mismatched=mismatched)
    (slope,) = torch.autograd.grad(loss, logprob)
    assert torch.isfinite(loss)
    assert (slope < 0).all() if label else (slope > 0).all()
    part, other = ("desirable", "undesirable") if label else ("undesirable", "desirable")
    reward = 0.1 * (logprob - ref).mean().item()
    np.testing.assert_allclose(metrics[f"reward_{part}"].item(), reward, **ALGEBRA)
    assert metrics[f"reward_{other}"] == metrics["margin"] == 0.0


def test_metrics_are_means_of_the_parts(batch):
    logprob, ref, good, _ = batch
    _, metrics = kto_loss(logprob, ref, good, kl=0.3, beta=0.5)
    reward = 0.5 * (logprob - ref).detach()
    up, down = reward[good].mean(), reward[~good].mean()
    for name, value in (("desirable", up), ("undesirable", down)):
        np.testing.assert_allclose(metrics[f"reward_{name}"].item(), value.item(), **ALGEBRA)
    np.testing.assert_allclose(metrics["margin"].item(), (up - down).item(), **ALGEBRA)
    assert not any(value.requires_grad for value in metrics.values())


def test_a_far_answer_keeps_its_loss_and_slope_in_float32():
    """1 − σ(30) is 0 in float32; σ(−30) is 9e-14."""
    logprob = torch.tensor([30.0], requires_grad=True)
    loss, _ = kto_loss(logprob, torch.zeros(1), torch.tensor([True]), kl=0.0, beta=1.0)
    loss.backward()
    relative = tolerance("float32") | {"atol": 0}
    np.testing.assert_allclose(loss.item(), math.exp(-30.0), **relative)
    np.testing.assert_allclose(logprob.grad.item(), -math.exp(-30.0), **relative)


def test_an_empty_batch_gives_zero():
    none = torch.zeros(0, requires_grad=True)
    loss, metrics = kto_loss(none, none, torch.zeros(0), mismatched=(none, none))
    loss.backward()
    assert loss.item() == 0.0
    assert {value.item() for value in metrics.values()} == {0.0}


def test_the_denominator_replaces_the_number_of_answers(batch):
    logprob, ref, good, _ = batch
    one, _ = kto_loss(logprob, ref, good, kl=0.0, aggregate="none")
    two, _ = kto_loss(logprob, ref, good, kl=0.0, denominator=torch.tensor(36))
    torch.testing.assert_close(two, one.sum() / 36, **ALGEBRA)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"kl": None},
            ValueError,
            "kto_loss: exactly one of kl and mismatched must be given, got neither. Pass the mism",
        ),
        (
            {"mismatched": (torch.zeros(2), torch.zeros(2))},
            ValueError,
            "kto_loss: exactly one of kl and mismatched must be given, got both",
        ),
        ({"beta": 0.0}, ValueError, "kto_loss: beta must be a finite number above 0.0, got 0.0"),
        (
            {"desirable_weight": -1.0},
            ValueError,
            "kto_loss: desirable_weight must be a finite number at least 0.0, got -1.0",
        ),
        (
            {"desirable": torch.ones(2)},
            ValueError,
            r"kto_loss: desirable must have the shape of logprob \(3,\), got \(2,\)",
        ),
        ({"kl": torch.zeros(3)}, ValueError, r"kto_loss: kl must be one number, got shape \(3,\)"),
        (
            {"kl": None, "mismatched": torch.zeros(3)},
            ValueError,
            r"mismatched must be \(log-probabilities, reference log-probabilities\), got Tensor",
        ),
        (
            {"logprob": torch.zeros(3, 2)},
            ValueError,
            r"kto_loss: logprob must have shape \(b,\), got \(3, 2\). Sum over tokens first",
        ),
        ({"aggregate": "sum"}, ValueError, "kto_loss: aggregate must be one of mean, none"),
        ({"impl": "triton"}, NotImplementedError, "kto_loss: impl='triton' is not in this"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {name: torch.zeros(3) for name in ("logprob", "ref_logprob", "desirable")}
    with pytest.raises(error, match=text):
        kto_loss(**given | {"kl": 0.0} | arguments)
