"""A row of logits in plain Python: log-probability, entropy, log-sum-exp and their gradients.

Written from the definitions with exact sums; nothing here is shared with the library.
"""

from __future__ import annotations

import math

INF = math.inf


def stats(logits: list[float], y: int, temperature: float) -> tuple[float, float, float]:
    """(ℓ, H, lse); a logit of −∞ is a token that cannot be drawn."""
    z = [x / temperature for x in logits]
    top = max(z)
    if top == -INF:
        return math.nan, math.nan, -INF
    lse = top + math.log(math.fsum(math.exp(x - top) for x in z))
    entropy = -math.fsum(math.exp(x - lse) * (x - lse) for x in z if x > -INF)
    return z[y] - lse, entropy, lse


def gradient(
    logits: list[float], y: int, temperature: float, upstream: tuple[float, float, float]
) -> list[float]:
    """∂(g_ℓ ℓ + g_H H + g_Z lse)/∂logits, from ∂ℓ, ∂H = −p_j (log p_j + H) and ∂lse = p_j."""
    g_logprob, g_entropy, g_lse = upstream
    _, entropy, lse = stats(logits, y, temperature)
    slopes = []
    for j, x in enumerate(logits):
        if x == -INF:
            slopes.append(g_logprob * (j == y) / temperature)
            continue
        log_p = x / temperature - lse
        p = math.exp(log_p)
        d_logprob, d_entropy = (j == y) - p, -p * (log_p + entropy)
        slopes.append((g_logprob * d_logprob + g_entropy * d_entropy + g_lse * p) / temperature)
    return slopes
