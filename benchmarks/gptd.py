"""GPTD: the marginal-likelihood fit against GPyTorch's exact GP, and one online step."""

from __future__ import annotations

import numpy as np

from benchmarks.timing import Case
from kernrl.approx.dictionary import Dictionary
from kernrl.data.returns import discounted
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF
from kernrl.value.gptd import GPTD
from kernrl.value.hyperparameters import maximise_likelihood

GAMMA = 0.9


def episode(n: int) -> Transitions:
    """One terminated episode in eight dimensions, all of which matter to its value."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n + 1, 8))
    value = np.sin(x[:, 0]) + 0.5 * np.cos(2 * x[:, 1]) * x[:, 2] + 0.3 * np.tanh(x[:, 7])
    value += 0.3 * np.sin(x[:, 3] + x[:, 4]) + 0.2 * x[:, 5] * x[:, 6]
    returns = value[:n] + 0.1 * rng.standard_normal(n)
    rewards = np.append(returns[:-1] - GAMMA * returns[1:], returns[-1])
    return Transitions(x[:-1], rewards, x[1:], np.arange(n) == n - 1)


def likelihood_fit(n: int = 2000) -> Case:
    """Eight length scales, variance and noise: L-BFGS from the same start to the same optimum.

    On one terminated episode GPTD is GP regression on the returns, so the peer is GPyTorch's exact
    GP on them, held to Cholesky factors (its default above 800 rows is not exact), by torch's
    L-BFGS with strong-Wolfe steps. Both run on as many threads as the environment allows.
    """
    data, reached = episode(n), {}

    def agree(name: str, likelihood: float) -> None:
        reached[name] = likelihood
        if max(reached.values()) - min(reached.values()) > 0.1:
            raise AssertionError(f"different optima: {reached}")

    def ours() -> None:
        start = GPTD(1.0 * RBF(np.ones(8)), GAMMA, 0.1)
        agree("kernrl", maximise_likelihood(start, data).log_marginal_likelihood)

    return Case(
        f"GPTD likelihood fit {n} rows, d = 8, ARD",
        1,
        "fits",
        {"kernrl": ours, "gpytorch": lambda: agree("gpytorch", _by_gpytorch(data))},
        repeats=1,
    )


def _by_gpytorch(data: Transitions) -> float:
    """The log likelihood that GPyTorch reaches."""
    import gpytorch
    import torch

    x, y = torch.tensor(data.states), torch.tensor(discounted(data.rewards, GAMMA))

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            inner = gpytorch.kernels.RBFKernel(ard_num_dims=8)
            self.covar_module = gpytorch.kernels.ScaleKernel(inner)

        def forward(self, z: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(z), self.covar_module(z)
            )

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Model(likelihood).double()
    model.covar_module.outputscale, likelihood.noise = 1.0, 0.1
    model.covar_module.base_kernel.lengthscale = 1.0
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-9
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        return loss

    with gpytorch.settings.max_cholesky_size(10**6):
        optimiser.step(closure)
        return -closure().item() * len(data)


def online_step() -> Case:
    """1 000 rows of experience on 500 atoms, and the same handed over one row at a time.

    The second contender pays for checks and for a Transitions object a row.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4001, 8))
    ends = np.arange(4000) % 200 == 199
    data = Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], ends)
    dictionary = Dictionary(threshold=0.5, max_size=500)
    model = GPTD(RBF(1.0), 0.95, dictionary=dictionary).fit(data[:3000])
    if model.features_.size != 500:
        raise AssertionError("the dictionary must be full")
    more = data[3000:]

    def one_by_one() -> None:
        for i in range(len(more)):
            model.partial_fit(more[i : i + 1])

    contenders = {"kernrl": lambda: model.partial_fit(more), "kernrl, row by row": one_by_one}
    return Case("online GPTD, 500 atoms, d = 8", len(more), "rows", contenders)


CASES = (likelihood_fit, online_step)
