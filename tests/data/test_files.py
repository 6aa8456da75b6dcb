"""A file is the old one or the new one, never half of one; parquet keeps everything."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernrl.data import parquet
from kernrl.data.files import replacing
from kernrl.data.transitions import Transitions

pytest.importorskip("pyarrow")


def make(n=7, **changes):
    rng = np.random.default_rng(0)
    rows = {
        "states": rng.normal(size=(n, 3)),
        "rewards": rng.normal(size=n),
        "next_states": rng.normal(size=(n, 3)),
        "terminated": np.arange(n) % 3 == 2,
        "actions": np.arange(n),
        "truncated": np.arange(n) % 4 == 3,
    }
    return Transitions(**{**rows, **changes})


# ---------------------------------------------------------------- whole or not at all


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_replaces_the_file_and_keeps_a_link(tmp_path):
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    with replacing(link) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_permissions_are_the_usual_ones(tmp_path):
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("where", [".", "missing/a"])
def test_no_place_for_a_file(tmp_path, where):
    with (
        pytest.raises(FileNotFoundError, match="save: path must name a file in a folder that exi"),
        replacing(tmp_path / where, owner="save"),
    ):
        pass


# ---------------------------------------------------------------- parquet

CASES = {
    "plain": {},
    "no actions": {"actions": None},
    "wide actions": {
        "actions": np.zeros((7, 2), np.float32),
        "next_actions": np.ones((7, 2), "f4"),
    },
    "float32": {"states": np.ones((7, 3), np.float32), "rewards": np.ones(7, np.float32)},
    "float16": {"rewards": np.ones(7, np.float16)},
    "whole states": {"states": np.arange(7), "next_states": np.arange(7)},
    "images": {
        "states": np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3),
        "next_states": np.zeros((7, 2, 2, 3), np.uint8),
    },
    "booleans": {"states": np.eye(7, dtype=bool), "next_states": np.eye(7, dtype=bool)},
    "own episodes": {"episode": np.arange(7) * 3},
}


@pytest.mark.parametrize("case", CASES)
def test_parquet_gives_back_what_it_was_given(tmp_path, case):
    t = make(**CASES[case])
    t.to_parquet(tmp_path / "t.parquet")
    back = Transitions.from_parquet(tmp_path / "t.parquet")
    for name, x in t.columns.items():
        y = getattr(back, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert (y.dtype, y.shape) == (x.dtype, x.shape), name
            np.testing.assert_array_equal(x, y)


def test_a_slice_and_a_reversal_are_written_as_they_read(tmp_path):
    t = make()[5:1:-1]
    t.to_parquet(tmp_path / "t")
    np.testing.assert_array_equal(Transitions.from_parquet(tmp_path / "t").states, t.states)


def test_torch_rows_come_back_as_numpy(tmp_path):
    t = Transitions(torch.arange(3.0), torch.ones(3), torch.arange(3.0), torch.zeros(3))
    t.to_parquet(tmp_path / "t")
    assert isinstance(Transitions.from_parquet(tmp_path / "t").states, np.ndarray)


def test_other_tools_read_the_columns(tmp_path):
    import pyarrow.parquet as pq

    t = make()
    t.to_parquet(tmp_path / "t")
    table = pq.read_table(tmp_path / "t")
    assert table.column("rewards").to_pylist() == t.rewards.tolist()
    assert table.column("states").to_pylist() == t.states.tolist()


def test_chunks(tmp_path):
    t = make(10)
    t.to_parquet(tmp_path / "t")
    parts = list(parquet.chunks(tmp_path / "t", 4))
    assert [part.n for part in parts] == [4, 4, 2]
    for name in ("states", "episode", "actions"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(t, name))


def test_chunks_of_a_folder(tmp_path):
    """Files in order of name, each chunk in one file, no two episodes with one id."""
    t = make(10)
    t[6:10].replace(episode=[0, 0, 1, 2]).to_parquet(tmp_path / "b.parquet")
    t[0:6].replace(episode=[0, 0, 0, 1, 2, 2]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    parts = list(parquet.chunks(tmp_path, 4))
    assert [part.n for part in parts] == [4, 2, 4]
    np.testing.assert_array_equal(np.concatenate([part.states for part in parts]), t.states)
    ids = np.concatenate([part.episode for part in parts])
    assert ids.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 4, 5]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ValueError, match=r"chunks: the folder must hold files \*.parquet, got none"
    ):
        list(parquet.chunks(empty))


def test_an_interrupted_write_leaves_the_old_rows(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    path = tmp_path / "t"
    make(3).to_parquet(path)

    def break_off(table, where):
        where.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", break_off)
    with pytest.raises(OSError, match="disk full"):
        make(5).to_parquet(path)
    assert Transitions.from_parquet(path).n == 3
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_none_of_ours(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "Transitions.from_parquet: path must be a parquet file written by to_parquet, got "
    (tmp_path / "text").write_text("hello")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "foreign")
    for name in ("text", "foreign"):
        with pytest.raises(ValueError, match=re.escape(text)):
            Transitions.from_parquet(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Transitions.from_parquet(tmp_path / "missing")


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "FORMAT", 2)
    make().to_parquet(tmp_path / "t")
    monkeypatch.undo()
    text = (
        "Transitions.from_parquet: the file must have format 1, got 2. "
        "Read it with the kernrl that wrote it."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        Transitions.from_parquet(tmp_path / "t")


def test_bad_numbers_in_a_file_are_refused(tmp_path):
    t = make()
    rewards = t.rewards.copy()
    rewards[2] = np.nan
    object.__setattr__(t, "rewards", rewards)
    t.to_parquet(tmp_path / "t")
    with pytest.raises(ValueError, match="every reward must be finite, got nan at row 2"):
        Transitions.from_parquet(tmp_path / "t")


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = (
        "Transitions.to_parquet: parquet files need pyarrow, got no such package. "
        "Install the extra: pip install 'kernrl[data]'."
    )
    with pytest.raises(ImportError, match=re.escape(text)):
        make().to_parquet(tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_transitions_load_neither_pyarrow_nor_minari_nor_gymnasium():
    code = (
        "import sys, kernrl.data.transitions;"
        "print([m for m in ('pyarrow', 'minari', 'gymnasium', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- minari


def dataset(**changes):
    """Two episodes in the form of Minari's EpisodeData."""
    one = SimpleNamespace(
        observations=np.arange(4.0)[:, None],
        actions=np.array([0, 1, 0]),
        rewards=np.array([1.0, 2.0, 3.0]),
        terminations=np.array([False, False, True]),
        truncations=np.zeros(3, dtype=bool),
    )
    two = SimpleNamespace(**{**vars(one), "terminations": np.zeros(3, dtype=bool), **changes})
    return SimpleNamespace(iterate_episodes=lambda: iter([one, two]))


