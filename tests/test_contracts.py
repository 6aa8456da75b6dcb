"""Every public class passes its contract. A new class without an entry here fails the last test."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import contracts
import numpy as np
import pytest
from contract_parts import check_learnt_names, check_parameters
from sklearn.preprocessing import StandardScaler

from kernrl.agent import Agent
from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.control.kernel_q_learning import KernelQLearning
from kernrl.control.klspi import KLSPI
from kernrl.data.collect import collect
from kernrl.data.transitions import Transitions
from kernrl.deep.ppo import PPO
from kernrl.kernels import base, dot, state_action, stationary
from kernrl.kernels.base import Kernel
from kernrl.value.averagers import KernelAverager
from kernrl.value.bellman_loss import MQL
from kernrl.value.density_ratio import MWL
from kernrl.value.factorisation import StochasticFactorisation
from kernrl.value.fqe import KernelFQE
from kernrl.value.gptd import GPTD
from kernrl.value.gptd_ensemble import GPTDEnsemble
from kernrl.value.lstd import KLSTD, KLSTDQ
from kernrl.value.occupancy import SuccessorRepresentation
from kernrl.value.recursive import RecursiveKLSTD
from kernrl.value.regularised import RegularisedLSTD, RegularisedLSTDQ
from kernrl.value.state_transform import StateTransform
from kernrl.value.td import KernelTD

RBF, Delta = stationary.RBF, base.Delta

# ---------------------------------------------------------------- kernels

KERNELS: dict[str, Kernel] = {
    "RBF": RBF(0.7),
    "RBF ARD": RBF(np.array([0.5, 1.0, 2.0])),
    "RBF median": RBF("median"),
    "Matern 1/2": stationary.Matern(0.8, nu=0.5),
    "Matern 3/2": stationary.Matern(0.8, nu=1.5),
    "Matern 5/2": stationary.Matern("median", nu=2.5),
    "Laplacian": stationary.Laplacian(0.9),
    "RationalQuadratic": stationary.RationalQuadratic(1.1, mixture=0.6),
    "Periodic": stationary.Periodic(1.2, period=2.5),
    "Linear": dot.Linear(variance=1.5, offset=0.3),
    "Polynomial": dot.Polynomial(degree=3, offset=1.0),
    "Delta": Delta(),
    "Sum": RBF(0.7) + dot.Linear(),
    "Product": RBF("median") * stationary.Matern(2.0),
    "Scaled": 2.5 * RBF("median"),
    "OnDimensions": RBF("median").on([0, 2]),
    "nested": 0.5 * (RBF("median").on([0]) + stationary.Periodic(1.0, 3.0).on([1, 2])) * RBF(3.0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str) -> None:
    contracts.check_kernel(KERNELS[name])


@pytest.mark.parametrize("actions", [Delta(), RBF(0.5)], ids=["blocks", "smooth"])
def test_kernel_on_states_and_actions(actions: Kernel, rng: np.random.Generator) -> None:
    pairs = np.column_stack((rng.standard_normal((12, 2)), rng.integers(3, size=12)))
    contracts.check_kernel(state_action.StateAction(RBF("median"), actions), pairs)


# ---------------------------------------------------------------- feature maps

FEATURES: dict[str, Callable[[], Any]] = {
    **{
        f"Nystroem {how}": lambda how=how: Nystroem(RBF("median"), 20, landmarks=how, rng=3)
        for how in ("uniform", "kmeans++", "rpcholesky", "leverage", "greedy")
    },
    **{
        f"RandomFeatures {how}": lambda how=how: RandomFeatures(RBF("median"), 32, how, rng=3)
        for how in ("iid", "orthogonal", "qmc")
    },
    "Dictionary": lambda: Dictionary(RBF("median"), threshold=0.1),
    "Dictionary of a size": lambda: Dictionary(RBF("median"), prune="komp", max_size=9),
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_map(name: str) -> None:
    contracts.check_feature_map(FEATURES[name]())


# ---------------------------------------------------------------- estimators


@pytest.fixture(scope="module")
def walk() -> Transitions:
    """A hundred random steps of CartPole."""
    return collect("CartPole-v1", "random", 100, seed=4)


def push_right(states: np.ndarray) -> np.ndarray:
    """A fixed policy: the action of every state is 1."""
    return np.ones(len(states), dtype=np.int64)


FORMS: dict[str, Callable[[], Any]] = {
    "exact": lambda: None,
    "Nystroem": lambda: Nystroem(n_components=15, rng=2),
    "random features": lambda: RandomFeatures(n_components=40, rng=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_klstd(form: str, walk: Transitions) -> None:
    contracts.check_estimator(KLSTD(RBF("median"), 0.9, 1e-3, FORMS[form]()), walk)


@pytest.mark.parametrize("form", FORMS)
def test_klstdq(form: str, walk: Transitions) -> None:
    actions = Delta() if form != "random features" else RBF(0.5)
    kernel = state_action.StateAction(RBF("median"), actions)
    if form == "random features":  # a product of kernels has no frequencies of its own
        kernel = RBF("median")
    estimator = KLSTDQ(kernel, push_right, 0.9, 1e-3, FORMS[form]())
    contracts.check_estimator(estimator, walk, lambda t: (t.states, t.actions))


# What predicts V from states: name -> a fresh estimator.
ESTIMATORS: dict[str, Callable[[], Any]] = {
    "RegularisedLSTD": lambda: RegularisedLSTD(RBF("median"), 0.9),
    "RegularisedLSTD Nystroem": lambda: RegularisedLSTD(
        RBF("median"), 0.9, features=Nystroem(n_components=15, rng=2)
    ),
    "KernelAverager": lambda: KernelAverager(RBF("median"), 0.9),
    "StochasticFactorisation": lambda: StochasticFactorisation(RBF("median"), 0.9, 15, rng=1),
    "RecursiveKLSTD": lambda: RecursiveKLSTD(RBF("median"), 0.9),
    "RecursiveKLSTD window": lambda: RecursiveKLSTD(
        RBF("median"), 0.9, features=Nystroem(n_components=15, rng=2), window=40
    ),
    **{
        f"KernelTD {how}": lambda how=how: KernelTD(RBF("median"), 0.9, method=how)
        for how in ("td", "residual", "gtd2", "tdc")
    },
    "SuccessorRepresentation": lambda: SuccessorRepresentation(RBF("median"), 0.9),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(name: str, walk: Transitions) -> None:
    contracts.check_estimator(ESTIMATORS[name](), walk)


def test_regularised_lstdq(walk: Transitions) -> None:
    estimator = RegularisedLSTDQ(state_action.StateAction(RBF("median")), push_right, 0.9)
    contracts.check_estimator(estimator, walk, lambda t: (t.states, t.actions))


@pytest.mark.parametrize("make", [KernelFQE, MQL, MWL])
@pytest.mark.parametrize("form", FORMS)
def test_off_policy(make: Any, form: str, walk: Transitions) -> None:
    kernel = state_action.StateAction(RBF("median"), RBF(0.5))
    if form == "random features":
        kernel = RBF("median")
    estimator = make(kernel, push_right, 0.9, 1e-2, FORMS[form]())
    contracts.check_estimator(estimator, walk, lambda t: (t.states, t.actions))


@pytest.mark.parametrize("noise_model", ["returns", "white"])
@pytest.mark.parametrize("form", [*FORMS, "dictionary"])
def test_gptd(form: str, noise_model: str, walk: Transitions) -> None:
    dictionary = Dictionary(threshold=0.05) if form == "dictionary" else None
    features = None if dictionary else FORMS[form]()
    contracts.check_estimator(
        GPTD(RBF("median"), 0.9, 0.5, noise_model, dictionary, features, mean=2.0), walk
    )


def test_gptd_ensemble(walk: Transitions) -> None:
    kernels = [RBF("median"), 3.0 * stationary.Matern(0.5)]
    features = RandomFeatures(n_components=40, rng=2)
    contracts.check_estimator(GPTDEnsemble(kernels, 0.9, 0.5, features=features), walk)


# ---------------------------------------------------------------- agents

AGENTS: dict[str, tuple[Callable[[], Agent], str]] = {
    "KLSPI": (
        lambda: KLSPI(
            features=Nystroem(n_components=20), first_round=200, round_steps=150, rng=1
        ),
        "CartPole-v1",
    ),
    "KernelQLearning": (lambda: KernelQLearning(rng=1), "CartPole-v1"),
    "PPO": (lambda: PPO(n_steps=128, n_epochs=2, hidden=(8,), rng=1), "CartPole-v1"),
    "PPO continuous": (lambda: PPO(n_steps=128, n_epochs=2, hidden=(8,), rng=1), "Pendulum-v1"),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
def test_agent(name: str) -> None:
    contracts.check_agent(*AGENTS[name])


def test_state_transform(walk: Transitions) -> None:
    """What it does is tested in tests/value: it takes transitions, as no feature map does."""
    transform = StateTransform(StandardScaler())
    check_parameters(transform)
    before = set(vars(transform))
    check_learnt_names(before, transform.fit(walk))


# ---------------------------------------------------------------- nothing is left out

COVERED = {
    *(type(kernel) for kernel in KERNELS.values()),
    state_action.StateAction,
    *(type(make()) for make in FEATURES.values()),
    KLSTD,
    KLSTDQ,
    KernelFQE,
    MQL,
    MWL,
    GPTD,
    GPTDEnsemble,
    RegularisedLSTDQ,
    StateTransform,
    *(type(make()) for make in ESTIMATORS.values()),
    *(type(make()) for make, _ in AGENTS.values()),
}
# Bases, and things that are no kernel, feature map, estimator or agent.
EXEMPT = {Kernel, Agent}
FACES = ("kernrl", *(f"kernrl.{r}" for r in ("kernels", "approx", "value", "control", "deep")))


def promises_something(thing: object) -> bool:
    """Whether a public object falls under one of the contracts."""
    verbs = ("predict", "transform")
    return inspect.isclass(thing) and (
        issubclass(thing, Kernel) or any(hasattr(thing, verb) for verb in verbs)
    )


@pytest.mark.parametrize("face", FACES)
def test_every_public_class_has_a_contract(face: str) -> None:
    room = importlib.import_module(face)
    public = [getattr(room, name) for name in room.__all__]
    missing = {c for c in public if promises_something(c)} - COVERED - EXEMPT
    assert not missing, f"add {missing} to the tables of this file"
    if face != "kernrl":
        assert any(promises_something(c) for c in public)


# ---------------------------------------------------------------- the contracts can fail


class Loud(Kernel):
    """A kernel that is not symmetric."""

    def _section(self, xp: Any, z: Any) -> Any:
        return lambda x: x[:, :1] + 2 * z[:, 0][None, :]

    def _diagonal(self, xp: Any, x: Any) -> Any:
        return 3 * x[:, 0]


def test_a_wrong_kernel_is_caught() -> None:
    with pytest.raises(AssertionError):
        contracts.check_kernel(Loud())


class Careless(KLSTD):
    """An estimator that draws from NumPy's global generator."""

    def fit(self, X: Any, y: Any = None) -> Any:
        np.random.random()
        return super().fit(X)


