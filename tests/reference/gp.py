"""Gaussian processes and GPTD as in the papers: dense matrices, inverses, one row at a time."""

import numpy as np


def gp_regression(x, y, query, kernel, noise, mean=0.0):
    """(mean, covariance, log likelihood) of GP regression: Rasmussen & Williams (2006), §2.2."""
    s = kernel(x) + noise * np.eye(len(x))
    inverse, across = np.linalg.inv(s), kernel(query, x)
    centred = y - mean
    likelihood = -0.5 * centred @ inverse @ centred - 0.5 * np.linalg.slogdet(2 * np.pi * s)[1]
    return (
        mean + across @ inverse @ centred,
        kernel(query) - across @ inverse @ across.T,
        likelihood,
    )


def dense_h(t, gamma):
    """H entry by entry, and the points of its columns: consecutive rows of an episode share one."""
    points, rows = [], []
    for i in range(len(t)):
        linked = (
            i > 0
            and t.episode[i] == t.episode[i - 1]
            and np.array_equal(t.next_states[i - 1], t.states[i])
        )
        if not linked:
            points.append(t.states[i])
        here = len(points) - 1
        if t.terminated[i]:
            rows.append((here, None))
        else:
            points.append(t.next_states[i])
            rows.append((here, here + 1))
    h = np.zeros((len(t), len(points)))
    for i, (here, ahead) in enumerate(rows):
        h[i, here] = 1.0
        if ahead is not None:
            h[i, ahead] = -gamma
    return h, np.array(points)


def gptd(t, query, gram, gamma, noise, correlated, mean=0.0):
    """(mean, covariance, log p) by α = Hᵀ(HKHᵀ + Σ)⁻¹r and C = Hᵀ(HKHᵀ + Σ)⁻¹H.

    `gram(x, y)` is the covariance of V.
    """
    h, points = dense_h(t, gamma)
    sigma = noise * (h @ h.T if correlated else np.eye(len(t)))
    s = h @ gram(points, points) @ h.T + sigma
    inverse = np.linalg.inv(s)
    centred = t.rewards - mean * h.sum(axis=1)
    across = gram(query, points)
    covariance = gram(query, query) - across @ h.T @ inverse @ h @ across.T
    likelihood = -0.5 * centred @ inverse @ centred - 0.5 * np.linalg.slogdet(2 * np.pi * s)[1]
    return mean + across @ h.T @ inverse @ centred, covariance, likelihood


def engel_recursion(t, gram, gamma, noise, correlated):
    """α and C of the exact recursion, row by row (Engel, Mannor & Meir 2003 and 2005)."""
    h, points = dense_h(t, gamma)
    k = gram(points, points)
    p = len(points)
    alpha, c_matrix = np.zeros(p), np.zeros((p, p))
    d, c, s = 0.0, np.zeros(p), 1.0
    for i in range(len(t)):
        row = h[i]
        discount = -row[row < 0].sum()
        delta = k @ row
        shared = i > 0 and bool(np.any((h[i] > 0) & (h[i - 1] < 0)))
        decay = gamma * noise / s if correlated and shared else 0.0
        before = c
        d = decay * d + t.rewards[i] - delta @ alpha
        c = decay * before + row - c_matrix @ delta
        own = noise * (1 + discount**2) - gamma * noise * decay if correlated else noise
        s = own + row @ delta - delta @ c_matrix @ delta + 2 * decay * before @ delta
        alpha = alpha + c * d / s
        c_matrix = c_matrix + np.outer(c, c) / s
    return alpha, c_matrix


def finite_difference(f, theta, step=1e-5):
    """Central differences of a scalar function."""
    out = np.zeros_like(theta)
    for i in range(len(theta)):
        e = np.zeros_like(theta)
        e[i] = step
        out[i] = (f(theta + e) - f(theta - e)) / (2 * step)
    return out
