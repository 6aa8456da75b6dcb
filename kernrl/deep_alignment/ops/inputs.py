"""What every op asks of its tensors: floating, on one device, of one shape; mask before maths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernrl import checks

IMPLEMENTATIONS = ("auto", "torch", "triton")


def implementation(owner: str, impl: str) -> None:
    """`impl` must be known and present: this version holds the torch form of every op."""
    checks.choice(owner, "impl", impl, IMPLEMENTATIONS)
    if impl == "triton":
        checks.fail(
            owner,
            "impl='triton' is not in this version",
            cure="Use impl='auto' or impl='torch'.",
            error=NotImplementedError,
        )


def tensor(owner: str, name: str, x: Any) -> Tensor:
    """`x` itself, a torch tensor of whatever dtype."""
    if not isinstance(x, Tensor):
        cure = "Convert it first, for example with torch.as_tensor."
        checks.fail(owner, f"{name} must be a torch tensor", type(x).__name__, cure, TypeError)
    return x


def floating(owner: str, name: str, x: Any) -> Tensor:
    """`x` as float32 or float64: half precision is raised to float32, since ops sum and exp."""
    out = uncast(owner, name, x)
    return out.float() if out.element_size() < 4 else out


def uncast(owner: str, name: str, x: Any) -> Tensor:
    """A floating `x` in its own dtype: for tensors too large to be copied whole."""
    out = tensor(owner, name, x)
    if not out.is_floating_point():
        rule, got = f"{name} must be a floating-point tensor", f"dtype {out.dtype}"
        checks.fail(owner, rule, got, "Convert it first, for example with x.float().", TypeError)
    return out


def matching(owner: str, name: str, x: Any, like_name: str, like: Tensor) -> Tensor:
    """A floating `x` with the shape and device of `like`; a last axis of one is spread over t."""
    out = floating(owner, name, x)
    same_device(owner, name, out, like_name, like)
    if out.shape == like.shape:
        return out
    if like.ndim > 1 and out.shape == (*like.shape[:-1], 1):
        return out.expand_as(like)
    rule = f"{name} must have the shape of {like_name} {checks.shape(like)}"
    checks.fail(owner, rule, checks.shape(out))


def flags(owner: str, name: str, x: Any, like_name: str, like: Tensor) -> Tensor:
    """`x` as booleans with the shape and device of `like`; None means none set."""
    if x is None:
        return torch.zeros_like(like, dtype=torch.bool)
    out = tensor(owner, name, x)
    same_device(owner, name, out, like_name, like)
    if out.shape != like.shape:
        rule = f"{name} must have the shape of {like_name} {checks.shape(like)}"
        checks.fail(owner, rule, checks.shape(out))
    return out if out.dtype == torch.bool else out != 0


def counting(owner: str, mask: Any, like_name: str, like: Tensor) -> Tensor | None:
    """The mask as booleans; numbers count where they are not zero. None counts everything."""
    return None if mask is None else flags(owner, "mask", mask, like_name, like)


def same_device(owner: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """`x` and `like` must live on one device."""
    if x.device != like.device:
        cure = f"Move one of them, for example with {name}.to({like_name}.device)."
        rule = f"{name} must be on the device of {like_name} ({like.device})"
        checks.fail(owner, rule, str(x.device), cure)


def sequences(owner: str, what: str, x: Tensor) -> None:
    """`what` works on sequences, so `x` needs a batch axis before time."""
    if x.ndim < 2:
        checks.fail(owner, f"{what} needs tensors of shape (b, t)", checks.shape(x))


def epsilon(owner: str, name: str, value: Any) -> float:
    """A clip range: a finite number of at least 0."""
    return checks.real(owner, name, value, at_least=0.0)


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` with exact zeros, and no gradient, where the mask is False, whatever stands there."""
    return x if mask is None else torch.where(mask, x, 0.0)


def count(mask: Tensor | None, x: Tensor) -> int | Tensor:  # how many entries of x count, ≥ 1
    """The number to divide a sum over `x` by; 1 where nothing counts, since 0/1 is the answer."""
    return max(x.numel(), 1) if mask is None else mask.sum().clamp(min=1)


def lengths(mask: Tensor | None, x: Tensor) -> int | Tensor:  # (b, t) -> int or (b, 1), ≥ 1
    """The number of counting entries per sequence; 1 for an empty one."""
    return max(x.shape[-1], 1) if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
