"""The kernel averager: its equation iterated in loops, tables, contraction, both flags."""

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


def walk(n=40, seed=0, n_actions=3):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    actions = 10 * rng.integers(n_actions, size=n)
    return Transitions(
        x[:-1], rng.normal(size=n), x[1:], terminated, truncated=truncated, actions=actions
    )


def iterated(t, gamma, length_scale, query, greedy):
    """Q(s, a) = Σ_k κ_a(s, s_k)(r_k + γ m_k max_a' Q(s'_k, a')), one state at a time, 400 times."""
    labels = t.actions if greedy else np.zeros(len(t))
    actions = np.unique(labels)

    def q(state, target):
        out = []
        for a in actions:
            mine = np.flatnonzero(labels == a)
            k = np.exp(-0.5 * ((t.states[mine] - state) ** 2).sum(axis=1) / length_scale**2)
            out.append(k @ target[mine] / k.sum())
        return np.array(out)

    v = np.zeros(len(t))
    for _ in range(400):
        target = t.rewards + gamma * np.where(t.terminated, 0.0, v)
        v = np.array([q(s, target).max() for s in t.next_states])
    target = t.rewards + gamma * np.where(t.terminated, 0.0, v)
    return np.array([q(s, target) for s in query])


@pytest.mark.parametrize("greedy", [False, True])
def test_is_its_equation_iterated(greedy):
    t = walk()
    query = np.random.default_rng(1).normal(size=(6, 2))
    expected = iterated(t, 0.9, 0.8, query, greedy)
    model = KernelAverager(RBF(0.8), 0.9, greedy=greedy).fit(t)
    np.testing.assert_allclose(model.action_values(query), expected, **tolerance("closed form"))
    np.testing.assert_allclose(
        model.predict(query), expected.max(axis=1), **tolerance("closed form")
    )
    np.testing.assert_array_equal(model.actions_, [0, 10, 20] if greedy else [0])
    np.testing.assert_allclose(
        model.next_values_, model.predict(t.next_states), **tolerance("closed form")
    )


class TestAgainstDynamicProgramming:
    def chain(self, n=3000):
        chain = Chain(8, [2, 8])
        s, a, r, s2 = chain.random_walk(n, seed=0)
        counts = np.zeros((2, 8, 8))
        np.add.at(counts, (a, s.astype(int) - 1, s2.astype(int) - 1), 1.0)
        return chain, Transitions(s, r, s2, np.zeros(n), actions=a), counts

    def test_value_of_the_behaviour(self):
        chain, t, counts = self.chain(600)
        p = counts.sum(axis=0) / counts.sum(axis=(0, 2))[:, None]
        v = np.linalg.solve(np.eye(8) - 0.9 * p, chain.reward)
        model = KernelAverager(Delta(), 0.9).fit(t)
        np.testing.assert_allclose(
            model.predict(np.arange(1.0, 9.0)), v, **tolerance("closed form")
        )

    def test_best_value(self):
        """Value iteration on the empirical table."""
        chain, t, counts = self.chain(600)
        p = counts / counts.sum(axis=2, keepdims=True)
        q = np.zeros((8, 2))
        for _ in range(600):
            q = chain.reward[:, None] + 0.9 * (p @ q.max(axis=1)).T
        model = KernelAverager(Delta(), 0.9, greedy=True).fit(t)
        got = model.action_values(np.arange(1.0, 9.0))
        np.testing.assert_allclose(got, q, **tolerance("closed form"))
        assert model.n_rounds_ < 8
        delta = model.td_errors(t)
        for state in range(8):  # the residual of the table averages to nothing
            for action in (0, 1):
                mine = (t.states[:, 0] == state + 1) & (t.actions == action)
                assert abs(delta[mine].mean()) < tolerance("closed form")["rtol"]

    def test_boyan_chain(self):
        s, r, s2, end = boyan()
        t = Transitions(s, r, s2, end, episode=np.arange(len(s)))
        model = KernelAverager(Delta(), 1.0).fit(t)
        np.testing.assert_allclose(
            model.predict(np.arange(13.0)), -2.0 * (12 - np.arange(13)), **tolerance("closed form")
        )


@pytest.mark.parametrize("greedy", [False, True])
def test_td_errors_are_those_of_the_values(greedy):
    """r + γ m max Q(s', ·) − Q(s, a) row by row, with rows that end."""
    t = walk()
    model = KernelAverager(RBF(0.8), 0.9, greedy=greedy).fit(t)
    q, ahead = model.action_values(t.states), model.predict(t.next_states)
    for i, delta in enumerate(model.td_errors(t)):
        column = int(t.actions[i]) // 10 if greedy else 0
        target = t.rewards[i] + (0.0 if t.terminated[i] else 0.9 * ahead[i])
        assert delta == pytest.approx(target - q[i, column])


