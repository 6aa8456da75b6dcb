"""Control with kernels, one agent a file."""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "KLSPI": "kernrl.control.klspi",
        "KernelQLearning": "kernrl.control.kernel_q_learning",
    },
)
