"""Advantages and returns from their definitions, a double loop over pairs of time steps."""

from __future__ import annotations

import math

import numpy as np


def _rest(row, t, terminated, truncated, mask, segments):
    """The counting entries from t to the end of t's episode, in order."""
    out = []
    for i in range(t, mask.shape[1]):
        if segments is not None and segments[row, i] != segments[row, t]:
            break
        if mask[row, i]:
            out.append(i)
            if terminated[row, i] or truncated[row, i]:
                break
    return out


def gae(
    rewards, values, next_values, terminated, truncated, gamma, trace_decay, mask, segments=None
):
    """A_t = Σ_l (γλ)^l δ_{t+l} to the end of t's episode, counting only entries in the mask."""
    advantages = np.zeros_like(rewards)
    for row, t in np.argwhere(mask):
        for power, later in enumerate(_rest(row, t, terminated, truncated, mask, segments)):
            follow = 0.0 if terminated[row, later] else next_values[row, later]
            delta = rewards[row, later] + gamma * follow - values[row, later]
            advantages[row, t] += (gamma * trace_decay) ** power * delta
    return advantages, np.where(mask, advantages + values, 0.0)


def td_lambda(rewards, next_values, terminated, truncated, gamma, trace_decay, mask, segments=None):
    """G_t = (1 − λ) Σ_{n<N} λ^{n−1} G^(n) + λ^{N−1} G^(N): n-step returns to the end."""
    out = np.zeros_like(rewards)
    for row, t in np.argwhere(mask):
        steps = _rest(row, t, terminated, truncated, mask, segments)
        returns = []
        for n in range(1, len(steps) + 1):
            total = sum(gamma**i * rewards[row, s] for i, s in enumerate(steps[:n]))
            if not terminated[row, steps[n - 1]]:
                total += gamma**n * next_values[row, steps[n - 1]]
            returns.append(total)
        mixed = (1 - trace_decay) * sum(trace_decay**i * g for i, g in enumerate(returns[:-1]))
        out[row, t] = mixed + trace_decay ** (len(returns) - 1) * returns[-1]
    return out


def vtrace(
    rewards, values, next_values, log_ratio, terminated, truncated, gamma, trace_decay,
    ratio_bound, trace_bound, mask, segments=None,
):  # fmt: skip
    """Espeholt et al. (2018): v_t = V_t + Σ_s γ^{s−t} (Π_{i<s} c_i) δ_s; then A_t from v_{t+1}."""
    targets, advantages = np.zeros_like(rewards), np.zeros_like(rewards)

    def follow(row, s):
        return 0.0 if terminated[row, s] else next_values[row, s]

    def weight(row, s, bound):
        return min(bound, math.exp(log_ratio[row, s]))

    for row, t in np.argwhere(mask):
        total, product = 0.0, 1.0
        for s in _rest(row, t, terminated, truncated, mask, segments):
            delta = rewards[row, s] + gamma * follow(row, s) - values[row, s]
            total += product * weight(row, s, ratio_bound) * delta
            product *= gamma * trace_decay * weight(row, s, trace_bound)
        targets[row, t] = values[row, t] + total
    for row, t in np.argwhere(mask):
        steps = _rest(row, t, terminated, truncated, mask, segments)
        ahead = targets[row, steps[1]] - values[row, steps[1]] if len(steps) > 1 else 0.0
        target = rewards[row, t] + gamma * (follow(row, t) + ahead)
        advantages[row, t] = weight(row, t, ratio_bound) * (target - values[row, t])
    return advantages, targets


def retrace(
    rewards, q, next_values, log_ratio, terminated, truncated, gamma, trace_decay, mask,
    segments=None,
):  # fmt: skip
    """Munos et al. (2016): G_t = Q_t + Σ_s γ^{s−t} (Π_{t<i≤s} c_i) δ_s."""
    out = np.zeros_like(rewards)
    for row, t in np.argwhere(mask):
        product, total = 1.0, 0.0
        for i, s in enumerate(_rest(row, t, terminated, truncated, mask, segments)):
            if i > 0:
                product *= gamma * trace_decay * min(1.0, math.exp(log_ratio[row, s]))
            follow = 0.0 if terminated[row, s] else next_values[row, s]
            total += product * (rewards[row, s] + gamma * follow - q[row, s])
        out[row, t] = q[row, t] + total
    return out


def next_values(values, mask, bootstrap, segments=None):
    """V of the next counting entry of the same segment; `bootstrap` after a row's last, else 0."""
    out = np.zeros_like(values)
    b, t = values.shape
    for row in range(b):
        for i in range(t):
            same = [
                j for j in range(i + 1, t)
                if segments is None or segments[row, j] == segments[row, i]
            ]  # fmt: skip
            later = [j for j in same if mask[row, j]]
            if later:
                out[row, i] = values[row, later[0]]
            elif segments is None or segments[row, i] == segments[row, -1]:
                out[row, i] = bootstrap[row]
    return out
