"""The public names, their parameters and defaults: what examples and users call, as written."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, train_test_split

import kernrl as kr
from kernrl import deep_alignment

REQUIRED = inspect.Parameter.empty
ANY = object()  # there is a default; which one is not promised

# name -> parameters with their defaults, in order. Before "*": may be given by position, so these
# must be the first ones. After it: by keyword.
SIGNATURES = {
    # data
    "Transitions": {
        "states": REQUIRED, "rewards": REQUIRED, "next_states": REQUIRED, "terminated": REQUIRED,
        "*": None, "actions": None, "next_actions": None, "truncated": None, "episode": None,
    },
    "collect": {"env": REQUIRED, "policy": REQUIRED, "n_steps": REQUIRED, "seed": None},
    # kernels
    "RBF": {"length_scale": ANY},
    "Matern": {"length_scale": ANY, "nu": ANY},
    "Laplacian": {"length_scale": ANY},
    "RationalQuadratic": {"length_scale": ANY, "mixture": ANY},
    "Periodic": {"length_scale": ANY, "period": ANY},
    "Linear": {"variance": ANY, "offset": ANY},
    "Polynomial": {"degree": ANY, "offset": ANY},
    "Delta": {},
    "StateAction": {"state_kernel": REQUIRED, "action_kernel": ANY},
    "gram": {"kernel": REQUIRED, "x": REQUIRED, "y": None},
    # sparsification
    "Nystroem": {"kernel": None, "n_components": 500, "landmarks": "rpcholesky", "rng": None},
    "RandomFeatures": {"kernel": None, "n_components": 1000, "method": "orthogonal", "rng": None},
    "Dictionary": {
        "kernel": ANY, "admit": "ald", "threshold": ANY, "prune": None, "max_size": ANY
    },
    # prediction
    "KLSTD": {
        "kernel": REQUIRED, "gamma": 0.99, "ridge": 1e-3, "features": None, "trace_decay": 0.0,
        "device": "auto",
    },
    "KLSTDQ": {
        "kernel": REQUIRED, "policy": ANY, "*": None, "gamma": 0.99, "ridge": 1e-3,
        "features": None, "trace_decay": 0.0, "device": "auto",
    },
    # control
    "KLSPI": {"kernel": ANY, "gamma": 0.99, "ridge": 1e-5, "features": ANY},
    "KernelQLearning": {"kernel": ANY, "gamma": 0.99, "learning_rate": ANY},
    "PPO": {"*": None, "gamma": ANY, "trace_decay": ANY, "learning_rate": ANY, "rng": None},
    # harness
    "evaluate": {"agent": REQUIRED, "env": REQUIRED, "n_episodes": 20, "seed": 0},
    "run_experiment": {"config": REQUIRED},
    "report": {"run_dir": REQUIRED},
    "iqm": {"scores": REQUIRED},
    "bootstrap_interval": {
        "scores": REQUIRED, "statistic": REQUIRED, "*": None, "n_resamples": 10_000, "level": 0.95,
        "rng": None,
    },
    "performance_profile": {"scores": REQUIRED},
    "probability_of_improvement": {"scores_a": REQUIRED, "scores_b": REQUIRED},
    # ops
    "deep_alignment.policy_loss": {
        "logprob": REQUIRED, "old_logprob": REQUIRED, "advantage": REQUIRED, "mask": ANY,
        "*": None, "kind": "clip", "clip": (0.2, 0.2), "dual_clip": None,
        "aggregate": "token-mean", "denominator": None, "impl": "auto",
    },
    "deep_alignment.value_loss": {
        "value": REQUIRED, "old_value": REQUIRED, "returns": REQUIRED, "mask": ANY,
        "*": None, "clip": None,
    },
    "deep_alignment.gae": {
        "rewards": REQUIRED, "values": REQUIRED, "next_values": REQUIRED, "terminated": REQUIRED,
        "truncated": None, "*": None, "gamma": REQUIRED, "trace_decay": REQUIRED, "mask": None,
    },
    "deep_alignment.whiten": {"x": REQUIRED, "mask": ANY},
    "deep_alignment.aggregate": {
        "x": REQUIRED, "mask": REQUIRED, "how": "token-mean", "denominator": None
    },
    # agents
    "Agent.fit": {"self": REQUIRED, "env": REQUIRED, "total_steps": ANY, "callbacks": (),
                  "progress": False},
    "Agent.predict": {"self": REQUIRED, "observations": REQUIRED, "deterministic": True},
    "Agent.save": {"self": REQUIRED, "path": REQUIRED},
    "Agent.load": {"path": REQUIRED},
}  # fmt: skip


def found(name):
    thing = kr
    for part in name.split("."):
        thing = deep_alignment if part == "deep_alignment" else getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(found(name)).parameters
    promised = dict(SIGNATURES[name])
    names = list(promised)
    first = names.index("*") if "*" in names else len(names)
    assert list(parameters)[:first] == names[:first]
    promised.pop("*", None)
    for key, default in promised.items():
        got = parameters[key].default
        if default is ANY:
            assert got is not REQUIRED or key in ("mask",), f"{name}: {key} has no default"
        else:
            assert got == default, f"{name}: {key}={got!r}"
    rest = set(parameters) - set(promised)
    needed = {k for k in rest if parameters[k].default is REQUIRED} - {"thresholds"}
    assert not needed, f"{name} also needs {needed}"


@pytest.mark.parametrize("agent", [kr.KLSPI, kr.KernelQLearning, kr.PPO])
def test_every_agent_is_one_agent(agent):
    assert issubclass(agent, kr.Agent)
    assert inspect.signature(agent).parameters["rng"].default is None
    assert callable(agent().value)


def test_features_of_klspi():
    assert kr.KLSPI().features.get_params() == kr.Nystroem(n_components=300).get_params()


@pytest.mark.parametrize("room", ["kernels", "approx", "data", "value", "control", "deep"])
def test_what_a_room_offers_is_offered_by_the_face(room):
    face = importlib.import_module(f"kernrl.{room}")
    for name in face.__all__:
        if name in kr.__all__:
            assert getattr(face, name) is getattr(kr, name)


# ---------------------------------------------------------------- called as written


def data(n=60, seed=0):
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, 2))
    return kr.Transitions(states, states[:, 0], 0.5 * states, np.zeros(n, bool))


def test_transitions_are_x_for_scikit_learn():
    """A kernel estimator in each of its tools, the kernel's parameters in the grid."""
    t = data()
    assert [len(t[test]) for _, test in KFold(3).split(t)] == [20, 20, 20]
    train, test = train_test_split(t, test_size=0.25, random_state=0)
    assert (len(train), len(test)) == (45, 15)
    value = kr.KLSTD(kr.RBF(1.0), gamma=0.9)
    scores = cross_val_score(value, t, cv=3)
    assert scores.shape == (3,) and np.all(scores < 0)
    grid = {
        "kernel__length_scale": [1e-3, 1.0],
        "ridge": [1e-4, 1e-2],
        "features": [None, kr.Nystroem(n_components=20, rng=0)],
    }
    search = GridSearchCV(value, grid, cv=3, error_score="raise").fit(t)
    assert search.best_params_["kernel__length_scale"] == 1.0  # 0.001 knows nothing between rows
    assert value.kernel.length_scale == 1.0 and value.ridge == 1e-3
    both = kr.KLSTD(kr.RBF(1.0) + 2.0 * kr.Matern(1.0, nu=2.5).on([0]), gamma=0.9)
    deep = {"kernel__left__length_scale": [0.5], "kernel__right__factor": [3.0]}
    best = GridSearchCV(both, deep, cv=3, error_score="raise").fit(t).best_estimator_
    assert (best.kernel.left.length_scale, best.kernel.right.factor) == (0.5, 3.0)


