"""Rows from JSON files with true line numbers: one object per line, or one array of objects.

A file is read as it is written, whatever its ending: an array in a `.jsonl` file and lines in a `.json` file both work.
Accepted as harmless: byte order mark, CRLF, blank lines. NaN and Infinity are no JSON and make a broken line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.row_source import SourceRow
from alto_core.data.utf8 import read_utf8
from alto_core.errors import DataError

WHITESPACE = " \t\r\n"


def read_json_rows(path: Path) -> Iterator[SourceRow]:
    """Yield the rows of a JSON-lines file or of a JSON array.

    Raises:
        DataError: the file cannot be read, or an array is broken (nothing after the break can be trusted).
    """
    content = read_utf8(path)
    if _is_array(content):
        return _array_rows(path, content.decode("utf-8"))
    return _line_rows(path.name, content)


def _is_array(content: bytes) -> bool:
    """Whether the file is one array: it starts with a bracket, and its first line alone is no JSON value of its own."""
    start = content.lstrip()
    if not start.startswith(b"["):
        return False
    try:
        start.decode("utf-8")
    except UnicodeDecodeError:
        return False
    first_line, _, rest = start.partition(b"\n")
    if not rest.strip():
        return True
    try:
        json.loads(first_line)
    except (ValueError, RecursionError):
        return True
    return False


def _line_rows(name: str, content: bytes) -> Iterator[SourceRow]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        origin = f"{name}:{number}"
        try:
            text = line.decode("utf-8").strip(WHITESPACE)
        except UnicodeDecodeError as error:
            problem = UnusableRowError(Reason.INVALID_UNICODE, f"byte 0x{line[error.start]:02x} is not UTF-8")
            yield SourceRow(origin=origin, content=line.decode("utf-8", "replace"), problem=problem)
            continue
        if not text:
            continue
        try:
            yield SourceRow(origin=origin, content=_DECODER.decode(text))
        except _RepeatedKeyError as error:
            yield SourceRow(
                origin=origin, content=text, problem=UnusableRowError(Reason.DUPLICATE_KEY, repr(error.key))
            )
        except (ValueError, RecursionError) as error:
            yield SourceRow(
                origin=origin, content=text, problem=UnusableRowError(Reason.BROKEN_LINE, _json_finding(error))
            )


def _array_rows(path: Path, text: str) -> Iterator[SourceRow]:
    position, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    needs_comma = False
    while True:
        start = _skip_whitespace(text, position)
        line, position = line + text.count("\n", position, start), start
        if text.startswith("]", position):
            break
        if needs_comma:
            if not text.startswith(",", position):
                raise _broken_array(path, line, "expected `,` or `]` after a row")
            needs_comma, position = False, position + 1
            continue
        try:
            content, end = _DECODER.raw_decode(text, position)
        except _RepeatedKeyError as error:
            raise _broken_array(
                path, line, f"{Reason.DUPLICATE_KEY} {error.key!r} in the row that starts here"
            ) from None
        except (ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken_array(path, line, _json_finding(error)) from None
        yield SourceRow(origin=f"{path.name}:{line}", content=content)
        line, position, needs_comma = line + text.count("\n", position, end), end, True
    if text[position + 1 :].strip(WHITESPACE):
        raise _broken_array(path, line, "text after the array's end")


def _broken_array(path: Path, line: int, finding: str) -> DataError:
    return DataError(
        f"{path}:{line}: broken JSON array: {finding}. Mend the file, or write one object per line (JSON lines)."
    )


def _skip_whitespace(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def _json_finding(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


class _RepeatedKeyError(Exception):
    def __init__(self, key: str):
        self.key = key
        super().__init__(key)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return mapping


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
