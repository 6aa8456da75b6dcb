"""Every kernel against scikit-learn, scipy, GPyTorch or its formula written out."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.gaussian_process import kernels as sk
from sklearn.metrics.pairwise import laplacian_kernel
from tolerances import tolerance

from kernrl.kernels.base import Delta, Kernel
from kernrl.kernels.dot import Linear, Polynomial
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF, Laplacian, Matern, Periodic, RationalQuadratic

ARD = np.array([0.5, 1.0, 2.0])

AGAINST_SKLEARN = {
    "rbf": (RBF(0.7), sk.RBF(0.7)),
    "rbf ard": (RBF(ARD), sk.RBF(ARD)),
    "matern12": (Matern(0.7, nu=0.5), sk.Matern(0.7, nu=0.5)),
    "matern32": (Matern(ARD, nu=1.5), sk.Matern(ARD, nu=1.5)),
    "matern52": (Matern(0.7, nu=2.5), sk.Matern(0.7, nu=2.5)),
    "rational quadratic": (RationalQuadratic(0.7, 1.3), sk.RationalQuadratic(0.7, 1.3)),
    "linear": (Linear(1.0, 0.3), sk.DotProduct(math.sqrt(0.3))),
    "sum": (RBF(1.0) + Linear(), sk.RBF(1.0) + sk.DotProduct(0.0)),
    "product": (RBF(1.0) * Matern(2.0), sk.RBF(1.0) * sk.Matern(2.0)),
    "scaled": (2.5 * RBF(0.7), 2.5 * sk.RBF(0.7)),
}

EVERY = {
    **{name: ours for name, (ours, _) in AGAINST_SKLEARN.items()},
    "laplacian": Laplacian(ARD),
    "periodic": Periodic(0.9, 1.7),
    "periodic ard": Periodic(ARD, ARD[::-1]),
    "polynomial": Polynomial(3, 0.5),
    "delta": Delta(),
    "on": RBF(0.7).on([2, 0]) + Matern(0.4).on([-2]),
    "state-action": StateAction(RBF([0.5, 2.0]), RBF(0.3)),
}


@pytest.fixture
def xy():
    rng = np.random.default_rng(0)
    return rng.normal(size=(17, 3)), rng.normal(size=(9, 3))


@pytest.mark.parametrize("name", AGAINST_SKLEARN)
def test_equals_sklearn(name, xy):
    ours, theirs = AGAINST_SKLEARN[name]
    np.testing.assert_allclose(ours(*xy), theirs(*xy), **tolerance("closed form"))


def test_laplacian_is_sklearns(xy):
    np.testing.assert_allclose(
        Laplacian(2.0)(*xy), laplacian_kernel(*xy, gamma=0.5), **tolerance("closed form")
    )


def test_laplacian_is_matern_half_in_one_dimension(xy):
    x, y = xy[0][:, :1], xy[1][:, :1]
    np.testing.assert_allclose(
        Laplacian(0.6)(x, y), Matern(0.6, nu=0.5)(x, y), **tolerance("algebra")
    )


@pytest.mark.parametrize("factor", [1.0, 7.3])
def test_periodic_formula_written_out(xy, factor):
    x, y = xy[0] * factor, xy[1] * factor
    expected = np.exp(-2.0 * (np.sin(np.pi * (x[:, None] - y[None]) / 1.7) ** 2 / 0.9**2).sum(-1))
    np.testing.assert_allclose(Periodic(0.9, 1.7)(x, y), expected, **tolerance("closed form"))


def test_polynomial_and_delta_written_out(xy):
    x, y = xy
    np.testing.assert_allclose(
        Polynomial(3, 0.5)(x, y), (x @ y.T + 0.5) ** 3, **tolerance("algebra")
    )
    z = np.array([[0, 1], [0, 2], [0, 1]])
    np.testing.assert_array_equal(Delta()(z), [[1, 0, 1], [0, 1, 0], [1, 0, 1]])


def test_rational_quadratic_tends_to_rbf(xy):
    np.testing.assert_allclose(
        RationalQuadratic(0.7, 1e8)(*xy), RBF(0.7)(*xy), **tolerance("iterative")
    )


@pytest.mark.parametrize("name", EVERY)
def test_equals_gpytorch(name, xy):
    torch = pytest.importorskip("torch")
    bridge = EVERY[name].to_gpytorch()
    with torch.no_grad():
        theirs = bridge(*(torch.as_tensor(v) for v in xy)).to_dense().numpy()
    np.testing.assert_allclose(EVERY[name](*xy), theirs, **tolerance("iterative"))


@pytest.mark.parametrize("name", EVERY)
def test_diagonal_row_and_symmetry(name, xy):
    kernel, (x, y) = EVERY[name], xy
    gram = kernel(x)
    np.testing.assert_array_equal(np.diagonal(gram), kernel.diagonal(x))
    np.testing.assert_allclose(gram, gram.T, **tolerance("algebra"))
    np.testing.assert_allclose(kernel.row(x[2], y), kernel(x, y)[2], **tolerance("closed form"))
    assert np.linalg.eigvalsh(gram).min() > -1e-10


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
def test_same_values_in_other_libraries(name, library, xy):
    lib = pytest.importorskip(library)
    x, y = (lib.asarray(v) for v in xy)
    for ours, expected in (
        (EVERY[name](x, y), EVERY[name](*xy)),
        (EVERY[name](x), EVERY[name](xy[0])),
    ):
        assert type(ours) is type(x)
        np.testing.assert_allclose(np.asarray(ours), expected, **tolerance("closed form"))


@pytest.mark.parametrize("name", EVERY)
def test_float32_stays_float32_and_offset_data_keep_digits(name, xy):
    if "linear" in name or name in ("polynomial", "sum"):
        pytest.skip("a dot product is not translation invariant")
    x, y = (np.float32(np.round(v * 8) / 8) for v in xy)  # exact under the offset
    near, far = EVERY[name](x, y), EVERY[name](x + np.float32(1024), y + np.float32(1024))
    assert near.dtype == far.dtype == np.float32
    np.testing.assert_allclose(far, near, **tolerance("float32"))


def test_rough_kernel_is_exact_at_near_duplicates():
    """exp(−r) has slope −1 at 0: the expanded distance's 1e-16 would become 1e-8 here."""
    x = np.array([[1.0, 2.0, 3.0]])
    y = x + 1e-9
    expected = np.exp(-np.linalg.norm(x - y))
    assert abs(Matern(1.0, nu=0.5)(x, y)[0, 0] - expected) < 1e-15


