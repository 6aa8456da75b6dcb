"""One file of arrays and JSON: how learnt things are kept, without pickle.

The container is safetensors; the JSON sits in its metadata, beside a checksum over everything.
Values JSON cannot say are tagged: {"!tuple": […]}, {"!float": "inf"}, {"!array": {…}},
{"!object": "module.Class", "params": {…}}. Only classes are named, never code: a class is looked
up in kernrl or among the modules already imported, and must be a dataclass or have `get_params`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import numbers
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data import files

FORMAT = 1  # raise it when an older kernrl could no longer read the file

# ---------------------------------------------------------------- values <-> JSON


def encode(owner: str, name: str, value: object) -> Any:
    """`value` as what JSON can say; `name` is its place, for errors. A Generator becomes None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"!float": repr(number)}
    if isinstance(value, np.random.Generator | np.random.SeedSequence | np.random.RandomState):
        return None
    if isinstance(value, list):
        return [encode(owner, f"{name}[{k}]", item) for k, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": encode(owner, name, list(value))}
    if isinstance(value, Mapping):
        return _encode_mapping(owner, name, value)
    if arrays.is_array(value):
        return {"!array": _encode_array(owner, name, arrays.host(value))}
    return _encode_object(owner, name, value)


def _encode_mapping(owner: str, name: str, value: Mapping[Any, object]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str) or key.startswith("!"):
            checks.fail(owner, f"{name} must have names as keys to be saved", repr(key))
    return {key: encode(owner, f"{name}.{key}", item) for key, item in value.items()}


def _encode_array(owner: str, name: str, x: np.ndarray) -> dict[str, Any]:
    checks.numeric(owner, name, x)
    values = encode(owner, name, x.reshape(-1).tolist())
    return {"dtype": x.dtype.name, "shape": list(x.shape), "values": values}


def _encode_object(owner: str, name: str, value: object) -> dict[str, Any]:
    params = parameters(value)
    if params is None:
        checks.fail(
            owner,
            f"{name} must be a number, text, array, list, dict, kernel or estimator to be saved",
            type(value).__name__,
            error=TypeError,
        )
    return {
        "!object": class_path(owner, type(value)),
        "params": {key: encode(owner, f"{name}.{key}", item) for key, item in params.items()},
    }


def decode(owner: str, value: Any) -> Any:
    """What `encode` wrote, as it was."""
    if isinstance(value, list):
        return [decode(owner, item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("!"):
        return {key: decode(owner, item) for key, item in value.items()}
    checks.choice(owner, "a tag in the file", tag, _DECODERS)
    return _DECODERS[tag](owner, value)


def _decode_array(owner: str, value: dict[str, Any]) -> np.ndarray:
    text = value["!array"]
    values = np.array(decode(owner, text["values"]), dtype=text["dtype"])
    return values.reshape(text["shape"])


def _decode_object(owner: str, value: dict[str, Any]) -> Any:
    cls = find_class(owner, value["!object"])
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "get_params")):
        rule = "an object in the file must be a dataclass or have get_params"
        checks.fail(owner, rule, value["!object"], "Do not trust this file.", TypeError)
    return build(owner, cls, decode(owner, value["params"]))


_DECODERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "!array": _decode_array,
    "!float": lambda owner, value: float(value["!float"]),
    "!object": _decode_object,
    "!tuple": lambda owner, value: tuple(decode(owner, value["!tuple"])),
}

# ---------------------------------------------------------------- classes by name


def parameters(value: object) -> dict[str, Any] | None:
    """The constructor's arguments of a dataclass or scikit-learn style object; otherwise None."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if hasattr(value, "get_params"):
        return dict(value.get_params(deep=False))
    return None


def class_path(owner: str, cls: type) -> str:
    """`module.Class`, after a check that the class can be found again under that name."""
    path = f"{cls.__module__}.{cls.__qualname__}"
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls:
        cure = "Define it at the top of a module."
        checks.fail(owner, "a class to be saved must be importable by its name", path, cure)
    return path


def find_class(owner: str, path: object) -> type:
    """The class of a path: from kernrl, or from a module that is already imported."""
    module, _, name = str(path).rpartition(".")
    if module == "kernrl" or module.startswith("kernrl."):
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and found.__module__ == module):
        checks.fail(
            owner,
            "the file's class must be one of kernrl or of a module already imported",
            repr(path),
            f"Import {module or 'its module'} first, if you trust the file.",
        )
    return found


def build(owner: str, cls: type, params: dict[str, Any]) -> Any:
    """`cls(**params)`, with an error that says that the file and the class disagree."""
    try:
        return cls(**params)
    except (TypeError, ValueError) as error:
        rule = f"the file's parameters must be those of {cls.__name__}"
        cure = "It was saved by another version of the class."
        raise ValueError(checks.sentence(owner, rule, str(error), cure)) from error


# ---------------------------------------------------------------- the file


def write(owner: str, path: Any, state: Mapping[str, np.ndarray], header: dict[str, Any]) -> None:
    """Write `state` and the encoded `header` to one file, atomically."""
    from safetensors.numpy import save

    for name, x in state.items():
        checks.numeric(owner, f"state {name!r}", x)
    # safetensors writes memory as it lies, so the rows must lie in C order
    tensors = {name: np.array(x, order="C") for name, x in state.items()}
    text = json.dumps({"format": FORMAT, **header}, allow_nan=False)
    content = save(tensors, metadata={"kernrl": text, "sha256": _checksum(text, tensors)})
    with files.replacing(path, owner=owner) as temporary:
        temporary.write_bytes(content)


def read(
    owner: str, path: Any, required: Collection[str] = ()
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the header of a file, after checking format, checksum and header keys."""
    from safetensors import SafetensorError, safe_open

    if not Path(checks.path(owner, "path", path)).is_file():
        checks.fail(owner, "path must be a file", repr(str(path)), error=FileNotFoundError)
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        header = json.loads(metadata["kernrl"])
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        sound = metadata["sha256"] == _checksum(metadata["kernrl"], state)
    except (SafetensorError, KeyError, ValueError) as error:
        rule = "path must be a file written by save"
        raise ValueError(checks.sentence(owner, rule, repr(str(path)), str(error))) from error
    if header.get("format") != FORMAT:
        rule = f"the file must have format {FORMAT}"
        checks.fail(owner, rule, header.get("format"), "Read it with the kernrl that wrote it.")
    cure = "It was damaged or changed after it was saved."
    checks.require(sound, owner, "the file's checksum must be right", repr(str(path)), cure)
    missing = sorted(set(required) - set(header))
    checks.require(not missing, owner, "the file's header must be complete", f"no {missing}")
    return state, header


def _checksum(text: str, state: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(state):
        x = state[name]
        digest.update(f"{name} {x.dtype.name} {x.shape} ".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()