def test_kernel_algebra_and_shapes(rng):
    x, y = rng.normal(size=(7, 3)), rng.normal(size=(5, 3))
    kernel = 2.0 * kr.RBF(1.5) * kr.Matern(1.0, nu=1.5) + kr.Linear().on([0, 2])
    assert kernel(x).shape == (7, 7)
    assert kernel(x, y).shape == (7, 5)
    assert kernel.diagonal(x).shape == (7,)
    assert kr.StateAction(kr.RBF(1.0), kr.Delta())(x, y).shape == (7, 5)
    assert kr.RBF(1.0).to_gpytorch()._get_name() == "RBFKernel"
    fitted = kr.KLSTD(kr.RBF("median"), gamma=0.9).fit(data())
    assert fitted.kernel.length_scale == "median"
    assert np.isfinite(float(fitted.kernel_.length_scale))


@pytest.mark.parametrize("landmarks", ["rpcholesky", "uniform", "kmeans++", "leverage", "greedy"])
def test_every_way_to_choose_landmarks(landmarks):
    features = kr.Nystroem(n_components=10, landmarks=landmarks, rng=0)
    assert kr.KLSTD(kr.RBF(1.0), features=features).fit(data()).predict([[0.0, 0.0]]).shape == (1,)


@pytest.mark.parametrize("method", ["orthogonal", "iid", "qmc"])
def test_every_way_to_draw_features(method):
    features = kr.RandomFeatures(n_components=20, method=method, rng=0)
    assert kr.KLSTD(kr.RBF(1.0), features=features).fit(data()).predict([[0.0, 0.0]]).shape == (1,)


@pytest.mark.parametrize("prune", [None, "komp", "oldest", "leverage"])
def test_every_way_to_prune(prune, rng):
    size = {} if prune is None else {"max_size": 3}
    dictionary = kr.Dictionary(kr.RBF(0.1), admit="ald", threshold=0.01, prune=prune, **size)
    for x in rng.normal(size=(3, 2)):
        dictionary.offer(x)
    assert dictionary.atoms_.shape == (3, 2)


def test_chunks_are_one_data_set():
    t = data()
    whole = kr.KLSTD(kr.RBF(1.0)).fit(t)
    parts = kr.KLSTD(kr.RBF(1.0)).fit(iter([t[:25], t[25:]]))
    np.testing.assert_array_equal(whole.weights_, parts.weights_)


def test_the_commands_are_there():
    done = subprocess.run(
        [sys.executable, "-m", "kernrl", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in ("--seeds", "--jobs", "--out", "--resume"):
        assert option in done.stdout
