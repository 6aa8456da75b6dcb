"""The one way to run and to judge: experiments, evaluation, statistics, reports."""

from kernrl._lazy import attach

_TABLE: dict[str, str] = {}
for _room, _names in {
    "kernrl.harness.evaluation": "EpisodeScores evaluate",
    "kernrl.harness.experiment": "Cell Experiment load",
    "kernrl.harness.launch": "run_experiment",
    "kernrl.harness.records": "Run open_run",
    "kernrl.harness.reporting": "Report report",
    "kernrl.harness.stats": (
        "Interval auc bootstrap_interval iqm mean_interval performance_profile "
        "probability_of_improvement steps_to_threshold"
    ),
}.items():
    _TABLE |= dict.fromkeys(_names.split(), _room)

__getattr__, __dir__, __all__ = attach(__name__, _TABLE)
