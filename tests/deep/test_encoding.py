"""Encoding against NumPy: flattening, one-hot categories, running moments over all rows seen."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from tolerances import tolerance

from kernrl.deep.encoding import Encoder

BOX = spaces.Box(-np.inf, np.inf, (3,))


def test_boxes_are_flattened_to_float32_whatever_leads(rng):
    encode = Encoder(spaces.Box(0, 255, (2, 4), dtype=np.uint8))
    assert encode.size == 8
    x = rng.integers(0, 256, size=(5, 7, 2, 4), dtype=np.uint8)
    got = encode(x)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x.reshape(5, 7, 8))
    scalar = Encoder(spaces.Box(-1.0, 1.0, ()))
    np.testing.assert_array_equal(scalar(np.array([0.5, -0.5])), [[0.5], [-0.5]])


def test_categories_are_one_hot_from_their_start():
    encode = Encoder(spaces.Discrete(3, start=5))
    np.testing.assert_array_equal(encode(np.array([5, 7])), [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(encode(np.array([[6], [6]])), [[[0, 1, 0]], [[0, 1, 0]]])
    encode = Encoder(spaces.MultiDiscrete([2, 3]))
    np.testing.assert_array_equal(
        encode(np.array([[1, 0], [0, 2]])), [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    )
    encode = Encoder(spaces.MultiBinary(2))
    np.testing.assert_array_equal(encode(np.array([[1, 0]], dtype=np.int8)), [[1.0, 0.0]])


def test_moments_are_those_of_all_rows_whatever_the_parts(rng):
    rows = 1e4 + rng.normal(size=(1000, 3)) * [1.0, 100.0, 1e-3]
    encode = Encoder(BOX, standardise=True)
    for part in np.split(rows, [1, 3, 3, 500]):
        encode.update(part)
    expected = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    np.testing.assert_allclose(encode(rows), expected, **tolerance("float32"))


def test_what_never_varies_is_only_centred():
    encode = Encoder(BOX, standardise=True)
    encode.update(np.array([[1.0, 2.0, 5.0], [3.0, 2.0, 5.0]]))
    np.testing.assert_allclose(encode(np.array([[1.0, 2.0, 6.0]])), [[-1.0, 0.0, 1.0]])


def test_before_any_row_the_input_passes_and_outliers_are_clipped():
    encode = Encoder(BOX, standardise=True)
    np.testing.assert_array_equal(encode(np.array([[1.0, 2.0, -99.0]])), [[1.0, 2.0, -10.0]])


def test_without_standardise_moments_do_not_matter(rng):
    encode = Encoder(BOX)
    encode.update(rng.normal(size=(9, 3)))
    x = rng.normal(size=(2, 3))
    np.testing.assert_array_equal(encode(x), x.astype(np.float32))


def test_encoding_moves_nothing_and_a_restored_encoder_continues(rng):
    first = Encoder(BOX, standardise=True)
    first.update(rng.normal(size=(20, 3)))
    before = {name: x.copy() for name, x in first.state().items()}
    first(rng.normal(size=(50, 3)))
    for name, x in first.state().items():
        np.testing.assert_array_equal(x, before[name])
    second = Encoder(BOX, standardise=True)
    second.restore(before)
    more, probe = rng.normal(size=(30, 3)), rng.normal(size=(4, 3))
    for encode in (first, second):
        encode.update(more)
    np.testing.assert_array_equal(first(probe), second(probe))


@pytest.mark.parametrize("space", [BOX, spaces.Discrete(4), spaces.MultiDiscrete([2, 2])])
def test_the_size_is_what_comes_out(space):
    encode = Encoder(space)
    assert encode(np.stack([space.sample()] * 3)).shape == (3, encode.size)
