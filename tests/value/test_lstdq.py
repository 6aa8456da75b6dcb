"""KLSTDQ: policy forms, tables, errors."""

import numpy as np
import pytest
from reference.chains import Chain
from reference.walks import walk
from tolerances import tolerance

from kernrl.approx.nystroem import Nystroem
from kernrl.data.transitions import Transitions
from kernrl.kernels.base import Delta
from kernrl.kernels.state_action import StateAction
from kernrl.kernels.stationary import RBF
from kernrl.value.lstd import KLSTDQ


class TestQ:
    def chain(self, n=4000):
        chain = Chain(6, [1, 6])
        s, a, r, s2 = chain.random_walk(n, seed=0)
        return chain, Transitions(s, r, s2, np.zeros(n), actions=a)

    def test_policy_forms_agree(self):
        """next_actions, actions from a callable, one-hot probabilities, an object with predict."""
        _, t = self.chain(60)

        class Right:
            def predict(self, states):
                return np.ones(len(states), dtype=int)

        forms = [
            KLSTDQ(StateAction(RBF()), None).fit(t.replace(next_actions=np.ones(60, int))),
            KLSTDQ(StateAction(RBF()), lambda s: np.ones(len(s), int)).fit(t),
            KLSTDQ(StateAction(RBF()), lambda s: np.tile([0.0, 1.0], (len(s), 1))).fit(t),
            KLSTDQ(StateAction(RBF()), Right()).fit(t),
        ]
        for other in forms[1:]:
            np.testing.assert_allclose(other.weights_, forms[0].weights_, **tolerance("algebra"))

    def test_delta_on_pairs_is_the_tabular_fixed_point_of_the_data(self):
        """Q^π of the empirical chain, π uniform, from counts."""
        chain, t = self.chain()
        counts = np.zeros((2, 6, 6))
        s, s2 = t.states[:, 0].astype(int) - 1, t.next_states[:, 0].astype(int) - 1
        np.add.at(counts, (t.actions.ravel(), s, s2), 1.0)
        p = counts / counts.sum(axis=2, keepdims=True)
        system = np.eye(12) - 0.45 * np.tile(p.reshape(12, 6), (1, 2))
        q = np.linalg.solve(system, np.tile(chain.reward, 2)).reshape(2, 6)
        td = KLSTDQ(
            StateAction(Delta()),
            lambda x: np.full((len(x), 2), 0.5),
            0.9,
            ridge=1e-13,
            features=Nystroem(n_components=12),
        ).fit(t)
        for a in (0, 1):
            np.testing.assert_allclose(
                td.predict(np.arange(1.0, 7.0), np.full(6, a)), q[a], **tolerance("iterative")
            )
        pairs = np.column_stack((np.arange(1.0, 7.0), np.zeros(6)))
        np.testing.assert_array_equal(td.predict(pairs), td.predict(pairs[:, 0], pairs[:, 1]))

    @pytest.mark.parametrize(
        ("policy", "text"),
        [
            (None, "KLSTDQ: policy=None takes next_actions from the transitions.*Pass a policy"),
            (3, "KLSTDQ: policy must be callable, got 3"),
            (lambda s: np.ones(2, int), r"KLSTDQ: the policy must give 60 rows, got \(2,\)"),
            (
                lambda s: np.full((len(s), 2), 0.7),
                "must be at least 0 and sum to 1, got .* at row 0",
            ),
            (lambda s: np.full((len(s), 1), np.nan), "every action of the policy must be finite"),
        ],
    )
    def test_bad_policies(self, policy, text):
        _, t = self.chain(60)
        with pytest.raises((ValueError, TypeError), match=text):
            KLSTDQ(StateAction(RBF()), policy).fit(t)

    def test_actions_are_needed(self):
        with pytest.raises(ValueError, match="KLSTDQ: the transitions must have actions"):
            KLSTDQ(StateAction(RBF()), lambda s: s).fit(walk())
