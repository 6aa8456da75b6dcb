"""Gradients of functions of the Gram matrix, by formula and by autograd, against differences."""

import gpytorch
import numpy as np
import pytest
import torch
from reference.gp import finite_difference
from tolerances import tolerance

from kernrl.kernels import gpytorch_bridge, gradients
from kernrl.kernels.base import Delta, Kernel
from kernrl.kernels.dot import Linear, Polynomial
from kernrl.kernels.gpytorch_bridge import from_gpytorch
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern, Periodic, RationalQuadratic

ARD = np.array([0.5, 1.0, 2.0])
BY_FORMULA = {
    "RBF": RBF(0.7),
    "RBF ARD": RBF(ARD),
    "Matern 1/2": Matern(0.8, nu=0.5),
    "Matern 3/2": Matern(ARD, nu=1.5),
    "Matern 5/2": Matern(ARD, nu=2.5),
    "RationalQuadratic": RationalQuadratic(ARD, 0.6),
    "Linear": Linear(1.5, 0.3),
    "Linear through 0": Linear(2.0),
    "Polynomial": Polynomial(3, 0.5),
    "Polynomial of degree 1": Polynomial(1, 0.5),
    "Scaled": 2.5 * RBF(0.3),
    "Sum": RBF(0.7) + 2.0 * Linear(),
    "three terms": RBF(1.0) + RBF(2.0) + Matern(0.4),
    "Product": RBF(1.0) * Matern(2.0) * RBF(3.0),
    "on columns": 2.0 * RBF(ARD[:2]).on([0, 2]) + Delta(),
    "StateAction": StateAction(RBF(ARD[:2]), Matern(0.5)),
}
BY_AUTOGRAD = {
    "Laplacian": Laplacian(ARD),
    "Periodic": Periodic(1.2, 2.5),
    "Periodic ARD": Periodic(ARD, 2.5),
    "nested": 0.5 * (RBF(1.0).on([0]) + Periodic(1.0, 3.0).on([1, 2])) * Matern(3.0),
    "blocks": StateAction(Laplacian(0.7), Delta()),
}
EVERY = BY_FORMULA | BY_AUTOGRAD


