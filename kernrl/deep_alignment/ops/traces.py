"""The cousins of GAE on the same scan: TD(λ) returns, V-trace and Retrace(λ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import inputs
from kernrl.deep_alignment.ops.scan import cut_decay, reverse_scan
from kernrl.deep_alignment.ops.sequences import boundaries, following, last_counting


@dataclass(frozen=True, slots=True)
class Steps:
    """Checked transitions of an op, all (b, t)."""

    rewards: Tensor
    next_values: Tensor  # 0 where terminated
    cut: Tensor  # terminated or truncated
    mask: Tensor | None
    ends: Tensor  # boundaries of packed segments

    def decay(self, rate: float | Tensor) -> Tensor:
        """`rate` within an episode, 0 where it is cut, 1 across what does not count."""
        return cut_decay(rate, self.cut, self.mask, self.rewards, self.ends)

    def goes_on(self) -> Tensor:
        """1.0 where the step after this one belongs to the same episode."""
        return (~(self.cut | self.ends)).to(self.rewards.dtype)


@torch.no_grad()
def td_lambda(
    rewards: Tensor,  # (b, t) r_t
    next_values: Tensor,  # (b, t) V(s_{t+1}) of the true next observation
    terminated: Tensor,  # (b, t)
    truncated: Tensor | None = None,  # (b, t)
    *,
    gamma: float,
    trace_decay: float,
    mask: Tensor | None = None,  # (b, t) True = a real transition
    segments: Tensor | None = None,  # (b, t) whole numbers, for sequences packed into a row
    impl: str = "auto",
) -> Tensor:  # (b, t)
    """The λ-return, the target of TD(λ).

    G_t = r_t + γ [(1 − λ) V(s_{t+1}) + λ G_{t+1}],   and r_t + γ V(s_{t+1}) where the trace ends

    Sutton & Barto (2018), ch. 12. V(s_{t+1}) is 0 if terminated. The trace ends where the episode
    is terminated or truncated, at a change of `segments` and at the last entry that counts. λ = 0
    is the one-step target, λ = 1 the discounted return; equal to the returns of `gae` where
    V(s_{t+1}) is the value of the next entry.

    >>> one, end = torch.ones(1, 2), torch.tensor([[False, True]])
    >>> td_lambda(one, one, end, gamma=0.5, trace_decay=1.0)
    tensor([[1.5000, 1.0000]])
    """
    owner = "td_lambda"
    inputs.implementation(owner, impl)
    gamma, trace_decay = _rates(owner, gamma, trace_decay)
    x = _steps(owner, rewards, next_values, terminated, truncated, mask, segments)
    last = x.cut | x.ends | _last_of_segment(x)
    ahead = torch.where(last, x.next_values, (1.0 - trace_decay) * x.next_values)
    target = inputs.zeroed(x.rewards + gamma * ahead, x.mask)
    decay = cut_decay(gamma * trace_decay, last, x.mask, target, x.ends)
    return inputs.zeroed(reverse_scan(decay, target), x.mask)


@torch.no_grad()
def vtrace(
    rewards: Tensor,  # (b, t) r_t
    values: Tensor,  # (b, t) V(s_t)
    next_values: Tensor,  # (b, t) V(s_{t+1}) of the true next observation
    log_ratio: Tensor,  # (b, t) log π(a_t|s_t) − log μ(a_t|s_t), μ the behaviour policy
    terminated: Tensor,  # (b, t)
    truncated: Tensor | None = None,  # (b, t)
    *,
    gamma: float,
    trace_decay: float = 1.0,
    ratio_bound: float = 1.0,
    trace_bound: float = 1.0,
    mask: Tensor | None = None,  # (b, t) True = a real transition
    segments: Tensor | None = None,  # (b, t) whole numbers, for sequences packed into a row
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # policy-gradient advantages, value targets v: both (b, t)
    """Off-policy value targets and advantages with truncated importance weights.

    ρ_t = min(ρ̄, w_t),  c_t = λ min(c̄, w_t),  w = e^log_ratio,  ρ̄ = `ratio_bound`, c̄ = `trace_bound`
    δ_t = ρ_t (r_t + γ V(s_{t+1}) − V(s_t))
    v_t = V(s_t) + δ_t + γ c_t (v_{t+1} − V(s_{t+1}))
    A_t = ρ_t (r_t + γ v_{t+1} − V(s_t))

    Espeholt et al. (2018). On policy (w = 1 ≤ ρ̄, c̄) v is the TD(λ) target. Where the episode is
    cut v_{t+1} is V(s_{t+1}), or 0 if terminated. No gradient flows.

    >>> x, no = torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    >>> vtrace(x, 0 * x, 0 * x, 0 * x, no, gamma=0.5)[1]
    tensor([[1.5000, 1.0000]])
    """
    owner = "vtrace"
    inputs.implementation(owner, impl)
    gamma, trace_decay = _rates(owner, gamma, trace_decay)
    rho_bar = checks.real(owner, "ratio_bound", ratio_bound, above=0.0)
    c_bar = checks.real(owner, "trace_bound", trace_bound, above=0.0)
    x = _steps(owner, rewards, next_values, terminated, truncated, mask, segments)
    values = inputs.matching(owner, "values", values, "rewards", rewards)
    values = inputs.zeroed(values, x.mask)
    weight = _weights(owner, log_ratio, x)
    rho = weight.clamp(max=rho_bar)
    delta = inputs.zeroed(rho * (x.rewards + gamma * x.next_values - values), x.mask)
    decay = x.decay(gamma * trace_decay * weight.clamp(max=c_bar))
    excess = reverse_scan(decay, delta)  # v − V
    ahead = x.goes_on() * following(excess)
    advantages = inputs.zeroed(delta + gamma * rho * ahead, x.mask)
    return advantages, inputs.zeroed(values + excess, x.mask)


@torch.no_grad()
def retrace(
    rewards: Tensor,  # (b, t) r_t
    action_values: Tensor,  # (b, t) Q(s_t, a_t)
    next_values: Tensor,  # (b, t) E_π Q(s_{t+1}, ·)
    log_ratio: Tensor,  # (b, t) log π(a_t|s_t) − log μ(a_t|s_t), μ the behaviour policy
    terminated: Tensor,  # (b, t)
    truncated: Tensor | None = None,  # (b, t)
    *,
    gamma: float,
    trace_decay: float = 1.0,
    mask: Tensor | None = None,  # (b, t) True = a real transition
    segments: Tensor | None = None,  # (b, t) whole numbers, for sequences packed into a row
    impl: str = "auto",
) -> Tensor:  # (b, t) targets for Q(s_t, a_t)
    """Retrace(λ) targets: safe for any behaviour policy, efficient near it.

    δ_t = r_t + γ E_π Q(s_{t+1}, ·) − Q(s_t, a_t),  c_t = λ min(1, e^log_ratio_t)
    G_t = Q(s_t, a_t) + δ_t + γ c_{t+1} (G_{t+1} − Q(s_{t+1}, a_{t+1}))

    Munos et al. (2016). E_π Q is 0 if terminated. The first step's own ratio is not used: its
    action is given. λ = 0 is expected SARSA. No gradient flows.

    >>> x, no = torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    >>> retrace(x, 0 * x, 0 * x, 0 * x, no, gamma=0.5)
    tensor([[1.5000, 1.0000]])
    """
    owner = "retrace"
    inputs.implementation(owner, impl)
    gamma, trace_decay = _rates(owner, gamma, trace_decay)
    x = _steps(owner, rewards, next_values, terminated, truncated, mask, segments)
    q = inputs.matching(owner, "action_values", action_values, "rewards", rewards)
    q = inputs.zeroed(q, x.mask)
    delta = inputs.zeroed(x.rewards + gamma * x.next_values - q, x.mask)
    trace = trace_decay * _weights(owner, log_ratio, x).clamp(max=1.0)
    # y_t = c_t (G_t − Q_t) obeys the scan with its own c_t; the target then needs y_{t+1}.
    y = reverse_scan(x.decay(gamma * trace), inputs.zeroed(trace * delta, x.mask))
    return inputs.zeroed(q + delta + gamma * x.goes_on() * following(y), x.mask)


# ---------------------------------------------------------------- inputs


def _rates(owner: str, gamma: float, trace_decay: float) -> tuple[float, float]:
    gamma = checks.real(owner, "gamma", gamma, at_least=0.0, at_most=1.0)
    return gamma, checks.real(owner, "trace_decay", trace_decay, at_least=0.0, at_most=1.0)


def _steps(
    owner: str,
    rewards: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    mask: Tensor | None,
    segments: Tensor | None,
) -> Steps:
    rewards = inputs.floating(owner, "rewards", rewards)
    inputs.sequences(owner, "rewards", rewards)
    ahead = inputs.matching(owner, "next_values", next_values, "rewards", rewards)
    terminated = inputs.flags(owner, "terminated", terminated, "rewards", rewards)
    truncated = inputs.flags(owner, "truncated", truncated, "rewards", rewards)
    mask = inputs.counting(owner, mask, "rewards", rewards)
    return Steps(
        inputs.zeroed(rewards, mask),
        # masked_fill, not a product: V past an end may be anything, even inf.
        inputs.zeroed(ahead.masked_fill(terminated, 0.0), mask),
        terminated | truncated,
        mask,
        boundaries(owner, segments, "rewards", rewards),
    )


def _weights(owner: str, log_ratio: Tensor, x: Steps) -> Tensor:
    log_ratio = inputs.matching(owner, "log_ratio", log_ratio, "rewards", x.rewards)
    return inputs.zeroed(log_ratio, x.mask).exp()


def _last_of_segment(x: Steps) -> Tensor:
    """The last counting entry of every row, and of every segment of it."""
    last = last_counting(x.mask, x.rewards)
    if x.mask is None or not x.rewards.numel():
        return last
    # An entry is the last that counts of its segment if a boundary comes before the next one:
    # the scan carries "a counting entry follows" back over masked entries, and stops at ends.
    counts = x.mask.to(x.rewards.dtype)
    follows = reverse_scan((1.0 - counts).masked_fill_(x.ends, 0.0), counts)
    follows = following(follows).masked_fill(x.ends, 0.0)
    return last | (x.mask & (follows == 0))
