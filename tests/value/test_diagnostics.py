"""Diagnostics: Taylor–Parr's identity written out, contraction by iterating, spectra."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.averagers import KernelAverager
from kernrl.value.diagnostics import bellman_errors, contraction, ridge_path, spectrum
from kernrl.value.lstd import KLSTD, KLSTDQ

FORMS = {
    "exact": None,
    "Nystroem": Nystroem(n_components=12, rng=0),
    "random features": RandomFeatures(n_components=20, rng=0),
}


def walk(n=40, seed=0):
    """A random trajectory of three episodes: one terminated, one truncated, one open."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * 0.4
    terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
    terminated[n // 3], truncated[2 * n // 3] = True, True
    rewards = np.sin(x[:-1, 0]) + 0.3 * rng.normal(size=n)
    actions = rng.integers(2, size=n)
    return Transitions(x[:-1], rewards, x[1:], terminated, truncated=truncated, actions=actions)


class TestBellmanErrors:
    def test_is_the_two_regressions_written_out(self):
        t, new, kernel, ridge = walk(), walk(25, seed=1), Matern(1.0), 1e-2
        td = KLSTD(kernel, 0.9, ridge).fit(t)
        errors = bellman_errors(td, t, new)
        smoother = np.linalg.solve(kernel(t.states) + 40 * ridge * np.eye(40), np.eye(40))
        ahead = np.where(t.terminated, 0.0, td.predict(t.next_states))
        reward = new.rewards - kernel(new.states, t.states) @ smoother @ t.rewards
        new_ahead = np.where(new.terminated, 0.0, td.predict(new.next_states))
        moved = 0.9 * (new_ahead - kernel(new.states, t.states) @ smoother @ ahead)
        np.testing.assert_allclose(errors.reward, reward, **tolerance("closed form"))
        np.testing.assert_allclose(errors.transition, moved, **tolerance("closed form"))

    @pytest.mark.parametrize("form", FORMS)
    def test_the_parts_add_up_to_the_td_errors(self, form):
        t, new = walk(), walk(25, seed=1)
        td = KLSTD(RBF(1.0), 0.9, 1e-2, FORMS[form]).fit(t)
        for judged in (None, new):
            errors = bellman_errors(td, t, judged)
            expected = td.td_errors(t if judged is None else judged)
            np.testing.assert_allclose(errors.total, expected, **tolerance("closed form"))
            np.testing.assert_allclose(
                errors.reward + errors.transition, errors.total, **tolerance("algebra")
            )

    def test_of_pairs_under_a_mixed_policy(self):
        t = walk()
        td = KLSTDQ(StateAction(RBF(1.0)), lambda s: np.full((len(s), 2), 0.5), 0.9, 1e-2).fit(t)
        errors = bellman_errors(td, t, walk(25, seed=1))
        expected = td.td_errors(walk(25, seed=1))
        np.testing.assert_allclose(errors.total, expected, **tolerance("closed form"))

    def test_on_the_training_rows_it_is_the_ridge_times_the_weights(self):
        """(K + nλI)w = r + γK'w, so r + γK'w − Kw = nλw."""
        t = walk()
        td = KLSTD(Matern(1.0), 0.9, 1e-2).fit(t)
        expected = 40 * 1e-2 * td.weights_
        np.testing.assert_allclose(
            bellman_errors(td, t).total, expected, **tolerance("closed form")
        )

    def test_perfect_models_have_no_error(self):
        """A deterministic cycle on tables: reward and next value are known; held out = train."""
        s = np.arange(5.0)
        t = Transitions(s, s**2, (s + 1) % 5, np.zeros(5))
        errors = bellman_errors(KLSTD(Delta(), 0.9, 0.0).fit(t), t)
        assert max(np.abs(x).max() for x in errors) < 1e-10

    def test_tells_a_wrong_reward_from_a_wrong_transition(self):
        """Rewards noisy, moves sure; then rewards sure, moves noisy."""
        s, noise = np.linspace(0, 1, 200)[:, None], np.random.default_rng(0).normal(size=(200, 1))
        sure = Transitions(s, s[:, 0], 0.9 * s, np.zeros(200))
        noisy_reward = sure.replace(rewards=(s + 0.5 * noise)[:, 0])
        noisy_move = sure.replace(next_states=0.9 * s + 0.5 * noise)
        parts = []
        for t in (noisy_reward, noisy_move):
            td = KLSTD(RBF(0.5), 0.9, 1e-3).fit(t[::2])
            parts.append(bellman_errors(td, t[::2], t[1::2]).summary())
        assert parts[0]["reward"] > 5 * parts[0]["transition"]
        assert parts[1]["transition"] > 5 * parts[1]["reward"]

    def test_summary(self):
        errors = bellman_errors(KLSTD(RBF(1.0), 0.9, 1e-2).fit(walk()), walk(), walk(25, seed=1))
        summary = errors.summary()
        assert summary["total"] == pytest.approx(np.sqrt(np.mean(errors.total**2)))
        expected = np.corrcoef(errors.reward, errors.transition)[0, 1]
        assert summary["correlation"] == pytest.approx(expected)

    def test_other_rows_than_those_of_the_fit_are_found_out(self):
        td = KLSTD(RBF(1.0), 0.9, 1e-2).fit(walk())
        with pytest.raises(ValueError, match="train must be the rows that the estimator was fit"):
            bellman_errors(td, walk(seed=3))


def test_ridge_path_is_a_fit_for_each_ridge():
    t, new, ridges = walk(), walk(25, seed=1), [1e-6, 1e-3, 1e-1, 10.0]
    td = KLSTD(RBF(1.0), 0.9)
    path = ridge_path(td, t, new, ridges)
    assert not hasattr(td, "weights_"), "clones are fitted"
    for i, ridge in enumerate(ridges):
        fitted = KLSTD(RBF(1.0), 0.9, ridge).fit(t)
        expected = np.sqrt(np.mean(fitted.td_errors(new) ** 2))
        assert path.total[i] == pytest.approx(expected)
    assert path.reward[-1] == pytest.approx(np.sqrt(np.mean(new.rewards**2)), rel=0.1)
    assert path.transition[-1] < 0.1 * path.transition.max()
    with pytest.raises(ValueError, match="ridge_path: there must be at least one ridge, got none"):
        ridge_path(td, t, new, [])


class TestContraction:
    @pytest.mark.parametrize("form", FORMS)
    def test_norms_are_those_of_the_smoother(self, form):
        t = walk()
        td = KLSTD(RBF(1.0), 0.9, 1e-2, FORMS[form]).fit(t)
        got = contraction(td, t)
        if form == "exact":
            phi, ahead = RBF(1.0)(t.states), RBF(1.0)(t.next_states, t.states)
            alpha = ahead @ np.linalg.inv(phi + 0.4 * np.eye(40))
        else:
            phi, ahead = (td.features_.transform(x) for x in (t.states, t.next_states))
            alpha = ahead @ np.linalg.solve(phi.T @ phi + 0.4 * np.eye(phi.shape[1]), phi.T)
        np.testing.assert_allclose(got.norms, np.abs(alpha).sum(axis=1), **tolerance("closed form"))
        assert got.factor == pytest.approx(0.9 * got.norms.max())

    @pytest.mark.parametrize("ridge", [1e-9, 1e-2, 1.0])
    def test_bounds_what_one_iteration_does(self, ridge):
        """Two value vectors at s': their distance after a regressed backup, and the worst pair."""
        t = walk().replace(terminated=np.zeros(40))
        td = KLSTD(Matern(0.7), 0.9, ridge).fit(t)
        got = contraction(td, t)
        solve = np.linalg.inv(Matern(0.7)(t.states) + 40 * ridge * np.eye(40))
        alpha = Matern(0.7)(t.next_states, t.states) @ solve
        rng = np.random.default_rng(1)
        for _ in range(50):
            v, w = rng.normal(size=(2, 40))
            ratio = np.abs(alpha @ (0.9 * (v - w))).max() / np.abs(v - w).max()
            assert ratio <= got.factor * (1 + 1e-9)
        worst = np.sign(alpha[got.norms.argmax()])
        assert np.abs(alpha @ (0.9 * worst)).max() == pytest.approx(got.factor)
        assert got.guaranteed == (got.factor < 1)

    def test_where_it_is_guaranteed_iteration_finds_klstd(self):
        t = walk()
        td = KLSTD(RBF(1.0), 0.5, 1.0).fit(t)
        assert contraction(td, t).guaranteed
        solve = np.linalg.inv(RBF(1.0)(t.states) + 40 * np.eye(40))
        alpha = RBF(1.0)(t.next_states, t.states) @ solve
        v = np.zeros(40)
        for _ in range(200):
            v = alpha @ (t.rewards + 0.5 * np.where(t.terminated, 0.0, v))
        np.testing.assert_allclose(td.predict(t.next_states), v, **tolerance("closed form"))

    def test_small_noise_breaks_it_off_the_data(self):
        """‖α‖₁ ≤ 1 or so at large λ, and many times that at small λ; an averager has 1."""
        x = np.random.default_rng(0).random(60)
        t = Transitions(x, x, np.random.default_rng(1).random(60) * 1.2, np.zeros(60))
        norms = [
            contraction(KLSTD(RBF(0.2), 0.9, ridge).fit(t), t).largest
            for ridge in (1e-1, 1e-3, 1e-6)
        ]
        assert norms[0] < 1.2 and norms[0] < norms[1] < norms[2] and norms[2] > 5

    def test_states_to_look_at(self):
        t = walk()
        td = KLSTD(RBF(1.0), 0.9, 1e-2).fit(t)
        got = contraction(td, t, t.next_states[:3])
        np.testing.assert_allclose(got.norms, contraction(td, t).norms[:3], **tolerance("algebra"))


class TestSpectrum:
    def test_of_the_exact_system(self):
        t = walk()
        got = spectrum(KLSTD(RBF(1.0), 0.9, 1e-2).fit(t), t)
        ahead = RBF(1.0)(t.next_states, t.states) * ~t.terminated[:, None]
        matrix = RBF(1.0)(t.states) + 0.4 * np.eye(40) - 0.9 * ahead
        expected = np.linalg.eigvals(matrix)
        np.testing.assert_allclose(
            np.sort_complex(got.eigenvalues), np.sort_complex(expected), **tolerance("closed form")
        )
        assert got.smallest_real == pytest.approx(expected.real.min())
        assert got.smallest == pytest.approx(np.abs(expected).min())
        exact = np.linalg.cond(matrix, 1)
        assert exact / 3 <= got.condition <= exact * (1 + 1e-9)

    def test_of_features(self):
        t = walk()
        td = KLSTD(RBF(1.0), 0.9, 1e-2, FORMS["random features"]).fit(t)
        phi = td.features_.transform(t.states)
        ahead = td.features_.transform(t.next_states) * ~t.terminated[:, None]
        expected = np.linalg.eigvals(phi.T @ (phi - 0.9 * ahead) + 0.4 * np.eye(20))
        np.testing.assert_allclose(
            np.sort_complex(spectrum(td, t).eigenvalues),
            np.sort_complex(expected),
            **tolerance("closed form"),
        )

    @pytest.mark.parametrize("ridge", [1e-3, 1.0])
    def test_off_the_trajectory_it_crosses_zero(self, ridge):
        """s' = 2s and a linear kernel: (1 − 2γ) ssᵀ + nλI has the eigenvalue nλ − (2γ − 1)‖s‖²."""
        s = np.random.default_rng(0).normal(size=(20, 1))
        t = Transitions(s, s[:, 0], 2 * s, np.zeros(20))
        got = spectrum(KLSTD(Linear(), 0.9, ridge).fit(t), t)
        expected = 20 * ridge - 0.8 * np.sum(s**2)
        assert got.smallest_real == pytest.approx(min(expected, 20 * ridge))
        assert (got.smallest_real < 0) == (ridge < 0.1)


@pytest.mark.parametrize("diagnose", [bellman_errors, contraction, spectrum])
def test_one_clear_error(diagnose):
    t, name = walk(), diagnose.__name__
    with pytest.raises(
        TypeError, match=f"{name}: the estimator must be a KLSTD or KLSTDQ, got Ker"
    ):
        diagnose(KernelAverager(RBF()).fit(t), t)
    with pytest.raises(NotFittedError):
        diagnose(KLSTD(RBF()), t)
    with pytest.raises(ValueError, match=f"{name}: trace_decay must be 0, got 0.5"):
        diagnose(KLSTD(RBF(), trace_decay=0.5).fit(t), t)
    with pytest.raises(TypeError, match=f"{name}: X must be Transitions"):
        diagnose(KLSTD(RBF()).fit(t), 3)


def test_torch():
    torch = pytest.importorskip("torch")
    t = walk()
    columns = {k: None if v is None else torch.tensor(np.array(v)) for k, v in t.columns.items()}
    moved = Transitions(**columns)
    for features in FORMS.values():
        here = KLSTD(RBF(1.0), 0.9, 1e-2, features).fit(t)
        there = KLSTD(RBF(1.0), 0.9, 1e-2, features).fit(moved)
        for diagnose, field in ((bellman_errors, 1), (contraction, 0), (spectrum, 1)):
            np.testing.assert_allclose(
                diagnose(there, moved)[field], diagnose(here, t)[field], **tolerance("iterative")
            )
