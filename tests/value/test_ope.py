"""estimate_return against dynamic programming, the estimators, enumeration, refits and coverage."""

import itertools

import numpy as np
import pytest
from reference.chains import Chain
from reference.occupancy import population, tabulated
from scipy.stats import t as student
from sklearn.base import clone
from tolerances import tolerance

from kernrl import checks
from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.dot import Linear
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value import system_sums
from kernrl.value.bellman_loss import MQL
from kernrl.value.density_ratio import MWL
from kernrl.value.fqe import KernelFQE
from kernrl.value.lstd import KLSTDQ
from kernrl.value.ope import Estimate, estimate_return

TABLE = StateAction(Delta())
KERNEL = StateAction(RBF(1.0), RBF(1.0))
SOLVED = ("lstdq", "fqe", "mql", "mwl")
ESTIMATORS = {"lstdq": KLSTDQ, "fqe": KernelFQE, "mql": MQL, "mwl": MWL}


def mixed(states):
    """π(1|s) = 1/(1 + exp(−s₁))."""
    p = 1 / (1 + np.exp(-states[:, 0]))
    return np.column_stack((1 - p, p))


def walk(n_episodes=12, length=6, seed=0):
    """Episodes of a random walk in the plane; every third ends in a terminal state."""
    rng = np.random.default_rng(seed)
    parts = []
    for k in range(n_episodes):
        x = rng.normal(size=(length + 1, 2)).cumsum(axis=0) * 0.3
        end = np.arange(length) == length - 1
        parts.append(
            Transitions(
                x[:-1], np.sin(x[:-1, 0]), x[1:], end & (k % 3 == 0), truncated=end & (k % 3 > 0),
                actions=rng.integers(2, size=length),
            )
        )  # fmt: skip
    return Transitions.concatenate(parts)


