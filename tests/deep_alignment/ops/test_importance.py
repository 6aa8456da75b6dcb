"""Importance weights against loops over sequences; drops, overflow, masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.importance import (
    HOW,
    LEVELS,
    effective_fraction,
    importance_weights,
    off_policy_mask,
)


@pytest.fixture
def batch(rng):
    """ℓ_old, ℓ_b, mask; row 2 is masked, row 3 drifts far."""
    old = -rng.exponential(size=(5, 7))
    sampler = old + rng.normal(scale=0.7, size=old.shape)
    sampler[3] -= 1.0
    mask = rng.random(old.shape) < 0.7
    mask[2] = False
    return tuple(map(torch.from_numpy, (old, sampler, mask)))


def by_loops(old, sampler, mask, level, how, bounds, sequence_bounds):
    weights, plain, kept = np.zeros(old.shape), [], 0
    for row in range(len(old)):
        columns = [t for t in range(old.shape[1]) if mask[row, t]]
        deltas = [old[row, t].item() - sampler[row, t].item() for t in columns]
        geometric = math.exp(sum(deltas) / len(deltas)) if deltas else 1.0
        for t, delta in zip(columns, deltas, strict=True):
            token = {"token": math.exp(delta), "sequence": math.exp(sum(deltas))}
            w = token.get(level, geometric)
            plain.append(w)
            inside = how == "none" or bounds[0] <= w <= bounds[1]
            if how == "mask" and not inside:
                w = 0.0
            if how == "truncate":
                w = min(max(w, bounds[0]), bounds[1])
            near = sequence_bounds is None or (
                sequence_bounds[0] <= geometric <= sequence_bounds[1]
            )
            weights[row, t] = w if near else 0.0
            kept += inside and near
    plain = np.array(plain)
    ess = plain.sum() ** 2 / (plain.size * (plain**2).sum())
    return weights, {"ess": ess, "in_bounds": kept / plain.size}


@pytest.mark.parametrize("sequence_bounds", [None, (0.5, 1.8)])
@pytest.mark.parametrize("bounds", [(0.0, 2.0), (0.5, 1.5)])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_match_loops(level, how, bounds, sequence_bounds, batch):
    settings = {
        "level": level, "how": how, "bounds": bounds, "sequence_bounds": sequence_bounds,
    }  # fmt: skip
    got, metrics = importance_weights(*batch, **settings)
    expected, seen = by_loops(*batch, **settings)
    np.testing.assert_allclose(got.numpy(), expected, **tolerance("algebra"))
    for name, value in seen.items():
        np.testing.assert_allclose(metrics[name].item(), value, **tolerance("algebra"))
    kept = batch[2].numpy()
    np.testing.assert_allclose(
        metrics["weight_mean"].item(), expected[kept].mean(), **tolerance("algebra")
    )
    assert metrics["weight_max"].item() == got.max().item()


def test_the_batch_reaches_both_bounds_and_a_dropped_sequence(batch):
    plain, _ = importance_weights(*batch, how="none")
    kept = plain[batch[2]]
    assert kept.min() < 0.5
    assert kept.max() > 2.0
    rows, _ = importance_weights(*batch, sequence_bounds=(0.5, 1.8))
    assert not rows[3].any()
    assert rows[0].any()


def test_the_sampler_itself_weighs_one(batch):
    old, _, mask = batch
    for level in LEVELS:
        weights, metrics = importance_weights(old, old, mask, level=level)
        assert torch.equal(weights, mask.to(weights.dtype))
        assert metrics["ess"] == metrics["in_bounds"] == 1.0


def test_an_overflowing_weight_is_truncated_or_dropped():
    old, sampler = torch.zeros(1, 2), torch.tensor([[-200.0, 0.0]])
    assert importance_weights(old, sampler)[0].tolist() == [[2.0, 1.0]]
    assert importance_weights(old, sampler, how="mask")[0].tolist() == [[0.0, 1.0]]
    assert importance_weights(old, sampler)[1]["ess"] == 0.5


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_whatever_stands_in_a_masked_entry_is_not_read(junk, batch):
    old, sampler, mask = batch
    clean, metrics = importance_weights(old, sampler, mask, level="sequence")
    dirty = [x.masked_fill(~mask, junk) for x in (old, sampler)]
    got, seen = importance_weights(*dirty, mask, level="sequence")
    assert torch.equal(got, clean)
    assert seen == metrics


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_nothing_that_counts_gives_zeros(shape):
    off = torch.zeros(shape, dtype=torch.bool)
    weights, metrics = importance_weights(torch.zeros(shape), torch.zeros(shape), off)
    assert not weights.any()
    assert {value.item() for value in metrics.values()} == {0.0}


def test_off_policy_mask_is_its_definition(batch, rng):
    old, sampler, mask = batch
    adv = torch.from_numpy(rng.normal(size=old.shape))
    keep = off_policy_mask(old, sampler, adv, mask, limit=0.05)
    for row in range(len(old)):
        columns = mask[row].nonzero()[:, 0]
        drift = (sampler[row, columns] - old[row, columns]).mean() if len(columns) else 0.0
        for t in range(old.shape[1]):
            assert keep[row, t].item() == (0.0 if adv[row, t] < 0 and drift > 0.05 else 1.0)
    assert set(keep.flatten().tolist()) == {0.0, 1.0}


def test_effective_fraction_is_bounded(rng):
    x = torch.from_numpy(rng.normal(scale=5.0, size=50))
    assert 1 / 50 <= effective_fraction(x, None).item() <= 1.0
    np.testing.assert_allclose(
        effective_fraction(x, None).item(),
        effective_fraction(x + 1e3, None).item(),
        **tolerance("closed form"),
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"level": "tokens"},
            ValueError,
            "importance_weights: level must be one of geometric, sequence, token, got 'tokens'. "
            "Did you mean 'token'",
        ),
        (
            {"how": "clip"},
            ValueError,
            "importance_weights: how must be one of mask, none, truncate, got 'clip'",
        ),
        (
            {"bounds": (-1.0, 2.0)},
            ValueError,
            "importance_weights: bounds low must be a finite number at least 0.0, got -1.0",
        ),
        (
            {"bounds": (1.0, 0.5)},
            ValueError,
            "importance_weights: bounds high must be a finite number above 1.0, got 0.5",
        ),
        ({"bounds": 2.0}, ValueError, r"importance_weights: bounds must be \(low, high\), got 2.0"),
        (
            {"sequence_bounds": (0.5,)},
            ValueError,
            r"importance_weights: sequence_bounds must be \(low, high\), got \(0.5,\)",
        ),
        (
            {"behaviour_logprob": torch.zeros(3, 2)},
            ValueError,
            r"behaviour_logprob must have the shape of old_logprob \(2, 3\), got \(3, 2\)",
        ),
        (
            {"old_logprob": torch.zeros(2, 3).long()},
            TypeError,
            "importance_weights: old_logprob must be a floating-point tensor",
        ),
        ({"impl": "triton"}, NotImplementedError, "importance_weights: impl='triton' is not in"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    given = {name: torch.zeros(2, 3) for name in ("old_logprob", "behaviour_logprob")}
    with pytest.raises(error, match=text):
        importance_weights(**given | arguments)


def test_sequence_forms_need_a_time_axis():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"level='sequence' needs tensors of shape \(b, t\)"):
        importance_weights(x, x, level="sequence")
    with pytest.raises(ValueError, match=r"sequence_bounds needs tensors of shape \(b, t\)"):
        importance_weights(x, x, sequence_bounds=(0.5, 2.0))
    with pytest.raises(ValueError, match=r"off_policy_mask: logprob needs tensors of shape"):
        off_policy_mask(x, x, x, limit=0.5)
