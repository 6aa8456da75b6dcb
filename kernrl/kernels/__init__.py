"""k(x, y) and its matrix: kernels, their algebra, the Gram."""

from kernrl._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(
            ("Kernel", "Delta", "Sum", "Product", "Scaled", "OnDimensions"), "kernrl.kernels.base"
        ),
        **dict.fromkeys(
            ("RBF", "Matern", "Laplacian", "RationalQuadratic", "Periodic"),
            "kernrl.kernels.stationary",
        ),
        **dict.fromkeys(("Linear", "Polynomial"), "kernrl.kernels.dot"),
        "StateAction": "kernrl.kernels.state_action",
        # `gram` itself is public as kernrl.gram: here the file of that name would hide it.
        **dict.fromkeys(("GramOperator", "matvec"), "kernrl.kernels.gram"),
    },
)