class TestValue:
    @pytest.mark.parametrize("method", SOLVED)
    def test_population_of_a_chain_gives_dynamic_programming(self, method):
        chain = Chain(5, [1, 5])
        policy = np.linspace(0.1, 0.9, 5)[:, None] * [1, -1] + [0, 1]
        t = population(chain, np.array([[1, 2], [3, 1], [1, 1], [2, 2], [1, 4]]))
        starts = np.array([1.0, 1.0, 2.0, 4.0])
        got = estimate_return(
            t, tabulated(policy), method=method, kernel=TABLE, gamma=0.9, ridge=0.0, level=None,
            features=Nystroem(n_components=10), initial_states=starts,
        )  # fmt: skip
        expected = chain.value(policy)[starts.astype(int) - 1].mean()
        np.testing.assert_allclose(got.value, expected, **tolerance("closed form"))
        assert (got.low, got.high, got.level) == (None, None, None)

    @pytest.mark.parametrize("method", SOLVED)
    def test_two_states_by_hand(self, method):
        """A ends with action 1, or pays 1 and goes to B; B pays 2 and goes to A."""
        gamma, p = 0.8, 0.6
        t = Transitions(
            [[0.0], [0.0], [1.0]], [1.0, 0.0, 2.0], [[1.0], [0.0], [0.0]], [False, True, False],
            actions=[0, 1, 0], episode=[0, 1, 2],
        )  # fmt: skip

        def policy(s):
            return np.where(s == 0.0, [[p, 1 - p]], [[1.0, 0.0]])

        def value(t):
            return estimate_return(
                t, policy, method=method, kernel=TABLE, gamma=gamma, ridge=0.0, level=None,
                initial_states=[[0.0]],
            ).value  # fmt: skip

        assert value(t) == pytest.approx(p * (1 + 2 * gamma) / (1 - p * gamma**2))
        # Only cut, action 1 leads back to A: V(A) = p(1 + γV(B)) + (1 − p)γV(A).
        cut = t.replace(terminated=[False] * 3, truncated=[False, True, False])
        expected = p * (1 + 2 * gamma) / (1 - p * gamma**2 - (1 - p) * gamma)
        assert value(cut) == pytest.approx(expected)

    @pytest.mark.parametrize("method", SOLVED)
    @pytest.mark.parametrize("given", [False, True])
    def test_is_what_the_estimator_says(self, method, given):
        t, features = walk(), Nystroem(n_components=25, rng=3)
        starts = t.states[:4] if given else None
        got = estimate_return(
            t, mixed, method=method, kernel=KERNEL, gamma=0.9, ridge=1e-2, features=features,
            initial_states=starts, level=None,
        )  # fmt: skip
        fit = ESTIMATORS[method](KERNEL, mixed, 0.9, 1e-2, features)
        if method == "fqe":
            fit.set_params(tolerance=1e-12)
        if method == "mwl":
            expected = fit.fit(t, initial_states=starts).value_
        else:
            first, fit = (t.states[t.episode_starts] if starts is None else starts), fit.fit(t)
            q = [fit.predict(first, np.full(len(first), a)) for a in (0, 1)]
            expected = np.mean(mixed(first)[:, 0] * q[0] + mixed(first)[:, 1] * q[1])
        np.testing.assert_allclose(got.value, expected, **tolerance("closed form"))

    def test_defaults(self):
        """No kernel, no features: up to 200 rows it is the exact form with the median kernel."""
        t = walk()
        kernel = StateAction(RBF("median"), Delta())
        q = KLSTDQ(kernel, mixed, 0.9, 1e-5).fit(t)
        first = t.states[t.episode_starts]
        expected = sum(
            np.mean(mixed(first)[:, a] * q.predict(first, np.full(12, a))) for a in (0, 1)
        )
        got = estimate_return(t, mixed, gamma=0.9)
        np.testing.assert_allclose(got.value, expected, **tolerance("iterative"))
        assert got.low < got.value < got.high and got.n == 12 and got.level == 0.95
        assert got.method == "lstdq, bootstrap, expanded percentile over episodes"

    def test_continuous_actions_and_sarsa(self):
        t = walk()
        wide = t.replace(actions=np.column_stack((t.actions, -t.actions)) * 0.5)
        assert np.isfinite(estimate_return(wide, lambda s: s, level=None).value)
        sarsa = t.replace(next_actions=np.roll(t.actions, -1))
        assert np.isfinite(estimate_return(sarsa, None, level=None).value)

    @pytest.mark.parametrize("method", SOLVED)
    def test_torch(self, method):
        torch = pytest.importorskip("torch")
        t = walk().replace(next_actions=np.roll(walk().actions, -1))
        moved = Transitions(
            **{k: None if v is None else torch.asarray(np.array(v)) for k, v in t.columns.items()}
        )
        kwargs = dict(method=method, kernel=KERNEL, gamma=0.9, ridge=1e-2, n_resamples=100)
        here, there = (estimate_return(x, None, **kwargs) for x in (t, moved))
        np.testing.assert_allclose(
            [there.value, there.low, there.high],
            [here.value, here.low, here.high],
            **tolerance("iterative"),
        )


