"""The row op and the fused head, forward and backward, beside torch and (where installed) TRL."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from benchmarks.timing import Case


def row_op(n: int = 1024, v: int = 32_000) -> Case:
    """Log-probability and entropy of n tokens with gradients, against log-probability alone.

    The bar: at most 1.05 of log_softmax + gather, which says nothing of entropy.
    """
    import torch

    from kernrl.deep_alignment.ops.logprobs import token_logprobs

    torch.manual_seed(0)
    logits, ids = torch.randn(n, v).mul_(3).requires_grad_(), torch.randint(v, (n,))

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, ids[:, None])[:, 0]

    def stepped(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            logits.grad = None
            loss().backward()

        return step

    def kernrl() -> torch.Tensor:
        stats = token_logprobs(logits, ids)
        return (stats.logprob - 0.01 * stats.entropy).sum()

    def torch_entropy() -> torch.Tensor:
        log_p = logits.log_softmax(-1)
        return (gathered(log_p) + 0.01 * (log_p.exp() * log_p).sum(-1)).sum()

    contenders = {
        "kernrl": kernrl,
        "torch, no entropy": lambda: gathered(logits.log_softmax(-1)).sum(),
        "torch, entropy": torch_entropy,
    }
    if importlib.util.find_spec("trl") is not None:
        from trl.trainer.utils import selective_log_softmax_and_entropy

        def trl() -> torch.Tensor:
            logprob, entropy = selective_log_softmax_and_entropy(logits, ids)
            return (logprob - 0.01 * entropy).sum()

        contenders["trl"] = trl
    return Case(
        f"row op {n} × {v}, float32, forward and backward",
        n,
        "tokens",
        {name: stepped(loss) for name, loss in contenders.items()},
    )


def linear_head(n: int = 4096, h: int = 256, v: int = 32_000) -> Case:
    """The head and the row op in one, with gradients of both factors.

    The bar: at most 110 MB beyond the inputs, gradients counted, and the time of torch's
    linear_cross_entropy in chunks of 512. That has two forms: per token, as here, it multiplies
    four times, for a backward pass must make the logits again; of a mean it knows the gradient
    while it is still in the forward pass, and multiplies three times.
    """
    import torch
    from torch.nn import functional

    from kernrl.deep_alignment.ops.linear_logprobs import linear_token_logprobs

    torch.manual_seed(0)
    hidden, ids = torch.randn(n, h, requires_grad=True), torch.randint(v, (n,))
    weight = torch.randn(v, h).mul_(h**-0.5).requires_grad_()

    def stepped(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            hidden.grad = weight.grad = None
            loss().backward()
            hidden.grad = weight.grad = None

        return step

    def with_entropy() -> torch.Tensor:
        stats = linear_token_logprobs(hidden, weight, ids)
        return -(stats.logprob + 0.01 * stats.entropy).mean()

    contenders = {
        "kernrl": lambda: -linear_token_logprobs(hidden, weight, ids).logprob.mean(),
        "kernrl, entropy": with_entropy,
        "torch, eager": lambda: functional.cross_entropy(hidden @ weight.T, ids),
    }
    if hasattr(functional, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)

        def peer(reduction: str) -> torch.Tensor:
            return functional.linear_cross_entropy(
                hidden, weight, ids, reduction=reduction, options=options
            ).mean()

        contenders["torch, per token"] = lambda: peer("none")
        contenders["torch, mean"] = lambda: peer("mean")
    return Case(
        f"linear head {n} × {h} × {v}, float32, forward and backward",
        n,
        "tokens",
        {name: stepped(loss) for name, loss in contenders.items()},
        repeats=3,
        memory=True,
    )


CASES = (row_op, linear_head)