def test_state_action_never_mixes_actions(xy):
    """The block-stacked RBF of a public port gives 0.98 here; one block per action gives 0."""
    z = np.array([[0.1, 0.1, 0.0], [0.1, 0.1, 1.0]])
    np.testing.assert_array_equal(StateAction(RBF(1.0))(z), np.eye(2))


def test_engel_action_kernel_values():
    """k_u(u, u') = 1 + (1 − b)/2·(uᵀu' − 1): 1, 0.55 and 0.1 at b = 0.1 for dot = 1, 0, −1."""
    b = 0.1
    kernel = Linear(variance=(1 - b) / 2, offset=(1 + b) / 2)
    u = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(kernel(u[:1], u)[0], [1.0, 0.55, 0.1], **tolerance("algebra"))


class TestMedian:
    def test_is_the_median_of_distinct_distances(self, xy):
        x = np.vstack([xy[0]] * 3)  # revisited states must not drag it to 0
        kernel = RBF("median").resolve(x, rng=0)
        d = cdist(x, x)[np.triu_indices(len(x), 1)]
        assert kernel.length_scale == pytest.approx(np.median(d[d > 0]), rel=1e-9)

    def test_each_part_sees_its_own_columns(self, xy):
        x = xy[0]
        kernel = StateAction(RBF("median"), RBF("median").on([0])).resolve(x, rng=0)
        state = RBF("median").resolve(x[:, :2], rng=0)
        assert kernel.state_kernel.length_scale == pytest.approx(state.length_scale)
        assert kernel.is_resolved

    def test_laplacian_uses_city_block(self, xy):
        d = cdist(xy[0], xy[0], "cityblock")[np.triu_indices(17, 1)]
        assert Laplacian("median").resolve(xy[0]).length_scale == pytest.approx(np.median(d))

    def test_constant_data_warn(self):
        with pytest.warns(UserWarning, match="no two distinct rows, so 1.0 is used"):
            assert RBF("median").resolve(np.ones((5, 2))).length_scale == 1.0

    def test_unresolved_says_what_to_do(self, xy):
        with pytest.raises(
            ValueError, match=r"RBF: length_scale='median' must be resolved.*resolve\(X\)"
        ):
            RBF("median")(xy[0])

    def test_subsample_is_seeded(self):
        x = np.random.default_rng(1).normal(size=(3000, 2))
        scales = {RBF("median").resolve(x, rng=s).length_scale for s in (0, 0, 1)}
        assert len(scales) == 2


