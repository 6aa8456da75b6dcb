"""The basement: CUDA C++ for CuPy arrays. It knows arrays and numbers, no kernel class."""

from kernrl._lazy import attach

# `gram` itself is reached as kernrl.gpu.gram.gram: here the file of that name would hide it.
_PUBLIC = {
    "matvec": "kernrl.gpu.gram",
}

__getattr__, __dir__, __all__ = attach(__name__, _PUBLIC)
