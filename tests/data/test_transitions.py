"""Transitions: what is refused, what is kept, how rows are chosen and joined."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transition_rows import columns, make

from kernrl.data.transitions import Transitions

# ---------------------------------------------------------------- what is kept


def test_fields_shape_and_episodes():
    t = make()
    assert (len(t), t.n, t.shape) == (6, 6, (6, 2))
    assert t.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert t.episode_starts.tolist() == [True, False, False, True, False, False]
    assert t.next_actions is None
    assert t.episode.dtype == np.int64
    assert repr(t) == "Transitions(n=6, d=2, actions int64, 2 episodes)"


def test_both_flags_are_kept_where_both_are_set():
    t = Transitions([0.0, 1], [0, 0], [1.0, 2], [False, True], truncated=[False, True])
    assert t.terminated.tolist() == t.truncated.tolist() == [False, True]


def test_one_dimensional_states_become_a_column():
    t = Transitions(np.arange(3), [0, 0, 0], np.arange(3), [0, 0, 1])
    assert t.states.shape == t.next_states.shape == (3, 1)
    assert t.states.dtype.kind == "i"  # whole states stay whole
    assert t.rewards.dtype == np.float64
    assert t.terminated.dtype == np.bool_


def test_truncated_is_false_where_it_is_not_given():
    t = make(truncated=None)
    assert not t.truncated.any()
    assert t.episode.tolist() == [0, 0, 0, 1, 1, 1]


def test_dtypes_stay():
    t = make(states=np.zeros((6, 2), np.float32), rewards=np.zeros(6, np.float32))
    assert t.states.dtype == t.rewards.dtype == np.float32


def test_a_foreign_byte_order_becomes_the_machine_s():
    t = make(states=np.arange(12.0).reshape(6, 2).astype(">f8"))
    assert t.states.dtype == np.float64 and t.states.dtype.isnative
    assert t.states[1].tolist() == [2.0, 3.0]


def test_images_keep_their_shape():
    t = Transitions(
        np.zeros((2, 4, 4, 3), np.uint8), [0, 0], np.zeros((2, 4, 4, 3), np.uint8), [0, 1]
    )
    assert t.shape == (2, 4, 4, 3)


# ---------------------------------------------------------------- immutable


def test_nothing_can_be_written():
    t = make()
    with pytest.raises(AttributeError):
        t.rewards = np.zeros(6)
    for name, x in t.columns.items():
        if x is not None:
            with pytest.raises(ValueError, match="read-only"):
                x[0] = 0
            assert not x.flags.writeable, name
    for part in (t[1:3], t[[0, 2]], t.replace(rewards=np.ones(6)), copy.deepcopy(t)):
        assert not any(x.flags.writeable for x in part.columns.values() if x is not None)


def test_the_caller_s_arrays_stay_his():
    given = columns()
    t = Transitions(**given)
    given["states"][0] = 99.0
    given["rewards"][0] = 99.0
    assert t.states[0, 0] == t.rewards[0] == 0.0
    assert given["states"].flags.writeable


def test_read_only_arrays_are_not_copied():
    states = np.zeros((6, 2))
    states.flags.writeable = False
    assert make(states=states).states is states


def test_pickle_keeps_rows_and_the_lock():
    t = pickle.loads(pickle.dumps(make()))
    assert t.states[5].tolist() == [10.0, 11.0]
    assert not t.states.flags.writeable


# ---------------------------------------------------------------- what is refused

BAD = {
    "nan reward": (
        {"rewards": [0, 1, np.nan, 3, 4, 5]},
        ValueError,
        "Transitions: every reward must be finite, got nan at row 2. Drop or repair the row.",
    ),
    "inf state": (
        {"states": np.where(np.arange(12).reshape(6, 2) == 7, np.inf, 0.0)},
        ValueError,
        "Transitions: every state must be finite, got inf at row 3. Drop or repair the row.",
    ),
    "nan next state": (
        {"next_states": np.full((6, 2), np.nan)},
        ValueError,
        "Transitions: every next_state must be finite, got nan at row 0. Drop or repair the row.",
    ),
    "nan action": (
        {"actions": np.full((6, 1), np.nan)},
        ValueError,
        "Transitions: every action must be finite, got nan at row 0. Drop or repair the row.",
    ),
    "lengths": (
        {"rewards": np.zeros(5)},
        ValueError,
        "Transitions: rewards must have as many rows as states (6), got 5.",
    ),
    "empty": (
        {"states": np.zeros((0, 2))},
        ValueError,
        "Transitions: states must have at least one row, got (0, 2).",
    ),
    "no columns": (
        {"states": np.zeros((6, 0)), "next_states": np.zeros((6, 0))},
        ValueError,
        "Transitions: states must have at least one column, got (6, 0).",
    ),
    "scalar states": (
        {"states": 3.0},
        ValueError,
        "Transitions: states must have shape (n, d) or (n,), got a scalar.",
    ),
    "scalar reward": (
        {"rewards": 3.0},
        ValueError,
        "Transitions: rewards must have one entry for each row, got a scalar.",
    ),
    "text states": (
        {"states": np.array([["a", "b"]] * 6)},
        TypeError,
        "Transitions: states must be real numbers, got dtype <U1. "
        "Convert it to a numeric array first.",
    ),
    "ragged": (
        {"states": [[1.0], [1.0, 2.0]]},
        ValueError,
        "Transitions: states must be a rectangular array of numbers, got ragged rows.",
    ),
    "no rewards": (
        {"rewards": None},
        TypeError,
        "Transitions: rewards must be an array, got None.",
    ),
    "column of rewards": (
        {"rewards": np.zeros((6, 1))},
        ValueError,
        "Transitions: rewards must have shape (n,), got (6, 1).",
    ),
    "flags that are counts": (
        {"terminated": [0, 1, 0, 2, 0, 0]},
        ValueError,
        "Transitions: terminated must hold only True and False (or 0 and 1), got 2 at row 3.",
    ),
    "flags that are nan": (
        {"truncated": [0, 0, 0, np.nan, 0, 0]},
        ValueError,
        "Transitions: truncated must hold only True and False (or 0 and 1), got nan at row 3.",
    ),
    "other next states": (
        {"next_states": np.zeros((6, 3))},
        ValueError,
        "Transitions: next_states must have the shape of states, got (6, 3) and (6, 2).",
    ),
    "action cubes": (
        {"actions": np.zeros((6, 1, 1))},
        ValueError,
        "Transitions: actions must have shape (n,) or (n, a), got (6, 1, 1).",
    ),
    "other next actions": (
        {"next_actions": np.zeros((6, 2))},
        ValueError,
        "Transitions: next_actions must have the shape of actions, got (6, 2) and (6,).",
    ),
    "next actions alone": (
        {"actions": None, "next_actions": np.zeros(6)},
        ValueError,
        "Transitions: next_actions must have the shape of actions, got (6,) and none.",
    ),
    "real episodes": (
        {"episode": np.zeros(6)},
        TypeError,
        "Transitions: episode must hold integers, got dtype float64.",
    ),
    "episodes apart": (
        {"episode": [0, 0, 1, 0, 1, 1], "terminated": [0] * 6},
        ValueError,
        "Transitions: the rows of an episode must be consecutive, got an id that comes back. "
        "Sort the rows by episode and time.",
    ),
    "episode past its end": (
        {"episode": [0] * 6},
        ValueError,
        "Transitions: an episode must end at its terminated or truncated row, "
        "got row 3 after the end. Give the rows after the end another episode id.",
    ),
    "two libraries": (
        {"rewards": torch.zeros(6)},
        TypeError,
        "arrays: all arrays must come from one library, got numpy.ndarray, torch.Tensor. "
        "Convert them first, for example with numpy.asarray.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_one_clear_error(case):
    changes, error, text = BAD[case]
    with pytest.raises(error) as caught:
        make(**changes)
    assert str(caught.value) == text


# ---------------------------------------------------------------- choosing rows

KEYS = [
    slice(1, 4),
    slice(None, None, 2),
    slice(None, None, -1),
    slice(-2, None),
    [0, 2, 5],
    np.array([5, 0, -1]),
    np.array([True, False, True, True, False, False]),
    [True, False, False, False, False, True],
    np.uint8([1, 2]),
    3,
    -1,
    np.int64(2),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("ellipsis", [False, True])
def test_rows_are_chosen_as_numpy_chooses_them(key, ellipsis):
    t = make()
    part = t[(key, ...)] if ellipsis else t[key]
    expected = np.atleast_1d(np.arange(6)[key])
    assert isinstance(part, Transitions)
    assert part.rewards.tolist() == expected.tolist()
    assert part.states[:, 0].tolist() == (2.0 * expected).tolist()
    assert part.terminated.tolist() == t.terminated[expected].tolist()
    assert part.actions.tolist() == t.actions[expected].tolist()
    Transitions(**part.columns)  # what was chosen keeps all the promises


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (6, "Transitions: a row number must be at least -6 and below 6, got 6."),
        ([0, -7], "Transitions: a row number must be at least -6 and below 6, got -7."),
        ([True], "Transitions: a mask must have shape (6,), got (1,)."),
        (
            [0.5],
            "Transitions: rows must be chosen by integers, a slice or a mask, got float64 (1,).",
        ),
        ((0, 1), "Transitions: rows must be chosen along the first axis by one key, got (0, 1)."),
        ("states", "Transitions: rows must be chosen by integers, a slice or a mask, got <U6 ()."),
    ],
)
def test_bad_keys(key, text):
    with pytest.raises(IndexError, match=re.escape(text)):
        make()[key]


@pytest.mark.parametrize("key", [[], slice(3, 3), np.zeros(6, bool)], ids=str)
def test_no_rows_is_an_error(key):
    text = "Transitions: a selection must have at least one row, got (0, 2)."
    with pytest.raises(ValueError, match=re.escape(text)):
        make()[key]


def test_whole_episodes_keep_their_ids_and_a_gap_splits():
    t = make(9, terminated=[0, 0, 1] * 3, truncated=None)
    assert t[3:].episode.tolist() == [1, 1, 1, 2, 2, 2]
    assert t[[0, 1, 2, 6, 7, 8]].episode.tolist() == [0, 0, 0, 2, 2, 2]
    assert t[[0, 2, 3, 4]].episode_starts.tolist() == [True, True, True, False]
    assert t[[1, 0]].episode_starts.tolist() == [True, True]
    assert t[[0, 3, 1]].episode_starts.tolist() == [True, True, True]


@given(st.lists(st.integers(0, 11), min_size=1, max_size=20))
def test_rows_are_joined_exactly_where_they_follow_each_other(key):
    t = make(12, terminated=[0, 0, 0, 1] * 3, truncated=None)
    part = t[key]
    follows = [b == a + 1 and a % 4 != 3 for a, b in pairwise(key)]
    assert part.episode_starts.tolist() == [True] + [not x for x in follows]
    Transitions(**part.columns)


def test_iteration_ends():
    assert [row.rewards.tolist() for row in make()] == [[float(k)] for k in range(6)]


def test_it_refuses_to_be_one_array():
    with pytest.raises(TypeError, match=r"no single array .* Use one of its fields"):
        np.asarray(make())


# ---------------------------------------------------------------- new from old


def test_replace_checks_again():
    t = make()
    assert t.replace(rewards=np.ones(6)).rewards.tolist() == [1.0] * 6
    with pytest.raises(ValueError, match="every reward must be finite, got inf at row 0"):
        t.replace(rewards=np.full(6, np.inf))
    with pytest.raises(ValueError, match=r"got 'reward'\. Did you mean 'rewards'\?"):
        t.replace(reward=np.ones(6))


def test_concatenate_keeps_rows_and_keeps_episodes_apart():
    t = Transitions.concatenate([make(), make()[:2], make()[2:4]])
    assert t.rewards.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert t.episode.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 4]
    Transitions(**t.columns)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: make(actions=None), "all parts must have actions or none"),
        (
            lambda: Transitions([0.0], [0], [0.0], [1], actions=[0]),
            "states must have the same columns",
        ),
        (lambda: "rows", "every part must be Transitions, got str at part 1"),
    ],
)
def test_parts_that_do_not_fit(other, text):
    with pytest.raises((ValueError, TypeError), match=text):
        Transitions.concatenate([make(), other()])


def test_concatenate_nothing():
    with pytest.raises(ValueError, match="it needs at least one part, got none"):
        Transitions.concatenate([])
