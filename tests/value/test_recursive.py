"""Recursive KLSTD: equal to batch fits, whatever the chunks, the window and the forgetting."""

import numpy as np
import pytest
from reference.chains import Chain, boyan
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl import linalg
from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.lstd import KLSTD
from kernrl.value.recursive import RecursiveKLSTD

ALL = Dictionary(admit="all")


def walk(n=60, seed=0):
    """A random trajectory of three episodes: one terminated, one truncated, one open.

    Each begins elsewhere than the last one ended.
    """
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(n, 2)).cumsum(axis=0) * 0.4
    s2 = np.vstack((s[1:], s[-1:] + 0.1))
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    s2[terminated | truncated] += 0.3
    return Transitions(s, np.sin(s[:, 0]), s2, terminated, truncated=truncated)


def in_chunks(model, t, size):
    for start in range(0, len(t), size):
        model.partial_fit(t[start : start + size])
    return model


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_with_every_state_admitted_it_is_the_exact_batch(decay, size):
    """Rows one by one, in sevens (which cut episodes) and at once: KLSTD's n×n form."""
    t, query = walk(), np.random.default_rng(1).normal(size=(9, 2))
    batch = KLSTD(Matern(1.0), 0.9, 1e-3, trace_decay=decay).fit(t)
    model = RecursiveKLSTD(Matern(1.0), 0.9, 1e-3, ALL, trace_decay=decay)
    in_chunks(model, t, size)
    assert model.n_transitions_ == model.n_effective_ == 60
    np.testing.assert_allclose(model.predict(query), batch.predict(query), **tolerance("iterative"))
    np.testing.assert_allclose(model.td_errors(t), batch.td_errors(t), **tolerance("iterative"))


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("size", [1, 7, 17, 60])
@pytest.mark.parametrize("window", [1, 16, 25, 60, 90])
def test_a_window_is_a_batch_of_the_last_rows(decay, size, window):
    t, query = walk(), np.random.default_rng(1).normal(size=(9, 2))
    features = Nystroem(RBF(1.0), n_components=1, rng=0)  # of the first call, whatever its size
    model = RecursiveKLSTD(RBF(1.0), 0.9, 1e-2, features, window=window, trace_decay=decay)
    in_chunks(model, t, size)
    phi = model.features_.transform
    last = t[-window:]
    mapped = last.replace(states=phi(last.states), next_states=phi(last.next_states))
    batch = KLSTD(Linear(), 0.9, 1e-2, trace_decay=decay).fit(mapped)
    assert model.n_effective_ == min(window, 60)
    np.testing.assert_allclose(
        model.predict(query), batch.predict(phi(query)), **tolerance("closed form")
    )
    model = RecursiveKLSTD(Matern(1.0), 0.9, 1e-2, ALL, window=window, trace_decay=decay)
    in_chunks(model, t, size)
    batch = KLSTD(Matern(1.0), 0.9, 1e-2, trace_decay=decay).fit(last)
    np.testing.assert_allclose(model.predict(query), batch.predict(query), **tolerance("iterative"))


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_forgetting_is_a_weighted_batch(decay, size):
    """Σ β^(t−i) of everything, in loops on random features."""
    t, beta, gamma, ridge = walk(), 0.95, 0.9, 1e-2
    features = RandomFeatures(RBF(1.0), n_components=10, rng=0)
    model = RecursiveKLSTD(RBF(1.0), gamma, ridge, features, beta, trace_decay=decay)
    in_chunks(model, t, size)
    phi = model.features_.transform(t.states)
    ahead = model.features_.transform(t.next_states) * ~t.terminated[:, None]
    a, b, n, trace = np.zeros((10, 10)), np.zeros(10), 0.0, np.zeros(10)
    for i in range(60):
        trace = phi[i] if t.episode_starts[i] else gamma * decay * trace + phi[i]
        a = beta * a + np.outer(trace, phi[i] - gamma * ahead[i])
        b, n = beta * b + trace * t.rewards[i], beta * n + 1
    expected = np.linalg.solve(a + n * ridge * np.eye(10), b)
    assert model.n_effective_ == pytest.approx(n)
    np.testing.assert_allclose(model.weights_, expected, **tolerance("closed form"))


