"""Kernel TD: textbook recursions, gradients, fixed points, a counterexample, pruning."""

import copy

import numpy as np
import pytest
from reference.chains import Chain
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.approx.dictionary import Dictionary
from kernrl.checks import KernrlWarning
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.lstd import KLSTD
from kernrl.value.regularised import RegularisedLSTD
from kernrl.value.td import METHODS, KernelTD

ALL = Dictionary(admit="all")


def walk(n=30, seed=0):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
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


def textbook(t, n, method, eta, beta, gamma, decay, ridge):
    """Linear TD with one indicator per state 0 … n−1, row by row."""
    theta, e, h, y = np.zeros(n), np.zeros(n), np.zeros(n), 0.0
    for i in range(len(t)):
        phi = np.eye(n)[int(t.states[i, 0])]
        ahead = np.zeros(n) if t.terminated[i] else gamma * np.eye(n)[int(t.next_states[i, 0])]
        e = phi if t.episode_starts[i] else gamma * decay * e + phi
        delta = t.rewards[i] + ahead @ theta - phi @ theta
        y += beta * (delta - y)
        step = {
            "td": delta * e,
            "residual": y * (phi - ahead),
            "gtd2": (phi @ h) * (phi - ahead),
            "tdc": delta * phi - ahead * (phi @ h),
        }[method]
        theta = (1 - eta * ridge) * theta + eta * step
        h = h + beta * (delta - phi @ h) * phi
    return theta


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize(
    ("method", "decay"), [("td", 0.0), ("td", 0.8), ("residual", 0.0), ("gtd2", 0.0), ("tdc", 0.0)]
)
def test_on_tables_it_is_the_textbook(method, decay, size):
    """Three episodes, two ends, any chunks (cut within episodes)."""
    s, _, _, s2 = Chain(6, [1, 6]).random_walk(200, seed=0)
    ends, cuts = np.zeros(200, bool), np.zeros(200, bool)
    ends[50], cuts[120] = True, True
    rewards = np.random.default_rng(1).normal(size=200)
    t = Transitions(s - 1, rewards, s2 - 1, ends, truncated=cuts)
    expected = textbook(t, 6, method, 0.1, 0.3, 0.9, decay, 0.01)
    model = KernelTD(
        Delta(), 0.9, 0.1, method, 0.01, decay, auxiliary_rate=0.3, dictionary=Dictionary()
    )
    in_chunks(model, t, size)
    assert model.n_transitions_ == 200
    got = model.predict(np.arange(6.0))
    np.testing.assert_allclose(got, expected, **tolerance("closed form"))


@pytest.mark.parametrize("end", [False, True])
def test_residual_steps_are_functional_gradients(end):
    """−⟨step, g⟩ against central differences of ½δ² + ½λ‖V‖² along functions g of the RKHS."""
    t, kernel, gamma, ridge, eta = walk(), RBF(1.0), 0.9, 0.3, 0.1
    row = t[9] if not end else t[10]
    assert bool(row.terminated[0]) == end
    model = KernelTD(kernel, gamma, eta, "residual", ridge, dictionary=ALL).fit(t)
    before, atoms = model.weights_, model.support_
    k = kernel(atoms)

    def objective(w):
        ahead = 0.0 if end else (kernel(row.next_states, atoms) @ w)[0]
        delta = row.rewards[0] + gamma * ahead - (kernel(row.states, atoms) @ w)[0]
        return 0.5 * delta**2 + 0.5 * ridge * (w @ k @ w)

    model.partial_fit(row)
    assert len(model.weights_) == len(before), "both points are atoms already"
    step = (model.weights_ - before) / eta
    for g in np.random.default_rng(1).normal(size=(10, len(before))):
        slope = (objective(before + 1e-5 * g) - objective(before - 1e-5 * g)) / 2e-5
        np.testing.assert_allclose(-step @ k @ g, slope, **tolerance("finite difference"))


