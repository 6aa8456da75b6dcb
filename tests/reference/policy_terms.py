"""Policy and value losses token by token in plain Python, with their gradients written out.

The formulas are those of the papers, the gradients were derived by hand: nothing here is shared
with the library. Each function takes lists of floats of one sequence's counting tokens.
"""

from __future__ import annotations

import math

Tokens = list[float]


def _cut(ratio: float, advantage: float, low: float, high: float) -> bool:
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def none(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    return [-a * x for a, x in zip(adv, new, strict=True)], [-a for a in adv]


def clip(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    loss, gradient = [], []
    for x, o, a in zip(new, old, adv, strict=True):
        rho = math.exp(x - o)
        loss.append(-min(rho * a, _clip(rho, low, high) * a))
        gradient.append(0.0 if _cut(rho, a, low, high) else -rho * a)
    return loss, gradient


def dual_clip(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float, c: float):
    loss, gradient = clip(new, old, adv, low, high)
    for i, (x, o, a) in enumerate(zip(new, old, adv, strict=True)):
        if a < 0:
            loss[i] = min(loss[i], -c * a)
            gradient[i] = 0.0 if math.exp(x - o) > c else gradient[i]
    return loss, gradient


def cispo(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    weights = [_clip(math.exp(x - o), low, high) for x, o in zip(new, old, strict=True)]
    loss = [-w * a * x for w, a, x in zip(weights, adv, new, strict=True)]
    return loss, [-w * a for w, a in zip(weights, adv, strict=True)]


def sapo(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float, taus=(1.0, 1.05)):
    loss, gradient = [], []
    for x, o, a in zip(new, old, adv, strict=True):
        rho, tau = math.exp(x - o), taus[0] if a > 0 else taus[1]
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        loss.append(-a * 4 / tau * gate)
        gradient.append(-a * 4 * gate * (1 - gate) * rho)
    return loss, gradient


def _sequence_ratio(new: Tokens, old: Tokens) -> float:
    return math.exp(sum(x - o for x, o in zip(new, old, strict=True)) / len(new))


def gspo(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    """Every token carries the sequence's loss; the gradient is that of their sum."""
    s, n = _sequence_ratio(new, old), len(new)
    loss = [-min(s * a, _clip(s, low, high) * a) for a in adv]
    through = sum(0.0 if _cut(s, a, low, high) else -s * a for a in adv)
    return loss, [through / n] * n


def gspo_token(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    s = _sequence_ratio(new, old)
    loss, _ = gspo(new, old, adv, low, high)
    return loss, [0.0 if _cut(s, a, low, high) else -s * a for a in adv]


def gmpo(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    """Zhao et al. (2025) write each factor as min(ρ^sgn A, clip(ρ)^sgn A)^sgn A."""
    product, n = 1.0, len(new)
    for x, o, a in zip(new, old, adv, strict=True):
        rho, sign = math.exp(x - o), 1 if a > 0 else -1
        product *= min(rho**sign, _clip(rho, low, high) ** sign) ** sign
    mean = product ** (1 / n)
    through = sum(-a * mean for a in adv) / n
    cut = [_cut(math.exp(x - o), a, low, high) for x, o, a in zip(new, old, adv, strict=True)]
    return [-a * mean for a in adv], [0.0 if c else through for c in cut]


def vespo(new: Tokens, old: Tokens, adv: Tokens, low: float, high: float):
    """Shen et al. (2026): the coefficient of the score is a gamma-shaped φ(w), φ(1) = 1."""
    w = math.exp(sum(x - o for x, o in zip(new, old, strict=True)))
    loss, gradient = [], []
    for x, a in zip(new, adv, strict=True):
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi = w**k * math.exp(rate * (1 - w))
        loss.append(-phi * a * x)
        gradient.append(-phi * a)
    return loss, gradient


KINDS = {
    "none": none,
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "gmpo": gmpo,
    "vespo": vespo,
}


def value(v: float, old: float, target: float, epsilon: float | None) -> tuple[float, float]:
    """½ max((v − R)², (v_c − R)²) and its derivative."""
    own = 0.5 * (v - target) ** 2
    if epsilon is None or abs(v - old) <= epsilon:
        return own, v - target
    other = 0.5 * (old + math.copysign(epsilon, v - old) - target) ** 2
    return (own, v - target) if own >= other else (other, 0.0)
