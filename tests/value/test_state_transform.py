"""Pipelines of state transforms: each is its estimator on states transformed by hand."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF
from kernrl.value.bellman_loss import bellman_scorer
from kernrl.value.gptd import GPTD
from kernrl.value.lstd import KLSTD
from kernrl.value.state_transform import StateTransform
from kernrl.value.td import KernelTD


def walk(n=60, seed=0):
    """Columns of very unlike scales."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 1, 2)).cumsum(axis=0) * [1e3, 1e-3] + [5e4, 0.0]
    return Transitions(x[:-1], np.sin(x[:-1, 1] * 1e3), x[1:], np.arange(n) % 20 == 19)


ESTIMATORS = [
    KLSTD(RBF(), 0.9),
    KLSTD(RBF(), 0.9, features=Nystroem(n_components=20, rng=0), trace_decay=0.5),
    GPTD(RBF(), 0.9, 0.1),
    KernelTD(RBF(), 0.9),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_is_the_estimator_on_scaled_states(estimator):
    t = walk()
    model = make_pipeline(StateTransform(StandardScaler()), clone(estimator)).fit(t)
    mean, scale = t.states.mean(axis=0), t.states.std(axis=0)
    scaled = t.replace(states=(t.states - mean) / scale, next_states=(t.next_states - mean) / scale)
    by_hand = clone(estimator).fit(scaled)
    query = t.next_states[:7]
    expected = by_hand.predict((query - mean) / scale)
    np.testing.assert_allclose(model.predict(query), expected, **tolerance("closed form"))
    assert model.score(t) == pytest.approx(by_hand.score(scaled), rel=1e-8)
    loss = bellman_scorer(RBF(2.0))
    assert loss(model, t) == pytest.approx(loss(by_hand, scaled), rel=1e-8)


def test_columns_may_become_fewer_and_all_else_stays():
    t = walk().replace(actions=np.arange(60))
    out = StateTransform(PCA(1)).fit_transform(t)
    assert out.states.shape == out.next_states.shape == (60, 1)
    for name in ("rewards", "actions", "terminated", "truncated", "episode"):
        np.testing.assert_array_equal(getattr(out, name), getattr(t, name))


@pytest.mark.parametrize("scoring", [None, bellman_scorer(RBF(2.0))], ids=["score", "bellman"])
def test_searches_tune_it(scoring):
    t = walk()
    model = make_pipeline(StateTransform(StandardScaler()), KLSTD(RBF(), 0.9))
    folds = KFold(3, shuffle=True, random_state=0)
    grid = {
        "statetransform__transformer__with_std": [True, False],
        "klstd__kernel__length_scale": [0.3, 1.0],
    }
    search = GridSearchCV(model, grid, cv=folds, scoring=scoring, error_score="raise").fit(t)
    assert search.best_params_.keys() == grid.keys()
    assert np.all(np.isfinite(cross_val_score(model, t, cv=folds, scoring=scoring)))


def test_torch_transitions_are_taken_to_the_host():
    torch = pytest.importorskip("torch")
    t = walk()
    moved = Transitions(**{k: v if v is None else torch.tensor(v) for k, v in t.columns.items()})
    out = StateTransform(StandardScaler()).fit(moved).transform(moved)
    expected = StateTransform(StandardScaler()).fit_transform(t)
    np.testing.assert_array_equal(out.states, expected.states)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: StateTransform("scale").fit(t), "transformer must have fit .*, got 'scale'"),
        (lambda t: StateTransform(PCA(1)).fit(t.states), "X must be Transitions, got ndarray"),
        (
            lambda t: StateTransform(PCA(1)).fit(t).transform(np.zeros((3, 5))),
            "states must have 2 columns, got 5",
        ),
    ],
)
def test_one_clear_error(call, text):
    with pytest.raises((TypeError, ValueError), match=f"StateTransform: {text}"):
        call(walk())


def test_unfitted():
    with pytest.raises(NotFittedError, match="StateTransform: it must be fitted before use"):
        StateTransform(PCA(1)).transform(np.zeros((3, 2)))