@pytest.mark.parametrize(
    ("method", "decay", "solution"),
    [
        ("td", 0.0, KLSTD(Matern(1.0), 0.9, 1e-2)),
        ("td", 0.7, KLSTD(Matern(1.0), 0.9, 1e-2, trace_decay=0.7)),
        ("residual", 0.0, RegularisedLSTD(Matern(1.0), 0.9, 1e-2, backup_ridge=0.0)),
    ],
)
def test_the_mean_step_is_zero_at_the_batch_solution(method, decay, solution):
    """KLSTD(λ) with the same ridge for td, regularised residual minimisation for residual."""
    t = walk()
    batch = clone(solution).fit(t)
    model = KernelTD(Matern(1.0), 0.9, 1e-8, method, 1e-2, decay, dictionary=ALL).fit(t)
    chol = model.features_.factor_

    def mean_step(values_at_atoms):
        """Of one sweep from the function with these values at the atoms, as its coordinates."""
        moved = copy.deepcopy(model)
        moved._value = start = np.linalg.solve(chol.lower, values_at_atoms)
        moved._next = None
        moved.partial_fit(t)
        return (moved._value - start) / (1e-8 * len(t))

    # Atoms are states and next states, which span both solutions.
    still = np.abs(mean_step(batch.predict(model.support_))).max()
    moving = np.abs(mean_step(0.5 * batch.predict(model.support_))).max()
    assert still < 1e-6 < 1e-2 < moving


class TestFixedPoints:
    @pytest.mark.parametrize("method", ["td", "gtd2", "tdc", "residual"])
    def test_only_the_residual_gradient_is_biased(self, method):
        """Sutton, Maei et al. (2009): the projected error's zero is V^π on tables; δ²'s is not."""
        chain = Chain(4, [1], success=0.5, gamma=0.8)
        v = chain.value(np.full((4, 2), 0.5))
        s, _, r, s2 = chain.random_walk(6000, seed=0)
        t = Transitions(s, r, s2, np.zeros(6000))
        model = KernelTD(Delta(), 0.8, 1.0, method, learning_rate_decay=0.5)
        if method in ("gtd2", "tdc"):
            model.set_params(auxiliary_rate=0.2, learning_rate=0.5, learning_rate_decay=0.3)
        model.fit(Transitions.concatenate([t] * 2))
        error = np.abs(model.predict(np.arange(1.0, 5.0)) - v).max() / v.max()
        if method == "residual":
            assert error > 0.2
        else:
            assert error < 0.12

    def test_td_diverges_where_gradient_td_does_not(self):
        """Two states of features 1 and 2, only the first visited: V(2) = 2V(1) runs away for
        γ > ½ (Tsitsiklis & Van Roy, 1997)."""
        n = 400
        t = Transitions(np.ones(n), np.zeros(n), np.full(n, 2.0), np.zeros(n),
                        truncated=np.ones(n))  # fmt: skip
        first = t[0].replace(rewards=[1.0], terminated=[True])  # something to start from
        values = {}
        for method in ("td", "gtd2", "tdc"):
            model = KernelTD(Linear(), 0.9, 0.1, method, auxiliary_rate=0.1).fit(first)
            if method == "td":
                with pytest.warns(KernrlWarning, match="KernelTD: values have diverged"):
                    model.partial_fit(t)
            else:
                model.partial_fit(t)
            values[method] = abs(model.predict([[1.0]])[0])
            assert model.diverged_ == (method == "td")
        assert values["td"] > 1e10
        assert values["gtd2"] < 0.02 and values["tdc"] < 0.02


