"""From text to objects: `"kernrl.control.klspi.KLSPI"` and `{class = "…", length_scale = 1.0}`.

There is no registry: whatever Python can import can be named.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from kernrl import checks


def locate(path: str, owner: str = "build") -> Any:
    """The object at an import path "package.module.Name".

    ImportError names the part that was not found and guesses what was meant; an error that the
    module itself raises while being imported is passed on.
    """
    module, _, name = path.rpartition(".")
    if not module:
        checks.fail(
            owner,
            "a class must be an import path such as 'kernrl.kernels.stationary.RBF'",
            repr(path),
        )
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it needs is not
        rule = f"{path!r} must be importable"
        guess = _guess(error.name.rpartition(".")[2], _siblings(error.name))
        checks.fail(owner, rule, f"no module {error.name!r}", guess, ImportError)
    if not hasattr(home, name):
        guess = _guess(name, [key for key in dir(home) if not key.startswith("_")])
        checks.fail(
            owner,
            f"{path!r} must be importable",
            f"no {name!r} in {module}",
            guess,
            ImportError,
        )
    return getattr(home, name)


def construct(spec: Any, owner: str = "build") -> Any:
    """Every table with a key "class" in `spec` as an object, inside lists and tables too.

    >>> construct({"class": "fractions.Fraction", "numerator": 1, "denominator": 2})
    Fraction(1, 2)
    """
    if isinstance(spec, Mapping):
        inner = {key: construct(value, owner) for key, value in spec.items() if key != "class"}
        return instance(spec["class"], inner, owner) if "class" in spec else inner
    if isinstance(spec, list | tuple):
        return [construct(value, owner) for value in spec]
    return spec


def instance(path: str, params: Mapping[str, Any], owner: str = "build") -> Any:
    """The class at `path` called with `params`, refused early if it has no such parameter."""
    kind = locate(path, owner)
    if not callable(kind):
        checks.fail(owner, f"{path!r} must be a class", type(kind).__name__, error=TypeError)
    known = _parameters(kind)
    unknown = [] if known is None else [key for key in params if key not in known]
    if known is not None and unknown:
        cure = _guess(unknown[0], known) or f"It takes {', '.join(known) or 'nothing'}."
        rule = f"{path.rpartition('.')[2]} has no parameter {unknown[0]!r}"
        checks.fail(owner, rule, cure=cure, error=TypeError)
    return kind(**params)


def _parameters(kind: Any) -> list[str] | None:
    """The keyword names that `kind` takes; None if it takes any, or does not say."""
    try:
        found = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    return [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _siblings(module: str) -> list[str]:
    """The modules that lie where `module` was looked for."""
    parent = module.rpartition(".")[0]
    try:
        places = importlib.import_module(parent).__path__ if parent else None
    except (ImportError, AttributeError):
        return []
    return [found.name for found in pkgutil.iter_modules(places)]


def _guess(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
