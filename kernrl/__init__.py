"""kernrl: kernel-based reinforcement learning and fused RL operator kernels.

The face: a lazy table of public names. Importing it loads no torch, cupy or triton.
"""

from kernrl._lazy import attach

__version__ = "0.1.0"

_TABLE: dict[str, str] = {}
for _room, _names in {
    "kernrl.kernels.base": "Kernel Delta Sum Product Scaled OnDimensions",
    "kernrl.kernels.stationary": "RBF Matern Laplacian RationalQuadratic Periodic",
    "kernrl.kernels.dot": "Linear Polynomial",
    "kernrl.kernels.state_action": "StateAction",
    "kernrl.kernels.gram": "gram GramOperator",
    "kernrl.approx.nystroem": "Nystroem",
    "kernrl.approx.random_features": "RandomFeatures",
    "kernrl.approx.dictionary": "Dictionary",
    "kernrl.data.transitions": "Transitions",
    "kernrl.data.collect": "collect",
    "kernrl.data.replay": "Replay",
    "kernrl.agent": "Agent",
    "kernrl.value.lstd": "KLSTD KLSTDQ",
    "kernrl.value.bellman_loss": "MQL bellman_scorer kernel_bellman_loss",
    "kernrl.value.density_ratio": "MWL",
    "kernrl.value.fqe": "KernelFQE",
    "kernrl.value.gptd": "GPTD",
    "kernrl.value.gptd_ensemble": "GPTDEnsemble",
    "kernrl.value.hyperparameters": "maximise_likelihood",
    "kernrl.value.averagers": "KernelAverager",
    "kernrl.value.diagnostics": "bellman_errors contraction ridge_path spectrum",
    "kernrl.value.divergence": "DivergenceMonitor",
    "kernrl.value.factorisation": "StochasticFactorisation",
    "kernrl.value.ope": "Estimate estimate_return",
    "kernrl.value.occupancy": "SuccessorRepresentation",
    "kernrl.value.recursive": "RecursiveKLSTD",
    "kernrl.value.regularised": "RegularisedLSTD RegularisedLSTDQ",
    "kernrl.value.state_transform": "StateTransform",
    "kernrl.value.td": "KernelTD",
    "kernrl.control.klspi": "KLSPI",
    "kernrl.control.kernel_q_learning": "KernelQLearning",
    "kernrl.deep.ppo": "PPO",
    "kernrl.harness.evaluation": "EpisodeScores evaluate",
    "kernrl.harness.experiment": "Experiment",
    "kernrl.harness.launch": "run_experiment",
    "kernrl.harness.reporting": "report",
    "kernrl.harness.stats": (
        "Interval bootstrap_interval iqm performance_profile probability_of_improvement"
    ),
}.items():
    _TABLE |= dict.fromkeys(_names.split(), _room)

__getattr__, __dir__, __all__ = attach(__name__, _TABLE)
