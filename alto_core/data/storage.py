"""A prepared data set in a folder: parquet for rows, JSON for the rest.

Reading it back gives the same value, checked by digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alto_core.data.report import DataReport
from alto_core.data.rows import GenerationRow, PairRow, SplitData, TaskData, TokenRow, data_digest
from alto_core.errors import DataError
from alto_core.whole_files import whole_file

LAYOUT_VERSION = 1
ROWS_FILE, GENERATION_FILE, SUMMARY_FILE = "rows.parquet", "generation_rows.parquet", "task_data.json"
ROW_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("row_id", pa.int64()),
        ("origin", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("label_mask", pa.list_(pa.bool_())),
    ]
)
PAIR_SCHEMA = pa.schema([*ROW_SCHEMA, ("prompt_length", pa.int32()), ("rejected_start", pa.int32())])
"""Of preference pairs."""
GENERATION_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("row_id", pa.int64()),
        ("origin", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("reference", pa.string()),
    ]
)


def save_task_data(task_data: TaskData, folder: Path) -> None:
    """Write a prepared data set. The summary goes last, so a folder that has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    rows = [(split.name, row) for split in task_data.splits for row in split.rows]
    holds_pairs = isinstance(rows[0][1], PairRow)
    _write_table(rows, PAIR_SCHEMA if holds_pairs else ROW_SCHEMA, folder / ROWS_FILE)
    generation_rows = [(split.name, row) for split in task_data.splits for row in split.generation_rows]
    _write_table(generation_rows, GENERATION_SCHEMA, folder / GENERATION_FILE)
    summary = {
        "layout_version": LAYOUT_VERSION,
        "digest": task_data.digest,
        "splits": [split.name for split in task_data.splits],
        "stop_token_ids": list(task_data.stop_token_ids),
        "pad_token_id": task_data.pad_token_id,
        "max_length": task_data.max_length,
        "report": task_data.report.to_dict(),
    }
    with whole_file(folder / SUMMARY_FILE) as file:
        file.write_text(json.dumps(summary, indent=2), encoding="utf-8")


def load_task_data(folder: Path) -> TaskData:
    """Read a data set that `save_task_data` wrote.

    Raises:
        DataError: a file is missing, damaged, of another layout, or does not match the digest.
    """
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_bytes())
        if summary["layout_version"] != LAYOUT_VERSION:
            raise ValueError(f"layout {summary['layout_version']}, expected {LAYOUT_VERSION}")
        rows = _read_rows(folder / ROWS_FILE)
        generation_rows = _read_generation_rows(folder / GENERATION_FILE)
        splits = {
            name: SplitData(
                name=name, rows=tuple(rows.get(name, ())), generation_rows=tuple(generation_rows.get(name, ()))
            )
            for name in summary["splits"]
        }
        task_data = TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits.get("test"),
            digest=summary["digest"],
            report=DataReport.from_dict(summary["report"]),
            stop_token_ids=tuple(summary["stop_token_ids"]),
            pad_token_id=summary["pad_token_id"],
            max_length=summary["max_length"],
        )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{folder}: the prepared data set cannot be read: {error}. Prepare it again.") from None
    found = data_digest(
        task_data.splits,
        stop_token_ids=task_data.stop_token_ids,
        pad_token_id=task_data.pad_token_id,
        max_length=task_data.max_length,
    )
    if found != task_data.digest:
        raise DataError(
            f"{folder}: the prepared data set has digest {found}, expected {task_data.digest}. Prepare it again."
        )
    return task_data


def _write_table(rows: list[tuple[str, Any]], schema: pa.Schema, path: Path) -> None:
    columns = {name: [split if name == "split" else getattr(row, name) for split, row in rows] for name in schema.names}
    with whole_file(path) as file:
        pq.write_table(pa.table(columns, schema=schema), file)


def _read_rows(path: Path) -> dict[str, list[TokenRow]]:
    shared: dict[int, int] = {}
    rows: dict[str, list[TokenRow]] = {}
    for split, fields in _records(path, ROW_SCHEMA, PAIR_SCHEMA):
        # Equal ids share one int object, as they do when they come from the tokenizer.
        token_ids = tuple(shared.setdefault(index, index) for index in fields["token_ids"])
        kind = PairRow if "prompt_length" in fields else TokenRow
        row = kind(**{**fields, "token_ids": token_ids, "label_mask": tuple(fields["label_mask"])})
        rows.setdefault(split, []).append(row)
    return rows


def _read_generation_rows(path: Path) -> dict[str, list[GenerationRow]]:
    rows: dict[str, list[GenerationRow]] = {}
    for split, fields in _records(path, GENERATION_SCHEMA):
        row = GenerationRow(**{**fields, "prompt_ids": tuple(fields["prompt_ids"])})
        rows.setdefault(split, []).append(row)
    return rows


def _records(path: Path, *schemas: pa.Schema) -> Any:
    table = pq.read_table(path)
    if not any(table.schema.equals(schema) for schema in schemas):
        raise ValueError(f"{path.name} has other columns than expected")
    for batch in table.to_batches(max_chunksize=4096):
        for fields in batch.to_pylist():
            yield fields.pop("split"), fields
