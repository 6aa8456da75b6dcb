"""Values through JSON and back, and what a file may not do."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from kernrl.data import checkpoint
from kernrl.kernels.base import Delta
from kernrl.kernels.stationary import RBF


@dataclass(frozen=True)
class Setting:
    width: float = 1.0
    inner: object = None


def through(value):
    text = json.dumps(checkpoint.encode("save", "value", value), allow_nan=False)
    return checkpoint.decode("load", json.loads(text))


VALUES = [
    None,
    True,
    3,
    2**70,
    0.1,
    "text",
    [],
    [1, [2.5, None]],
    (1, (2, [3])),
    {},
    {"a": {"b": (1,)}},
    math.inf,
    -math.inf,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values(value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_nan():
    assert math.isnan(through(math.nan))


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int32(3), 3),
        (np.uint64(2**63), 2**63),
        (np.bool_(True), True),
        (np.float64(np.inf), math.inf),
        (np.str_("a"), "a"),
    ],
)
def test_numpy_scalars_become_python_s(scalar, plain):
    back = through(scalar)
    assert back == plain
    assert type(back) is type(plain)


@pytest.mark.parametrize(
    "x",
    [
        np.array([0.1, np.nan, -np.inf]),
        np.float32([[1 / 3, 2]]),
        np.array(3.5),
        np.zeros((0, 2)),
        np.array([True, False]),
        np.array([2**63], dtype=np.uint64),
        np.arange(6).reshape(2, 3).T,
    ],
    ids=repr,
)
def test_arrays_keep_every_bit(x):
    back = through(x)
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    np.testing.assert_array_equal(back, x)


def test_tensors_become_numpy():
    assert through(torch.arange(3)).tolist() == [0, 1, 2]


def test_randomness_is_not_kept():
    for source in (np.random.default_rng(0), np.random.SeedSequence(0), np.random.RandomState(0)):
        assert through(source) is None


def test_kernels_and_estimators():
    kernel = through(2.0 * RBF(np.array([0.5, 2.0])) + Delta())
    x = np.random.default_rng(0).normal(size=(4, 2))
    expected = 2.0 * RBF(np.array([0.5, 2.0])) + Delta()
    np.testing.assert_array_equal(kernel(x), expected(x))
    assert through(StandardScaler(with_mean=False)).with_mean is False
    assert through(Setting(2.0, Setting(inner=[RBF(3.0)]))).inner.inner[0].length_scale == 3.0


def local_class():
    @dataclass
    class Local:
        x: int = 0

    return Local()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            lambda x: x,
            "save: value must be a number, text, array, list, dict, kernel or estimator to be "
            "saved, got function.",
        ),
        (
            [1, {"a": object()}],
            "save: value[1].a must be a number, text, array, list, dict, kernel",
        ),
        (RBF, "save: value must be a number, text, array, list, dict, kernel or estimator to be"),
        (np.array(["a"]), "save: value must be real numbers, got dtype <U1."),
        (1j, "save: value must be a number"),
        ({1: 2}, "save: value must have names as keys to be saved, got 1."),
        ({"!tuple": 2}, "save: value must have names as keys to be saved, got '!tuple'."),
        (Setting(inner=open), "save: value.inner must be a number"),
        (local_class(), "save: a class to be saved must be importable by its name, got "),
    ],
)
def test_what_cannot_be_saved(value, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        checkpoint.encode("save", "value", value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"!object": "os.system", "params": {}}, "the file's class must be one of kernrl or of a"),
        ({"!object": "kernrl.arrays.np", "params": {}}, "the file's class must be one of kernrl"),
        ({"!object": "kernrl.agent.Transitions", "params": {}}, "the file's class must be one of"),
        (
            {"!object": "not_imported.Thing", "params": {}},
            "Import not_imported first, if you trust",
        ),
        (
            {"!object": "subprocess.Popen", "params": {"args": ["touch", "/tmp/kernrl-was-here"]}},
            "an object in the file must be a dataclass or have get_params, got subprocess.Popen. "
            "Do not trust this file.",
        ),
        (
            {"!object": "kernrl.kernels.stationary.RBF", "params": {"sigma": 1}},
            "load: the file's parameters must be those of RBF, got ",
        ),
        ({"!eval": "1 + 1"}, "load: a tag in the file must be one of !array, !float, !object, !tu"),
    ],
    ids=["function", "module", "borrowed", "unknown", "popen", "parameters", "tag"],
)
def test_what_a_file_cannot_do(value, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        checkpoint.decode("load", value)


# ---------------------------------------------------------------- the file

STATE = {
    "a": np.arange(6.0).reshape(2, 3).T,
    "flag": np.array([True, False]),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.float32),
    "half": np.float16([1, 2]),
}


def test_arrays_and_header_come_back(tmp_path):
    checkpoint.write("save", tmp_path / "a", STATE, {"x": [1, None]})
    state, header = checkpoint.read("load", tmp_path / "a")
    assert header == {"format": checkpoint.FORMAT, "x": [1, None]}
    assert state.keys() == STATE.keys()
    for name, x in STATE.items():
        assert (state[name].dtype, state[name].shape) == (x.dtype, x.shape), name
        np.testing.assert_array_equal(state[name], x)


def test_every_changed_byte_is_noticed(tmp_path):
    """Flip each byte in turn: no change anywhere in the file goes through as another content."""
    path = tmp_path / "a"
    checkpoint.write("save", path, {"w": np.arange(3.0)}, {"x": 1})
    content = path.read_bytes()
    for k in range(len(content)):
        path.write_bytes(content[:k] + bytes([content[k] ^ 1]) + content[k + 1 :])
        try:
            state, header = checkpoint.read("load", path)
        except ValueError as error:
            assert str(error).startswith("load: ")
        else:  # JSON's own white space
            assert state["w"].tolist() == [0.0, 1.0, 2.0] and header["x"] == 1


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x00" * 100, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "]
)
def test_files_that_are_none_of_ours(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    text = "load: path must be a file written by save, got "
    with pytest.raises(ValueError, match=re.escape(text)):
        checkpoint.read("load", tmp_path / "a")


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="load: path must be a file, got"):
            checkpoint.read("load", path)


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 7)
    checkpoint.write("save", tmp_path / "a", {}, {})
    monkeypatch.undo()
    text = "load: the file must have format 1, got 7. Read it with the kernrl that wrote it."
    with pytest.raises(ValueError, match=re.escape(text)):
        checkpoint.read("load", tmp_path / "a")


def test_a_header_must_be_complete(tmp_path):
    checkpoint.write("save", tmp_path / "a", {}, {"x": 1})
    with pytest.raises(ValueError, match=r"the file's header must be complete, got no \['y'\]"):
        checkpoint.read("load", tmp_path / "a", ("x", "y"))


def test_state_must_be_numbers(tmp_path):
    with pytest.raises(TypeError, match="save: state 'a' must be real numbers, got dtype object"):
        checkpoint.write("save", tmp_path / "a", {"a": np.array([None])}, {})
    assert not list(tmp_path.iterdir())
