"""Sums of turned rows against sums of whitened rows, in both precisions."""

import numpy as np
import pytest
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.kernels.stationary import RBF, Matern
from kernrl.value import landmark_sums as module
from kernrl.value.landmark_sums import landmark_sums, streams, turn
from kernrl.value.system import FeatureSystem, Rows

N = 2 * module.BLOCK_ROWS + 7


def rows_of(rng, dtype, n=N, following=1):
    x = rng.normal(size=(n, 3)).astype(dtype)
    ahead = tuple(
        (
            rng.random(n).astype(dtype),
            (0.9 * x + 0.3 * rng.normal(size=(n, 3))).astype(dtype),
        )
        for _ in range(following)
    )
    return Rows(x, np.sin(x[:, 0]), np.arange(n) == 0, ahead)


def whitened_sums(features, rows, gamma):
    phi = features.transform(rows.points).astype(float)
    ahead = sum(c[:, None] * features.transform(z) for c, z in rows.following)
    return phi.T @ (phi - gamma * ahead), phi.T @ rows.rewards


@pytest.fixture
def features(rng):
    return Nystroem(Matern(1.0), 60, landmarks="uniform", rng=0).fit(rng.normal(size=(500, 3)))


@pytest.mark.parametrize("gamma", [0.0, 0.9])
@pytest.mark.parametrize("following", [1, 3])
def test_equals_whitened_rows(rng, features, gamma, following):
    rows = rows_of(rng, float, following=following)
    assert turn(features.whitener_) is not None
    got, expected = landmark_sums(features, rows, gamma), whitened_sums(features, rows, gamma)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a / N, b / N, **tolerance("closed form"))


def test_few_features_of_many_landmarks_are_whitened_at_once(rng):
    smooth = Nystroem(RBF(20.0), 60, landmarks="uniform", rng=0).fit(rng.normal(size=(500, 3)))
    smooth.whitener_, smooth.n_features_ = smooth.whitener_[:, -10:], 10
    assert turn(smooth.whitener_) is None
    rows = rows_of(rng, float)
    got, expected = landmark_sums(smooth, rows, 0.9), whitened_sums(smooth, rows, 0.9)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a / N, b / N, **tolerance("closed form"))


def test_the_turn_is_orthogonal_and_undone(features):
    whitener = features.whitener_
    left, right, back = turn(whitener)
    h = np.eye(len(whitener)) - left @ right
    np.testing.assert_allclose(h @ h.T, np.eye(len(h)), **tolerance("algebra"))
    p = left.shape[1]
    leading = np.linalg.qr(whitener[:, ::-1][:, :p])[0]
    np.testing.assert_allclose((h @ leading)[p:], 0.0, **tolerance("algebra"))
    np.testing.assert_allclose(h @ back, whitener, **tolerance("closed form"))


def test_float32_keeps_the_digits_of_whitening(rng, monkeypatch):
    """Where bare k (no turn) loses several times as many."""
    narrow = rows_of(rng, np.float32, 8 * N)
    rows = Rows(
        *(np.asarray(x, float) for x in (narrow.points, narrow.rewards)),
        narrow.starts,
        tuple((c.astype(float), z.astype(float)) for c, z in narrow.following),
    )
    wide = Nystroem(RBF(0.8), 200, landmarks="uniform", rng=0).fit(rows.points)
    slim = Nystroem(RBF(0.8), 200, landmarks="uniform", rng=0).fit(narrow.points)

    def values(features, sums):
        ridged = sums[0] + 1e-5 * len(rows) * np.eye(len(sums[0]))
        return features.transform(rows.points[:1000]) @ np.linalg.solve(ridged, sums[1])

    expected = values(wide, whitened_sums(wide, rows, 0.9))

    def error(sums):
        return np.abs(values(slim, sums) - expected).max() / np.abs(expected).max()

    turned = error(landmark_sums(slim, narrow, 0.9))
    whitened = error(whitened_sums(slim, narrow, 0.9))
    bare = module.Turn(
        np.zeros((200, 1), np.float32), np.zeros((1, 200), np.float32), slim.whitener_.astype(float)
    )
    monkeypatch.setattr(module, "turn", lambda _: bare)
    assert turned < 4 * whitened, (turned, whitened)
    assert error(landmark_sums(slim, narrow, 0.9)) > 3 * turned


def test_thread_count_does_not_change_a_bit(rng, features, monkeypatch):
    rows, got = rows_of(rng, np.float32), []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        got.append(landmark_sums(features, rows, 0.9))
    np.testing.assert_array_equal(got[0][0], got[1][0])
    np.testing.assert_array_equal(got[0][1], got[1][1])


def test_only_plain_sums_of_many_rows_stream(rng, features):
    assert streams(features, rows_of(rng, float))
    assert not streams(features, rows_of(rng, float, n=100))

    class Keeps(FeatureSystem):
        def _accumulate(self, phi, *rest):
            self.kept = phi
            super()._accumulate(phi, *rest)

    rows = rows_of(rng, float)
    plain, keeps = FeatureSystem(features, 0.9), Keeps(features, 0.9)
    plain.add(rows)
    keeps.add(rows)
    assert keeps.kept.shape[1] == features.n_features_
    np.testing.assert_allclose(plain.matrix / N, keeps.matrix / N, **tolerance("closed form"))
    assert plain.n == keeps.n == N
    assert not FeatureSystem(features, 0.9, 0.5)._only_sums