class TestImportance:
    BEHAVIOUR = np.array([[0.25, 0.75], [0.5, 0.5]])
    TARGET = np.array([[0.6, 0.4], [0.1, 0.9]])

    def one(self, rows):
        """An episode (s, a, r) … as Transitions that end in a terminal state."""
        s, a, r = (np.array(x) for x in zip(*rows, strict=True))
        end = np.arange(len(s)) == len(s) - 1
        return Transitions(s.astype(float), r.astype(float), np.roll(s, -1).astype(float), end,
                           actions=a)  # fmt: skip

    @pytest.mark.parametrize("method", ["is", "pdis"])
    def test_is_unbiased(self, method):
        """Every episode of two steps, each with its probability: s₁ = a₀, r = 1 + 2s + 3a."""
        gamma, mean, value = 0.8, 0.0, 0.0
        for a0, a1 in itertools.product((0, 1), repeat=2):
            t = self.one([(0, a0, 1 + 3 * a0), (a0, a1, 1 + 2 * a0 + 3 * a1)])
            chance = self.BEHAVIOUR[0, a0] * self.BEHAVIOUR[a0, a1]
            estimate = estimate_return(
                t, lambda s: self.TARGET[s[:, 0].astype(int)], method=method, gamma=gamma,
                behaviour=lambda s: self.BEHAVIOUR[s[:, 0].astype(int)], level=None,
            )  # fmt: skip
            mean += chance * estimate.value
            likely = self.TARGET[0, a0] * self.TARGET[a0, a1]
            value += likely * (1 + 3 * a0 + gamma * (1 + 2 * a0 + 3 * a1))
        assert mean == pytest.approx(value)

    def test_sums_by_a_loop(self):
        episodes = [[(0, 1, 1.0), (1, 0, 2.0)], [(1, 1, -1.0)], [(0, 0, 3.0), (0, 1, 0.5)]]
        t = Transitions.concatenate([self.one(e) for e in episodes])
        behaviour = self.BEHAVIOUR[t.states[:, 0].astype(int), t.actions]
        total = dict.fromkeys(("is", "pdis", "wis", "rho"), 0.0)
        for episode in episodes:
            rho, g, each = 1.0, 0.0, 0.0
            for k, (s, a, r) in enumerate(episode):
                rho *= self.TARGET[s, a] / self.BEHAVIOUR[s, a]
                g, each = g + 0.9**k * r, each + 0.9**k * rho * r
            total["is"] += rho * g / 3
            total["pdis"] += each / 3
            total["wis"], total["rho"] = total["wis"] + rho * g, total["rho"] + rho
        total["wis"] /= total["rho"]
        for method in ("is", "pdis", "wis"):
            got = estimate_return(
                t, lambda s: self.TARGET[s[:, 0].astype(int)], method=method, gamma=0.9,
                behaviour=behaviour,
            )  # fmt: skip
            assert got.value == pytest.approx(total[method])
            assert got.n == 3 and "bootstrap t over episodes" in got.method

    def test_on_policy_it_is_the_mean_return(self):
        t = Transitions.concatenate([self.one([(0, 1, 1.0), (1, 0, 2.0)]), self.one([(1, 1, 5.0)])])
        for method in ("is", "pdis", "wis"):
            got = estimate_return(t, mixed, method=method, gamma=0.5, behaviour=mixed, level=None)
            assert got.value == pytest.approx((2.0 + 5.0) / 2)

    def test_deterministic_policies_and_cut_episodes(self):
        t = self.one([(0, 1, 1.0), (1, 0, 2.0)])
        half = np.full(2, 0.5)
        kwargs = dict(gamma=1.0, behaviour=half, level=None)
        for method, expected in (("is", 0.0), ("pdis", 2.0)):
            got = estimate_return(t, lambda s: np.ones(len(s), int), method=method, **kwargs)
            assert got.value == expected
        with pytest.raises(ValueError, match="must be able to make one of the episodes"):
            estimate_return(t, lambda s: np.ones(len(s), int), method="wis", **kwargs)
        cut = t.replace(terminated=[False, False], truncated=[False, True])
        with pytest.warns(checks.KernrlWarning, match=r"1 of 1 episodes do not end .* γᵀ = 0.81 "):
            estimate_return(cut, mixed, method="is", gamma=0.9, behaviour=half, level=None)


