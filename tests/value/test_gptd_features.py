"""GPTD on a dictionary, landmarks and random features: dense formulas, recursion, drift."""

import numpy as np
import pytest
from gptd_cases import QUERY, assert_same, walk
from reference import gp
from tolerances import tolerance

from kernrl.approx.dictionary import Dictionary
from kernrl.approx.nystroem import Nystroem
from kernrl.approx.random_features import RandomFeatures
from kernrl.data.transitions import Transitions
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value.gptd import GPTD

MODELS = pytest.mark.parametrize("model", ["returns", "white"])


class TestFeatures:
    @MODELS
    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    def test_weight_space_is_function_space(self, model, gamma):
        """Random features: the regression on weights is GPTD with the Gram matrix ΦΦᵀ."""
        t, features = walk(), RandomFeatures(2.0 * RBF(0.8), n_components=30, rng=0)
        td = GPTD(RBF(9.0), gamma, 0.2, model, features=features, mean=0.3).fit(t)

        def gram(x, y):
            return td.features_.transform(x) @ td.features_.transform(y).T

        mean, covariance, likelihood = gp.gptd(
            t, QUERY, gram, gamma, 0.2, model == "returns", mean=0.3
        )
        np.testing.assert_allclose(td.predict(QUERY), mean, **tolerance("closed form"))
        np.testing.assert_allclose(td.covariance(QUERY), covariance, **tolerance("closed form"))
        np.testing.assert_allclose(
            td.log_marginal_likelihood_, likelihood, **tolerance("closed form")
        )
        std = td.predict(QUERY, return_std=True)[1]
        np.testing.assert_allclose(std**2, np.diagonal(covariance), **tolerance("closed form"))

    @MODELS
    @pytest.mark.parametrize("kind", ["dictionary", "landmarks"])
    def test_sparse_is_exact_with_the_projected_gram(self, model, kind):
        """ALD: the mean is that of A K_DD Aᵀ; the variance adds what the atoms cannot see."""
        t, kernel = walk(), 2.0 * RBF(0.8)
        given = (
            {"dictionary": Dictionary(threshold=0.1)}
            if kind == "dictionary"
            else {"features": Nystroem(n_components=15, rng=0)}
        )
        td = GPTD(kernel, 0.9, 0.2, model, mean=0.3, **given).fit(t)
        atoms = td.support_
        assert 5 < len(atoms) < 40
        inverse = np.linalg.inv(kernel(atoms))

        def gram(x, y):
            return kernel(x, atoms) @ inverse @ kernel(atoms, y)

        mean, covariance, likelihood = gp.gptd(
            t, QUERY, gram, 0.9, 0.2, model == "returns", mean=0.3
        )
        np.testing.assert_allclose(td.predict(QUERY), mean, **tolerance("closed form"))
        unseen = kernel(QUERY) - gram(QUERY, QUERY)
        np.testing.assert_allclose(
            td.covariance(QUERY), covariance + unseen, **tolerance("closed form")
        )
        np.testing.assert_allclose(
            td.log_marginal_likelihood_, likelihood, **tolerance("closed form")
        )
        std = td.predict(QUERY, return_std=True)[1]
        np.testing.assert_allclose(
            std**2, np.diagonal(covariance + unseen), **tolerance("closed form")
        )
        assert np.all(std**2 <= kernel.diagonal(QUERY))

    @MODELS
    def test_all_points_as_atoms_are_the_exact_form(self, model):
        t, kernel = walk(), Matern(0.8, nu=0.5)  # rough: no point is nearly spanned by others
        exact = GPTD(kernel, 0.9, 0.2, model).fit(t)
        sparse = GPTD(kernel, 0.9, 0.2, model, Dictionary(admit="all")).fit(t)
        assert len(sparse.support_) == len(np.unique(exact.support_, axis=0))  # one comes twice
        assert_same(sparse, exact, t)
        assert_same(GPTD(kernel, 0.9, 0.2, model, Dictionary(admit="all")).partial_fit(t), exact, t)

    @MODELS
    @pytest.mark.parametrize("size", [1, 7, 60])
    def test_recursion_is_batch(self, model, size):
        t = walk()
        features = RandomFeatures(n_components=30, rng=0)
        # fitted elsewhere: the frequencies are those of the seed, whatever rows come first
        batch = GPTD(RBF(0.8), 0.9, 0.2, model, features=features, mean=0.4).fit(t)
        online = GPTD(RBF(0.8), 0.9, 0.2, model, features=features, mean=0.4)
        for start in range(0, 60, size):
            online.partial_fit(t[start : start + size])
        assert_same(online, batch, t)
        half = GPTD(RBF(0.8), 0.9, 0.2, model, features=features, mean=0.4).fit(t[:33])
        assert_same(half.partial_fit(t[33:]), batch, t)

    @MODELS
    def test_engels_sparse_recursion(self, model):
        """partial_fit on a growing dictionary: A holds the coefficients of each state's moment."""
        t, kernel = walk(), RBF(0.8)
        online = GPTD(kernel, 0.9, 0.2, model, Dictionary(threshold=0.2))
        for i in range(len(t)):
            online.partial_fit(t[i : i + 1])
        h, points = gp.dense_h(t, 0.9)
        dictionary, rows = Dictionary(kernel, threshold=0.2), []
        for x in points:
            rows.append(dictionary.offer(x).coefficients)
        m = dictionary.size
        assert m == len(online.support_) < 40
        a = np.array([np.pad(row, (0, m - len(row))) for row in rows])
        ha, k = h @ a, kernel(dictionary.atoms_)
        s = ha @ k @ ha.T + 0.2 * (h @ h.T if model == "returns" else np.eye(len(t)))
        alpha = ha.T @ np.linalg.solve(s, t.rewards)
        across = kernel(QUERY, dictionary.atoms_)
        np.testing.assert_allclose(
            online.predict(QUERY), across @ alpha, **tolerance("closed form")
        )
        c = ha.T @ np.linalg.solve(s, ha)
        np.testing.assert_allclose(
            online.covariance(QUERY), kernel(QUERY) - across @ c @ across.T,
            **tolerance("closed form"),
        )  # fmt: skip

    @MODELS
    @pytest.mark.parametrize("max_size", [None, 8])
    def test_many_rows_at_once_are_the_rows_one_by_one(self, model, max_size):
        """Blocks in which no state joins the dictionary are taken together: the same numbers."""
        t = walk(400)
        dictionary = Dictionary(threshold=0.2, max_size=max_size)
        one, many = (GPTD(RBF(2.0), 0.9, 0.2, model, dictionary, mean=0.4) for _ in range(2))
        for i in range(400):
            one.partial_fit(t[i : i + 1])
        many.partial_fit(t[:150]).partial_fit(t[150:])
        np.testing.assert_array_equal(many.support_, one.support_)
        assert_same(many, one, t)
        assert 4 < len(one.support_) < 40

    @MODELS
    def test_blocks_and_chunks_are_one_fit(self, model, monkeypatch):
        from kernrl.value import gptd_weights

        t = walk()
        make = lambda: GPTD(  # noqa: E731  # three fits that must be alike
            RBF(0.8), 0.9, 0.2, model, features=RandomFeatures(n_components=30, rng=0)
        )
        whole = make().fit(t)
        monkeypatch.setattr(gptd_weights, "BLOCK_ROWS", 7)
        assert_same(make().fit(t), whole, t)
        assert_same(make().fit(t[k : k + 11] for k in range(0, 60, 11)), whole, t)

    def test_a_dictionary_on_chunks_goes_on_online(self):
        t = walk()
        chunks = [t[k : k + 15] for k in range(0, 60, 15)]
        td = GPTD(RBF(0.8), 0.9, 0.2, dictionary=Dictionary(threshold=0.2)).fit(iter(chunks))
        again = GPTD(RBF(0.8), 0.9, 0.2, dictionary=Dictionary(threshold=0.2)).fit(chunks[0])
        for chunk in chunks[1:]:
            again.partial_fit(chunk)
        assert_same(td, again, t, "algebra")

    def test_long_runs_do_not_drift(self):
        """20 000 recursive rows against one factorisation, at a noise of a thousandth."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(20_001, 2))
        t = Transitions(x[:-1], np.sin(x[:-1, 0]), x[1:], np.arange(20_000) % 50 == 49)
        features = RandomFeatures(n_components=20, rng=0)
        batch = GPTD(RBF(1.0), 0.9, 1e-3, features=features).fit(t)
        online = GPTD(RBF(1.0), 0.9, 1e-3, features=features).partial_fit(t)
        assert_same(online, batch, t, "iterative")
