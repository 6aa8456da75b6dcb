"""What preference_loss says when it is asked for something it cannot mean."""

from __future__ import annotations

import pytest
import torch

from kernrl.deep_alignment.ops.preference import preference_loss


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"kind": "dppo"},
            ValueError,
            "preference_loss: kind must be one of aot, aot-unpaired, apo-down, apo-zero, bco, cpo, "
            r"discopop, dpo, .*, got 'dppo'\. Did you mean 'dpo'\?",
        ),
        (
            {"beta": 0.0, "kind": "hinge"},
            ValueError,
            "preference_loss: beta of kind='hinge' must be a finite number above 0.0, got 0.0",
        ),
        ({"beta": -0.1}, ValueError, "preference_loss: beta of kind='dpo' must be a finite number"),
        (
            {"ref_chosen": None},
            ValueError,
            "preference_loss: kind='dpo' needs ref_chosen, got None. Pass both references, or",
        ),
        (
            {"kind": "nca", "ref_rejected": None},
            ValueError,
            "preference_loss: kind='nca' needs ref_rejected, got None. Pass both references, or",
        ),
        (
            {"kind": "simpo"},
            ValueError,
            "kind='simpo' knows no reference, so ref_chosen must be None, got Tensor. Leave it out",
        ),
        (
            {"kind": "ipo"},
            ValueError,
            r"preference_loss: kind='ipo' needs lengths to average over tokens, got None. Pass \(",
        ),
        (
            {"nll_weight": 1.0},
            ValueError,
            "preference_loss: kind='dpo' needs lengths for its NLL term, got None",
        ),
        (
            {"kind": "ipo", "lengths": torch.ones(3)},
            ValueError,
            r"lengths must be \(chosen tokens, rejected tokens\), got Tensor",
        ),
        (
            {"kind": "ipo", "lengths": (torch.ones(3), torch.ones(2))},
            ValueError,
            r"lengths must have the shape of chosen_logprob \(3,\), got \(2,\)",
        ),
        (
            {"kind": "ipo", "label_smoothing": 0.1},
            ValueError,
            "label_smoothing belongs to kind dpo, robust, sigmoid-norm, simpo, cpo, exo, aot, .*, "
            "got kind='ipo'. Leave it out",
        ),
        (
            {"label_smoothing": 0.5},
            ValueError,
            "preference_loss: label_smoothing must be a finite number at least 0.0 and below 0.5",
        ),
        (
            {"kind": "apo-zero", "margin": 1.0},
            ValueError,
            "margin belongs to kind dpo, robust, hinge, sigmoid-norm, simpo, cpo, got kind='apo-z",
        ),
        (
            {"kind": "exo", "f_divergence": "js"},
            ValueError,
            "preference_loss: f_divergence belongs to kind dpo, robust, hinge, got kind='exo'",
        ),
        (
            {"f_divergence": "kl"},
            ValueError,
            "f_divergence must be one of alpha, forward-kl, js, reverse-kl, got 'kl'",
        ),
        ({"f_divergence": "alpha", "alpha": 0.0}, ValueError, "preference_loss: alpha must be a"),
        ({"shift": 1.0}, ValueError, "preference_loss: shift belongs to kind bco, got kind='dpo'"),
        ({"temperature": 1.0}, ValueError, "temperature belongs to kind discopop, got kind='dpo'"),
        (
            {"kind": "discopop", "temperature": 0.0},
            ValueError,
            "preference_loss: temperature must be a finite number above 0.0, got 0.0",
        ),
        (
            {"kind": "aot", "weights": torch.ones(3)},
            ValueError,
            "kind='aot' compares sorted batches, so weights must be None, got Tensor",
        ),
        (
            {"rejected_logprob": torch.zeros(2)},
            ValueError,
            r"rejected_logprob must have the shape of chosen_logprob \(3,\), got \(2,\)",
        ),
        (
            {"chosen_logprob": torch.zeros(3, 4)},
            ValueError,
            r"chosen_logprob must have shape \(b,\), got \(3, 4\). Sum over tokens first: seq",
        ),
        (
            {"chosen_logprob": torch.zeros(3).long()},
            TypeError,
            "preference_loss: chosen_logprob must be a floating-point tensor",
        ),
        (
            {"ref_chosen": torch.zeros(3, device="meta")},
            ValueError,
            r"ref_chosen must be on the device of chosen_logprob \(cpu\), got meta",
        ),
        (
            {"aggregate": "sum"},
            ValueError,
            "preference_loss: aggregate must be one of mean, none, got 'sum'",
        ),
        ({"impl": "triton"}, NotImplementedError, "preference_loss: impl='triton' is not in this"),
    ],
)
def test_errors_say_what_must_hold(arguments, error, text):
    names = ("chosen_logprob", "rejected_logprob", "ref_chosen", "ref_rejected")
    given = {name: torch.zeros(3) for name in names} | arguments
    with pytest.raises(error, match=text):
        preference_loss(**given)
