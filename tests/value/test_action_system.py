"""The incremental LSTD-Q systems against the same matrices built row by row."""

import numpy as np
import pytest
from tolerances import tolerance

from kernrl.value.action_system import ActionBlocks, ActionPairs


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    n, m, a = 50, 4, 3
    actions = rng.integers(a, size=n)
    actions[actions == 1] = 2  # action 1 is never taken
    return rng.normal(size=(n, m)), rng.normal(size=(n, m)), actions, rng.normal(size=n), a


def written_out(phi, next_phi, actions, policy, rewards, n_actions, gamma, ridge):
    n, m = phi.shape
    a, b = np.zeros((n_actions * m,) * 2), np.zeros(n_actions * m)
    for i in range(n):
        here, ahead = np.zeros((n_actions, m)), np.zeros((n_actions, m))
        here[actions[i]], ahead[policy[i]] = phi[i], next_phi[i]
        a += np.outer(here.ravel(), (here - gamma * ahead).ravel())
        b += here.ravel() * rewards[i]
    return np.linalg.solve(a + n * ridge * np.eye(len(b)), b)


def test_blocks_follow_changing_policies(rows):
    phi, next_phi, actions, rewards, n_actions = rows
    system = ActionBlocks(phi, next_phi, actions, rewards, 0.9, n_actions)
    rng = np.random.default_rng(1)
    policy = rng.integers(n_actions, size=50)
    for _ in range(4):
        system.follow(policy)
        expected = written_out(phi, next_phi, actions, policy, rewards, n_actions, 0.9, 1e-2)
        weights = system.solve(1e-2, owner="test")
        np.testing.assert_allclose(weights.ravel(), expected, **tolerance("closed form"))
        assert np.abs(weights[1]).max() < 1e-15  # a value of 0 for an action without evidence
        greedy = system.greedy(weights)
        np.testing.assert_array_equal(greedy, np.argmax(next_phi @ weights.T, axis=1))
        changes = rng.random(50) < 0.3
        new = np.where(changes, rng.integers(n_actions, size=50), policy)
        assert system.follow(new) == np.count_nonzero(new != policy)
        policy = new


def test_pairs_equal_blocks_on_block_features(rows):
    """φ(s, a) = e_a ⊗ φ(s) makes the pair system the block system."""
    phi, next_phi, actions, rewards, n_actions = rows
    eye = np.eye(n_actions)
    pair = np.einsum("na,nm->nam", eye[actions], phi).reshape(50, -1)
    next_pair = np.stack([np.kron(eye[a][None], next_phi) for a in range(n_actions)])
    blocks = ActionBlocks(phi, next_phi, actions, rewards, 0.9, n_actions)
    pairs = ActionPairs(pair, next_pair, rewards, 0.9)
    policy = np.random.default_rng(2).integers(n_actions, size=50)
    for _ in range(3):
        assert blocks.follow(policy) == pairs.follow(policy)
        w, v = blocks.solve(1e-2, owner="test"), pairs.solve(1e-2, owner="test")
        np.testing.assert_allclose(v, w.ravel(), **tolerance("closed form"))
        np.testing.assert_array_equal(pairs.greedy(v), blocks.greedy(w))
        policy = blocks.greedy(w)
