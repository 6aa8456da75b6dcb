"""Markov chains solved exactly: dynamic programming on tables, no kernel anywhere."""

import numpy as np


class Chain:
    """States 1 … n, actions left (0) and right (1); the intended move happens with `success`.

    The reward belongs to the state that is left. Lagoudakis & Parr (2003), Koller & Parr (2000).
    """

    def __init__(self, n, rewarded, success=0.9, gamma=0.9):
        self.n, self.gamma = n, gamma
        self.reward = np.zeros(n)
        self.reward[np.asarray(rewarded) - 1] = 1.0
        down = np.eye(n, k=-1)
        down[0, 0] = 1.0
        up = np.eye(n, k=1)
        up[-1, -1] = 1.0
        self.p = np.stack(
            [success * down + (1 - success) * up, success * up + (1 - success) * down]
        )

    def optimal(self):
        """Q* (n, 2) by value iteration to rounding."""
        q = np.zeros((self.n, 2))
        for _ in range(2000):
            q = self.reward[:, None] + self.gamma * (self.p @ q.max(axis=1)).T
        return q

    def value(self, policy):
        """V^π for probabilities π (n, 2): (I − γP^π)⁻¹ r."""
        p = np.einsum("sa,ast->st", policy, self.p)
        return np.linalg.solve(np.eye(self.n) - self.gamma * p, self.reward)

    def random_walk(self, n_steps, seed):
        """(states, actions, rewards, next_states) of one uniformly random trajectory."""
        rng = np.random.default_rng(seed)
        actions = rng.integers(2, size=n_steps)
        states = np.empty(n_steps + 1, dtype=int)
        states[0] = rng.integers(self.n)
        for t in range(n_steps):
            states[t + 1] = rng.choice(self.n, p=self.p[actions[t], states[t]])
        return states[:-1] + 1.0, actions, self.reward[states[:-1]], states[1:] + 1.0


def boyan():
    """Boyan's chain as rows whose averages are its exact dynamics: (s, r, s', terminated).

    States 0 … 12, γ = 1, V(i) = −2(12 − i).
    """
    rows = []
    for i in range(11):
        rows += [(i, -3.0, i + 1, False), (i, -3.0, i + 2, False)]
    rows += [(11, -2.0, 12, False)] * 2 + [(12, 0.0, 12, True)] * 2
    return [np.array(column) for column in zip(*rows, strict=True)]


def tabular_lstd(states, rewards, next_states, terminated, starts, n, gamma, decay=0.0):
    """LSTD(λ) with one indicator per state 0 … n−1, row by row as in the textbook."""
    a, b, trace = np.zeros((n, n)), np.zeros(n), np.zeros(n)
    for s, r, s2, end, start in zip(states, rewards, next_states, terminated, starts, strict=True):
        here, ahead = np.eye(n)[s], np.zeros(n) if end else np.eye(n)[s2]
        trace = here if start else gamma * decay * trace + here
        a += np.outer(trace, here - gamma * ahead)
        b += trace * r
    return np.linalg.solve(a, b)
