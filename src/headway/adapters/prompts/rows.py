"""Reads rows from files, whole and strictly: what is not a row is refused with the file and line, never skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from headway.errors import ConfigError, StorageError
from headway.formats.bounded import open_regular, refuse_irregular

MAX_ROW_BYTES = 64 * 1024**2
Row = dict[str, Any]

_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


def read_rows(path: Path) -> Sequence[Row]:
    """Return the rows of a `.jsonl` file, a `.parquet` or `.arrow` file, or a directory of those. Raises `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"prompts: {path} does not exist (a relative path starts at the config file)")
    if path.is_file() and path.suffix in {".jsonl", ".ndjson"}:
        try:
            return _read_jsonl(path)
        except OSError as error:
            raise ConfigError(f"prompts: {path} cannot be read: {error.strerror}") from error
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in {".parquet", ".arrow", ".feather"})
    kinds = {file.suffix for file in files}
    if not files or not kinds <= {".parquet", ".arrow", ".feather"}:
        raise ConfigError(f'prompts: {path} holds no prompts: name a .jsonl file, .parquet or .arrow files, or a "module:function"')
    if len(kinds) > 1:
        raise ConfigError(f"prompts: {path} holds {' and '.join(sorted(kinds))} files: which of them are meant? Name one kind's directory")
    return _read_tables(files)


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # on \n only: JSON strings may hold other characters that count as line ends elsewhere (U+2028, U+0085, ...)
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), 1):
            if len(line) > MAX_ROW_BYTES:
                raise ConfigError(f"prompts: {path}:{number}: a row has more than {MAX_ROW_BYTES} bytes: name what is large by its path")
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                rows.append(_decode_row(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f"prompts: {path}:{number}: each line must be one JSON object: {error}") from error
    return rows


def _read_tables(files: Sequence[Path]) -> Sequence[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            refuse_irregular(file)
            if file.suffix == ".parquet":
                tables.append(pq.ParquetFile(file).read())
                continue
            with pa.memory_map(str(file)) as source:
                try:
                    tables.append(pa.ipc.open_file(source).read_all())
                except pa.ArrowInvalid:  # Hugging Face's datasets writes the streaming format
                    source.seek(0)
                    tables.append(pa.ipc.open_stream(source).read_all())
        except (pa.ArrowException, OSError, StorageError) as error:
            raise ConfigError(f"prompts: {file} cannot be read: {error}") from error
    try:
        return TableRows(pa.concat_tables(tables, promote_options="permissive"))
    except pa.ArrowException as error:
        raise ConfigError(f"prompts: the files beside {files[0]} do not have the same columns: {error}") from error


class TableRows(Sequence[Row]):
    """The rows of an Arrow table, made into Python values one at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return TableRows(self._table.take(list(range(start, stop, step))))
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row