@pytest.mark.parametrize("greedy", [False, True])
def test_contracts(greedy):
    """‖V₁ − V₂‖∞ ≤ ‖r₁ − r₂‖∞/(1 − γ) for any rewards, where ridge regression has no such bound."""
    t, rng = walk().replace(terminated=np.zeros(40)), np.random.default_rng(1)
    query = rng.normal(size=(50, 2)) * 4
    for length_scale in (0.01, 0.3, 3.0):
        model = KernelAverager(RBF(length_scale), 0.95, greedy=greedy)
        value = model.fit(t).predict(query)
        other = rng.normal(size=40) * rng.random()
        moved = model.fit(t.replace(rewards=t.rewards + other)).predict(query)
        assert np.abs(moved - value).max() <= np.abs(other).max() / 0.05 * (1 + 1e-12)
        shifted = model.fit(t.replace(rewards=t.rewards + 3.0)).predict(query)
        np.testing.assert_allclose(shifted, value + 60.0, **tolerance("closed form"))
        assert value.max() <= t.rewards.max() / 0.05


def test_terminated_and_truncated_differ():
    one = ([[0.0]], [1.0], [[0.0]])
    values = [
        KernelAverager(RBF(), 0.5)
        .fit(Transitions(*one, [end], truncated=[cut]))
        .predict([[0.0]])[0]
        for end, cut in ((True, False), (False, True), (True, True))
    ]
    assert values == pytest.approx([1.0, 2.0, 1.0])


def test_episodes_and_chunks_in_any_order():
    t, query = walk(), np.random.default_rng(1).normal(size=(6, 2))
    make = KernelAverager(RBF(0.8), 0.9, greedy=True)
    whole = clone(make).fit(t).predict(query)
    parts = [t[:14], t[14:27], t[27:]]
    for model in (
        clone(make).fit(Transitions.concatenate(parts[::-1])),
        clone(make).fit(iter(parts)),
        clone(make).partial_fit(parts[0]).partial_fit(parts[1]).partial_fit(parts[2]),
    ):
        np.testing.assert_allclose(model.predict(query), whole, **tolerance("closed form"))


def test_float32_and_torch():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    here = KernelAverager(RBF(0.8), 0.9, greedy=True).fit(t)
    there = KernelAverager(RBF(0.8), 0.9, greedy=True).fit(Transitions(**columns))
    out = there.predict(columns["states"].float())
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), here.predict(t.states), **tolerance("float32"))
    assert there.score(Transitions(**columns)) == pytest.approx(here.score(t))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, t: m.set_params(gamma=1.5).fit(t), "KernelAverager: gamma must be a finite"),
        (lambda m, t: m.set_params(greedy=2).fit(t), "greedy must be True or False, got 2"),
        (lambda m, t: m.set_params(kernel=Linear()).fit(t), "must not be negative"),
        (
            lambda m, t: m.fit(t.replace(actions=t.actions * 0.5)),
            r"greedy=True needs integer actions \(n,\), got float64 \(40,\)",
        ),
        (
            lambda m, t: m.fit(Transitions(t.states, t.rewards, t.next_states, t.terminated)),
            "greedy=True needs transitions with actions",
        ),
        (lambda m, t: m.fit(3), "X must be Transitions, got int"),
        (lambda m, t: m.fit([]), "there must be at least one chunk"),
        (lambda m, t: m.fit(t).predict(np.ones((2, 3))), "must have 2 columns, got 3"),
        (
            lambda m, t: m.fit(t).td_errors(t.replace(actions=np.full(40, 7))),
            r"actions must be among \[0, 10, 20\], got 7",
        ),
        (lambda m, t: m.predict(t.states), "KernelAverager: it must be fitted"),
    ],
)
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError, NotFittedError), match=text):
        make(KernelAverager(RBF(), 0.9, greedy=True), walk())


def test_too_much_memory_says_the_number(monkeypatch):
    from kernrl import arrays

    monkeypatch.setattr(arrays, "available_bytes", lambda x: 1000.0)
    with pytest.raises(MemoryError, match=r"weights of 40 rows.*Use StochasticFactorisation"):
        KernelAverager(RBF()).fit(walk())
