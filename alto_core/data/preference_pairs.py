"""One row of preference data to a pair: a prompt, the answer that is preferred, and one that is not.

A prompt is a text or a list of turns, an answer a text or a list that ends with one assistant turn; the answers of a
pair are of the same kind. Where no prompt is named, it is what both sides begin with: whole turns, or text up to the
white space before the first word that differs. Refused is what would teach nothing, or the opposite: sides that are
equal or swapped, a prompt that stands again in one answer only, sides that part before the last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto_core.data.chat import num_shared
from alto_core.data.formats import (
    SIDES,
    Chat,
    PromptCompletion,
    RowFormat,
    Turn,
    check_order,
    described,
    field_text,
    parse_turn,
)
from alto_core.data.report import Reason, UnusableRowError

SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
"""Columns in which data sets say how good the two sides are."""
SHORTEST_REPEATED = 16
"""Characters: an answer may well begin with a shorter prompt's words."""


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two rows that differ in their last answer alone."""

    chosen: Chat | PromptCompletion
    rejected: Chat | PromptCompletion
    repeats_prompt: bool = False
    """The prompt stood in both answers again, and was taken off."""
    has_common_prompt: bool = False
    """No prompt was named; the sides' common beginning was taken for it."""


def parse_pair(content: Any, row_format: RowFormat) -> PreferencePair:
    """Take the parts of one row.

    Raises:
        UnusableRowError: a side is missing, empty or of another kind than the other, both are equal or swapped, or the
            prompt is not the same for both.
    """
    if not isinstance(content, dict):
        raise UnusableRowError(Reason.NOT_A_MAPPING, f"got {described(content)}")
    columns = [row_format.columns[side] for side in SIDES]
    for column in columns:
        if content.get(column) is None:
            raise UnusableRowError(Reason.MISSING_FIELD, "null" if column in content else "", column)
    _check_scores(content)
    kinds = {isinstance(content[column], list) for column in columns}
    if len(kinds) == 2:
        detail = f"{columns[0]} is {described(content[columns[0]])}, {columns[1]} is {described(content[columns[1]])}"
        raise UnusableRowError(Reason.SIDES_OF_TWO_KINDS, detail)
    prompt_column = row_format.columns["prompt"]
    if prompt_column != "prompt" and content.get(prompt_column) is None:
        raise UnusableRowError(Reason.MISSING_FIELD, field=prompt_column)
    has_turns = isinstance(content[columns[0]], list) or isinstance(content.get(prompt_column), list)
    return (_chats if has_turns else _texts)(content, prompt_column, columns)


def _check_scores(content: Mapping[str, Any]) -> None:
    for names in SCORES:
        better, worse = (content.get(name) for name in names)
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (better, worse))
        if is_number and better < worse:  # type: ignore[operator]
            raise UnusableRowError(Reason.SIDES_SWAPPED, f"{names[0]} {better} is below {names[1]} {worse}")


def _texts(content: Mapping[str, Any], prompt_column: str, columns: Sequence[str]) -> PreferencePair:
    sides = [field_text(content, column) for column in columns]
    _check_answers(sides, columns)
    if content.get(prompt_column) is None:
        prompt = _common_beginning(*sides)
        if not prompt.strip():
            raise UnusableRowError(Reason.NO_COMMON_PROMPT, "no prompt is named, and the sides begin differently")
        answers = [side[len(prompt) :] for side in sides]
        _check_answers(answers, columns)
        rows = [PromptCompletion(prompt=prompt, completion=answer, takes_template=False) for answer in answers]
        return PreferencePair(chosen=rows[0], rejected=rows[1], has_common_prompt=True)
    prompt = field_text(content, prompt_column)
    repeats = len(prompt.strip()) >= SHORTEST_REPEATED and [side.startswith(prompt.strip()) for side in sides]
    if repeats and repeats[0] != repeats[1]:
        raise UnusableRowError(Reason.PROMPT_REPEATED, field=columns[repeats.index(True)])
    if repeats and repeats[0]:
        sides = [side[len(prompt if side.startswith(prompt) else prompt.strip()) :] for side in sides]
        _check_answers(sides, columns)
    rows = [PromptCompletion(prompt=prompt, completion=side) for side in sides]
    return PreferencePair(chosen=rows[0], rejected=rows[1], repeats_prompt=bool(repeats and repeats[0]))


def _chats(content: Mapping[str, Any], prompt_column: str, columns: Sequence[str]) -> PreferencePair:
    named = _turns(content, prompt_column, "user") if content.get(prompt_column) is not None else []
    sides = [_turns(content, column, "assistant") for column in columns]
    repeats = [bool(named) and side[: len(named)] == named for side in sides]
    if repeats[0] != repeats[1]:
        raise UnusableRowError(Reason.PROMPT_REPEATED, field=columns[repeats.index(True)])
    if not repeats[0]:
        sides = [[*named, *side] for side in sides]
    for side, column in zip(sides, columns, strict=True):
        if not side or side[-1].role != "assistant":
            raise UnusableRowError(Reason.NO_ANSWER, "the last turn is to be the assistant's", column)
        check_order(side, column)
    if sides[0][:-1] != sides[1][:-1]:
        raise UnusableRowError(Reason.PROMPTS_DIFFER, "the sides part before their last turn")
    _check_answers([side[-1].content for side in sides], columns)
    chats = [Chat(turns=tuple(side)) for side in sides]
    return PreferencePair(chosen=chats[0], rejected=chats[1], repeats_prompt=repeats[0], has_common_prompt=not named)


def _turns(content: Mapping[str, Any], column: str, role: str) -> list[Turn]:
    """Turns of a column; a text is one turn of the role."""
    value = content[column]
    if not isinstance(value, list):
        return [Turn(role=role, content=field_text(content, column))]
    return [parse_turn(turn, f"{column}[{i}]") for i, turn in enumerate(value)]


def _check_answers(answers: Sequence[str], columns: Sequence[str]) -> None:
    for answer, column in zip(answers, columns, strict=True):
        if not answer.strip():
            raise UnusableRowError(Reason.EMPTY_ANSWER, field=column)
    if answers[0].strip() == answers[1].strip():
        raise UnusableRowError(Reason.IDENTICAL_SIDES, "such a pair's margin is always 0")


def _common_beginning(first: str, second: str) -> str:
    """Up to the white space before the first word in which two texts differ."""
    shared = first[: num_shared(first, second)]
    while shared and not shared[-1].isspace():
        shared = shared[:-1]
    return shared.rstrip()
