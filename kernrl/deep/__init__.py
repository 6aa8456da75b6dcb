"""Agents with neural networks, one a file; their losses live in `kernrl.deep_alignment.ops`."""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"PPO": "kernrl.deep.ppo"})
