"""Which columns of a row hold what, and the checked parts of one row. Knows neither templates nor tokens.

Rules for chats: one optional system turn, at the start; then user and assistant in turn, the user first. Turns after
the last assistant turn are cut off, since nothing of them is trained. Text parts are text: numbers and objects are not
turned into it, and a missing or null field is not an empty text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alto_core.config import DataSection
from alto_core.data.report import Reason, UnusableRowError, excerpt
from alto_core.data.row_source import SourceRow
from alto_core.errors import DataError

Kind = Literal["messages", "prompt_completion", "text", "preference"]
PARTS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Parts of each format, the likeliest format first. Pairs (`preference`, see `preference_pairs`) may lack a prompt, and
are never taken for granted: the task file asks for them."""
SIDES = ("chosen", "rejected")
ROWS_LOOKED_AT = 100
"""Rows whose columns decide the format when the task file does not name one."""
USUAL_PAIRS = (
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("input", "target"),
)
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Turns in an order that every template should take; the last one is the assistant's."""

    turns: tuple[Turn, ...]
    num_cut_turns: int = 0
    """Turns after the last answer, left away."""


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """An instruction and its answer."""

    prompt: str
    completion: str
    takes_template: bool = True
    """False: the texts stand as the model is to see them."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A text that is trained as a whole."""

    text: str


