"""Stochastic factorisation: distributions, the averager as a limit, batch = incremental, tables."""

import numpy as np
import pytest
from reference.chains import Chain, boyan
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF
from kernrl.value.averagers import KernelAverager
from kernrl.value.factorisation import StochasticFactorisation


def walk(n=60, seed=0, n_actions=2):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    actions = rng.integers(n_actions, size=n)
    return Transitions(
        x[:-1], rng.normal(size=n), x[1:], terminated, truncated=truncated, actions=actions
    )


def endless(t):
    return t.replace(terminated=np.zeros(len(t)), truncated=np.zeros(len(t)))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("length_scale", [1e-3, 0.5, 5.0])
def test_rows_sum_to_one(greedy, length_scale):
    model = StochasticFactorisation(RBF(length_scale), 0.9, 10, greedy=greedy, rng=0)
    p = model.fit(endless(walk())).transition_matrices_
    assert p.shape == (1 + greedy, 10, 10)
    assert p.min() >= 0
    np.testing.assert_allclose(p.sum(axis=2), 1.0, **tolerance("algebra"))


def test_is_its_equations_in_loops():
    t, reps = walk(), walk(5, seed=3).states
    k, k_bar = RBF(0.7), RBF(1.3)
    model = StochasticFactorisation(
        k, 0.9, landmarks=reps, representative_kernel=k_bar, greedy=True
    ).fit(t)
    q = np.zeros((5, 2))
    left = k(reps, t.states)
    right = k_bar(t.next_states, reps)
    right = right / right.sum(axis=1, keepdims=True)
    for _ in range(400):
        new = np.zeros((5, 2))
        for a in (0, 1):
            for i in range(5):
                mine = np.flatnonzero(t.actions == a)
                kappa = left[i, mine] / left[i, mine].sum()
                for weight, row in zip(kappa, mine, strict=True):
                    ahead = 0.0 if t.terminated[row] else right[row] @ q.max(axis=1)
                    new[i, a] += weight * (t.rewards[row] + 0.9 * ahead)
        if np.abs(new - q).max() < 1e-12:
            break
        q = new
    np.testing.assert_allclose(model.weights_, q, **tolerance("closed form"))
    query = np.random.default_rng(1).normal(size=(6, 2))
    weights = k_bar(query, reps)
    expected = weights / weights.sum(axis=1, keepdims=True) @ q
    np.testing.assert_allclose(model.action_values(query), expected, **tolerance("closed form"))
    np.testing.assert_allclose(
        model.predict(query), expected.max(axis=1), **tolerance("closed form")
    )


@pytest.mark.parametrize("greedy", [False, True])
def test_with_all_next_states_it_is_the_averager(greedy):
    """m = n, s̄ = s': P̄ = κ(S', S), the averager's own chain on the next states."""
    t = walk()
    whole = KernelAverager(RBF(0.7), 0.9, greedy=greedy).fit(t)
    model = StochasticFactorisation(
        RBF(0.7),
        0.9,
        landmarks=t.next_states,
        representative_kernel=Delta(),
        greedy=greedy,
    ).fit(t)
    got = model.predict(t.next_states)
    np.testing.assert_allclose(got, whole.next_values_, **tolerance("closed form"))


def test_with_all_states_it_is_the_averager_everywhere():
    """m = n, s̄ = s, κ = Delta: D Ḱ in place of Ḱ D, and the same value function."""
    t = walk()
    whole = KernelAverager(RBF(0.7), 0.9).fit(t)
    model = StochasticFactorisation(
        Delta(), 0.9, landmarks=t.states, representative_kernel=RBF(0.7)
    ).fit(t)
    query = np.random.default_rng(1).normal(size=(9, 2))
    np.testing.assert_allclose(
        model.predict(query), whole.predict(query), **tolerance("closed form")
    )


@pytest.mark.parametrize("length_scale", [1e-2, 0.5])
@pytest.mark.parametrize("greedy", [False, True])
def test_batch_is_incremental(greedy, length_scale):
    """Also where an action comes late and representatives are reached late or never."""
    t = walk()
    t = t.replace(actions=np.where(np.arange(60) < 20, 0, t.actions))
    make = StochasticFactorisation(
        RBF(length_scale), 0.9, landmarks=walk(8, seed=5).states, greedy=greedy
    )
    whole = clone(make).fit(t)
    grown = clone(make)
    for a, b in ((0, 20), (20, 21), (21, 60)):
        grown.partial_fit(t[a:b])
    chunked = clone(make).fit(t[k : k + 7] for k in range(0, 60, 7))
    for model in (grown, chunked):
        assert model.n_transitions_ == 60
        np.testing.assert_array_equal(model.actions_, whole.actions_)
        np.testing.assert_allclose(
            model.transition_matrices_, whole.transition_matrices_, **tolerance("algebra")
        )
        np.testing.assert_allclose(model.weights_, whole.weights_, **tolerance("closed form"))
    p = endless_mass(whole, t)
    np.testing.assert_allclose(p, 1.0, **tolerance("algebra"))


