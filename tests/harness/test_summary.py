from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from tolerances import tolerance

from kernrl.harness import stats
from kernrl.harness.summary import Result, Trace, average, improvements


def result(agent="a", env="e", scores=(1.0, 2.0, 4.0), threshold=None, traces=None):
    if traces is None:
        traces = [
            Trace(k, np.array([0.0, 10.0]), np.ones(2), np.array([0.0, s]))
            for k, s in enumerate(scores)
        ]
    return Result(
        agent,
        env,
        list(range(len(scores))),
        np.array(scores),
        0,
        10.0,
        1.0,
        1.0,
        50.0,
        threshold,
        traces,
    )


def test_curves_seen_at_the_same_places_are_averaged_there():
    xs, ys = [np.array([1.0, 2.0])] * 5, np.arange(10.0).reshape(5, 2) ** 2
    band = average(xs, ys)
    np.testing.assert_array_equal(band.x, xs[0])
    np.testing.assert_allclose(
        band.middle, scipy.stats.trim_mean(ys, 0.25, axis=0), **tolerance("algebra")
    )
    for k in range(2):
        expected = stats.bootstrap_interval(ys[:, k], stats.iqm, n_resamples=2000)
        assert (band.low[k], band.high[k]) == (expected.low, expected.high)


def test_curves_seen_at_other_places_are_interpolated_where_all_are_known():
    """On straight lines interpolation is exact: y = k x, so the mean of the lines is 2 x."""
    xs = [np.array([0.0, 5.0, 10.0]), np.array([2.0, 9.0]), np.array([1.0, 3.0, 12.0])]
    band = average(xs, [slope * x for slope, x in zip((1, 2, 3), xs, strict=True)])
    assert (band.x[0], band.x[-1]) == (2.0, 9.0)
    np.testing.assert_allclose(band.middle, 2 * band.x, **tolerance("algebra"))


def test_curves_that_share_no_place_still_have_a_point():
    band = average([np.array([0.0, 1.0]), np.array([5.0, 6.0])], np.zeros((2, 2)))
    assert len(band.x) == 1


def test_two_runs_have_a_middle_but_no_interval():
    band = average([np.array([1.0])] * 2, np.array([[1.0], [3.0]]))
    assert band.middle.tolist() == [2.0]
    assert np.isnan(band.low).all()
    two = result(scores=(1.0, 3.0))
    assert two.interval is None
    assert two.row()["iqm_low"] is None


def test_a_result_sums_up_its_runs():
    r = result(scores=(1.0, 5.0, 9.0, 100.0), threshold=9)
    assert (r.median, r.iqm, r.mean, r.worst, r.n) == (7.0, 7.0, 28.75, 1.0, 4)
    assert r.solved == "2 of 4 at 10 steps"
    assert result(threshold=1000).solved == "0 of 3"
    assert result().solved == ""
    assert r.auc == 3.5  # the median of the triangles under 0 → score


def test_improvement_is_averaged_over_shared_environments(rng):
    a, b = (result("a", env, rng.normal(size=4)) for env in "ef")
    c, d = (result("b", env, rng.normal(size=3)) for env in "eg")
    agents, table = improvements([a, b, c, d])
    assert agents == ["a", "b"]
    expected = stats.probability_of_improvement(a.scores, c.scores)
    assert table[0, 1] == pytest.approx(expected)
    assert table[1, 0] == pytest.approx(1 - expected)
    assert np.isnan(table[0, 0])
    e = result("b", "f", rng.normal(size=3))
    both = (expected + stats.probability_of_improvement(b.scores, e.scores)) / 2
    assert improvements([a, b, c, d, e])[1][0, 1] == pytest.approx(both)