class TestInterval:
    @pytest.mark.parametrize("method", SOLVED)
    @pytest.mark.parametrize("given", [False, True])
    def test_a_draw_is_a_refit_on_the_drawn_episodes(self, method, given):
        """Counts on sums give what concatenated episodes give, features held."""
        t = walk(4)
        features = Nystroem(n_components=20, rng=0)
        starts = t.states[:2] if given else None
        statistic, n, unit = system_sums.system_statistic(
            "test", t, mixed, KERNEL, features, starts, method, 0.9, 1e-2
        )
        assert (n, unit) == (4, "episodes")
        fitted = clone(features).set_params(kernel=KERNEL)
        z = np.column_stack((t.states, t.actions))
        episodes = [t[6 * k : 6 * (k + 1)] for k in (0, 2, 2, 3)]
        again, _, _ = system_sums.system_statistic(
            "test", Transitions.concatenate(episodes), mixed, KERNEL,
            _Held(fitted.fit(z)), starts, method, 0.9, 1e-2,
        )  # fmt: skip
        drawn, plain = statistic(np.array([[1.0, 0, 2, 1], [1, 1, 1, 1]]))
        refitted = again(np.ones((1, 4)))[0]
        np.testing.assert_allclose(drawn, refitted, **tolerance("closed form"))
        assert drawn != plain

    def test_of_a_mean_of_few_it_is_student_s(self):
        """On-policy "is" is the mean return, whose interval is known: mean ± t·s/√n."""
        returns = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
        t = Transitions(np.zeros(5), returns, np.zeros(5), np.ones(5), actions=np.zeros(5, int))
        half = np.full((5, 2), 0.5)
        got = estimate_return(
            t, lambda s: half, method="is", behaviour=lambda s: half, n_resamples=20_000, level=0.9
        )
        width = student.ppf(0.95, 4) * returns.std(ddof=1) / np.sqrt(5)
        expected = [returns.mean() - width, returns.mean() + width]
        np.testing.assert_allclose([got.low, got.high], expected, **tolerance("monte carlo"))

    def test_groups_where_sums_would_not_fit(self, monkeypatch):
        t = walk(10)
        one = estimate_return(t, mixed, kernel=KERNEL)
        monkeypatch.setattr(system_sums, "MOST_NUMBERS", 4 * (2 * 60 * 61 + 2))
        grouped = estimate_return(t, mixed, kernel=KERNEL)
        np.testing.assert_allclose(grouped.value, one.value, **tolerance("closed form"))
        assert grouped.n < 10 and "over groups of" in grouped.method

    def test_covers(self):
        """Of 40 data sets of a two-state chain, 95 % intervals miss the value at most six times.

        P(more than six misses) is below 1 % if they miss 5 % of the time.
        """
        chain = Chain(2, [1], gamma=0.7)
        policy = np.array([[0.8, 0.2], [0.3, 0.7]])
        expected = chain.value(policy).mean()
        missed, widths = 0, []
        for seed in range(40):
            rng = np.random.default_rng(seed)
            s = rng.integers(2, size=40)
            rows = []
            for _ in range(5):
                a = rng.integers(2, size=40)
                s2 = np.where(rng.random(40) < chain.p[a, s, 1], 1, 0)
                rows.append((s + 1.0, a, chain.reward[s], s2 + 1.0))
                s = s2
            s0, a, r, s2 = (np.stack(x, axis=1).ravel() for x in zip(*rows, strict=True))
            t = Transitions(s0, r, s2, np.zeros(200), actions=a, episode=np.repeat(range(40), 5))
            got = estimate_return(
                t, tabulated(policy), kernel=TABLE, gamma=0.7, ridge=1e-6, n_resamples=200,
                features=Nystroem(n_components=4),
            )  # fmt: skip
            missed += not got.low < expected < got.high
            widths.append(got.high - got.low)
        assert missed <= 6
        assert np.mean(widths) < 0.4 * expected  # and they say something

    def test_same_seed_same_interval(self):
        t = walk()
        one, two, other = (estimate_return(t, mixed, rng=k, n_resamples=100) for k in (1, 1, 2))
        assert one == two and one.low != other.low
        assert estimate_return(t, mixed) == estimate_return(t, mixed, rng=0)

    def test_level(self):
        narrow, broad = (estimate_return(walk(), mixed, level=k) for k in (0.5, 0.99))
        assert broad.low < narrow.low < narrow.high < broad.high

    @pytest.mark.filterwarnings("ignore:estimate_return. .* is unlike all data")
    def test_a_draw_that_diverges_has_no_bounds(self):
        """Five episodes in twelve double their state: drawn seven times, they make it diverge."""
        s = np.ones(12)
        t = Transitions(
            s, s, np.r_[np.full(5, 2.0), np.zeros(7)], np.zeros(12), actions=np.zeros(12, int),
            next_actions=np.zeros(12, int), episode=np.arange(12),
        )  # fmt: skip
        kwargs = dict(method="fqe", kernel=Linear().on([0]), gamma=0.99, ridge=0.0)
        got = estimate_return(t, None, features=Nystroem(n_components=1), **kwargs)
        assert got.low == -np.inf and got.high == np.inf and np.isfinite(got.value)
        always = t.replace(next_states=np.full((12, 1), 2.0))
        with pytest.raises(ValueError, match=r"the iteration of fqe must contract.*lstdq"):
            estimate_return(always, None, features=Nystroem(n_components=1), **kwargs)


