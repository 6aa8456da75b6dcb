"""Group advantages against NumPy by groups; equal rewards, lone answers, unscored ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import tolerance

from kernrl.deep_alignment.ops.groups import KINDS, group_advantages, informative_groups

EPS = 1e-6


def by_groups(rewards, ids, kind):
    """Definitions over the scored rows; rows alone in their group and equal groups by rule."""
    scored = ~np.isnan(rewards)
    out, centred = np.zeros(len(rewards)), np.zeros(len(rewards))
    for group in np.unique(ids):
        rows = np.flatnonzero((ids == group) & scored)
        if len(rows) == 0:
            continue
        r = rewards[rows]
        equal = r.max() == r.min()
        centred[rows] = 0.0 if equal else r - r.mean()
        if kind == "grpo" and not equal:
            out[rows] = (r - r.mean()) / (r.std(ddof=1) + EPS)
        if kind == "rloo" and not equal:
            for i, row in enumerate(rows):
                out[row] = r[i] - np.delete(r, i).mean()
    r = rewards[scored]
    if kind == "dr_grpo":
        return centred
    if kind == "lite_ppo":
        return centred / (r.std(ddof=1) + EPS)
    if kind == "reinforce++":
        out[scored] = (r - r.mean()) / (r.std(ddof=1) + EPS)
    if kind == "reinforce++-baseline":
        return centred / (np.sqrt((centred**2).sum() / (len(r) - 1)) + EPS)
    return out


@pytest.fixture
def batch(rng):
    """Seven groups of uneven size in no order: one equal, one alone, some NaN, one all NaN."""
    ids = np.array([5, 2, 5, 9, 2, 5, 7, 7, 5, 2, 0, 0, 11, 11, 30, 30, 30])
    rewards = rng.normal(size=len(ids))
    rewards[ids == 0] = 0.1
    rewards[ids == 11] = np.nan
    rewards[[2, 15]] = np.nan
    order = rng.permutation(len(ids))
    return rewards[order], ids[order]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_by_id_match_the_definitions(kind, batch):
    rewards, ids = batch
    got = group_advantages(torch.from_numpy(rewards), torch.from_numpy(ids), kind)
    np.testing.assert_allclose(got.numpy(), by_groups(rewards, ids, kind), **tolerance("algebra"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_groups_by_size_are_consecutive_rows(size, kind, rng):
    rewards = rng.normal(size=12)
    got = group_advantages(torch.from_numpy(rewards), size, kind)
    ids = np.arange(12) // size
    np.testing.assert_allclose(got.numpy(), by_groups(rewards, ids, kind), **tolerance("algebra"))
    same = group_advantages(torch.from_numpy(rewards), torch.from_numpy(ids), kind)
    assert torch.equal(got, same)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.1, 1e6, -3.7, 0.0])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 1000])
def test_equal_rewards_give_exactly_zero(n, value, kind):
    """Eight times 0.1 in float32 has σ = 8e-9; an eps of 1e-8 makes −0.41 of it."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((n,), value, dtype=dtype)
        assert not group_advantages(rewards, n, kind, eps=0.0).any()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce++-baseline"])
def test_an_equal_group_among_others_is_exactly_zero(kind):
    rewards = torch.tensor([0.1] * 8 + [0.3, 0.9, 0.2, 0.5, 0.6, 0.1, 0.8, 0.7])
    got = group_advantages(rewards, 8, kind)
    assert not got[:8].any()
    assert got[8:].all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reinforce++"])
def test_a_group_of_one_is_zero(kind):
    got = group_advantages(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), kind)
    assert got[0] == 0.0
    assert got[1] < 0 < got[2]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unscored_answer_takes_no_part(kind):
    with_it = torch.tensor([1.0, torch.nan, 4.0, 2.0, 0.0])
    ids = torch.tensor([0, 0, 0, 1, 1])
    scored = torch.tensor([0, 2, 3, 4])
    got = group_advantages(with_it, ids, kind)
    assert got[1] == 0.0
    without = group_advantages(with_it[scored], ids[scored], kind)
    torch.testing.assert_close(got[scored], without, **tolerance("float32"))


def test_two_answers_of_grpo_are_a_root_of_a_half_apart():
    """The sample deviation (n − 1); the population's would give ±1."""
    got = group_advantages(torch.tensor([0.0, 1.0], dtype=torch.float64), 2, eps=0.0)
    np.testing.assert_allclose(got.numpy(), [-(0.5**0.5), 0.5**0.5], **tolerance("algebra"))


def test_rloo_is_dr_grpo_by_n_over_n_minus_one(rng):
    rewards = torch.from_numpy(rng.normal(size=12))
    one, other = (group_advantages(rewards, 4, kind) for kind in ("rloo", "dr_grpo"))
    torch.testing.assert_close(one, 4 / 3 * other, **tolerance("algebra"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_and_half_precision_is_raised(kind):
    rewards = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    got = group_advantages(rewards, 2, kind)
    assert got.dtype == torch.float32
    assert not got.requires_grad


@pytest.mark.parametrize("groups", [4, torch.zeros(0, dtype=torch.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_stays_empty(kind, groups):
    assert group_advantages(torch.zeros(0), groups, kind).shape == (0,)
    assert informative_groups(torch.zeros(0), groups).shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_scored_gives_zeros(kind):
    assert not group_advantages(torch.full((4,), torch.nan), 2, kind).any()


def test_informative_groups_are_those_that_differ(batch):
    rewards, ids = batch
    got = informative_groups(torch.from_numpy(rewards), torch.from_numpy(ids))
    for i, group in enumerate(ids):
        r = rewards[(ids == group) & ~np.isnan(rewards)]
        assert bool(got[i]) == (not np.isnan(rewards[i]) and r.max() > r.min())
    middle = informative_groups(torch.tensor([0.0, 1.0, 2.0]), 3)  # one reward is the mean itself
    assert middle.all()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"kind": "gprpo"},
            ValueError,
            r"group_advantages: kind must be one of dr_grpo, grpo, lite_ppo, reinforce\+\+, "
            r"reinforce\+\+-baseline, rloo, got 'gprpo'\. Did you mean 'grpo'\?",
        ),
        (
            {"groups": 4},
            ValueError,
            "group_advantages: groups of 4 must divide the number of rewards, got 6. Pass the gr",
        ),
        ({"groups": 0}, ValueError, "group_advantages: groups must be an integer of at least 1"),
        (
            {"groups": torch.zeros(5).long()},
            ValueError,
            r"group_advantages: groups must have the shape of rewards \(6,\), got \(5,\)",
        ),
        (
            {"groups": torch.zeros(6)},
            TypeError,
            "group_advantages: groups must be a tensor of whole numbers, got dtype torch.float32",
        ),
        (
            {"rewards": torch.zeros(2, 3)},
            ValueError,
            r"group_advantages: rewards must have shape \(b,\), got \(2, 3\)",
        ),
        (
            {"rewards": torch.zeros(6).long()},
            TypeError,
            "group_advantages: rewards must be a floating-point tensor",
        ),
        ({"eps": -1.0}, ValueError, "group_advantages: eps must be a finite number at least 0.0"),
        ({"impl": "triton"}, NotImplementedError, "group_advantages: impl='triton' is not in"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    with pytest.raises(error, match=text):
        group_advantages(**{"rewards": torch.zeros(6), "groups": 3} | arguments)