def test_sparse_rows_keep_the_atoms_of_their_arrival():
    """(A_c K + nλI) w = b_c on the coefficients each state got from the dictionary when it came."""
    t, gamma, ridge = walk(), 0.9, 1e-2
    dictionary = Dictionary(RBF(1.0), threshold=0.05)
    model = RecursiveKLSTD(RBF(1.0), gamma, ridge, dictionary).fit(t)
    own, rows = clone(dictionary), []
    for i in range(60):
        here = own.offer(t.states[i]).coefficients
        ahead = np.zeros(0) if t.terminated[i] else own.offer(t.next_states[i]).coefficients
        rows.append((here, ahead, t.rewards[i]))
    m = own.size
    assert 3 < m < 30
    a, b = np.zeros((m, m)), np.zeros(m)
    for here, ahead, reward in rows:
        here, ahead = np.pad(here, (0, m - len(here))), np.pad(ahead, (0, m - len(ahead)))
        a += np.outer(here, here - gamma * ahead)
        b += here * reward
    expected = np.linalg.solve(a @ RBF(1.0)(own.atoms_) + 60 * ridge * np.eye(m), b)
    np.testing.assert_array_equal(model.support_, own.atoms_)
    np.testing.assert_allclose(model.weights_, expected, **tolerance("iterative"))
    # Near what a batch makes of the final atoms: old rows miss what came later, by the threshold.
    batch = KLSTD(RBF(1.0), gamma, ridge, clone(dictionary)).fit(t)
    gap = np.abs(model.predict(t.states) - batch.predict(t.states)).max()
    assert gap < 0.1 * np.abs(batch.predict(t.states)).max()
    np.testing.assert_allclose(
        in_chunks(clone(model), t, 7).weights_, model.weights_, **tolerance("iterative")
    )


@pytest.mark.parametrize("prune", ["oldest", "leverage", "komp"])
@pytest.mark.parametrize("window", [None, 30])
def test_pruning_projects_every_row(prune, window):
    """Each φ becomes the projection on the atoms left: coefficients a_kept + share·a_gone."""
    t, gamma, ridge, kernel = walk(), 0.9, 1e-2, Matern(1.0)
    dictionary = Dictionary(admit="all", prune=prune, max_size=12)
    model = RecursiveKLSTD(kernel, gamma, ridge, dictionary, window=window)
    model.partial_fit(t[:20])
    assert model.features_.size == 12
    grown = RecursiveKLSTD(kernel, gamma, ridge, ALL, window=window).partial_fit(t[:20])
    atoms = model.support_
    project = np.linalg.solve(kernel(atoms), kernel(atoms, grown.support_))  # K_YY⁻¹ K_YD
    a = np.linalg.solve(kernel(grown.support_), kernel(grown.support_, t.states[:20])).T
    ahead = np.linalg.solve(kernel(grown.support_), kernel(grown.support_, t.next_states[:20])).T
    a, ahead = a @ project.T, ahead @ project.T
    system = a.T @ (a - gamma * ahead) @ kernel(atoms) + 20 * ridge * np.eye(12)
    expected = np.linalg.solve(system, a.T @ t.rewards[:20])
    np.testing.assert_allclose(model.weights_, expected, **tolerance("iterative"))
    in_chunks(model, t[20:], 9)  # and it goes on
    assert model.features_.size == 12
    assert np.all(np.isfinite(model.predict(t.states)))


