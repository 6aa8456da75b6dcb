"""Cuts through episodes: which are healed, and that healing gives back what was cut."""

import numpy as np
import pytest

from kernrl.data.transitions import Transitions
from kernrl.value.episodes import goes_on, open_end, whole


def walk():
    """Episodes of rows 0-2 (terminated), 3-5 (truncated) and 6-8 (open)."""
    x = np.arange(20.0).reshape(10, 2)
    flags = np.zeros((2, 9), bool)
    flags[0, 2] = flags[1, 5] = True
    return Transitions(x[:-1], np.arange(9.0), x[1:], flags[0], truncated=flags[1])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_whole_is_what_was_cut(size):
    t = walk()
    healed = whole([t[k : k + size] for k in range(0, 9, size)])
    np.testing.assert_array_equal(healed.episode, t.episode)
    np.testing.assert_array_equal(healed.states, t.states)


def test_only_an_open_episode_goes_on_and_only_where_it_stands():
    t = walk()
    assert open_end(t[:3]) is None and open_end(t[3:6]) is None
    np.testing.assert_array_equal(open_end(t[:2]), t.states[2])
    assert goes_on(t[2:], open_end(t[:2])) and not goes_on(t[3:], open_end(t[:2]))
    assert not goes_on(t, None)
    assert whole([t[:2], t[3:6], t[7:]]).episode.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_other_libraries():
    torch = pytest.importorskip("torch")
    t = walk()
    moved = Transitions(**{k: v if v is None else torch.tensor(v) for k, v in t.columns.items()})
    healed = whole([moved[:4], moved[4:]])
    assert healed.episode.tolist() == t.episode.tolist()
