"""Losses, estimators and scans of deep RL and alignment: torch tensors in, torch tensors out.

Token and environment tensors are (b, t): one sequence a row, time last. `mask` is True where an
entry counts.
"""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AdaptiveKL": "kernrl.deep_alignment.ops.kl",
        "aggregate": "kernrl.deep_alignment.ops.aggregate",
        "full_kl": "kernrl.deep_alignment.ops.kl",
        "gae": "kernrl.deep_alignment.ops.advantage",
        "importance_weights": "kernrl.deep_alignment.ops.importance",
        "kl_penalty": "kernrl.deep_alignment.ops.kl",
        "length_mask": "kernrl.deep_alignment.ops.sequences",
        "next_values": "kernrl.deep_alignment.ops.sequences",
        "off_policy_mask": "kernrl.deep_alignment.ops.importance",
        "policy_loss": "kernrl.deep_alignment.ops.policy",
        "preference_loss": "kernrl.deep_alignment.ops.preference",
        "retrace": "kernrl.deep_alignment.ops.traces",
        "segment_ids": "kernrl.deep_alignment.ops.sequences",
        "sequence_logprobs": "kernrl.deep_alignment.ops.sequences",
        "td_lambda": "kernrl.deep_alignment.ops.traces",
        "value_loss": "kernrl.deep_alignment.ops.value",
        "vtrace": "kernrl.deep_alignment.ops.traces",
        "whiten": "kernrl.deep_alignment.ops.advantage",
    },
)