def endless_mass(model, t):
    """Row sums of P̄ when nothing terminates, for the same representatives."""
    return clone(model).fit(endless(t)).transition_matrices_.sum(axis=2)


def test_a_representative_out_of_reach_takes_the_nearest_row():
    t = Transitions([[0.0], [1.0]], [5.0, 7.0], [[1.0], [0.0]], [True, True])
    model = StochasticFactorisation(RBF(1e-2), 0.9, landmarks=[[0.0], [9.0]]).fit(t)
    np.testing.assert_allclose(model.mean_rewards_, [[5.0, 7.0]], **tolerance("algebra"))


class TestAgainstDynamicProgramming:
    def test_best_value_of_a_chain(self):
        chain = Chain(8, [2, 8])
        s, a, r, s2 = chain.random_walk(3000, seed=0)
        counts = np.zeros((2, 8, 8))
        np.add.at(counts, (a, s.astype(int) - 1, s2.astype(int) - 1), 1.0)
        p, q = counts / counts.sum(axis=2, keepdims=True), np.zeros((8, 2))
        for _ in range(600):
            q = chain.reward[:, None] + 0.9 * (p @ q.max(axis=1)).T
        t = Transitions(s, r, s2, np.zeros(3000), actions=a)
        model = StochasticFactorisation(Delta(), 0.9, 8, greedy=True, rng=0).fit(t)
        got = model.action_values(np.arange(1.0, 9.0))
        np.testing.assert_allclose(got, q, **tolerance("closed form"))

    def test_boyan_chain(self):
        s, r, s2, end = boyan()
        t = Transitions(s, r, s2, end, episode=np.arange(len(s)))
        model = StochasticFactorisation(Delta(), 1.0, 13, rng=0).fit(t)
        np.testing.assert_allclose(
            model.predict(np.arange(13.0)), -2.0 * (12 - np.arange(13)), **tolerance("closed form")
        )

    def test_torus(self):
        """C5: V = 3.828218 cos 2πx, from 20 000 samples on 60 representatives."""
        rng = np.random.default_rng(0)
        x = (np.r_[0.0, 0.1 * rng.normal(size=20000)].cumsum()) % 1.0
        circle = np.column_stack((np.cos(2 * np.pi * x), np.sin(2 * np.pi * x)))
        t = Transitions(circle[:-1], circle[:-1, 0], circle[1:], np.zeros(20000))
        model = StochasticFactorisation(RBF(0.1), 0.9, 60, rng=0).fit(t)
        error = model.predict(circle[:500]) - 3.828218 * circle[:500, 0]
        assert np.sqrt(np.mean(error**2)) < 0.35  # 13 % of the root mean square of V


def test_terminated_and_truncated_differ():
    one = ([[0.0]], [1.0], [[0.0]])
    values = [
        StochasticFactorisation(RBF(), 0.5, 1)
        .fit(Transitions(*one, [end], truncated=[cut]))
        .predict([[0.0]])[0]
        for end, cut in ((True, False), (False, True), (True, True))
    ]
    assert values == pytest.approx([1.0, 2.0, 1.0])


def test_the_seed_chooses_the_representatives():
    t = walk()
    a, b, c = (StochasticFactorisation(RBF(), n_components=5, rng=k).fit(t) for k in (0, 0, 1))
    np.testing.assert_array_equal(a.landmarks_, b.landmarks_)
    assert not np.array_equal(a.landmarks_, c.landmarks_)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    make = StochasticFactorisation(RBF(0.8), 0.9, 9, greedy=True, rng=0)
    here, there = clone(make).fit(t), clone(make).fit(Transitions(**columns))
    out = there.predict(columns["states"])
    assert isinstance(out, torch.Tensor)
    np.testing.assert_allclose(out.numpy(), here.predict(t.states), **tolerance("closed form"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, t: m.set_params(n_components=100).fit(t), "n_components must be at most n, got"),
        (lambda m, t: m.set_params(n_components=0).fit(t), "n_components must be an integer of"),
        (lambda m, t: m.set_params(landmarks="grid").fit(t), "landmarks must be one of"),
        (lambda m, t: m.set_params(landmarks=[[0.0]]).fit(t), "must have 2 columns, got 1"),
        (lambda m, t: m.set_params(landmarks=[[0.0, np.inf]]).fit(t), "landmark must be finite"),
        (lambda m, t: m.set_params(kernel=Linear()).fit(t), "must not be negative"),
        (lambda m, t: m.set_params(representative_kernel=3).fit(t), "must be a kernel or None"),
        (lambda m, t: m.fit(t).partial_fit(5), "X must be Transitions, got int"),
        (lambda m, t: m.fit([]), "there must be at least one chunk"),
        (lambda m, t: m.predict(t.states), "StochasticFactorisation: it must be fitted"),
    ],
)
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError, NotFittedError), match=text):
        make(StochasticFactorisation(RBF(), 0.9, 5), walk())
