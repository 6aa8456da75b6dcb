"""Generalised advantages from their definition, a double loop over pairs of time steps."""

from __future__ import annotations

import numpy as np


def gae(rewards, values, next_values, terminated, truncated, gamma, trace_decay, mask):
    """A_t = Σ_l (γλ)^l δ_{t+l} to the end of t's episode, counting only entries in the mask."""
    advantages = np.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        kept = np.flatnonzero(mask[row])
        for i, t in enumerate(kept):
            for power, later in enumerate(kept[i:]):
                follow = 0.0 if terminated[row, later] else next_values[row, later]
                delta = rewards[row, later] + gamma * follow - values[row, later]
                advantages[row, t] += (gamma * trace_decay) ** power * delta
                if terminated[row, later] or truncated[row, later]:
                    break
    return advantages, np.where(mask, advantages + values, 0.0)
