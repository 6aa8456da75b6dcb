"""Making n into m: landmarks, Nyström features, random features, online dictionaries."""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Nystroem": "kernrl.approx.nystroem",
        "RandomFeatures": "kernrl.approx.random_features",
        "Dictionary": "kernrl.approx.dictionary",
        "GrowingCholesky": "kernrl.approx.growing",
    },
)
