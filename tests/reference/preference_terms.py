"""Preference losses of one pair in plain Python, with both derivatives written out.

Each function takes the two sums ℓ_w, ℓ_l, their references, the two lengths, β and ε, and gives
(loss, ∂/∂ℓ_w, ∂/∂ℓ_l). The formulas are those of the papers, in probabilities rather than
log-sigmoids; the derivatives were derived by hand: nothing here is shared with the library.
"""

from __future__ import annotations

import math


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _cross_entropy(h: float, e: float) -> tuple[float, float]:
    """Of the label (1 − e, e) under σ(h), and its derivative."""
    p, q = _sigmoid(h), _sigmoid(-h)
    return -(1 - e) * math.log(p) - e * math.log(q), p - (1 - e)


def dpo(w, v, rw, rl, nw, nl, beta, e):
    loss, slope = _cross_entropy(beta * ((w - rw) - (v - rl)), e)
    return loss, beta * slope, -beta * slope


def robust(w, v, rw, rl, nw, nl, beta, e):
    """The estimate is unbiased: averaged over label flips with rate e it is the clean loss."""
    right, up = _cross_entropy(beta * ((w - rw) - (v - rl)), 0.0)
    wrong, down = _cross_entropy(beta * ((w - rw) - (v - rl)), 1.0)
    loss = ((1 - e) * right - e * wrong) / (1 - 2 * e)
    slope = ((1 - e) * up - e * down) / (1 - 2 * e)
    return loss, beta * slope, -beta * slope


def hinge(w, v, rw, rl, nw, nl, beta, e):
    h = beta * ((w - rw) - (v - rl))
    slope = -beta if h < 1 else 0.0
    return max(0.0, 1 - h), slope, -slope


def ipo(w, v, rw, rl, nw, nl, beta, e):
    gap = (w - rw) / nw - (v - rl) / nl - 1 / (2 * beta)
    return gap**2, 2 * gap / nw, -2 * gap / nl


def sigmoid_norm(w, v, rw, rl, nw, nl, beta, e):
    loss, slope = _cross_entropy(beta * ((w - rw) / nw - (v - rl) / nl), e)
    return loss, beta * slope / nw, -beta * slope / nl


def simpo(w, v, rw, rl, nw, nl, beta, e):
    return sigmoid_norm(w, v, 0.0, 0.0, nw, nl, beta, e)


def cpo(w, v, rw, rl, nw, nl, beta, e):
    loss, up, down = dpo(w, v, 0.0, 0.0, nw, nl, beta, e)
    return loss - w / nw, up - 1 / nw, down


def orpo(w, v, rw, rl, nw, nl, beta, e):
    p, q = math.exp(w / nw), math.exp(v / nl)
    h = math.log(p / (1 - p)) - math.log(q / (1 - q))
    slope = beta * (_sigmoid(h) - 1)
    loss = -beta * math.log(_sigmoid(h)) - w / nw
    return loss, slope / (1 - p) / nw - 1 / nw, -slope / (1 - q) / nl


def nca(w, v, rw, rl, nw, nl, beta, e):
    p, q = _sigmoid(beta * (w - rw)), _sigmoid(beta * (v - rl))
    loss = -math.log(p) - 0.5 * math.log(1 - p) - 0.5 * math.log(1 - q)
    return loss, beta * (-(1 - p) + 0.5 * p), beta * 0.5 * q


def exo(w, v, rw, rl, nw, nl, beta, e):
    e = e or 1e-3
    h = beta * ((w - rw) - (v - rl))
    p = _sigmoid(h)
    loss = p * math.log(p / (1 - e)) + (1 - p) * math.log((1 - p) / e)
    slope = beta * p * (1 - p) * (h - math.log((1 - e) / e))
    return loss, slope, -slope


def sppo_hard(w, v, rw, rl, nw, nl, beta, e):
    a, b = w - rw - 1 / (2 * beta), v - rl + 1 / (2 * beta)
    return a * a + b * b, 2 * a, 2 * b


def apo_zero(w, v, rw, rl, nw, nl, beta, e):
    p, q = _sigmoid(beta * (w - rw)), _sigmoid(beta * (v - rl))
    return (1 - p) + q, -beta * p * (1 - p), beta * q * (1 - q)


def apo_down(w, v, rw, rl, nw, nl, beta, e):
    p, gap = _sigmoid(beta * (w - rw)), _sigmoid(beta * ((w - rw) - (v - rl)))
    fall = beta * gap * (1 - gap)
    return p + (1 - gap), beta * p * (1 - p) - fall, fall


def discopop(w, v, rw, rl, nw, nl, beta, e, tau=0.05):
    h = beta * ((w - rw) - (v - rl))
    m = _sigmoid(h / tau)
    logistic, exponential = -math.log(_sigmoid(h)), math.exp(-h)
    loss = (1 - m) * logistic + m * exponential
    slope = m * (1 - m) / tau * (exponential - logistic)
    slope += (1 - m) * (_sigmoid(h) - 1) - m * exponential
    return loss, beta * slope, -beta * slope


def sft(w, v, rw, rl, nw, nl, beta, e):
    return -w / nw, -1 / nw, 0.0


KINDS = {
    "dpo": dpo,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "sigmoid-norm": sigmoid_norm,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
    "nca": nca,
    "exo": exo,
    "sppo-hard": sppo_hard,
    "apo-zero": apo_zero,
    "apo-down": apo_down,
    "discopop": discopop,
    "sft": sft,
}


def bco(w, v, rw, rl, beta):
    """Of a whole batch (lists); δ is the mean reward and takes no part in the derivative."""
    up = [beta * (x - y) for x, y in zip(w, rw, strict=True)]
    down = [beta * (x - y) for x, y in zip(v, rl, strict=True)]
    delta = sum(up + down) / len(up + down)
    loss = [
        -math.log(_sigmoid(a - delta)) - math.log(1 - _sigmoid(b - delta))
        for a, b in zip(up, down, strict=True)
    ]
    slope_w = [beta * (_sigmoid(a - delta) - 1) for a in up]
    return loss, slope_w, [beta * _sigmoid(b - delta) for b in down]


def aot(w, v, rw, rl, beta, e, paired):
    """Of a whole batch: the i-th smallest against the i-th smallest, by rank."""
    n = len(w)
    if paired:
        mine = [beta * (x - y) for x, y in zip(w, v, strict=True)]
        other = [beta * (x - y) for x, y in zip(rw, rl, strict=True)]
    else:
        mine = [beta * (x - y) for x, y in zip(w, rw, strict=True)]
        other = [beta * (x - y) for x, y in zip(v, rl, strict=True)]
    rank = sorted(range(n), key=mine.__getitem__)
    other_rank = sorted(range(n), key=other.__getitem__)
    loss, slope_w, slope_l = [], [0.0] * n, [0.0] * n
    for i, j in zip(rank, other_rank, strict=True):
        value, slope = _cross_entropy(mine[i] - other[j], e)
        loss.append(value)
        slope_w[i] += beta * slope
        slope_l[i if paired else j] -= beta * slope
    return loss, slope_w, slope_l


def f_dpo(w, v, rw, rl, beta, e, derivative):
    """Wang et al. (2024) with f' as a function of u = π/π_ref, its slope by central differences."""

    def loss(a, b):
        h = beta * (derivative(math.exp(a - rw)) - derivative(math.exp(b - rl)))
        return _cross_entropy(h, e)[0]

    step = 1e-5
    up = (loss(w + step, v) - loss(w - step, v)) / (2 * step)
    return loss(w, v), up, (loss(w, v + step) - loss(w, v - step)) / (2 * step)
