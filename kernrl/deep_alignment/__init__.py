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
        "group_advantages": "kernrl.deep_alignment.ops.groups",
        "importance_weights": "kernrl.deep_alignment.ops.importance",
        "informative_groups": "kernrl.deep_alignment.ops.groups",
        "kl_penalty": "kernrl.deep_alignment.ops.kl",
        "kto_loss": "kernrl.deep_alignment.ops.kto",
        "length_mask": "kernrl.deep_alignment.ops.sequences",
        "linear_token_logprobs": "kernrl.deep_alignment.ops.linear_logprobs",
        "merge_partials": "kernrl.deep_alignment.ops.linear_logprobs",
        "next_values": "kernrl.deep_alignment.ops.sequences",
        "off_policy_mask": "kernrl.deep_alignment.ops.importance",
        "overlong_penalty": "kernrl.deep_alignment.ops.rewards",
        "policy_loss": "kernrl.deep_alignment.ops.policy",
        "preference_loss": "kernrl.deep_alignment.ops.preference",
        "process_reward_loss": "kernrl.deep_alignment.ops.reward_model",
        "retrace": "kernrl.deep_alignment.ops.traces",
        "reward_model_loss": "kernrl.deep_alignment.ops.reward_model",
        "segment_ids": "kernrl.deep_alignment.ops.sequences",
        "sequence_logprobs": "kernrl.deep_alignment.ops.sequences",
        "shape_rewards": "kernrl.deep_alignment.ops.rewards",
        "shard_partials": "kernrl.deep_alignment.ops.linear_logprobs",
        "ShardPartials": "kernrl.deep_alignment.ops.linear_logprobs",
        "td_lambda": "kernrl.deep_alignment.ops.traces",
        "token_logprobs": "kernrl.deep_alignment.ops.logprobs",
        "TokenStats": "kernrl.deep_alignment.ops.logprobs",
        "value_loss": "kernrl.deep_alignment.ops.value",
        "vtrace": "kernrl.deep_alignment.ops.traces",
        "whiten": "kernrl.deep_alignment.ops.advantage",
    },
)
