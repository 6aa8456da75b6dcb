"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernrl import checks


@contextmanager
def replacing(path: Any, *, owner: str = "replacing") -> Iterator[Path]:
    """A path beside `path` to write to; it takes its place if the block succeeds, or vanishes.

    A reader of `path` sees the old file or the new one, and an interrupted write leaves the old.
    """
    target = Path(os.path.realpath(checks.path(owner, "path", path)))
    if target.is_dir() or not target.parent.is_dir():
        rule = "path must name a file in a folder that exists"
        checks.fail(owner, rule, repr(str(path)), "", FileNotFoundError)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # the name must not reach the disk before the content
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
