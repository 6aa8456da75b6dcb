"""What the on-policy agents learn from: the rows of one rollout, and shuffled parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Rollout(NamedTuple):
    """The valid rows of one rollout, n of them."""

    inputs: Tensor  # (n, d)
    actions: Tensor  # (n, k), as the head draws them
    logprob: Tensor  # (n,) at sampling time
    value: Tensor  # (n,) at sampling time
    advantage: Tensor  # (n,)
    returns: Tensor  # (n,)

    def minibatches(self, batch_size: int, rng: np.random.Generator) -> Iterator[Rollout]:
        """One shuffled pass in parts of nearly equal size, at most `batch_size` rows each."""
        n = len(self.value)
        n_parts = -(-n // batch_size)
        order = torch.from_numpy(rng.permutation(n))
        parts = [column[order].tensor_split(n_parts) for column in self]
        return map(Rollout._make, zip(*parts, strict=True))

    def explained_variance(self) -> float | None:
        """1 − Var(R − V)/Var(R): 1 is perfect, 0 no better than a constant; None if R is one."""
        spread = float(self.returns.var(correction=0))
        return 1 - float((self.returns - self.value).var(correction=0)) / spread if spread else None
