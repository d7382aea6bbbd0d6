"""Rows from files (.jsonl, .json, .csv, .parquet) and from hub data sets. Knows nothing of formats or tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alto_core.config.fields import FILE_ENDINGS
from alto_core.data.json_rows import read_json_rows
from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.row_source import SourceRow
from alto_core.data.utf8 import read_utf8
from alto_core.errors import DataError, first_line
from alto_core.hub import go_offline_without_hub

ROWS_PER_READ = 2048
LONGEST_CSV_CELL = 2**31 - 1
"""Python's csv module refuses cells above 131,072 characters unless told otherwise."""


def read_source(
    source: str, *, subset: str | None = None, split: str = "train", limit: int | None = None
) -> Iterator[SourceRow]:
    """Yield the rows of a file or of one split of a hub data set, the first `limit` at most.

    Raises:
        DataError: no such file or data set, an ending that is not known, or content that cannot be read at all.
    """
    rows = _read_all(source, subset=subset, split=split, limit=limit)
    for number, row in enumerate(rows):
        if number == limit:
            return
        yield row


def is_file_source(source: str) -> bool:
    """Whether a source names a file, by its ending or because it is there; all else is a hub data set or a folder."""
    return Path(source).suffix.lower() in FILE_ENDINGS or Path(source).is_file()


def check_source(source: str) -> None:
    """Look whether a source is there. A name that can be a hub data set passes.

    Raises:
        DataError: no such file or folder, or a file whose ending is not known.
    """
    path = Path(source)
    if not is_file_source(source):
        if path.is_absolute() and not path.exists():
            raise DataError(
                f"{source}: no such file or folder. Expected one of {', '.join(FILE_ENDINGS)}, or a hub data set."
            )
        return
    if not path.is_file():
        raise DataError(f"{source}: no such file. A relative path in a task file starts at the task file's folder.")
    if path.suffix.lower() not in FILE_ENDINGS:
        raise DataError(
            f"{source}: got a file ending in {path.suffix or 'nothing'!r}, expected one of {', '.join(FILE_ENDINGS)}."
        )


def _read_all(source: str, *, subset: str | None, split: str, limit: int | None) -> Iterator[SourceRow]:
    check_source(source)
    path = Path(source)
    if not is_file_source(source):
        return _hub_rows(source, subset=subset, split=split, limit=limit)
    match path.suffix.lower():
        case ".csv":
            return _csv_rows(path)
        case ".parquet":
            return _parquet_rows(path)
    return read_json_rows(path)


def _csv_rows(path: Path) -> Iterator[SourceRow]:
    content = read_utf8(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8. Save the file as UTF-8."
        ) from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records = _csv_records(path, reader)
    header = next((cells for cells in records if cells), [])
    apart = next((mark for mark in (";", "\t") if len(header) == 1 and mark in header[0]), None)
    if apart:
        raise DataError(f"{path}: the columns stand apart by {apart!r}, expected commas. Save the file with commas.")
    if len(set(header)) != len(header):
        raise DataError(f"{path}: the header names a column twice: {', '.join(header)}. Give each column its own name.")
    number = 0
    for cells in records:
        if not cells:
            continue
        number += 1
        origin = f"{path.name} row {number}"
        if len(cells) != len(header):
            problem = UnusableRowError(Reason.BROKEN_LINE, f"{len(cells)} cells, the header has {len(header)}")
            yield SourceRow(origin=origin, content=",".join(cells), problem=problem)
        else:
            yield SourceRow(origin=origin, content=dict(zip(header, cells, strict=True)))


def _csv_records(path: Path, reader: Any) -> Iterator[list[str]]:
    """The records of a csv reader. The cell limit is one for the whole process, so it is put back after each record."""
    while True:
        limit = csv.field_size_limit(LONGEST_CSV_CELL)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num}: broken CSV: {error}. Mend the quotes around this line."
            ) from None
        finally:
            csv.field_size_limit(limit)
        yield cells


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                for content in batch.to_pylist():
                    number += 1
                    yield SourceRow(origin=f"{path.name} row {number}", content=content)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {first_line(error)}. Write the file again.") from None


def _hub_rows(source: str, *, subset: str | None, split: str, limit: int | None) -> Iterator[SourceRow]:
    is_folder = Path(source).is_dir()
    is_away = "" if is_folder else go_offline_without_hub()  # before the import, which reads it
    # datasets takes a second to import, and files do not need it.
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetsError

    name = f"{source}/{subset}" if subset else source
    try:
        dataset = load_dataset(source, subset, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        if is_folder:
            raise DataError(
                f"folder {name}, split {split}: cannot be loaded as a data set: {first_line(error)}. "
                f"Check subset and split, or name a file in it that ends in {', '.join(FILE_ENDINGS)}."
            ) from None
        raise DataError(
            f"hub data set {name}, split {split}: cannot be loaded: {is_away or first_line(error)}. Check the name, "
            "subset and split. A file or folder of that name is not there either; relative ones start at the task "
            "file's folder."
        ) from None
    assert isinstance(dataset, Dataset)
    stop = len(dataset) if limit is None else min(limit, len(dataset))
    for start in range(0, stop, ROWS_PER_READ):
        chunk = dataset.select(range(start, min(start + ROWS_PER_READ, stop)))
        for number, content in enumerate(chunk.to_list(), start=start + 1):
            yield SourceRow(origin=f"{name}[{split}] row {number}", content=content)
