"""Model selection of every estimator of V: scikit-learn's searches, and which score to trust."""

import numpy as np
import pytest
from reference.chains import Chain
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, train_test_split

from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.stationary import RBF
from kernrl.value.averagers import KernelAverager
from kernrl.value.bellman_loss import bellman_scorer
from kernrl.value.factorisation import StochasticFactorisation
from kernrl.value.gptd import GPTD
from kernrl.value.gptd_ensemble import GPTDEnsemble
from kernrl.value.lstd import KLSTD
from kernrl.value.occupancy import SuccessorRepresentation
from kernrl.value.recursive import RecursiveKLSTD
from kernrl.value.regularised import RegularisedLSTD
from kernrl.value.td import KernelTD


def walk(n=120, seed=0):
    """Sure steps round a circle from random places, the reward a wave: V is a wave too."""
    angle = 2 * np.pi * np.random.default_rng(seed).random(n)
    x, x2 = (np.column_stack((np.cos(a), np.sin(a))) for a in (angle, angle + 0.5))
    return Transitions(x, 1.0 + np.sin(2 * angle), x2, np.zeros(n), truncated=np.ones(n))


ESTIMATORS = [
    KernelAverager(RBF(), 0.8),
    StochasticFactorisation(RBF(), 0.8, 20, rng=0),
    SuccessorRepresentation(RBF(), 0.8),
    RecursiveKLSTD(RBF(), 0.8),
    RegularisedLSTD(RBF(), 0.8, 1e-4),
    KernelTD(RBF(), 0.8, 0.5, n_epochs=3),
    GPTD(RBF(), 0.8, 0.1, dictionary=Dictionary()),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("scoring", [None, bellman_scorer(RBF(0.3))], ids=["score", "bellman"])
def test_a_grid_search_finds_the_width(estimator, scoring):
    """Both scores pass over a width at which nothing is shared and one at which all is."""
    widths = [1e-4, 0.2, 1e3]
    if isinstance(estimator, KernelAverager):
        widths = widths[1:]  # at width 0 it is the nearest neighbour, and good where moves are sure
    grid = {"kernel__length_scale": widths}
    folds = KFold(3, shuffle=True, random_state=0)
    search = GridSearchCV(estimator, grid, cv=folds, scoring=scoring).fit(walk())
    assert search.best_params_ == {"kernel__length_scale": 0.2}
    assert search.best_estimator_.predict([[0.0, 1.0]]).shape == (1,)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_cross_validation_and_splits(estimator):
    scores = cross_val_score(estimator, walk(), cv=4)
    assert scores.shape == (4,) and np.all(scores < 0)
    train, test = train_test_split(walk(), random_state=0)
    assert np.isfinite(estimator.fit(train).score(test))


def test_an_ensemble_is_judged_by_its_mixture():
    t = walk()
    mixture = GPTDEnsemble([RBF(0.2), RBF(1e3)], 0.8).fit(t)
    score = bellman_scorer(RBF(0.3))
    alone = score(GPTD(RBF(0.2), 0.8, 0.1).fit(t), t)
    assert 2 * alone < score(mixture, t) < 0


def test_the_td_error_prefers_the_wrong_estimator_and_the_bellman_loss_does_not():
    """On noisy moves the minimiser of squared TD errors scores best by them, far from V^π."""
    chain = Chain(6, [1], success=0.5)
    s, _, r, s2 = chain.random_walk(3000, seed=0)
    t = Transitions(s, r, s2, np.zeros(3000))
    v = chain.value(np.full((6, 2), 0.5))
    right = KLSTD(Delta(), 0.9, 1e-9, Nystroem(n_components=6)).fit(t[:2000])
    wrong = KernelTD(Delta(), 0.9, 0.5, "residual", learning_rate_decay=0.3, n_epochs=4)
    wrong.fit(t[:2000])
    errors = [np.abs(m.predict(np.arange(1.0, 7.0)) - v).max() for m in (right, wrong)]
    assert errors[0] < errors[1] / 2
    assert wrong.score(t[2000:]) > right.score(t[2000:])
    score = bellman_scorer(Delta())
    assert score(right, t[2000:]) > score(wrong, t[2000:])
