"""The table of tolerances: each entry has a reason, each name is known, dtypes are looked up."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
import torch
from tolerances import tolerance


def test_every_entry_has_a_reason_and_a_size() -> None:
    for entry in (*tolerances.TOLERANCES.values(), *tolerances.BY_DTYPE.values()):
        assert len(entry.reason.split()) >= 5
        assert 0 <= entry.atol <= entry.rtol < 0.1


def test_dtype_entries_belong_to_a_name_and_are_wider() -> None:
    for (name, _), entry in tolerances.BY_DTYPE.items():
        assert entry.rtol > tolerances.TOLERANCES[name].rtol


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), torch.float32])
def test_dtype_is_looked_up(dtype) -> None:
    assert tolerance("algebra", dtype) == tolerance("float32")


@pytest.mark.parametrize("dtype", [None, "float64", torch.float64])
def test_other_dtypes_take_the_named_entry(dtype) -> None:
    assert tolerance("algebra", dtype) == {"rtol": 1e-11, "atol": 1e-13}


def test_bfloat16_is_looked_up_by_name() -> None:
    assert tolerance("algebra", torch.bfloat16)["rtol"] > tolerance("float32")["rtol"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(KeyError, match="'close enough' is not in the table: algebra, closed form"):
        tolerance("close enough")