class Vain(KLSTD):
    """An estimator whose learnt attribute has no trailing underscore."""

    def fit(self, X: Any, y: Any = None) -> Any:
        self.fame = 1
        return super().fit(X)


class Meddling(KLSTD):
    """An estimator whose fit overwrites a parameter."""

    def fit(self, X: Any, y: Any = None) -> Any:
        self.gamma = float(self.gamma)
        self.kernel = self.kernel.resolve(X.states)
        return super().fit(X)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [(Careless, "global random"), (Vain, "must end in _"), (Meddling, "changed a parameter")],
)
def test_a_wrong_estimator_is_caught(wrong: type, complaint: str, walk: Transitions) -> None:
    with pytest.raises(AssertionError, match=complaint):
        contracts.check_estimator(wrong(RBF("median"), 0.9), walk)


class Forgetful(PPO):
    """An agent that loses its largest array on the way to the file."""

    def _state(self) -> dict[str, np.ndarray]:
        state = super()._state()
        name = max(state, key=lambda key: state[key].size)
        return {**state, name: np.zeros_like(state[name])}


class Unseeded(PPO):
    """An agent that draws fresh entropy while it learns."""

    def act(self, observations: np.ndarray) -> np.ndarray:
        actions = super().act(observations)
        return np.where(np.random.default_rng().random(len(actions)) < 0.1, 0, actions)


class Reseeding(PPO):
    """An agent that seeds the global generators."""

    def act(self, observations: np.ndarray) -> np.ndarray:
        np.random.seed(0)
        return super().act(observations)


class Greedy(PPO):
    """An agent that takes more steps than it was given."""

    def _end(self) -> None:
        super()._end()
        self.steps_ += 1


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Forgetful, "came back another"),
        (Unseeded, "the same seed"),
        (Reseeding, "global random"),
        (Greedy, "asked for 600 steps"),
    ],
)
def test_a_wrong_agent_is_caught(wrong: type, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        contracts.check_agent(
            lambda: wrong(n_steps=64, n_epochs=1, hidden=(4,), rng=0), "CartPole-v1"
        )