@pytest.fixture(scope="module")
def data():
    """Points of which two coincide and one column is constant, and a symmetric ∂f/∂K."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))  # more than one tile
    x[5] = x[6]
    g = rng.normal(size=(300, 300))
    return x, g + g.T


def by_differences(kernel, x, g, parameter):
    """Σ G ∂K/∂log θ by central differences in log θ."""

    def f(log_value):
        value = np.exp(log_value).reshape(parameter.value.shape)
        return np.vdot(g, gradients.with_parameters(kernel, {parameter.name: value})(x))

    return finite_difference(f, np.log(np.ravel(parameter.value))).reshape(parameter.value.shape)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("how", ["chosen", "autograd"])
def test_against_differences(name, how, data):
    kernel, (x, g) = EVERY[name], data
    assert gradients.has_formula(kernel) == (name in BY_FORMULA)
    if how == "chosen":
        matrix, pull_back = gradients.evaluate(kernel, x)
    else:
        matrix, pull_back = gpytorch_bridge.differentiate(kernel, x)
    np.testing.assert_allclose(matrix, kernel(x), **tolerance("algebra"))
    found, free = pull_back(g), list(gradients.free_parameters(kernel, x))
    assert set(found) == {p.name for p in free}
    scale = np.sum(np.abs(g))
    for p in free:
        expected = by_differences(kernel, x, g, p)
        assert found[p.name].shape == p.value.shape
        np.testing.assert_allclose(
            found[p.name] / scale, expected / scale, **tolerance("finite difference")
        )


def test_a_second_pull_back_is_as_good(data):
    x, g = data
    for kernel in (2.0 * RBF(ARD), 2.0 * Laplacian(ARD)):
        _, pull_back = gradients.evaluate(kernel, x)
        first = pull_back(g)
        for name, value in pull_back(2.0 * g).items():
            np.testing.assert_allclose(value, 2.0 * first[name], **tolerance("algebra"))


def test_offset_data_lose_nothing(data):
    """The sums are over differences, so the origin must not matter."""
    x, g = data
    near = gradients.evaluate(RBF(ARD), x).pull_back(g)["length_scale"]
    far = gradients.evaluate(RBF(ARD), x + 1024.0).pull_back(g)["length_scale"]
    np.testing.assert_allclose(far, near, **tolerance("closed form"))


def test_free_parameters_and_what_they_divide():
    x = np.column_stack((np.arange(4.0), 10.0 * np.arange(4.0), np.ones(4)))
    kernel = 2.0 * (RBF(ARD) + Linear(1.5).on([1])) * Matern(0.5).on([1, 2])
    free = {p.name: p for p in gradients.free_parameters(kernel, x)}
    assert list(free) == [
        "left__factor",
        "left__kernel__left__length_scale",
        "left__kernel__right__kernel__variance",
        "right__kernel__length_scale",
    ]
    deviation = np.std(np.arange(4.0))
    spread = free["left__kernel__left__length_scale"].spread
    np.testing.assert_allclose(spread, [deviation, 10 * deviation, 1.0])  # 1: nothing to go by
    assert free["right__kernel__length_scale"].spread == pytest.approx(10 * deviation / np.sqrt(2))
    assert free["left__factor"].spread is None
    assert not list(gradients.free_parameters(Delta(), x))


def test_a_new_kernel_and_the_old_as_it_was():
    old = 2.0 * RBF(ARD)
    new = gradients.with_parameters(old, {"factor": np.array(3.0), "kernel__length_scale": 2 * ARD})
    assert new.factor == 3.0 and type(new.factor) is float
    np.testing.assert_array_equal(new.kernel.length_scale, 2 * ARD)
    assert old.factor == 2.0 and old.kernel.length_scale is ARD


def test_one_length_scale_a_column():
    x = np.zeros((5, 4))
    kernel = StateAction(RBF(2.0) * Periodic(1.0, 2.0), Matern(3.0)) + RBF(0.5).on([0, 1])
    wide = gradients.with_ard(kernel, x)
    parts = ("state_kernel__left", "state_kernel__right", "action_kernel")
    names = [*(f"left__{part}" for part in parts), "right__kernel"]
    sizes = [np.shape(wide.get_params()[f"{k}__length_scale"]) for k in names]
    assert sizes == [(3,), (3,), (1,), (2,)]
    assert kernel.right.kernel.length_scale == 0.5
    x = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_allclose(wide(x), kernel(x), **tolerance("algebra"))


# ---------------------------------------------------------------- back from GPyTorch


@pytest.mark.parametrize("name", EVERY)
def test_there_and_back(name, data):
    kernel, x = EVERY[name], data[0][:20]
    back = from_gpytorch(kernel.to_gpytorch())
    np.testing.assert_allclose(back(x), kernel(x), **tolerance("algebra"))
    assert set(back.get_params()) == set(kernel.get_params())


def test_after_training_and_with_active_columns(data):
    module = (2.0 * RBF(ARD)).to_gpytorch()
    module.outputscale, module.base_kernel.lengthscale = 5.0, [[3.0, 2.0, 1.0]]
    back = from_gpytorch(module)
    assert back.factor == pytest.approx(5.0)
    np.testing.assert_allclose(back.kernel.length_scale, [3.0, 2.0, 1.0])
    other = gpytorch.kernels.RBFKernel(active_dims=[0, 2]) + gpytorch.kernels.MaternKernel()
    x = data[0][:9]
    with torch.no_grad():
        expected = other.double()(torch.tensor(x)).to_dense().numpy()
    np.testing.assert_allclose(from_gpytorch(other)(x), expected, **tolerance("algebra"))


def test_what_cannot_come_back_says_so():
    with pytest.raises(TypeError, match=r"from_gpytorch: the kernel must be one.*CosineKernel"):
        from_gpytorch(gpytorch.kernels.CosineKernel())
    with pytest.raises(ValueError, match="from_gpytorch: the kernel must not be a batch"):
        from_gpytorch(gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2])))


def test_a_user_kernel_without_a_gradient_says_so():
    class Mine(Kernel):
        pass

    with pytest.raises(TypeError, match="Mine: to_gpytorch knows kernrl's own kernels only"):
        gradients.evaluate(Mine(), np.ones((3, 1)))
