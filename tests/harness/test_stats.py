from __future__ import annotations

import time

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tolerances import tolerance

from kernrl.harness import stats

tables = arrays(
    float,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
    elements=st.floats(-1e3, 1e3, width=32),
)

# ---------------------------------------------------------------- one number from a table


@given(tables)
def test_iqm_is_scipys_trimmed_mean(scores):
    expected = scipy.stats.trim_mean(scores, 0.25, axis=None)
    np.testing.assert_allclose(stats.iqm(scores), expected, **tolerance("algebra"))


@pytest.mark.parametrize("f", [stats.iqm, stats.mean, stats.median])
def test_a_batch_of_tables_is_reduced_table_by_table(f, rng):
    batch = rng.normal(size=(6, 5, 3))
    np.testing.assert_allclose(f(batch), [f(one) for one in batch], **tolerance("algebra"))


@pytest.mark.parametrize("f", [stats.iqm, stats.mean, stats.median])
def test_one_dimension_is_one_task(f, rng):
    scores = rng.normal(size=7)
    assert f(scores) == f(scores[:, None])
    assert isinstance(f(scores), float)


@given(tables)
def test_profile_counts_what_is_strictly_above(scores):
    levels = np.append(np.unique(scores), [-2e3, 2e3])
    expected = [np.mean([[x > level for x in row] for row in scores]) for level in levels]
    got = stats.performance_profile(scores, levels)
    np.testing.assert_allclose(got, expected, **tolerance("algebra"))


def test_profile_of_a_batch(rng):
    batch = rng.normal(size=(4, 5, 2))
    got = stats.performance_profile(batch, [-1.0, 0.0, 1.0])
    expected = [stats.performance_profile(one, [-1.0, 0.0, 1.0]) for one in batch]
    np.testing.assert_allclose(got, expected, **tolerance("exact"))


def test_improvement_is_the_mann_whitney_statistic(rng):
    a, b = rng.integers(0, 5, size=(6, 3)), rng.integers(1, 6, size=(4, 3))  # with ties
    u = [scipy.stats.mannwhitneyu(a[:, k], b[:, k]).statistic / 24 for k in range(3)]
    got = stats.probability_of_improvement(a, b)
    np.testing.assert_allclose(got, np.mean(u), **tolerance("algebra"))
    assert got + stats.probability_of_improvement(b, a) == pytest.approx(1)


def test_improvement_over_itself_is_one_half(rng):
    scores = rng.normal(size=(5, 2))
    assert stats.probability_of_improvement(scores, scores) == 0.5


# ---------------------------------------------------------------- curves


def test_auc_of_a_straight_line_is_its_middle():
    steps = np.array([3.0, 4.0, 9.0])
    assert stats.auc(steps, 2 * steps + 1) == pytest.approx(2 * 6 + 1)
    assert stats.auc([5], [7.0]) == 7.0
    np.testing.assert_allclose(stats.auc([0, 1], [[0, 2], [4, 4]]), [1, 4], **tolerance("exact"))


def test_threshold_is_reached_at_the_first_evaluation_at_or_above_it():
    steps = [10, 20, 30]
    curves = [[0, 5, 1], [5, 0, 0], [0, 0, 4.9]]
    np.testing.assert_array_equal(stats.steps_to_threshold(steps, curves, 5), [20, 10, np.inf])


# ---------------------------------------------------------------- intervals


def ends(interval):
    return interval.low, interval.high


def test_mean_interval_of_one_task_is_students(rng):
    scores = rng.normal(size=6)
    expected = scipy.stats.ttest_1samp(scores, 0).confidence_interval(0.9)
    got = stats.mean_interval(scores, level=0.9)
    np.testing.assert_allclose(ends(got), expected, **tolerance("algebra"))


def test_mean_interval_of_two_tasks_is_welchs(rng):
    """The mean of two task means is half of Welch's difference between one and minus the other."""
    scores = rng.normal(size=(5, 2)) * [1, 10] + [0, 100]
    welch = scipy.stats.ttest_ind(scores[:, 0], -scores[:, 1], equal_var=False)
    expected = np.array(welch.confidence_interval(0.95)) / 2
    np.testing.assert_allclose(
        ends(stats.mean_interval(scores)), expected, **tolerance("closed form")
    )


def test_few_runs_bootstrap_of_the_mean_is_students_interval(rng):
    """√(n/(n−1)) times the spread of resampled means is s/√n: so with t it is the t interval."""
    scores = rng.normal(size=5)
    got = stats.bootstrap_interval(scores, stats.mean, n_resamples=100_000)
    expected = ends(stats.mean_interval(scores))
    np.testing.assert_allclose(ends(got), expected, **tolerance("monte carlo"))
    assert got.method == "stratified bootstrap t"
    assert got.n == 5


def test_many_runs_interval_is_the_expanded_percentile(rng):
    """Against scipy's plain percentile interval at the level that Hesterberg's widening gives."""
    scores = rng.exponential(size=12)
    t = scipy.stats.t.ppf(0.975, 11) * np.sqrt(12 / 11)
    reference = scipy.stats.bootstrap(
        (scores,),
        stats.iqm,
        vectorized=False,
        n_resamples=20_000,
        method="percentile",
        confidence_level=1 - 2 * scipy.stats.norm.cdf(-t),
        rng=np.random.default_rng(1),
    ).confidence_interval
    got = stats.bootstrap_interval(scores, stats.iqm, n_resamples=100_000)
    np.testing.assert_allclose(ends(got), reference, **tolerance("monte carlo"))
    assert got.method == "stratified bootstrap, expanded percentile"


