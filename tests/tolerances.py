"""Every tolerance the tests compare with, each with its reason. No test writes a number of its own.

Used as `np.testing.assert_allclose(got, expected, **tolerance("closed form"))`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    """How far apart two numbers may be, and why."""

    rtol: float
    atol: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "exact": Tolerance(0.0, 0.0, "the same operations in the same order: every bit agrees"),
    "algebra": Tolerance(
        1e-11,
        1e-13,
        "two orders of the same few float64 operations; each rounds by 1.1e-16, sums of some "
        "thousand terms lose four to five digits at worst",
    ),
    "closed form": Tolerance(
        1e-8,
        1e-10,
        "a float64 solve against a closed form: condition numbers up to 1e7 cost seven of "
        "sixteen digits",
    ),
    "iterative": Tolerance(
        1e-6, 1e-8, "an iteration stopped by its own residual, well above rounding"
    ),
    "finite difference": Tolerance(
        1e-5,
        1e-7,
        "central differences in float64: step h = 1e-5 leaves h² = 1e-10 of truncation and "
        "eps/h = 2e-11 of rounding, both scaled by higher derivatives",
    ),
    "monte carlo": Tolerance(
        2e-2,
        2e-3,
        "two independent simulations of 2e4 or more draws: a quantile far out is off by 1 % or so",
    ),
    "float32": Tolerance(
        2e-5, 2e-6, "float32 rounds by 6e-8; sums of some hundred terms lose two to three digits"
    ),
}

# The same comparison where the data have fewer digits: (name, dtype) -> what holds there.
BY_DTYPE: dict[tuple[str, str], Tolerance] = {
    ("algebra", "float32"): TOLERANCES["float32"],
    ("closed form", "float32"): Tolerance(
        1e-3, 1e-4, "a float32 solve: condition numbers up to 1e4 cost four of seven digits"
    ),
    ("algebra", "bfloat16"): Tolerance(
        2e-2, 1e-2, "bfloat16 keeps eight bits: one rounding is 4e-3"
    ),
    ("algebra", "float16"): Tolerance(
        2e-3, 1e-3, "float16 keeps eleven bits: one rounding is 5e-4"
    ),
}


def tolerance(name: str, dtype: object = None) -> dict[str, float]:
    """`rtol` and `atol` of a named tolerance, as keywords of numpy's and torch's comparisons.

    `dtype` (a NumPy or torch dtype, or its name) takes the entry for that dtype where there is one.
    """
    if name not in TOLERANCES:
        raise KeyError(f"tolerance {name!r} is not in the table: {', '.join(sorted(TOLERANCES))}")
    entry = BY_DTYPE.get((name, _dtype_name(dtype)), TOLERANCES[name])
    return {"rtol": entry.rtol, "atol": entry.atol}


def _dtype_name(dtype: object) -> str:
    if dtype is None:
        return ""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return text if text == "bfloat16" else np.dtype(dtype).name  # type: ignore[call-overload]  # any dtype-like
