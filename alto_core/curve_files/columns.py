"""Columns of a Parquet file as checked numpy arrays. What cannot be meant is refused by file, column and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alto_core.errors import DataError


class ColumnFile:
    """A Parquet file that must have certain columns; others are ignored.

    Args:
        path: the file.
        columns: names that must be there.

    Raises:
        DataError: there is no such file, it is no Parquet file, or lacks a column.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self.path = path
        if path.is_dir() or not path.exists():
            found = "a folder" if path.is_dir() else "no such file"
            raise DataError(f"{path}: got {found}, expected a Parquet file.")
        try:
            self._table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path}: got a file that cannot be read as Parquet ({str(error).splitlines()[0]}), expected a Parquet "
                f"file with the columns {', '.join(columns)}."
            ) from None
        missing = [name for name in columns if name not in self._table.column_names]
        if missing:
            raise DataError(
                f"{path}: got no column {' and no column '.join(missing)}, expected {', '.join(columns)}; "
                f"it has {', '.join(self._table.column_names) or 'none'}."
            )
        repeated = [name for name in columns if self._table.column_names.count(name) > 1]
        if repeated:
            raise DataError(f"{path}: got the column {repeated[0]} more than once, expected it once.")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def text(self, name: str) -> list[str]:
        """Text, or whole numbers as text; never empty."""
        column = self._decoded(name)
        if not (_is_text(column.type) or pa.types.is_integer(column.type)):
            raise self._wrong_type(name, column, "text")
        values = column.to_pylist()
        for row, value in enumerate(values):
            if value is None or str(value).strip() == "":
                raise self.refused(name, row, "nothing" if value is None else "an empty text", "a text")
        return [str(value) for value in values]

    def numbers(self, name: str, *, missing_as_nan: bool = False) -> np.ndarray:
        """Numbers as float64. A missing value is NaN where that is allowed, and refused elsewhere."""
        column = self._decoded(name)
        kind = column.type
        if pa.types.is_null(kind):
            values = np.full(len(column), np.nan)
        elif pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
            values = np.array([np.nan if v is None else float(v) for v in column.to_pylist()], dtype=np.float64)
        else:
            raise self._wrong_type(name, column, "numbers")
        if not missing_as_nan and np.isnan(values).any():
            raise self.refused(name, int(np.flatnonzero(np.isnan(values))[0]), "no value", "a number")
        return values

    def whole_numbers(self, name: str, *, at_least: int) -> np.ndarray:
        """Whole numbers as int64; floats count where they are whole."""
        values = self.numbers(name)
        wrong = ~np.isfinite(values) | (values != np.round(values)) | (values < at_least) | (np.abs(values) > 2**53)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise self.refused(name, row, f"{values[row]:g}", f"a whole number, {at_least} or more")
        return values.astype(np.int64)

    def refused(self, name: str, row: int, got: str, expected: str) -> DataError:
        """The error for one value. `row` counts from 0, the text from 1."""
        return DataError(f"{self.path}: column {name}, row {row + 1} of {len(self)}: got {got}, expected {expected}.")

    def _wrong_type(self, name: str, column: Any, expected: str) -> DataError:
        return DataError(f"{self.path}: column {name}: got values of type {column.type}, expected {expected}.")

    def _decoded(self, name: str) -> Any:
        column = self._table[name]
        return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