class TestParameters:
    def test_clone_and_nested_set(self):
        kernel = 2.0 * StateAction(RBF(0.5), Matern(1.0))
        twin = clone(kernel)
        assert twin is not kernel
        twin.set_params(kernel__state_kernel__length_scale=3.0, factor=4.0)
        assert twin.kernel.state_kernel.length_scale == 3.0 and twin.factor == 4.0
        assert kernel.kernel.state_kernel.length_scale == 0.5 and kernel.factor == 2.0

    def test_frozen(self):
        with pytest.raises(AttributeError):
            RBF(1.0).length_scale = 2.0

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: RBF(-1.0), "RBF: length_scale must be positive and finite.*got -1.0"),
            (lambda: RBF([1.0, np.nan]), "RBF: length_scale must be positive"),
            (
                lambda: RBF("mean"),
                "RBF: a length_scale given by name must be one of median, got 'mean'",
            ),
            (lambda: Matern(1.0, nu=2.0), "Matern: nu must be one of 0.5, 1.5, 2.5, got 2.0"),
            (
                lambda: RationalQuadratic(1.0, 0.0),
                "mixture must be a finite number above 0.0, got 0.0",
            ),
            (lambda: Periodic(1.0, -2.0), "Periodic: period must be positive"),
            (lambda: Linear(variance=0.0), "Linear: variance must be a finite number above 0.0"),
            (lambda: Polynomial(0), "Polynomial: degree must be an integer of at least 1, got 0"),
            (lambda: -1.0 * RBF(), "Scaled: factor must be a finite number above 0.0, got -1.0"),
            (lambda: RBF().on([]), "OnDimensions: dims must be a non-empty list"),
            (
                lambda: RBF().set_params(lengthscale=1.0),
                "RBF: a parameter must be one of length_scale.*",
            ),
            (lambda: RBF()([[1.0, np.inf]]), "RBF: every x must be finite, got inf at row 0"),
            (
                lambda: RBF()(np.ones((2, 3)), np.ones((4, 5))),
                r"RBF: x and y must share their last axis, got x \(2, 3\) and y \(4, 5\)",
            ),
            (
                lambda: RBF([1.0, 2.0])(np.ones((2, 3))),
                r"one entry per column \(3\), got 2 entries",
            ),
            (lambda: RBF().on([3])(np.ones((2, 3))), "dims must lie within the 3 columns, got 3"),
            (lambda: StateAction(RBF())(np.ones((2, 1))), "must hold a state and 1 action columns"),
            (lambda: Periodic().spectral_frequencies(np.ones((2, 1)), np.ones(2)), "Use Nystroem"),
        ],
    )
    def test_one_clear_error(self, make, text):
        with pytest.raises((ValueError, TypeError), match=text):
            make()

    def test_text_is_refused(self):
        with pytest.raises(TypeError, match="RBF: x must be real numbers"):
            RBF()(np.array([["a"]]))

    def test_user_kernels_have_no_silent_gpytorch(self):
        class Mine(Kernel):
            pass

        with pytest.raises(TypeError, match="Mine: to_gpytorch knows kernrl's own kernels only"):
            Mine().to_gpytorch()
