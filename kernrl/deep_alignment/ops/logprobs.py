"""The row op: log-probability, entropy and log-sum-exp of every token, with one backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kernrl import checks
from kernrl.deep_alignment.ops import backend, inputs, rows

OWNER = "token_logprobs"


class TokenStats(NamedTuple):
    """What `token_logprobs` says of each token, all of the shape of `ids`; 0 where masked."""

    logprob: Tensor  # ℓ = log softmax(z/τ)_y
    entropy: Tensor  # H = −Σ p log p
    lse: Tensor  # log Σ_j exp(z_j/τ)


def token_logprobs(
    logits: Tensor,  # (..., v), any floating dtype
    ids: Tensor,  # (...), integers in [0, v) where the mask is True
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,  # (...), True = counts; None counts everything
    impl: str = "auto",
) -> TokenStats:  # (...) each: float32, or float64 for float64 logits
    """Log-probability of the chosen token, entropy and log-sum-exp of its row, at z = logits/τ.

    ℓ = z_y − lse,  H = lse − Σ_j p_j z_j,  lse = log Σ_j e^{z_j};  with upstream gradients g:

    dz_j = g_ℓ δ_{jy} + p_j [g_lse − g_ℓ − g_H (H + log p_j)],  divided by τ for the logits.

    One pass forward, one backward; two numbers a row (lse, H) are kept between them, and half
    precision is summed in float32 without a copy of the logits. A row's results are the same to
    the bit whatever rows come with it, and with or without gradient.

    A masked row is not read; its results and its gradient are 0, and its id may be anything, such
    as −100. Logits of −∞ are tokens that cannot be drawn: they add nothing, H stays finite, and
    such a chosen token has ℓ = −∞ with a finite gradient. A row with nothing else has lse = −∞ and
    is NaN otherwise, as in torch. Gradients of gradients are refused.

    `impl`: "torch" is this definition; "triton" the same on a GPU, up to float32; "auto" takes
    Triton for CUDA tensors where it is installed. On the CPU an id outside [0, v) is an error; on
    a GPU, where looking would stall it, ℓ is NaN there.

    >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    >>> stats = token_logprobs(logits, torch.tensor([0, 2]))
    >>> [round(float(p), 4) for p in stats.logprob.exp()], round(float(stats.entropy[0]), 4)
    ([0.5, 0.7], 1.0397)
    """
    logits = inputs.uncast(OWNER, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        checks.fail(OWNER, "logits must have shape (..., v) with v > 0", checks.shape(logits))
    ids, mask = check_ids(OWNER, ids, mask, "logits", logits)
    temperature = checks.real(OWNER, "temperature", temperature, above=0.0)
    checks.choice(OWNER, "impl", impl, inputs.IMPLEMENTATIONS)
    return TokenStats(*_forward(logits, ids, mask, temperature, impl))


# ---------------------------------------------------------------- ids, shared with the linear op


def check_ids(
    owner: str, ids: Any, mask: Any, like_name: str, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Integer ids and boolean mask, one for each row of `like`."""
    ids = inputs.tensor(owner, "ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        checks.fail(owner, "ids must be integers", f"dtype {ids.dtype}", error=TypeError)
    inputs.same_device(owner, "ids", ids, like_name, like)
    if ids.shape != like.shape[:-1]:
        rule = f"ids must have the shape of {like_name} without its last axis"
        checks.fail(owner, f"{rule} {checks.shape(like[..., 0])}", checks.shape(ids))
    return ids.long(), inputs.counting(owner, mask, "ids", ids)


def in_range(owner: str, ids: Tensor, chosen: Tensor | None, v: int) -> None:
    """Every chosen id must be in [0, v); looked at on the CPU only."""
    if ids.is_cuda:
        return
    counted = ids if chosen is None else ids[chosen]
    bad = (counted < 0) | (counted >= v)
    if not bool(bad.any()):
        return
    first = int(bad.nonzero()[0])
    place = first if chosen is None else int(chosen[first])
    cure = "Mask the positions that do not count, for example with mask=ids != -100."
    rule = f"ids must be in [0, {v}) where the mask is True"
    checks.fail(owner, rule, f"{int(counted[first])} at token {place}", cure)


def twice_refused(owner: str) -> NoReturn:
    """Gradients of gradients have no formula here."""
    cure = "Take the loss's gradient once, or use torch.log_softmax."
    checks.fail(owner, "gradients of gradients are not supported", None, cure, NotImplementedError)


# ---------------------------------------------------------------- the op that torch knows

_LIBRARY = "kernrl::token_logprobs"


@torch.library.custom_op(
    _LIBRARY,
    mutates_args=(),
    schema="(Tensor logits, Tensor ids, Tensor? mask, float temperature, str impl)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    if backend.takes_triton(OWNER, impl, logits):
        from kernrl.deep_alignment.ops._triton import logprobs as triton

        return triton.token_stats(logits, ids, mask, temperature)
    flat, chosen = ids.flatten(), rows.kept(mask)
    in_range(OWNER, flat, chosen, logits.shape[-1])
    flat = flat.clamp(0, logits.shape[-1] - 1)
    parts = [rows.sums(z, flat[k], some, temperature) for z, k, some in _parts(logits, chosen)]
    highest, total, weighted, target = torch.cat(parts, 1)
    log_total = total.log()
    logprob, entropy = target - log_total, log_total - weighted / total
    lse = highest + log_total
    return logprob.view(ids.shape), entropy.view(ids.shape), lse.view(ids.shape)


@_forward.register_fake
def _(
    logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float, impl: str
) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(ids.shape, dtype=rows.accumulation(logits)) for _ in range(3))


@torch.library.custom_op(
    f"{_LIBRARY}_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor ids, Tensor? mask, Tensor entropy, Tensor lse,"
    " Tensor? grad_logprob, Tensor? grad_entropy, Tensor? grad_lse, float temperature, str impl)"
    " -> Tensor",
)
def _backward(
    logits: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    temperature: float,
    impl: str,
) -> Tensor:
    numbers = _coefficients(entropy, lse, grad_logprob, grad_entropy, grad_lse)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if backend.takes_triton(OWNER, impl, logits):
        from kernrl.deep_alignment.ops._triton import logprobs as triton

        triton.gradient(logits, ids, mask, numbers, temperature, out)
        return out
    flat, into = ids.flatten().clamp(0, logits.shape[-1] - 1), out.view(-1, logits.shape[-1])
    r, a, b, c = (None if x is None else x.flatten() for x in numbers)
    assert r is not None and a is not None and c is not None
    for z, k, some in _parts(logits, rows.kept(mask)):
        here = (r[k], a[k], None if b is None else b[k], c[k])
        rows.gradient(z, flat[k], some, here, temperature, into[k])
    return out


def _coefficients(
    entropy: Tensor,
    lse: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> rows.Numbers:
    """With d_j = log p_j: dz_j = p_j [g_lse − g_ℓ − g_H (H + d_j)] + g_ℓ δ_{jy}."""
    zeros = torch.zeros_like(lse)
    c = zeros if grad_logprob is None else grad_logprob
    a = (zeros if grad_lse is None else grad_lse) - c
    if grad_entropy is None or rows.unused(grad_entropy):
        return lse, a, None, c
    return lse, a - grad_entropy * entropy, -grad_entropy, c


@_backward.register_fake
def _(logits: Tensor, *rest: object) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _parts(logits: Tensor, chosen: Tensor | None) -> Iterator[tuple[Tensor, slice, Tensor | None]]:
    """The logits as matrices, the places of their rows, and the chosen ones within them."""
    start = 0
    for z in rows.matrices(logits):
        stop = start + len(z)
        some = None if chosen is None else chosen[(chosen >= start) & (chosen < stop)] - start
        yield z, slice(start, stop), some
        start = stop


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, ids, mask, ctx.temperature, ctx.impl = inputs
    ctx.save_for_backward(logits, ids, mask, *output[1:])


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(*ctx.saved_tensors, *grads, ctx.temperature, ctx.impl), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(lambda ctx, grad: twice_refused(OWNER))
