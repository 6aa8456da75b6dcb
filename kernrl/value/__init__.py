"""Prediction: fit(transitions) → predict(states). Kernel LSTD for V and for Q, and its cousins."""

from kernrl._lazy import attach

_TABLE: dict[str, str] = {}
for _file, _names in {
    "bellman_loss": "MQL bellman_scorer kernel_bellman_loss",
    "density_ratio": "MWL",
    "fqe": "KernelFQE",
    "gptd": "GPTD",
    "gptd_ensemble": "GPTDEnsemble",
    "hyperparameters": "maximise_likelihood",
    "lstd": "KLSTD KLSTDQ",
    "averagers": "KernelAverager",
    "diagnostics": "bellman_errors contraction ridge_path spectrum",
    "divergence": "DivergenceMonitor",
    "factorisation": "StochasticFactorisation",
    "ope": "Estimate estimate_return",
    "occupancy": "SuccessorRepresentation",
    "recursive": "RecursiveKLSTD",
    "regularised": "RegularisedLSTD RegularisedLSTDQ",
    "state_transform": "StateTransform",
    "td": "KernelTD",
}.items():
    _TABLE |= dict.fromkeys(_names.split(), f"kernrl.value.{_file}")

__getattr__, __dir__, __all__ = attach(__name__, _TABLE)
