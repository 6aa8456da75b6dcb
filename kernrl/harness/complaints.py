"""One sentence for what is wrong in a configuration: file, key, what came, what was meant."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kernrl import checks

# Kind of complaint in pydantic -> the rule in the house's words; {…} are pydantic's own facts.
RULES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "greater_than_equal": "must be at least {ge}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must not be empty",
    "too_short": "must have at least {min_length} entry",
    "value_error": "{error}",
}


def first(error: ValidationError, model: type[BaseModel], owner: str) -> str:
    """The first complaint as a house sentence, and how many more there are."""
    found = error.errors()
    found.sort(key=lambda one: one["type"] != "extra_forbidden")  # a typo explains the rest
    text = _sentence(found[0], model, owner)
    more = len(found) - 1
    return f"{text} ({more} more.)" if more else text


def _sentence(one: Any, model: type[BaseModel], owner: str) -> str:
    where = [part for part in one["loc"] if not _is_tag(part)]
    if one["type"] == "extra_forbidden":
        return _unknown_key(where, model, owner)
    if one["type"] == "missing":
        return checks.sentence(owner, f"{dotted(where)} is missing", cure="Add it.")
    rule = RULES.get(one["type"], one["msg"].lower()).format(**one.get("ctx", {}))
    return checks.sentence(owner, f"{dotted(where)} {rule}", repr(one["input"]))


def _unknown_key(where: list[Any], model: type[BaseModel], owner: str) -> str:
    *place, key = where
    known = sorted(_model_at(model, place).model_fields)
    guess = difflib.get_close_matches(str(key), known, n=1)
    cure = f"Did you mean {guess[0]!r}?" if guess else f"Known: {', '.join(known)}."
    inside = f" in {dotted(place)}" if place else ""
    return checks.sentence(owner, f"unknown key {str(key)!r}{inside}", cure=cure)


def dotted(where: list[Any]) -> str:
    """A place in a file: ["agents", 0, "env", "CartPole-v1"] is agents[0].env.CartPole-v1."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"


def nearby(path: Path) -> str:
    """A guess which file was meant."""
    if not path.parent.is_dir():
        return f"There is no folder {str(path.parent)!r}."
    names = [other.name for other in path.parent.glob("*.toml")]
    guess = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"Did you mean {str(path.parent / guess[0])!r}?" if guess else ""


def _is_tag(part: Any) -> bool:
    """Pydantic names the branch of a union in a place, such as 'constrained-int'."""
    return isinstance(part, str) and part.startswith(("constrained-", "list[", "function-"))


def _model_at(model: type[BaseModel], place: list[Any]) -> type[BaseModel]:
    """The model of the table at a place: follows fields through lists and tables of models."""
    for part in place:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:
            model = _inner(field.annotation) or model
    return model


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_inner(part) for part in typing.get_args(annotation))
    return next((one for one in found if one is not None), None)
