"""Which form of an op runs: torch's, or Triton's where there is a GPU or Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops.inputs import IMPLEMENTATIONS

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_triton(owner: str, impl: str, x: Tensor) -> bool:
    """Whether `impl` means Triton for data like `x`: "auto" takes it on CUDA, up to float32."""
    checks.choice(owner, "impl", impl, IMPLEMENTATIONS)
    if impl != "triton":
        return impl == "auto" and x.is_cuda and x.dtype in TRITON_DTYPES and _installed()
    cure = "Use impl='auto' or impl='torch'."
    if not _installed():
        rule = "impl='triton' needs the package triton"
        checks.fail(owner, rule, "an environment without", cure, ImportError)
    if x.dtype not in TRITON_DTYPES:
        rule = "impl='triton' takes float32, bfloat16 and float16"
        checks.fail(owner, rule, f"dtype {x.dtype}", cure, TypeError)
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        rule = "impl='triton' needs CUDA tensors (or TRITON_INTERPRET=1 before triton is imported)"
        checks.fail(owner, rule, f"tensors on {x.device}", cure)
    return True


def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
