"""Small networks: an orthogonal MLP, its NumPy twin for acting, action heads, a flat Adam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from kernrl import checks

Layers = list[tuple[np.ndarray, np.ndarray]]


def mlp(
    n_in: int, hidden: Sequence[int], n_out: int, *, gain: float, generator: torch.Generator
) -> nn.Sequential:
    """tanh layers with orthogonal weights of gain √2, a linear one of gain `gain`, zero biases."""
    sizes = (n_in, *hidden, n_out)
    gains = [math.sqrt(2)] * len(hidden) + [gain]
    layers: list[nn.Module] = []
    for rows, columns, scale in zip(sizes, sizes[1:], gains, strict=False):
        # The global stream stays untouched. Not skip_init: its first call imports SymPy, half a
        # second on the clock of training.
        with torch.random.fork_rng(devices=[]):
            linear = nn.Linear(rows, columns)
        nn.init.orthogonal_(linear.weight, scale, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def numpy_layers(network: nn.Sequential) -> Layers:
    """The weights and biases of `mlp` as NumPy arrays that share its memory."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    return [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in linear]


def numpy_forward(layers: Layers, x: np.ndarray) -> np.ndarray:  # (b, n_in) -> (b, n_out)
    """What the network computes, without torch: one observation costs microseconds, not 100."""
    *inner, (weight, bias) = layers
    for inner_weight, inner_bias in inner:
        x = np.tanh(x @ inner_weight + inner_bias)
    return x @ weight + bias


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold torch at one thread: on matrices this small a second one slows, and changes digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- heads


def head(owner: str, space: spaces.Space[Any]) -> Categorical | Gaussian:
    """The distribution over the actions of `space`."""
    if isinstance(space, spaces.Box):
        return Gaussian(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return Categorical(space)
    rule = "the action space must be Box, Discrete, MultiDiscrete or MultiBinary"
    checks.fail(owner, rule, space, error=TypeError)


class Categorical(nn.Module):
    """Independent categories, one for each entry of a discrete action.

    An inner action is (b, k) int64 from 0; `to_env` gives it the shape and start of the space.
    """

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        super().__init__()
        shape = space.shape or ()
        if isinstance(space, spaces.MultiBinary):
            sizes, self.start = np.full(shape, 2), np.zeros(shape, dtype=np.int64)
        elif isinstance(space, spaces.Discrete):
            sizes, self.start = np.array(space.n), np.array(space.start)
        else:
            sizes, self.start = space.nvec, space.start
        self.shape, self.dtype = shape, space.dtype
        self.sizes = [int(k) for k in sizes.reshape(-1)]
        ends = np.cumsum(self.sizes)
        self.blocks = [slice(int(e - k), int(e)) for e, k in zip(ends, self.sizes, strict=True)]
        self.n_outputs = int(ends[-1])

    def mode(self, logits: np.ndarray) -> np.ndarray:  # (b, Σk) -> (b, k)
        """The likeliest category of each entry."""
        return np.stack([logits[..., block].argmax(-1) for block in self.blocks], axis=-1)

    def sample(self, logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw: the largest logit after adding Gumbel noise (Gumbel 1954)."""
        return self.mode(logits + rng.gumbel(size=logits.shape))

    def to_env(self, actions: np.ndarray) -> np.ndarray:  # (b, k) -> (b, *shape)
        """Inner actions as the environment takes them."""
        return (actions.reshape(-1, *self.shape) + self.start).astype(self.dtype, copy=False)

    def forward(self, logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of the actions and entropy, (n, Σk), (n, k) -> (n,), (n,)."""
        logprob, entropy = 0.0, 0.0
        for i, block in enumerate(self.blocks):
            logp = logits[:, block].log_softmax(-1)
            logprob = logprob + logp.gather(-1, actions[:, i : i + 1]).squeeze(-1)
            entropy = entropy - (logp.exp() * logp).sum(-1)
        return logprob, entropy


class Gaussian(nn.Module):
    """Independent normals with the network's means and one learnt log σ for each dimension.

    An inner action is (b, d) float32, unbounded; `to_env` maps ±1 to the bounds of the space,
    where it has them, and clips what lies beyond.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.shape, self.dtype = space.shape, space.dtype
        self.n_outputs = int(np.prod(space.shape))
        self.low, self.high = space.low.reshape(-1), space.high.reshape(-1)
        bounded = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(bounded, self.low, -1.0), np.where(bounded, self.high, 1.0)
        self.centre, self.half = (low + high) / 2, (high - low) / 2
        self.log_std = nn.Parameter(torch.zeros(self.n_outputs))

    def mode(self, mean: np.ndarray) -> np.ndarray:  # (b, d) -> (b, d)
        """The mean."""
        return mean

    def sample(self, mean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw."""
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return mean + noise * np.exp(self.log_std.detach().numpy())

    def to_env(self, actions: np.ndarray) -> np.ndarray:  # (b, d) -> (b, *shape)
        """Inner actions as the environment takes them."""
        scaled = np.clip(self.centre + self.half * actions, self.low, self.high)
        return scaled.reshape(-1, *self.shape).astype(self.dtype, copy=False)

    def forward(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of the actions and entropy, (n, d), (n, d) -> (n,), (n,)."""
        log_std = self.log_std
        z = (actions - mean) * (-log_std).exp()
        constant = log_std.sum() + 0.5 * self.n_outputs * math.log(2 * math.pi)
        logprob = -0.5 * z.square().sum(-1) - constant
        return logprob, (constant + 0.5 * self.n_outputs).expand_as(logprob)


# ---------------------------------------------------------------- optimiser


class FlatAdam:
    """Adam (Kingma & Ba 2015) on all parameters as one vector, with the gradient's norm clipped.

    Parameters and gradients become views of two vectors, so an update is ten calls whatever the
    number of layers; on networks this small calls are the cost, and this takes a fifth of the
    time of torch.optim.Adam with clip_grad_norm_.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
    ) -> None:
        self.parameters = list(parameters)
        self.betas, self.eps, self.n_steps = betas, eps, 0
        self.vector = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.gradient = torch.zeros_like(self.vector)
        self.mean, self.square = torch.zeros_like(self.vector), torch.zeros_like(self.vector)
        start = 0
        for p in self.parameters:
            rows = slice(start, start := start + p.numel())
            p.data, p.grad = self.vector[rows].view_as(p), self.gradient[rows].view_as(p)

    @torch.no_grad()
    def step(self, loss: Tensor, learning_rate: float, max_grad_norm: float | None = None) -> None:
        """One step down the gradient of `loss`."""
        self.gradient.zero_()
        with torch.enable_grad():
            loss.backward()
        gradient = self.gradient
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            cure = "Lower learning_rate, or scale rewards and observations."
            checks.fail("FlatAdam", "the gradient must be finite", norm, cure, FloatingPointError)
        if max_grad_norm is not None and norm > max_grad_norm:
            gradient.mul_(max_grad_norm / norm)
        self.n_steps += 1
        first, second = self.betas
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correction = math.sqrt(1 - second**self.n_steps)
        divisor = self.square.sqrt().div_(correction).add_(self.eps)
        rate = learning_rate / (1 - first**self.n_steps)
        self.vector.addcdiv_(self.mean, divisor, value=-rate)
