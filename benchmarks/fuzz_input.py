"""What all kinds of fuzz.py's input share: odd values, damage to bytes, and the check of what comes out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from alto_core.errors import AltoError

ODD_TEXTS = (
    "", " ", "\x00", "a\ud800", "\u202e", "<|im_end|>", "<script>", "../../x", "{{ 7*7 }}", "=cmd()", "null", "1e-4",
    "\ufeff", "\uff4eame", "a" * 5000,
)  # fmt: skip
odd_numbers = st.sampled_from([0, -1, 1, 2, 8, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300, 1e-4, 1.0])
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
scalars = st.one_of(
    st.none(), st.booleans(), odd_numbers, not_finite, st.integers(-3, 70), st.floats(0, 2), st.sampled_from(ODD_TEXTS)
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
Damage = tuple[str, int, int]
damages: st.SearchStrategy[list[Damage]] = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "zero", "insert", "drop", "double"]), st.integers(0), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damage: list[Damage]) -> bytes:
    """The content with bytes cut off, flipped, zeroed, put in, left out, or a part of it twice."""
    for kind, where, value in damage:
        at = where % (len(content) + 1)
        before, part, after = content[:at], content[at : at + value], content[at + value :]
        match kind:
            case "cut":
                content = before
            case "flip":
                content = before + bytes(byte ^ (value or 1) for byte in content[at : at + 1]) + content[at + 1 :]
            case "zero":
                content = before + bytes(len(part)) + after
            case "insert":
                content = before + bytes([value]) + content[at:]
            case "drop":
                content = before + after
            case "double":
                content = before + part + content[at:]
    return content


class Kind(ABC):
    """One kind of input."""

    name: str

    @abstractmethod
    def strategy(self) -> st.SearchStrategy[Any]:
        """Draws cases."""

    @abstractmethod
    def run(self, case: Any) -> None:
        """Feed a case to ALTO. An `AltoError` is a right answer, any other exception a fault."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds."""


def names_it(call: Callable[[], Any], *words: str) -> Any:
    """The value of a call; an `AltoError` that names none of these words, or is no one-line text, is a fault."""
    try:
        return call()
    except AltoError as error:
        text = str(error)
        assert any(word in text for word in words), f"names none of {words}: {text[:300]}"
        assert len(text) < 20_000, f"{len(text)} characters: {text[:300]}"
        raise


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """A file of these columns; a column that Parquet has no type for is written as text."""
    try:
        return _parquet_of({name: _array(values) for name, values in columns.items()})
    except pa.ArrowNotImplementedError:
        return _parquet_of({name: pa.array([printable(value) for value in values]) for name, values in columns.items()})


def _parquet_of(columns: dict[str, pa.Array]) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    return bytes(buffer.getvalue())


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        return pa.array([printable(value) for value in values])


def printable(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()
