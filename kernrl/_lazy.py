"""Lazy faces (PEP 562): a table of public names, each imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__`, `__all__` for a package whose `table` maps name -> module.

    >>> getattr_, dir_, all_ = attach("demo", {"sqrt": "math"})
    >>> getattr_("sqrt")(9.0)
    3.0
    """

    def __getattr__(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(table[name]), name)

    def __dir__() -> list[str]:
        return sorted(table)

    return __getattr__, __dir__, sorted(table)
