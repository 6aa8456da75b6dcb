"""What interaction leaves behind: transitions, how they are collected, kept and summed."""

from kernrl._lazy import attach

# `collect` itself is public as kernrl.collect: here the file of that name would hide it.
_PUBLIC = {
    "Replay": "kernrl.data.replay",
    "Sampler": "kernrl.data.collect",
    "Step": "kernrl.data.collect",
    "Transitions": "kernrl.data.transitions",
    "discounted": "kernrl.data.returns",
    "episode_returns": "kernrl.data.returns",
}

__getattr__, __dir__, __all__ = attach(__name__, _PUBLIC)
