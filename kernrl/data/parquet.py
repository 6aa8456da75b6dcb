"""Transitions as one parquet file: a column for each field, rows of numbers as fixed-size lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kernrl import arrays, checks
from kernrl.data import files
from kernrl.data.rows import FIELDS
from kernrl.data.transitions import Transitions

FORMAT = 1
_KEY = b"kernrl"
_INSTALL = "Install the extra: pip install 'kernrl[data]'."


def write(transitions: Transitions, path: Any) -> None:
    """One file, atomically; the schema's metadata keeps dtypes and shapes."""
    owner = "Transitions.to_parquet"
    pa, pq = _pyarrow(owner)
    given = {k: arrays.host(x) for k, x in transitions.columns.items() if x is not None}
    layout = {k: {"dtype": x.dtype.name, "shape": list(x.shape[1:])} for k, x in given.items()}
    text = json.dumps({"format": FORMAT, "fields": layout})
    table = pa.table({name: _to_column(pa, x) for name, x in given.items()})
    with files.replacing(path, owner=owner) as temporary:
        pq.write_table(table.replace_schema_metadata({_KEY: text}), temporary)


def read(path: Any) -> Transitions:
    """All rows of a file that `write` wrote."""
    _, file, layout = _open(path)
    return _rows(file.read(), layout)


def chunks(path: Any, n_rows: int = 65_536) -> Iterator[Transitions]:
    """The rows of a file, or of a folder's `*.parquet` in order of name, up to `n_rows` at a time.

    For data larger than memory: `KLSTD(...).fit(chunks(folder))`. An episode that crosses from one
    chunk of a file into the next keeps its id in both; episodes of different files differ.
    """
    n_rows = checks.integer("chunks", "n_rows", n_rows, at_least=1)
    first_id = 0
    for each in _files(path):
        pa, file, layout = _open(each)
        top = first_id - 1
        for batch in file.iter_batches(n_rows):
            part = _rows(pa.Table.from_batches([batch]), layout)
            if first_id:
                part = part.replace(episode=part.episode + first_id)
            top = max(top, int(part.episode.max()))
            yield part
        first_id = top + 1


def _files(path: Any) -> list[Path]:
    """The file itself, or the parquet files of a folder."""
    if not Path(path).is_dir():
        return [Path(path)]
    found = sorted(Path(path).glob("*.parquet"))
    if not found:
        checks.fail("chunks", "the folder must hold files *.parquet", f"none in {str(path)!r}")
    return found


def _open(path: Any) -> tuple[Any, Any, dict[str, Any]]:
    """pyarrow, the open file, and the layout of its fields."""
    owner = "Transitions.from_parquet"
    pa, pq = _pyarrow(owner)
    if not Path(checks.path(owner, "path", path)).is_file():
        checks.fail(owner, "path must be a file", repr(str(path)), error=FileNotFoundError)
    try:
        file = pq.ParquetFile(path, memory_map=True)
        header = json.loads((file.schema_arrow.metadata or {})[_KEY])
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        rule = "path must be a parquet file written by to_parquet"
        raise ValueError(checks.sentence(owner, rule, repr(str(path)))) from error
    if header.get("format") != FORMAT:
        cure = "Read it with the kernrl that wrote it."
        checks.fail(owner, f"the file must have format {FORMAT}", header.get("format"), cure)
    return pa, file, header["fields"]


def _to_column(pa: Any, x: np.ndarray) -> Any:
    """(n,) as a plain column, (n, …) as lists of one length."""
    if x.ndim == 1:
        return pa.array(x)
    width = int(np.prod(x.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), width)


def _rows(table: Any, layout: dict[str, Any]) -> Transitions:
    columns: dict[str, Any] = dict.fromkeys(FIELDS)
    for name, field in layout.items():
        column = table.column(name).combine_chunks()
        flat = column if not field["shape"] else column.flatten()
        x = flat.to_numpy(zero_copy_only=False).astype(field["dtype"], copy=False)
        columns[name] = x.reshape(-1, *field["shape"])
    return Transitions(**columns)


def _pyarrow(owner: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            checks.sentence(owner, "parquet files need pyarrow", "no such package", _INSTALL)
        ) from error
    return pyarrow, pyarrow.parquet
