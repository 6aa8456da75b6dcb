"""Cases of a language-model head, and the comparison of two ways to its token statistics."""

from __future__ import annotations

import numpy as np
import torch
from tolerances import tolerance


def case(rng, shape=(3, 5), h=6, v=11, dtype=torch.float64):
    """hidden, weight, bias, ids, mask."""
    tensors = [torch.tensor(rng.normal(size=s), dtype=dtype) for s in ((*shape, h), (v, h), (v,))]
    ids = torch.as_tensor(rng.integers(v, size=shape))
    return *tensors, ids, torch.as_tensor(rng.random(shape) < 0.6)


def slopes(function, rng, *tensors):
    """Results and gradients of a random combination of the three results."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    stats = function(*leaves)
    weights = [torch.as_tensor(rng.normal(size=x.shape)).to(x.dtype) for x in stats]
    gradients = torch.autograd.grad(list(stats), leaves, weights)
    return [x.detach() for x in stats], gradients


def same(one, other, rng_seed, tensors, **limits):
    a = slopes(one, np.random.default_rng(rng_seed), *tensors)
    b = slopes(other, np.random.default_rng(rng_seed), *tensors)
    for got, want in zip([*a[0], *a[1]], [*b[0], *b[1]], strict=True):
        torch.testing.assert_close(got, want, **(limits or tolerance("algebra")))