class TestDictionary:
    def test_sparse_steps_are_projected_steps(self):
        """Every k(s, ·) replaced by Σ a_j k(z_j, ·), a what the dictionary said on its arrival."""
        t, eta, gamma = walk(60), 0.2, 0.9
        model = KernelTD(RBF(1.0), gamma, eta, dictionary=Dictionary(threshold=0.05)).fit(t)
        own, w = Dictionary(RBF(1.0), threshold=0.05), np.zeros(0)
        for i in range(60):
            here = own.offer(t.states[i]).coefficients
            ahead = np.zeros(0)
            if not t.terminated[i]:
                ahead = own.offer(t.next_states[i]).coefficients
            m = own.size
            w, here, ahead = (np.pad(x, (0, m - len(x))) for x in (w, here, ahead))
            v = RBF(1.0)(own.atoms_) @ w
            delta = t.rewards[i] + gamma * (ahead @ v) - here @ v
            w = w + eta * delta * here
        assert 3 < own.size < 30
        np.testing.assert_array_equal(model.support_, own.atoms_)
        np.testing.assert_allclose(model.weights_, w, **tolerance("iterative"))

    def test_a_terminal_step_brings_one_atom_and_another_two(self):
        for end in (True, False):
            t = Transitions([[0.0]], [1.0], [[5.0]], [end])
            model = KernelTD(RBF(1.0), 0.9, 0.5, "residual").fit(t)
            assert len(model.weights_) == 1 + (not end)

    @pytest.mark.parametrize(("method", "decay"), [("td", 0.0), ("td", 0.6), ("tdc", 0.0)])
    def test_pruning_moves_the_function_by_at_most_the_budget(self, method, decay):
        t, kernel, budget = walk(), RBF(1.0), 0.05
        dictionary = Dictionary(admit="all", prune="komp")
        model = KernelTD(kernel, 0.9, 0.3, method, trace_decay=decay, dictionary=dictionary)
        model.fit(t[:25])
        plain = copy.deepcopy(model)
        pruned = model.set_params(budget=budget)
        pruned.partial_fit(t[25:26])
        plain.partial_fit(t[25:26])
        assert len(pruned.weights_) < len(plain.weights_)
        both = np.vstack((plain.support_, pruned.support_))
        for name in ("_value", "_trace", "_helper")[: 1 if decay == 0.0 and method == "td" else 3]:
            w, u = (m.features_.factor_.finish_solve(getattr(m, name)) for m in (plain, pruned))
            w = np.concatenate((w, -u))  # the difference of two functions
            if name == "_trace" and not decay:
                continue  # e is φ of the last state, made anew in the next step
            assert np.sqrt(w @ kernel(both) @ w) <= budget * (1 + 1e-9)
            assert name == "_helper" or np.abs(u).max() > 0.1

    def test_pruning_leaves_the_trace_its_atoms(self):
        """V is 0 until the last reward: atoms that only e needs must still be there to credit."""
        s = np.arange(6.0)
        t = Transitions(s, s == 5, s + 1, s == 5)
        plain = KernelTD(RBF(0.5), 0.9, 0.3, trace_decay=0.9, dictionary=ALL).fit(t)
        komp = Dictionary(admit="all", prune="komp")
        pruned = clone(plain).set_params(dictionary=komp, budget=1e-9).fit(t)
        assert plain.predict([[0.0]])[0] > 0.05
        np.testing.assert_allclose(pruned.predict(s), plain.predict(s), **tolerance("closed form"))

    def test_a_budget_of_zero_changes_nothing(self):
        t = walk()
        plain = KernelTD(RBF(1.0), 0.9, 0.3, dictionary=ALL).fit(t)
        komp = clone(plain).set_params(dictionary=Dictionary(admit="all", prune="komp")).fit(t)
        np.testing.assert_array_equal(komp.weights_, plain.weights_)

    @pytest.mark.parametrize("prune", ["komp", "oldest", "leverage"])
    @pytest.mark.parametrize("decay", [0.0, 0.6])
    def test_a_full_dictionary_stays_full(self, prune, decay):
        dictionary = Dictionary(admit="all", prune=prune, max_size=8)
        model = KernelTD(RBF(1.0), 0.9, 0.3, trace_decay=decay, dictionary=dictionary)
        in_chunks(model, walk(), 4)
        assert model.support_.shape == (8, 2)
        assert np.all(np.isfinite(model.predict(walk().states)))
        np.testing.assert_allclose(  # V in coordinates and V on the atoms are one function
            model.features_.transform(walk().states) @ model._value,
            model.predict(walk().states),
            **tolerance("closed form"),
        )


def test_epochs_are_passes_and_a_fit_starts_over():
    t = walk()
    thrice = KernelTD(RBF(1.0), 0.9, trace_decay=0.5, n_epochs=3).fit(walk(seed=9)).fit(t)
    again = KernelTD(RBF(1.0), 0.9, trace_decay=0.5)
    for _ in range(3):
        again.partial_fit(t)
    np.testing.assert_allclose(thrice.weights_, again.weights_, **tolerance("closed form"))
    chunks = KernelTD(RBF(1.0), 0.9, trace_decay=0.5).fit([t[:7], t[7:]])
    once = KernelTD(RBF(1.0), 0.9, trace_decay=0.5).fit(t)
    np.testing.assert_allclose(chunks.weights_, once.weights_, **tolerance("closed form"))