def test_a_long_window_does_not_drift():
    """5000 rows through a window of 40, with traces; those that left were huge."""
    rng = np.random.default_rng(0)
    s = rng.integers(6, size=5001).astype(float)
    huge = np.where(np.arange(5000) < 4000, 1e12, 1.0)
    t = Transitions(s[:-1], rng.normal(size=5000) * huge, s[1:], np.zeros(5000))
    features = Nystroem(Delta(), n_components=6, landmarks="kmeans++", rng=0)
    model = RecursiveKLSTD(Delta(), 0.9, 1e-3, features, window=40, trace_decay=0.5)
    model.partial_fit(t[:50])
    in_chunks(model, t[50:4990], 3)
    in_chunks(model, t[4990:], 1)
    batch = KLSTD(Delta(), 0.9, 1e-3, Nystroem(n_components=6), trace_decay=0.5).fit(t[-40:])
    states = np.unique(t[-40:].states)
    np.testing.assert_allclose(
        model.predict(states), batch.predict(states), **tolerance("iterative")
    )


def test_values_between_rows_cost_few_factorisations(monkeypatch):
    """A value after each of 300 rows: right to rounding, from fewer than 30 inverses."""
    made = []
    honest = linalg.solve
    monkeypatch.setattr(linalg, "solve", lambda *a, **k: made.append(1) or honest(*a, **k))
    rng = np.random.default_rng(0)
    x = np.sin(0.3 * np.arange(701) + 0.1 * rng.normal(size=701))
    t = Transitions(x[:-1], x[:-1] ** 2, x[1:], np.zeros(700))
    model = RecursiveKLSTD(RBF(0.3), 0.9, 1e-3, Dictionary(threshold=1e-2)).fit(t[:400])
    made.clear()
    for i in range(400, 700):
        model.partial_fit(t[i : i + 1])
        value = model.predict(x[:5])
    assert len(made) < 30
    sums = model._sums
    exact = np.linalg.solve(sums.matrix + 0.7 * np.eye(len(sums.target)), sums.target)
    expected = model.features_.transform(x[:5, None]) @ exact
    np.testing.assert_allclose(value, expected, **tolerance("closed form"))


class TestAgainstDynamicProgramming:
    def test_boyan_chain(self):
        s, r, s2, end = boyan()
        t = Transitions(s, r, s2, end, episode=np.arange(len(s)))
        model = RecursiveKLSTD(Delta(), 1.0, 1e-12).fit(t)
        np.testing.assert_allclose(
            model.predict(np.arange(13.0)), -2.0 * (12 - np.arange(13)), **tolerance("closed form")
        )

    @pytest.mark.parametrize("how", [{"window": 400}, {"forgetting": 0.99}])
    def test_follows_a_reward_that_moves(self, how):
        """Dynamic programming on the table that the rows make by their weights of now."""
        s, _, r, s2 = Chain(6, [1]).random_walk(3000, seed=0)
        r = np.where(np.arange(3000) < 1500, r, (s == 6) * 1.0)
        age = np.arange(2999, -1, -1.0)
        weight = age < 400 if "window" in how else 0.99**age
        counts, rewards = np.zeros((6, 6)), np.zeros(6)
        np.add.at(counts, (s.astype(int) - 1, s2.astype(int) - 1), weight)
        np.add.at(rewards, s.astype(int) - 1, weight * r)
        visits = counts.sum(axis=1)
        v = np.linalg.solve(np.eye(6) - 0.9 * counts / visits[:, None], rewards / visits)
        t = Transitions(s, r, s2, np.zeros(3000))
        model = RecursiveKLSTD(Delta(), 0.9, 1e-12, **how).fit(t)
        got = model.predict(np.arange(1.0, 7.0))
        np.testing.assert_allclose(got, v, **tolerance("iterative"))
        still = RecursiveKLSTD(Delta(), 0.9, 1e-12).fit(t).predict(np.arange(1.0, 7.0))
        assert still[0] > 1.0 > got[0]


def test_terminated_and_truncated_differ():
    one = ([[0.0]], [1.0], [[0.0]])
    values = [
        RecursiveKLSTD(Delta(), 0.5, 0.0)
        .fit(Transitions(*one, [end], truncated=[cut]))
        .predict([[0.0]])[0]
        for end, cut in ((True, False), (False, True), (True, True))
    ]
    assert values == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize("flag", ["terminated", "truncated", "elsewhere"])