class _Held:
    """Features fitted beforehand."""

    def __init__(self, fitted):
        self.fitted, self.kernel, self.kernel_ = fitted, fitted.kernel_, fitted.kernel_

    def with_kernel(self, kernel):
        return self

    def fit(self, x):
        return self

    def transform(self, x):
        return self.fitted.transform(x)


def test_the_estimate_says_what_it_is():
    assert str(Estimate(1.5, None, None, "mwl", 2, None)) == "1.5 (mwl, n = 2)"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"method": "lstd"}, r"method must be one of fqe, is, lstdq, .*Did you mean 'lstdq'"),
        ({"gamma": 1.5}, "gamma must be"),
        ({"gamma": 1.0, "method": "mwl"}, "gamma must be a finite number below 1.0"),
        ({"ridge": -1.0}, "ridge must be"),
        ({"level": 1.0}, "level must be"),
        ({"n_resamples": 5}, "n_resamples must be an integer of at least 100"),
        ({"kernel": "rbf"}, "kernel must be a kernel"),
        ({"policy": 3}, "policy must be callable"),
        ({"initial_states": [[0.0]]}, "initial_states must have 2 columns, got 1"),
        ({"method": "is"}, "importance sampling needs the behaviour's probabilities"),
        ({"method": "is", "initial_states": [[0, 0]]}, "is starts where the episodes do"),
        ({"method": "is", "behaviour": [0.5]}, r"behaviour must have shape \(72,\), got \(1,\)"),
        ({"method": "is", "behaviour": np.zeros(72)}, r"probability in \(0, 1\], got 0.0 at row 0"),
        ({"method": "is", "behaviour": lambda s: np.ones((len(s), 2))}, "behaviour's probabilit"),
        ({"method": "is", "behaviour": lambda s: np.ones((len(s), 1))}, "every action of the data"),
        ({"method": "is", "behaviour": np.ones(72), "policy": None}, "needs a policy"),
        ({"transitions": walk(2)}, "an interval needs at least 3 episodes, got 2. Pass level="),
        ({"transitions": 3}, "X must be Transitions, got int"),
        ({"transitions": walk().replace(actions=None)}, "the transitions must have actions"),
        (
            {"method": "is", "transitions": walk().replace(actions=walk().states)},
            "is needs actions numbered",
        ),
    ],
)  # fmt: skip
def test_one_clear_error(change, text):
    arguments = {"transitions": walk(), "policy": mixed, **change}
    with pytest.raises((ValueError, TypeError), match=f"estimate_return: .*{text}"):
        estimate_return(arguments.pop("transitions"), arguments.pop("policy"), **arguments)
