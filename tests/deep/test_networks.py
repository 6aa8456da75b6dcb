"""Networks against linear algebra, heads against torch.distributions, FlatAdam against Adam."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tolerances import tolerance
from torch import nn

from kernrl.deep.networks import (
    FlatAdam,
    head,
    mlp,
    numpy_forward,
    numpy_layers,
    one_thread,
)


def network(seed=0, gain=0.5):
    return mlp(5, (16, 8), 3, gain=gain, generator=torch.Generator().manual_seed(seed))


def test_weights_are_orthogonal_with_their_gains_and_biases_zero():
    linear = [layer for layer in network() if isinstance(layer, nn.Linear)]
    for layer, gain in zip(linear, (2**0.5, 2**0.5, 0.5), strict=True):
        w = layer.weight.detach()
        gram = w.T @ w if w.shape[0] > w.shape[1] else w @ w.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), **tolerance("float32"))
        assert not layer.bias.any()


def test_weights_come_from_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = network(7)
    assert torch.equal(torch.get_rng_state(), before)
    second, other = network(7), network(8)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize("b", [1, 2, 33])
def test_the_numpy_form_computes_the_network_and_follows_its_weights(b, rng):
    net, x = network(), rng.normal(size=(b, 5)).astype(np.float32)
    layers = numpy_layers(net)
    for _ in range(2):
        expected = net(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(numpy_forward(layers, x), expected, **tolerance("float32"))
        with torch.no_grad():  # the second round sees the change through the same arrays
            net[0].weight.mul_(1.5)


def test_one_thread_is_put_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="inside"), one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- categories

DISCRETE = {
    "one": (spaces.Discrete(3), [3]),
    "started": (spaces.Discrete(4, start=-1), [4]),
    "many": (spaces.MultiDiscrete([2, 3, 5]), [2, 3, 5]),
    "table": (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 7]]), [2, 3, 4, 2]),
    "binary": (spaces.MultiBinary(3), [2, 2, 2]),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_categorical_matches_torch_distributions(name, rng):
    space, sizes = DISCRETE[name]
    law = head("test", space)
    assert law.n_outputs == sum(sizes)
    logits = torch.from_numpy(rng.normal(size=(11, sum(sizes))))
    actions = torch.from_numpy(law.sample(logits.numpy(), rng))
    assert actions.shape == (11, len(sizes))
    parts = [torch.distributions.Categorical(logits=z) for z in logits.split(sizes, dim=-1)]
    expected = sum(part.log_prob(a) for part, a in zip(parts, actions.T, strict=True))
    logprob, entropy = law(logits, actions)
    torch.testing.assert_close(logprob, expected, **tolerance("algebra"))
    expected = sum(part.entropy() for part in parts)
    torch.testing.assert_close(entropy, expected, **tolerance("algebra"))


@pytest.mark.parametrize("name", DISCRETE)
def test_every_action_is_one_of_the_space_and_every_one_is_drawn(name, rng):
    space, sizes = DISCRETE[name]
    law = head("test", space)
    drawn = law.sample(np.zeros((500, sum(sizes))), rng)
    actions = law.to_env(drawn)
    assert actions.shape == (500, *space.shape)
    kind = np.int64 if isinstance(space, spaces.Discrete) else None
    assert all(space.contains(kind(a) if kind else a) for a in actions)
    assert len(np.unique(drawn, axis=0)) == np.prod(sizes)


def test_draws_have_the_softmax_frequencies(rng):
    logits = np.array([0.0, 1.0, -2.0])
    drawn = head("test", spaces.Discrete(3)).sample(np.tile(logits, (100_000, 1)), rng)
    p = np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(drawn[:, 0], minlength=3)
    # Pearson's χ² with two degrees of freedom exceeds 13.8 once in a thousand.
    assert ((counts - 100_000 * p) ** 2 / (100_000 * p)).sum() < 13.8


def test_mode_is_the_largest_logit_of_each_entry():
    law = head("test", spaces.MultiDiscrete([2, 3]))
    np.testing.assert_array_equal(law.mode(np.array([[0.0, 1.0, 5.0, 2.0, 3.0]])), [[1, 0]])


# ---------------------------------------------------------------- normals


def test_gaussian_matches_torch_distributions(rng):
    law = head("test", spaces.Box(-1.0, 1.0, (3,)))
    with torch.no_grad():
        law.log_std.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    mean = torch.from_numpy(rng.normal(size=(7, 3))).float()
    actions = torch.from_numpy(law.sample(mean.numpy(), rng))
    assert actions.dtype == torch.float32
    normal = torch.distributions.Normal(mean, law.log_std.exp())
    logprob, entropy = law(mean, actions)
    expected = normal.log_prob(actions).sum(-1)
    torch.testing.assert_close(logprob, expected, **tolerance("float32"))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1), **tolerance("float32"))
    drawn = law.sample(np.zeros((100_000, 3), dtype=np.float32), rng)
    # 100 000 draws: the relative error of a deviation is 0.2 %, of which five sigma are 1.1 %.
    np.testing.assert_allclose(drawn.std(axis=0), np.exp([-1.0, 0.0, 0.5]), rtol=0.011)


def test_plus_minus_one_reaches_the_bounds_and_no_further():
    space = spaces.Box(np.array([[0.0, -2.0]]), np.array([[10.0, 2.0]]), dtype=np.float64)
    law = head("test", space)
    actions = law.to_env(np.array([[-1.0, -1.0], [0.0, 0.5], [1.0, 1.0], [7.0, -7.0]]))
    assert actions.dtype == np.float64
    expected = [[[0.0, -2.0]], [[5.0, 1.0]], [[10.0, 2.0]], [[10.0, -2.0]]]
    np.testing.assert_array_equal(actions, expected)


def test_an_unbounded_entry_is_left_as_drawn_and_a_half_bounded_one_clipped():
    space = spaces.Box(np.array([-np.inf, 0.0]), np.array([np.inf, np.inf]), dtype=np.float64)
    law = head("test", space)
    np.testing.assert_array_equal(law.to_env(np.array([[-9.0, -9.0]])), [[-9.0, 0.0]])


def test_an_unknown_action_space_is_refused():
    text = "PPO: the action space must be Box, Discrete, MultiDiscrete or MultiBinary, got Text"
    with pytest.raises(TypeError, match=text):
        head("PPO", spaces.Text(3))


# ---------------------------------------------------------------- optimiser


@pytest.mark.parametrize("max_grad_norm", [None, 0.05, 100.0])
def test_flat_adam_is_adam_with_clipped_gradients(max_grad_norm, rng):
    mine = network(gain=1.0)
    other = copy.deepcopy(mine)
    flat = FlatAdam(mine.parameters())
    adam = torch.optim.Adam(other.parameters(), lr=0.01, eps=1e-5)
    for _ in range(20):
        x = torch.from_numpy(rng.normal(size=(9, 5)).astype(np.float32))
        flat.step(mine(x).square().sum(), 0.01, max_grad_norm)
        adam.zero_grad()
        other(x).square().sum().backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(other.parameters(), max_grad_norm)
        adam.step()
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance("float32"))


def test_a_gradient_that_is_not_finite_stops_before_any_weight_moves():
    net = network()
    before = copy.deepcopy(net.state_dict())
    adam = FlatAdam(net.parameters())
    text = r"FlatAdam: the gradient must be finite, got nan\. Lower learning_rate, or scale"
    with pytest.raises(FloatingPointError, match=text):
        adam.step(net(torch.full((1, 5), torch.nan)).sum(), 0.1)
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name])


# ---------------------------------------------------------------- what making one costs


def test_making_the_first_network_imports_nothing():
    """SymPy, say, takes half a second, which would count as training in the first run."""
    code = (
        "import sys, torch; from kernrl.deep.networks import mlp; before = set(sys.modules); "
        "mlp(3, (4,), 2, gain=1.0, generator=torch.Generator()); "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
