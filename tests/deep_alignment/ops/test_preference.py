"""Every preference loss against scalar code in probabilities, its gradient, and the traps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import preference_terms
from tolerances import tolerance

from kernrl.deep_alignment.ops.preference import KINDS, preference_loss
from kernrl.deep_alignment.ops.preference_links import DIVERGENCES, log_odds
from kernrl.deep_alignment.ops.sequences import sequence_logprobs

SMOOTHED = [kind for kind, entry in KINDS.items() if "label_smoothing" in entry.options]
WITH_MARGIN = [kind for kind, entry in KINDS.items() if "margin" in entry.options]
SORTED = [kind for kind, entry in KINDS.items() if entry.sorts]
ALGEBRA = tolerance("algebra")


class Batch:
    """ℓ_w, ℓ_l, their references and lengths; rewards of both signs and orders."""

    def __init__(self, rng, n=9, dtype=torch.float64):
        self.counts = [rng.integers(1, 12, size=n) for _ in range(2)]
        policy = [-c * rng.uniform(0.2, 1.5, size=n) for c in self.counts]
        refs = [x + rng.normal(scale=3.0, size=n) for x in policy]
        self.policy = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in policy]
        self.refs = [torch.tensor(x, dtype=dtype) for x in refs]
        self.lengths = tuple(map(torch.from_numpy, self.counts))

    def loss(self, kind, **options):
        entry = KINDS[kind]
        given = [*self.policy, *(self.refs if entry.reference else (None, None))]
        return preference_loss(*given, kind=kind, lengths=self.lengths, **options)

    def slopes(self, loss):
        return torch.autograd.grad(loss, self.policy, allow_unused=True, materialize_grads=True)

    def rows(self):
        columns = [x.tolist() for x in (*self.policy, *self.refs, *self.lengths)]
        return zip(*columns, strict=True)


@pytest.fixture
def batch(rng):
    return Batch(rng)


def compare(loss, slopes, expected, name="algebra"):
    for got, want in zip((loss.detach(), *slopes), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(got.numpy(), want, **tolerance(name))


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize(
    ("kind", "smoothing"),
    [
        (kind, smoothing)
        for kind in preference_terms.KINDS
        for smoothing in (0.0, 0.1)
        if not smoothing or kind in SMOOTHED
    ],
)
def test_value_and_gradient_match_the_closed_forms(kind, smoothing, beta, batch):
    loss, _ = batch.loss(kind, beta=beta, label_smoothing=smoothing, aggregate="none")
    reference = preference_terms.KINDS[kind]
    expected = [reference(*row, beta, smoothing) for row in batch.rows()]
    compare(loss, batch.slopes(loss.sum()), expected)


@pytest.mark.parametrize("kind", ["aot", "aot-unpaired"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_aot_compares_the_sorted_batches(kind, smoothing, batch):
    loss, _ = batch.loss(kind, beta=0.3, label_smoothing=smoothing, aggregate="none")
    columns = [x.tolist() for x in (*batch.policy, *batch.refs)]
    expected = preference_terms.aot(*columns, 0.3, smoothing, kind == "aot")
    compare(loss, batch.slopes(loss.sum()), zip(*expected, strict=True))


def test_bco_takes_its_shift_from_the_batch_without_gradient(batch):
    loss, metrics = batch.loss("bco", beta=0.3, aggregate="none")
    columns = [x.tolist() for x in (*batch.policy, *batch.refs)]
    compare(loss, batch.slopes(loss.sum()), zip(*preference_terms.bco(*columns, 0.3), strict=True))
    given, _ = batch.loss("bco", beta=0.3, aggregate="none", shift=metrics["shift"])
    torch.testing.assert_close(given, loss, **ALGEBRA)
    number, _ = batch.loss("bco", beta=0.3, shift=0.25)
    assert not torch.allclose(number, loss.mean())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bco"])
def test_gradcheck(kind, batch):
    """bco is left out: its shift is a constant for the gradient, not for a finite difference."""
    refs = batch.refs if KINDS[kind].reference else (None, None)

    def loss(w, v):
        return preference_loss(w, v, *refs, kind=kind, beta=0.3, lengths=batch.lengths)[0]

    assert torch.autograd.gradcheck(loss, batch.policy)


def test_every_kind_has_a_reference():
    assert set(KINDS) == set(preference_terms.KINDS) | {"bco", "aot", "aot-unpaired"}


# ---------------------------------------------------------------- f-divergences

SLOPES_OF_F = {
    "reverse-kl": lambda u, a: math.log(u),
    "forward-kl": lambda u, a: -1 / u,
    "js": lambda u, a: math.log(2 * u / (1 + u)),
    "alpha": lambda u, a: (1 - u**-a) / a,
}


@pytest.mark.parametrize("alpha", [0.5, 0.9])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_f_divergences_are_their_derivative_of_the_ratio(divergence, alpha, batch):
    loss, _ = batch.loss("dpo", beta=0.3, f_divergence=divergence, alpha=alpha, aggregate="none")
    expected = [
        preference_terms.f_dpo(*row[:4], 0.3, 0.0, lambda u: SLOPES_OF_F[divergence](u, alpha))
        for row in batch.rows()
    ]
    compare(loss, batch.slopes(loss.sum()), expected, "finite difference")


def test_the_alpha_divergence_runs_from_the_reverse_to_the_forward_kl(batch):
    def at(**options):
        return batch.loss("dpo", **options)[0]

    one = at(f_divergence="alpha", alpha=1.0)
    assert torch.equal(one, at(f_divergence="forward-kl"))
    near = at(f_divergence="alpha", alpha=1e-9)
    torch.testing.assert_close(near, at(), **tolerance("iterative"))
    assert torch.equal(at(), at(f_divergence="reverse-kl"))


@pytest.mark.parametrize("kind", ["dpo", "robust", "hinge"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_unchanged_policy_earns_nothing_under_any_divergence(divergence, kind, batch):
    batch.refs = [x.detach().clone() for x in batch.policy]
    _, metrics = batch.loss(kind, f_divergence=divergence)
    for name in ("reward_chosen", "reward_rejected"):
        assert abs(metrics[name].item()) <= 1e-15


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_tiny_ratio_does_not_overflow(divergence):
    w = torch.tensor([-500.0], requires_grad=True)
    zero = torch.zeros(1)
    loss, _ = preference_loss(w, zero, zero, zero, f_divergence=divergence, alpha=1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(w.grad).all()


# ---------------------------------------------------------------- what each is a case of


def test_robust_is_unbiased_under_flipped_labels(batch):
    """With flips at rate ε: (1 − ε) L(w, l) + ε L(l, w) is the clean DPO loss."""
    e = 0.2
    given, options = (*batch.policy, *batch.refs), {"kind": "robust", "label_smoothing": e}
    flipped = [given[i] for i in (1, 0, 3, 2)]
    right, wrong = (preference_loss(*x, **options)[0] for x in (given, flipped))
    clean, _ = batch.loss("dpo")
    torch.testing.assert_close((1 - e) * right + e * wrong, clean, **ALGEBRA)


def test_at_the_reference_dpo_is_log_two_with_half_the_slope(batch):
    batch.refs = [x.detach().clone() for x in batch.policy]
    loss, metrics = batch.loss("dpo", beta=0.3, aggregate="none")
    up, down = batch.slopes(loss.sum())
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2)), **ALGEBRA)
    torch.testing.assert_close(up, torch.full_like(up, -0.15), **ALGEBRA)
    torch.testing.assert_close(down, -up, **ALGEBRA)
    assert metrics["margin"] == metrics["accuracy"] == 0.0


def test_ipo_is_length_averaged_and_stationary_at_its_target():
    """Δ̄_w − Δ̄_l = 1/(2β) is the minimum, whatever the lengths."""
    n = torch.tensor([4]), torch.tensor([10])
    w = torch.tensor([4 * 2.5], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, _ = preference_loss(w, zero, zero, zero, kind="ipo", beta=0.2, lengths=n)
    loss.backward()
    assert loss.item() == 0.0
    assert w.grad.item() == 0.0


def test_simpo_is_dpo_on_averages_with_a_margin(batch):
    loss, _ = batch.loss("simpo", beta=2.0, margin=0.5, aggregate="none")
    for got, (w, v, _, _, n, m) in zip(loss.tolist(), batch.rows(), strict=True):
        h = 2.0 * (w / n - v / m) - 0.5
        np.testing.assert_allclose(got, math.log1p(math.exp(-h)), **ALGEBRA)


@pytest.mark.parametrize("kind", WITH_MARGIN)
def test_a_margin_shifts_h_and_may_differ_by_pair(kind, batch, rng):
    """L(r_w, r_l; m) = L(r_w − m, r_l; 0), the shift through ℓ_w."""
    margin = torch.from_numpy(rng.uniform(0.1, 1.0, size=9))
    margin.requires_grad_()
    got, _ = batch.loss(kind, beta=0.5, margin=margin, aggregate="none")
    assert torch.autograd.grad(got.sum(), margin, allow_unused=True)[0] is None
    per_token = torch.from_numpy(batch.counts[0]) if KINDS[kind].average else 1.0
    nll = batch.policy[0] / batch.lengths[0] * KINDS[kind].nll_weight
    batch.policy[0] = (batch.policy[0] - margin.detach() / 0.5 * per_token).detach()
    moved, _ = batch.loss(kind, beta=0.5, aggregate="none")
    moved += batch.policy[0] / batch.lengths[0] * KINDS[kind].nll_weight - nll
    torch.testing.assert_close(got, moved, **ALGEBRA)
    one, _ = batch.loss(kind, margin=0.7)
    same, _ = batch.loss(kind, margin=torch.tensor(0.7, dtype=torch.float64))
    assert torch.equal(one, same)


def test_average_overrides_the_kind(batch):
    averaged, _ = batch.loss("dpo", average=True)
    assert torch.equal(averaged, batch.loss("sigmoid-norm")[0])
    summed, _ = batch.loss("sigmoid-norm", average=False)
    assert torch.equal(summed, batch.loss("dpo")[0])


def test_reference_free_is_a_uniform_reference(batch):
    free, _ = batch.loss("dpo", reference_free=True)
    alone, _ = preference_loss(*batch.policy, kind="dpo", reference_free=True)
    batch.refs = [torch.full_like(x, -3.0) for x in batch.refs]  # any constant cancels
    torch.testing.assert_close(free, batch.loss("dpo")[0], **ALGEBRA)
    assert torch.equal(free, alone)


def test_the_nll_term_is_averaged_over_each_chosen_sequence(batch):
    plain, _ = batch.loss("dpo", aggregate="none")
    loss, metrics = batch.loss("dpo", nll_weight=0.3, aggregate="none")
    nll = -batch.policy[0] / batch.lengths[0]
    torch.testing.assert_close(loss, plain + 0.3 * nll, **ALGEBRA)
    torch.testing.assert_close(metrics["nll"], nll.mean().detach(), **ALGEBRA)
    without, seen = batch.loss("cpo", nll_weight=0.0)
    torch.testing.assert_close(without, batch.loss("dpo", reference_free=True)[0], **ALGEBRA)
    assert "nll" not in seen


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SORTED])
def test_weights_multiply_pairs(kind, batch, rng):
    weights = torch.from_numpy(rng.exponential(size=9)).requires_grad_()
    plain, _ = batch.loss(kind, aggregate="none")
    loss, _ = batch.loss(kind, weights=weights)
    torch.testing.assert_close(
        loss, (plain * weights).mean().detach(), check_dtype=False, **ALGEBRA
    )
    assert torch.autograd.grad(loss, weights, allow_unused=True)[0] is None


def test_the_denominator_replaces_the_number_of_pairs(batch):
    one, _ = batch.loss("dpo", aggregate="none")
    torch.testing.assert_close(batch.loss("dpo", denominator=36)[0], one.sum() / 36, **ALGEBRA)


def test_ld_dpo_is_a_weight_on_the_tail_of_the_sums(rng):
    """Liu et al. (2024): tokens past the shorter length of the pair count α."""
    logprob = [torch.from_numpy(-rng.exponential(size=(2, 6))) for _ in range(2)]
    mask = [torch.arange(6) < n for n in (torch.tensor([[6], [2]]), torch.tensor([[4], [5]]))]
    shared = torch.tensor([4, 2])
    sums = [
        sequence_logprobs(x, m, shared_length=shared, tail_weight=0.25)[0]
        for x, m in zip(logprob, mask, strict=True)
    ]
    loss, _ = preference_loss(*sums, reference_free=True, beta=1.0, aggregate="none")
    for row, cut in enumerate([4, 2]):
        h = 0.0
        for sign, x, n in ((1, logprob[0], (6, 2)), (-1, logprob[1], (4, 5))):
            h += sign * (x[row, :cut].sum() + 0.25 * x[row, cut : n[row]].sum()).item()
        np.testing.assert_allclose(loss[row].item(), math.log1p(math.exp(-h)), **ALGEBRA)


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_means_without_gradient(kind, batch):
    _, metrics = batch.loss(kind, beta=0.3)
    rewards = []
    for w, v, rw, rl, n, m in batch.rows():
        if not KINDS[kind].reference:
            rw = rl = 0.0
        a, b = w - rw, v - rl
        if KINDS[kind].average:
            a, b = a / n, b / m
        if kind == "orpo":
            a, b = (x - math.log(1 - math.exp(x)) for x in (a, b))
        rewards.append((0.3 * a, 0.3 * b))
    up, down = np.array(rewards).T
    expected = {
        "reward_chosen": up.mean(), "reward_rejected": down.mean(),
        "margin": (up - down).mean(), "accuracy": (up > down).mean(),
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name].item(), value, **ALGEBRA)
    assert not any(value.requires_grad for value in metrics.values())
    assert 0 < metrics["accuracy"] < 1


# ---------------------------------------------------------------- traps


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_far_apart_log_probabilities_stay_finite(kind, gap):
    """log σ(−100) by log(sigmoid(x)) is −inf, log(1 + e^100) is inf."""
    w = torch.tensor([min(gap, 0.0) - 1.0], requires_grad=True)
    v = torch.tensor([-max(gap, 0.0) - 1.0], requires_grad=True)
    refs = [-torch.ones(1)] * 2 if KINDS[kind].reference else (None, None)
    n = torch.tensor([1]), torch.tensor([1])
    loss, _ = preference_loss(w, v, *refs, kind=kind, beta=1.0, lengths=n)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("x", [-1e-8, -1e-4, -0.3, -5.0, -50.0])
def test_log_odds_near_probability_one(x):
    """log1p(−exp(−1e-8)) is −inf; the odds of a sure token are finite and right."""
    from decimal import Decimal, getcontext

    getcontext().prec = 60
    exact = Decimal(x) - (1 - Decimal(x).exp()).ln()
    t = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    got = log_odds(t)
    got.backward()
    np.testing.assert_allclose(got.item(), float(exact), **ALGEBRA)
    slope = float(1 / (1 - Decimal(x).exp()))
    np.testing.assert_allclose(t.grad.item(), slope, **tolerance("closed form"))


def test_log_odds_of_a_sure_sequence_are_held():
    for dtype in (torch.float32, torch.float64):
        t = torch.zeros(2, dtype=dtype, requires_grad=True)
        got = log_odds(t)
        got.sum().backward()
        assert torch.isfinite(got).all()
        assert torch.isfinite(t.grad).all()


def test_orpo_of_two_sure_sequences_is_finite():
    w, v = (torch.zeros(1, requires_grad=True) for _ in range(2))
    loss, _ = preference_loss(w, v, kind="orpo", lengths=(torch.ones(1), torch.ones(1)))
    loss.backward()
    np.testing.assert_allclose(loss.item(), 0.1 * math.log(2), **tolerance("float32"))
    assert torch.isfinite(w.grad + v.grad).all()


def test_an_empty_sequence_has_the_average_zero(batch):
    batch.lengths = (torch.zeros(9, dtype=torch.long), batch.lengths[1])
    batch.policy[0] = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    loss, _ = batch.loss("simpo")
    assert torch.isfinite(loss)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_zero(kind):
    none = torch.zeros(0, requires_grad=True)
    refs = [none, none] if KINDS[kind].reference else (None, None)
    count = torch.zeros(0, dtype=torch.long)
    loss, metrics = preference_loss(none, none, *refs, kind=kind, lengths=(count, count))
    loss.backward()
    assert loss.item() == 0.0
    assert {value.item() for value in metrics.values()} == {0.0}


def test_the_reference_is_a_constant_and_half_precision_is_raised():
    w = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0], requires_grad=True)
    loss, _ = preference_loss(w, 2 * w.detach(), ref, ref)
    loss.backward()
    assert loss.dtype == torch.float32
    assert w.grad.dtype == torch.bfloat16
    assert ref.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_input(kind, batch):
    one, _ = batch.loss(kind)
    batch.policy = [torch.stack([x, x], -1)[:, 0] for x in batch.policy]
    batch.refs = [torch.stack([x, x], -1)[:, 0] for x in batch.refs]
    torch.testing.assert_close(batch.loss(kind)[0], one, **ALGEBRA)
