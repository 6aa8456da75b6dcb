"""Occupancies and density ratios of chains by linear algebra on tables; data without sampling."""

import numpy as np

from kernrl.data.transitions import Transitions


def population(chain, counts, tenths=9):
    """Rows whose frequencies are the chain's exact probabilities, for success 0.9.

    counts (n, 2): how often each pair is there; every pair is ten rows (or one, tenths=None,
    for success 1), each an episode of its own.
    """
    rows = []
    for s in range(chain.n):
        for a in (0, 1):
            for s2 in range(chain.n):
                copies = counts[s][a] * chain.p[a, s, s2] * (1 if tenths is None else 10)
                assert abs(copies - round(copies)) < 1e-9
                rows += [(s + 1.0, a, chain.reward[s], s2 + 1.0)] * round(copies)
    s, a, r, s2 = (np.array(column) for column in zip(*rows, strict=True))
    return Transitions(s, r, s2, np.zeros(len(r)), actions=a.astype(int), episode=np.arange(len(r)))


def occupancy(chain, policy, start):
    """d_π (n, 2) = (1 − γ) Σ γᵗ P(s_t, a_t) for probabilities `policy` (n, 2) and `start` (n,)."""
    p = np.einsum("sa,ast->st", policy, chain.p)
    states = np.linalg.solve(np.eye(chain.n) - chain.gamma * p.T, (1 - chain.gamma) * start)
    return states[:, None] * policy


def action_values(chain, policy):
    """Q^π (n, 2) = r + γ P V^π."""
    v = chain.value(policy)
    return chain.reward[:, None] + chain.gamma * np.einsum("ast,t->sa", chain.p, v)


def tabulated(policy):
    """A policy on states 1 … n as a callable giving probabilities."""
    return lambda states: policy[np.asarray(states)[:, 0].astype(int) - 1]