RowParts = Chat | PromptCompletion | PlainText


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A format and the columns that hold its parts."""

    kind: Kind
    columns: Mapping[str, str]
    """Column of each part of the format."""

    def ignored_columns(self, content: Mapping[str, Any]) -> set[str]:
        """Columns of a row that the format does not use, keys of single turns included."""
        ignored = content.keys() - self.columns.values()
        for column in self.columns.values():
            if isinstance(turns := content.get(column), list):
                keys = {key for turn in turns if isinstance(turn, dict) for key in turn}
                ignored |= {f"{column}[].{key}" for key in keys - {"role", "content"}}
        return {excerpt(str(column)) for column in ignored}


def choose_format(data: DataSection, first_rows: Sequence[SourceRow], source: str) -> RowFormat:
    """Settle the format: the one the task file names, else the first whose columns are there.

    Args:
        data: section of the task file.
        first_rows: some rows of the source; their columns together count.
        source: name of the source, for messages.

    Raises:
        DataError: there is no row, no format fits the columns, or `data.columns` names a part of another format.
    """
    if not first_rows:
        raise DataError(f"{source}: no row in it. Expected at least a few rows of text.")
    readable = [row.content for row in first_rows if row.problem is None and isinstance(row.content, dict)]
    if not readable:
        first = first_rows[0]
        finding = first.problem or UnusableRowError(Reason.NOT_A_MAPPING, f"got {described(first.content)}")
        raise DataError(
            f"{source}: no usable row among the first {len(first_rows)}. "
            f"{first.origin}: {finding}: {excerpt(first.content)}"
        )
    present = {str(column): None for content in readable for column in content}
    kind: Kind = _detected(data, tuple(present), source) if data.format == "auto" else data.format
    if kind == "preference":
        _check_sides(data, tuple(present), source)
    named: Mapping[str, str] = {str(part): column for part, column in data.columns.items()}
    for part in named:
        if part not in PARTS[kind]:
            raise DataError(
                f"data.columns.{part}: has no meaning for format {kind}, which has {', '.join(PARTS[kind])}. Remove it."
            )
    return RowFormat(kind=kind, columns={part: named.get(part, part) for part in PARTS[kind]})


def parse_row(content: Any, row_format: RowFormat) -> RowParts:
    """Take the parts of one row.

    Raises:
        UnusableRowError: a part is missing, of another type, empty where it is trained, or turns are out of order.
    """
    if not isinstance(content, dict):
        raise UnusableRowError(Reason.NOT_A_MAPPING, f"got {described(content)}")
    if row_format.kind == "messages":
        return _chat(content, row_format.columns["messages"])
    if row_format.kind == "text":
        text = field_text(content, row_format.columns["text"])
        if not text.strip():
            raise UnusableRowError(Reason.EMPTY_ANSWER, "no text", row_format.columns["text"])
        return PlainText(text=text)
    prompt = field_text(content, row_format.columns["prompt"])
    completion = field_text(content, row_format.columns["completion"])
    if not completion.strip():
        raise UnusableRowError(Reason.EMPTY_ANSWER, field=row_format.columns["completion"])
    return PromptCompletion(prompt=prompt, completion=completion)


def _detected(data: DataSection, present: Sequence[str], source: str) -> Kind:
    for kind, parts in PARTS.items():
        if kind != "preference" and all(data.columns.get(part, part) in present for part in parts):  # type: ignore[call-overload]
            return kind
    shown = ", ".join(excerpt(column) for column in present) or "none"
    raise DataError(
        f"{source}: got columns {shown}; expected `messages`, or `prompt` and `completion`, or `text`. {_hint(present)}"
    )


def _check_sides(data: DataSection, present: Sequence[str], source: str) -> None:
    for part in SIDES:
        column = data.columns.get(part, part)  # type: ignore[call-overload]
        if column not in present:
            shown = ", ".join(excerpt(name) for name in present) or "none"
            raise DataError(
                f"{source}: got columns {shown}; format preference expects `chosen` and `rejected`, and perhaps "
                f"`prompt`, but there is no {column!r}. Name your columns with `data.columns`."
            )


def _hint(present: Sequence[str]) -> str:
    if all(side in present for side in SIDES):
        return "These are preference pairs: set `objective: dpo`."
    if "conversations" in present:
        return "Turn `conversations` (from, value) into `messages` (role, content); roles are system, user, assistant."
    for prompt, completion in USUAL_PAIRS:
        if prompt in present and completion in present:
            return f"Perhaps `columns: {{prompt: {prompt}, completion: {completion}}}`?"
    return "Name your columns with `data.columns`, for example `columns: {prompt: question, completion: answer}`."


def _chat(content: dict[str, Any], column: str) -> Chat:
    if content.get(column) is None:
        raise UnusableRowError(Reason.MISSING_FIELD, field=column)
    values = content[column]
    if not isinstance(values, list):
        raise UnusableRowError(Reason.NOT_TURNS, f"got {described(values)}", column)
    turns = [parse_turn(value, f"{column}[{i}]") for i, value in enumerate(values)]
    last_answer = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=None)
    if last_answer is None:
        raise UnusableRowError(Reason.NO_ANSWER, f"roles {', '.join(turn.role for turn in turns) or 'none'}", column)
    kept = turns[: last_answer + 1]
    check_order(kept, column)
    for i, turn in enumerate(kept):
        if turn.role == "assistant" and not turn.content.strip():
            raise UnusableRowError(Reason.EMPTY_ANSWER, field=f"{column}[{i}].content")
    return Chat(turns=tuple(kept), num_cut_turns=len(turns) - len(kept))


def parse_turn(value: Any, place: str) -> Turn:
    """One turn of a chat; `place` is its path in the row.

    Raises:
        UnusableRowError: it has no role or no text, an unknown role, or a tool call.
    """
    if not isinstance(value, dict):
        raise UnusableRowError(Reason.NOT_TURNS, f"got {described(value)}, expected role and content", place)
    if "from" in value and "role" not in value:
        raise UnusableRowError(Reason.MISSING_FIELD, "got from/value, expected role/content", f"{place}.role")
    role = field_text(value, "role", f"{place}.role")
    if role not in ROLES:
        raise UnusableRowError(
            Reason.UNKNOWN_ROLE, f"got {excerpt(role)!r}, expected one of {', '.join(ROLES)}", f"{place}.role"
        )
    if value.get("tool_calls") or value.get("function_call"):
        raise UnusableRowError(Reason.TOOL_CALL, "tool calls are not trained", place)
    return Turn(role=role, content=field_text(value, "content", f"{place}.content"))


def check_order(turns: Sequence[Turn], column: str) -> None:
    """Refuse turns that are not an optional system turn, then user and assistant in turn.

    Raises:
        UnusableRowError: names the first turn out of order.
    """
    start = 1 if turns[0].role == "system" else 0
    for i, turn in enumerate(turns[start:]):
        expected = ("user", "assistant")[i % 2]
        if turn.role != expected:
            rule = f"got {turn.role}, expected {expected}: an optional system turn, then user and assistant in turn"
            raise UnusableRowError(Reason.TURN_ORDER, rule, f"{column}[{i + start}].role")


def field_text(content: Mapping[str, Any], column: str, place: str | None = None) -> str:
    """A field's text. `place` is the path shown to people where it is more than the column.

    Raises:
        UnusableRowError: it is missing, of another type, or no valid Unicode.
    """
    value = content.get(column)
    if value is None:
        raise UnusableRowError(Reason.MISSING_FIELD, "null" if column in content else "", place or column)
    if not isinstance(value, str):
        raise UnusableRowError(Reason.NOT_TEXT, f"got {described(value)}", place or column)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRowError(
            Reason.INVALID_UNICODE, f"lone surrogate at character {error.start}", place or column
        ) from None
    return value


def described(value: Any) -> str:
    """A value's type in the words of JSON, with the value where it is short."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {excerpt(repr(value) if isinstance(value, float) else value)}"
        case str():
            return "a text"
        case dict():
            return "an object"
        case list():
            return "a list"
    return type(value).__name__
