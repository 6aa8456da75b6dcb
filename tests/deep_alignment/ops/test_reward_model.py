"""Reward-model losses against scalar code; labels that are no index, logits that are not read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.reward_model import process_reward_loss, reward_model_loss

ALGEBRA = tolerance("algebra")


# ---------------------------------------------------------------- pairs


@pytest.fixture
def scores(rng):
    return [torch.from_numpy(rng.normal(scale=2.0, size=8)).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("centre", [0.0, 0.01])
@pytest.mark.parametrize("margin", ["none", "number", "per pair"])
def test_value_and_gradient_match_the_closed_form(margin, centre, scores, rng):
    each = np.abs(rng.normal(size=8))
    given = {"none": None, "number": 0.7, "per pair": torch.from_numpy(each)}[margin]
    m = {"none": np.zeros(8), "number": np.full(8, 0.7), "per pair": each}[margin]
    loss, _ = reward_model_loss(*scores, given, centre=centre, aggregate="none")
    up, down = torch.autograd.grad(loss.sum(), scores)
    for i, (w, v) in enumerate(zip(*(x.tolist() for x in scores), strict=True)):
        p = 1 / (1 + math.exp(-(w - v - m[i])))
        expected = -math.log(p) + centre * (w + v) ** 2
        pull = 2 * centre * (w + v)
        np.testing.assert_allclose(loss[i].item(), expected, **ALGEBRA)
        np.testing.assert_allclose(up[i].item(), p - 1 + pull, **ALGEBRA)
        np.testing.assert_allclose(down[i].item(), 1 - p + pull, **ALGEBRA)


def test_pairs_gradcheck(scores):
    assert torch.autograd.gradcheck(
        lambda w, v: reward_model_loss(w, v, 0.3, centre=0.02)[0], scores
    )


def test_metrics_and_weights(scores, rng):
    weights = torch.from_numpy(rng.exponential(size=8))
    plain, metrics = reward_model_loss(*scores, aggregate="none")
    w, v = (x.detach().numpy() for x in scores)
    expected = {"accuracy": np.mean(w > v), "margin": np.mean(w - v), "score": np.mean([w, v])}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name].item(), value, **ALGEBRA)
        assert not metrics[name].requires_grad
    loss, _ = reward_model_loss(*scores, weights=weights, denominator=4)
    torch.testing.assert_close(loss, (plain * weights).sum() / 4, **ALGEBRA)


def test_a_hopeless_pair_stays_finite():
    w = torch.tensor([-1e4], requires_grad=True)
    loss, _ = reward_model_loss(w, torch.tensor([1e4]))
    loss.backward()
    assert loss.item() == 2e4
    assert w.grad.item() == -1.0


def test_no_pairs_give_zero():
    none = torch.zeros(0, requires_grad=True)
    loss, metrics = reward_model_loss(none, none, centre=0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert {value.item() for value in metrics.values()} == {0.0}


# ---------------------------------------------------------------- steps


@pytest.fixture
def steps(rng):
    """Logits (4, 6, 3), labels with −100 where no step ends; row 2 has no step at all."""
    labels = rng.integers(0, 3, size=(4, 6))
    labels[rng.random((4, 6)) < 0.5] = -100
    labels[2] = -100
    logits = torch.from_numpy(rng.normal(scale=2.0, size=(4, 6, 3))).requires_grad_()
    return logits, torch.from_numpy(labels)


def test_classes_match_the_closed_form(steps):
    logits, labels = steps
    loss, metrics = process_reward_loss(logits, labels, aggregate="none")
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    right = []
    for i, y in np.ndenumerate(labels.numpy()):
        z = logits[i].tolist()
        p = [math.exp(x) / sum(map(math.exp, z)) for x in z]
        expected = [0.0, [0.0] * 3]
        if y != -100:
            expected = [-math.log(p[y]), [q - (j == y) for j, q in enumerate(p)]]
            right.append(max(range(3), key=z.__getitem__) == y)
        np.testing.assert_allclose(loss[i].item(), expected[0], **ALGEBRA)
        np.testing.assert_allclose(slope[i].numpy(), expected[1], **ALGEBRA)
    np.testing.assert_allclose(metrics["accuracy"].item(), np.mean(right), **ALGEBRA)


def test_one_class_takes_soft_labels(rng):
    z = torch.from_numpy(rng.normal(scale=2.0, size=(3, 5))).requires_grad_()
    y, mask = torch.from_numpy(rng.random((3, 5))), torch.from_numpy(rng.random((3, 5)) < 0.5)
    loss, metrics = process_reward_loss(z, y, mask, aggregate="none")
    (slope,) = torch.autograd.grad(loss.sum(), z)
    p = 1 / (1 + np.exp(-z.detach().numpy()))
    expected = -y.numpy() * np.log(p) - (1 - y.numpy()) * np.log(1 - p)
    np.testing.assert_allclose(loss.detach().numpy(), np.where(mask, expected, 0.0), **ALGEBRA)
    np.testing.assert_allclose(slope.numpy(), np.where(mask, p - y.numpy(), 0.0), **ALGEBRA)
    right = (p >= 0.5) == (y.numpy() >= 0.5)
    np.testing.assert_allclose(metrics["accuracy"].item(), right[mask].mean(), **ALGEBRA)


def test_one_class_is_two_classes_with_one_logit_at_zero(rng):
    z = torch.from_numpy(rng.normal(size=(3, 5)))
    labels = torch.from_numpy(rng.integers(0, 2, size=(3, 5)))
    labels[0, 1] = -100
    one, seen = process_reward_loss(z, labels)
    two, metrics = process_reward_loss(torch.stack([torch.zeros_like(z), z], -1), labels)
    torch.testing.assert_close(one, two, **ALGEBRA)
    assert seen == metrics
    given, _ = process_reward_loss(z, labels == 1, labels != -100)
    assert torch.equal(given, one)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_steps_gradcheck(how, steps):
    logits, labels = steps
    assert torch.autograd.gradcheck(
        lambda z: process_reward_loss(z, labels, aggregate=how)[0], logits
    )


def test_steps_or_solutions_weigh_alike(steps):
    logits, labels = steps
    each, _ = process_reward_loss(logits, labels, aggregate="none")
    mask = labels != -100
    by_step, _ = process_reward_loss(logits, labels)
    torch.testing.assert_close(by_step, each[mask].mean(), **ALGEBRA)
    by_solution, _ = process_reward_loss(logits, labels, aggregate="seq-mean-token-mean")
    means = torch.stack(
        [row[kept].mean() for row, kept in zip(each, mask, strict=True) if kept.any()]
    )
    torch.testing.assert_close(by_solution, means.mean(), **ALGEBRA)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_elsewhere_nothing_is_read(junk, steps):
    """Neither the logits nor the label: −100, or a class number that does not exist."""
    logits, labels = steps
    mask = labels != -100
    clean, _ = process_reward_loss(logits, labels)
    dirty = logits.detach().masked_fill(~mask[..., None], junk).requires_grad_()
    loss, metrics = process_reward_loss(dirty, labels.masked_fill(~mask, 99), mask)
    loss.backward()
    assert torch.equal(loss, clean)
    assert torch.isfinite(metrics["accuracy"])
    assert not dirty.grad[~mask].any()
    dirty = logits[..., 0].detach().masked_fill(~mask, junk).requires_grad_()
    loss, _ = process_reward_loss(dirty, labels.clamp(max=1))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(dirty.grad).all()
    assert not dirty.grad[~mask].any()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
@pytest.mark.parametrize("classes", [(), (4,)])
def test_no_steps_give_zero(classes, shape):
    logits = torch.zeros(*shape, *classes, requires_grad=True)
    loss, metrics = process_reward_loss(logits, torch.full(shape, -100))
    loss.backward()
    assert loss.item() == metrics["accuracy"].item() == 0.0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: reward_model_loss(torch.zeros(3, 1), torch.zeros(3, 1)),
            ValueError,
            r"reward_model_loss: chosen must have shape \(b,\), got \(3, 1\). Squeeze the last",
        ),
        (
            lambda: reward_model_loss(torch.zeros(3), torch.zeros(2)),
            ValueError,
            r"reward_model_loss: rejected must have the shape of chosen \(3,\), got \(2,\)",
        ),
        (
            lambda: reward_model_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2)),
            ValueError,
            r"reward_model_loss: margin must have the shape of chosen \(3,\), got \(2,\)",
        ),
        (
            lambda: reward_model_loss(torch.zeros(3), torch.zeros(3), centre=-1.0),
            ValueError,
            "reward_model_loss: centre must be a finite number at least 0.0, got -1.0",
        ),
        (
            lambda: reward_model_loss(torch.zeros(3), torch.zeros(3), impl="triton"),
            NotImplementedError,
            "reward_model_loss: impl='triton' is not in this version",
        ),
        (
            lambda: process_reward_loss(torch.zeros(3), torch.zeros(3)),
            ValueError,
            r"process_reward_loss: logits must have shape \(b, t\) or \(b, t, c\), got \(3,\)",
        ),
        (
            lambda: process_reward_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3)),
            TypeError,
            "process_reward_loss: labels of several classes must be whole numbers, got dtype torch",
        ),
        (
            lambda: process_reward_loss(torch.zeros(2, 3), torch.zeros(3, 2)),
            ValueError,
            r"process_reward_loss: labels must have shape \(2, 3\), got \(3, 2\)",
        ),
    ],
)
def test_errors_say_what_must_hold(call, error, text):
    with pytest.raises(error, match=text):
        call()