def test_resampling_stays_within_tasks(rng):
    """A task that is harder as a whole says nothing about how much runs vary."""
    scores = rng.normal(size=(12, 2))
    apart = stats.bootstrap_interval(scores + np.array([0, 1000]), stats.mean)
    together = stats.bootstrap_interval(scores, stats.mean)
    np.testing.assert_allclose(
        np.subtract(ends(apart), 500), ends(together), **tolerance("closed form")
    )


@pytest.mark.parametrize("n", [5, 12])
def test_tasks_are_resampled_apart(n, rng):
    """Runs of two tasks share nothing, so two equal columns say as much as twice the runs."""
    scores = rng.normal(size=n)
    one, two = (
        np.diff(ends(stats.bootstrap_interval(table, stats.mean, n_resamples=100_000)))
        for table in (scores, np.stack([scores, scores], axis=1))
    )
    np.testing.assert_allclose(two, one / np.sqrt(2), **tolerance("monte carlo"))


@pytest.mark.parametrize("n", [5, 12])
def test_any_function_of_a_table_can_be_the_statistic(n, rng):
    scores = rng.normal(size=(n, 2))
    by_hand = stats.bootstrap_interval(scores, np.mean, n_resamples=500)
    batched = stats.bootstrap_interval(scores, stats.mean, n_resamples=500)
    np.testing.assert_allclose(ends(by_hand), ends(batched), **tolerance("algebra"))
    worst = stats.bootstrap_interval(scores, lambda table: min(table[:, 0]), n_resamples=500)
    assert worst.low < worst.high


def test_the_same_scores_give_the_same_interval_and_a_seed_another(rng):
    scores = rng.normal(size=6)
    first = stats.bootstrap_interval(scores, stats.iqm)
    assert first == stats.bootstrap_interval(scores, stats.iqm)
    assert first == stats.bootstrap_interval(scores, stats.iqm, rng=0)
    assert first != stats.bootstrap_interval(scores, stats.iqm, rng=1)


@pytest.mark.parametrize("n", [5, 10])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_covers_as_often_as_it_says(n, skewed, rng):
    """The plain percentile interval keeps 88 to 91 of 95 at n = 5 and would fail here."""
    draw = rng.exponential if skewed else rng.normal
    truth = stats.iqm(draw(size=200_000))
    covered = 0
    for scores in draw(size=(600, n)):
        interval = stats.bootstrap_interval(scores, stats.iqm, n_resamples=400)
        covered += interval.low <= truth <= interval.high
    assert covered / 600 >= 0.93


def test_runs_that_all_agree_give_an_interval_without_width():
    for n in (3, 20):
        assert ends(stats.bootstrap_interval([500.0] * n, stats.iqm)) == (500.0, 500.0)
    assert ends(stats.mean_interval([500.0] * 3)) == (500.0, 500.0)


def test_ten_thousand_resamples_of_ten_by_five_take_under_half_a_second(rng):
    scores = rng.normal(size=(10, 5))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        stats.bootstrap_interval(scores, stats.iqm)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_an_interval_says_how_it_was_made():
    text = str(stats.bootstrap_interval([1.0, 2.0, 4.0], stats.iqm, level=0.9))
    assert text.endswith("(90 %, stratified bootstrap t, n = 3)")


# ---------------------------------------------------------------- errors

FAULTS = {
    "a statistic by name": (
        lambda: stats.bootstrap_interval(np.zeros((5, 1)), "iqm"),
        "bootstrap_interval: statistic must be a function of scores, such as iqm, got 'iqm'.",
    ),
    "two runs": (
        lambda: stats.bootstrap_interval([1.0, 2.0], stats.iqm),
        "bootstrap_interval: scores must have at least 3 runs, got 2. "
        "Run more seeds, or show the scores themselves.",
    ),
    "two runs, mean": (
        lambda: stats.mean_interval([[1.0, 2.0], [3.0, 4.0]]),
        "mean_interval: scores must have at least 3 runs, got 2. "
        "Run more seeds, or show the scores themselves.",
    ),
    "a failed run": (
        lambda: stats.iqm([1.0, np.nan]),
        "iqm: every score must be finite, got nan at row 1. Leave failed runs out.",
    ),
    "nothing": (lambda: stats.iqm([]), "iqm: scores must not be empty, got (0, 1)."),
    "text": (
        lambda: stats.iqm(["a"]),
        "iqm: scores must be real numbers, got dtype <U1. Convert it to a numeric array first.",
    ),
    "a level above one": (
        lambda: stats.bootstrap_interval([1, 2, 3], stats.iqm, level=95),
        "bootstrap_interval: level must be a finite number above 0 and below 1, got 95.",
    ),
    "few resamples": (
        lambda: stats.bootstrap_interval([1, 2, 3], stats.iqm, n_resamples=10),
        "bootstrap_interval: n_resamples must be an integer of at least 100, got 10.",
    ),
    "other tasks": (
        lambda: stats.probability_of_improvement([[1, 2]], [[1, 2, 3]]),
        "probability_of_improvement: both tables must be (runs, tasks) with the same tasks, "
        "got (1, 2) and (1, 3).",
    ),
    "a curve of another length": (
        lambda: stats.auc([1, 2], [1, 2, 3]),
        "auc: values must end in as many columns as steps (2), got (3,).",
    ),
    "steps that go back": (
        lambda: stats.steps_to_threshold([2, 1], [1, 2], 1),
        "steps_to_threshold: steps must increase, got [2.0, 1.0].",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_errors_say_what_to_do(what):
    call, text = FAULTS[what]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value) == text