def test_a_pass_does_not_run_on_into_the_next():
    """A loop that ends where it began, left open: each epoch is an episode of its own."""
    s = np.arange(5.0)
    t = Transitions(s, s, (s + 1) % 5, np.zeros(5))
    twice = Transitions.concatenate([t, t])
    expected = textbook(twice, 5, "td", 0.2, 1.0, 0.9, 0.8, 0.0)
    model = KernelTD(Delta(), 0.9, 0.2, trace_decay=0.8, n_epochs=2).fit(t)
    np.testing.assert_allclose(model.predict(s), expected, **tolerance("closed form"))
    joined = textbook(twice.replace(episode=np.zeros(10, int)), 5, "td", 0.2, 1.0, 0.9, 0.8, 0.0)
    on = KernelTD(Delta(), 0.9, 0.2, trace_decay=0.8).partial_fit(t).partial_fit(t)
    np.testing.assert_allclose(on.predict(s), joined, **tolerance("closed form"))


def test_a_falling_rate():
    t = Transitions([[0.0]], [1.0], [[0.0]], [True])
    model, v = KernelTD(Delta(), 0.9, 0.5, learning_rate_decay=1.0), 0.0
    for k in range(5):
        v += 0.5 / (1 + k) * (1.0 - v)
        assert model.partial_fit(t).predict([[0.0]])[0] == pytest.approx(v)


def test_terminated_and_truncated_differ():
    one = ([[0.0]] * 200, [1.0] * 200, [[0.0]] * 200)
    values = [
        KernelTD(Delta(), 0.5, 0.5)
        .fit(Transitions(*one, [end] * 200, truncated=[cut] * 200))
        .predict([[0.0]])[0]
        for end, cut in ((True, False), (False, True), (True, True))
    ]
    assert values == pytest.approx([1.0, 2.0, 1.0])


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    here, there = KernelTD(RBF(1.0), 0.9).fit(t), KernelTD(RBF(1.0), 0.9)
    out = there.fit(Transitions(**columns)).predict(columns["states"].float())
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), here.predict(t.states), **tolerance("float32"))


def test_every_method_has_a_test():
    assert set(METHODS) == {"td", "residual", "gtd2", "tdc"}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"method": "gtd"}, "method must be one of gtd2, residual, td, tdc, got 'gtd'. Did you"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0"),
        ({"learning_rate_decay": 1.5}, "learning_rate_decay must be"),
        ({"auxiliary_rate": 0.0}, "auxiliary_rate must be a finite number above 0"),
        ({"n_epochs": 0}, "n_epochs must be an integer of at least 1"),
        ({"budget": -1.0}, "budget must be a finite number"),
        ({"budget": 1.0}, "a budget needs a dictionary that prunes by it, got 1.0. Pass dict"),
        ({"dictionary": 3}, "dictionary must be a Dictionary or None, got 3"),
        ({"method": "tdc", "trace_decay": 0.5}, "only method='td' has traces"),
        ({"ridge": -1.0}, "ridge must be a finite number"),
    ],
)
def test_one_clear_error(params, text):
    with pytest.raises((ValueError, TypeError), match=f"^KernelTD: {text}"):
        KernelTD(RBF(1.0), 0.9).set_params(**params).fit(walk())


def test_clear_errors_of_data():
    t = walk()
    with pytest.raises(NotFittedError, match="KernelTD: it must be fitted"):
        KernelTD(RBF(1.0)).predict(t.states)
    with pytest.raises(ValueError, match="there must be at least one chunk"):
        KernelTD(RBF(1.0)).fit([])
    with pytest.raises(ValueError, match="chunks are read once, so n_epochs must be 1, got 2"):
        KernelTD(RBF(1.0), n_epochs=2).fit([t])
    with pytest.raises(TypeError, match="X must be Transitions, got int"):
        KernelTD(RBF(1.0)).fit(3)
    with pytest.raises(ValueError, match="must have 2 columns, got 1"):
        KernelTD(RBF(1.0)).fit(t).partial_fit(Transitions([[0.0]], [0.0], [[0.0]], [False]))