def test_minari_episodes():
    t = Transitions.from_minari(dataset())
    assert t.states.ravel().tolist() == [0, 1, 2] * 2
    assert t.next_states.ravel().tolist() == [1, 2, 3] * 2  # the final observation is there
    assert t.rewards.tolist() == [1, 2, 3] * 2
    assert t.terminated.tolist() == [False, False, True] + [False] * 3
    assert t.episode.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"observations": {"x": 1}}, "the observations of an episode must be an array, got dict."),
        (
            {"observations": np.zeros((3, 1))},
            "an episode of 3 steps must have 4 observations, got 3",
        ),
    ],
)
def test_minari_episodes_we_cannot_take(changes, text):
    with pytest.raises(
        (TypeError, ValueError), match=re.escape(f"Transitions.from_minari: {text}")
    ):
        Transitions.from_minari(dataset(**changes))


def test_no_minari_data_set(monkeypatch):
    with pytest.raises(TypeError, match="dataset must be a Minari dataset or its id, got int"):
        Transitions.from_minari(3)
    monkeypatch.setitem(sys.modules, "minari", None)
    text = (
        "Transitions.from_minari: Minari data sets need minari, got no such package. "
        "Install the extra: pip install 'kernrl[data]'."
    )
    with pytest.raises(ImportError, match=re.escape(text)):
        Transitions.from_minari("D4RL/door/human-v2")