def test_traces_end_with_the_episode_also_between_calls(flag):
    """Two episodes that meet in space: traces must not cross, though s' of one is s of the next."""
    s = np.array([0.0, 1.0, 1.0, 2.0])
    s2 = np.array([1.0, 1.0, 2.0, 0.0])
    flags = {"terminated": np.zeros(4, bool), "truncated": np.zeros(4, bool)}
    if flag == "elsewhere":
        s2[1] = 0.0  # an episode that was left open, and one that begins elsewhere
        ids = [0, 0, 1, 1]
    else:
        flags[flag][1], ids = True, None
    t = Transitions(s, np.arange(4.0), s2, flags["terminated"], truncated=flags["truncated"],
                    episode=ids)  # fmt: skip
    batch = KLSTD(Delta(), 0.9, 1e-3, Nystroem(n_components=3), trace_decay=0.9).fit(t)
    for size in (1, 2, 4):
        model = in_chunks(RecursiveKLSTD(Delta(), 0.9, 1e-3, trace_decay=0.9), t, size)
        np.testing.assert_allclose(
            model.predict(np.arange(3.0)),
            batch.predict(np.arange(3.0)),
            **tolerance("closed form"),
        )


def test_fit_starts_over_and_takes_chunks():
    t = walk()
    model = RecursiveKLSTD(RBF(1.0), 0.9).fit(walk(seed=5)).fit(t[:20])
    once = RecursiveKLSTD(RBF(1.0), 0.9).fit([t[:7], t[7:20]])
    np.testing.assert_allclose(model.weights_, once.weights_, **tolerance("closed form"))


def test_a_kernel_that_vanishes_values_nothing():
    model = RecursiveKLSTD(Linear()).fit(Transitions([[0.0]], [1.0], [[0.0]], [False]))
    np.testing.assert_array_equal(model.predict([[0.0], [3.0]]), [0.0, 0.0])


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    here = RecursiveKLSTD(RBF(1.0), 0.9).fit(t)
    there = RecursiveKLSTD(RBF(1.0), 0.9).fit(Transitions(**columns))
    out = there.predict(columns["states"].float())
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), here.predict(t.states), **tolerance("float32"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, t: m.set_params(forgetting=0.0).fit(t), "forgetting must be a finite number ab"),
        (lambda m, t: m.set_params(forgetting=1.1).fit(t), "and at most 1.0, got 1.1"),
        (lambda m, t: m.set_params(window=0).fit(t), "window must be an integer of at least 1"),
        (lambda m, t: m.set_params(window=2.5).fit(t), "window must be an integer of at least 1"),
        (
            lambda m, t: m.set_params(window=5, forgetting=0.9).fit(t),
            "must fade by forgetting or leave a window, got forgetting=0.9 and window=5",
        ),
        (lambda m, t: m.set_params(ridge=-1.0).fit(t), "ridge must be a finite number"),
        (lambda m, t: m.fit(3), "RecursiveKLSTD: X must be Transitions, got int"),
        (lambda m, t: m.fit([]), "there must be at least one chunk"),
        (lambda m, t: m.fit(t).partial_fit(Transitions([[0.0]], [0.0], [[0.0]], [0])), "2 columns"),
        (lambda m, t: m.predict(t.states), "RecursiveKLSTD: it must be fitted"),
        (
            lambda m, t: m.set_params(ridge=0.0, gamma=1.0, kernel=Delta()).fit(
                Transitions([[0.0, 0.0]], [1.0], [[0.0, 0.0]], [False])
            ),
            "RecursiveKLSTD: the system must not be singular",
        ),
    ],
)
def test_one_clear_error(make, text):
    with pytest.raises((ValueError, TypeError, NotFittedError), match=text):
        make(RecursiveKLSTD(RBF(1.0), 0.9), walk())
