"""Prediction: fit(transitions) → predict(states). Kernel LSTD for V and for Q."""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"KLSTD": "kernrl.value.lstd", "KLSTDQ": "kernrl.value.lstd"}
)
