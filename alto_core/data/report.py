"""What was read, what was left out and why: the fixed vocabulary of reasons and the report of a prepared data set.

Leaves the checks themselves to the rooms that make them; they raise `UnusableRowError`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

EXCERPT_CHARACTERS = 80


class Reason(StrEnum):
    """Why a row is left out. Reports, tests and docs use these words."""

    BROKEN_LINE = "broken line"
    DUPLICATE_KEY = "duplicate key"
    INVALID_UNICODE = "invalid unicode"
    NOT_A_MAPPING = "not a mapping"
    MISSING_FIELD = "missing field"
    NOT_TEXT = "field is not text"
    NOT_TURNS = "field is not a list of turns"
    EMPTY_ANSWER = "empty answer"
    EMPTY_PROMPT = "empty prompt"
    NO_ANSWER = "no assistant turn"
    UNKNOWN_ROLE = "unknown role"
    TOOL_CALL = "tool call"
    TURN_ORDER = "turn order"
    TEMPLATE_REFUSED = "template refused"
    TEMPLATE_UNSTABLE = "template is not prefix-stable"
    CONTROL_TOKEN = "control token in text"  # noqa: S105 - no password
    TOO_LONG = "too long"
    NO_TRAINED_TOKEN = "no trained token left"  # noqa: S105 - no password
    OUTSIDE_VOCABULARY = "token outside the model's vocabulary"
    HELD_OUT_DUPLICATE = "duplicate of a held-out row"
    IDENTICAL_SIDES = "identical sides"
    SIDES_SWAPPED = "sides swapped"
    SIDES_OF_TWO_KINDS = "sides of two kinds"
    PROMPT_REPEATED = "prompt repeated in one answer"
    PROMPTS_DIFFER = "prompts differ"
    NO_COMMON_PROMPT = "no common prompt"


class UnusableRowError(Exception):
    """One row cannot be used. Never leaves the data room: it is counted, or becomes a `DataError`.

    Args:
        reason: from the fixed vocabulary.
        detail: what was found there, and the rule where it is not obvious.
        field: column, or path such as `messages[1].role`.
    """

    def __init__(self, reason: Reason, detail: str = "", field: str | None = None):
        self.reason, self.detail, self.field = reason, detail, field
        place = f"field `{field}`: " if field else ""
        super().__init__(f"{place}{reason}" + (f" ({detail})" if detail else ""))


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Rows of one source that were left out for one reason, with the first of them as an example."""

    source: str
    """Section of the task file the source belongs to: `train`, `validation` or `test`."""
    reason: Reason
    count: int
    origin: str
    """File and row of the example."""
    explanation: str
    """Field and finding of the example; empty where the reason says it all."""
    excerpt: str
    """Start of the example row."""


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Sizes of one split."""

    name: str
    num_rows: int
    num_tokens: int
    num_labels: int
    """Trained tokens."""
    median_tokens: int
    p95_tokens: int
    longest_tokens: int

    @property
    def label_share(self) -> float:
        return self.num_labels / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a person wants to know about a prepared data set before anything is trained on it."""

    row_format: str
    rows_read: Mapping[str, int]
    """Rows found in each source, unusable ones included."""
    splits: tuple[SplitSummary, ...]
    left_out: tuple[LeftOut, ...]
    ignored_columns: tuple[str, ...]
    notes: tuple[str, ...]

    def count(self, reason: Reason, source: str = "train") -> int:
        """Rows of a source that were left out for a reason."""
        return sum(item.count for item in self.left_out if item.reason == reason and item.source == source)

    def as_text(self) -> str:
        """The report as plain lines and aligned tables."""
        read = ", ".join(f"{count} from {source}" for source, count in self.rows_read.items())
        parts = [f"format {self.row_format}; rows read: {read}"]
        if self.splits:
            parts.append(_split_table(self.splits))
        if self.left_out:
            parts.append(left_out_table(self.left_out))
        if self.ignored_columns:
            parts.append(f"ignored columns: {', '.join(self.ignored_columns)}")
        parts.extend(f"note: {note}" for note in self.notes)
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DataReport:
        """The inverse of `to_dict`."""
        return cls(
            row_format=fields["row_format"],
            rows_read=dict(fields["rows_read"]),
            splits=tuple(SplitSummary(**split) for split in fields["splits"]),
            left_out=tuple(LeftOut(**{**item, "reason": Reason(item["reason"])}) for item in fields["left_out"]),
            ignored_columns=tuple(fields["ignored_columns"]),
            notes=tuple(fields["notes"]),
        )


class RowTally:
    """Counts the rows of all sources while they are read, and keeps the first example of each reason."""

    def __init__(self) -> None:
        self.rows_read: dict[str, int] = {}
        self._left_out: dict[tuple[str, Reason], LeftOut] = {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Most frequent reason first, source by source."""
        order = list(self.rows_read)
        return tuple(sorted(self._left_out.values(), key=lambda item: (order.index(item.source), -item.count)))

    def count_read(self, source: str) -> None:
        self.rows_read[source] = self.rows_read.get(source, 0) + 1

    def leave_out(self, source: str, origin: str, problem: UnusableRowError, content: object) -> None:
        """Count a row that cannot be used; the first of each reason is kept as its example."""
        key = (source, problem.reason)
        known = self._left_out.get(key)
        if known is not None:
            self._left_out[key] = dataclasses.replace(known, count=known.count + 1)
            return
        explanation = str(problem) if problem.field or problem.detail else ""
        self._left_out[key] = LeftOut(
            source=source,
            reason=problem.reason,
            count=1,
            origin=origin,
            explanation=explanation,
            excerpt=excerpt(content),
        )


def excerpt(content: object) -> str:
    """The start of a row on one printable line; control characters and lone surrogates are escaped."""
    if isinstance(content, str):
        text = content[: 2 * EXCERPT_CHARACTERS]
    else:
        text = json.dumps(content, ensure_ascii=False, default=repr)
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: 2 * EXCERPT_CHARACTERS]
    )
    return shown if len(shown) <= EXCERPT_CHARACTERS else f"{shown[: EXCERPT_CHARACTERS - 3]}..."


def left_out_table(left_out: tuple[LeftOut, ...]) -> str:
    """Rows that were left out, one reason a line with its example below."""
    lines = ["left out:"]
    for item in left_out:
        lines.append(f"  {item.count:>7} {item.source:<10} {item.reason}")
        lines.append(f"          e.g. {item.origin}: {item.explanation or item.reason}: {item.excerpt}")
    return "\n".join(lines)


def _split_table(splits: tuple[SplitSummary, ...]) -> str:
    lines = [f"{'split':<11}{'rows':>8}{'tokens':>12}{'trained':>9}{'median':>8}{'p95':>7}{'longest':>9}"]
    for split in splits:
        lines.append(
            f"{split.name:<11}{split.num_rows:>8}{split.num_tokens:>12}{split.label_share:>9.1%}"
            f"{split.median_tokens:>8}{split.p95_tokens:>7}{split.longest_tokens:>9}"
        )
    return "\n".join(lines)
