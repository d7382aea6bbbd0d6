"""Columns to formats, and each way in which a row can lack a usable part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto_core.config import DataSection
from alto_core.data.formats import Chat, PromptCompletion, RowFormat, choose_format, parse_row
from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.row_source import SourceRow
from alto_core.errors import DataError

PAIRS = RowFormat(kind="prompt_completion", columns={"prompt": "prompt", "completion": "completion"})
CHATS = RowFormat(kind="messages", columns={"messages": "messages"})
TEXTS = RowFormat(kind="text", columns={"text": "text"})


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{role} says {i}"} for i, role in enumerate(roles)]}


def choose(content: dict[str, Any], **fields: Any) -> RowFormat:
    return choose_format(
        DataSection(source="a.jsonl", **fields), [SourceRow(origin="a.jsonl:1", content=content)], "a.jsonl"
    )


@pytest.mark.parametrize(
    ("content", "reason", "field"),
    [
        ({"prompt": "a", "completion": {"k": None}}, Reason.NOT_TEXT, "completion"),
        ({"prompt": "b", "completion": 42}, Reason.NOT_TEXT, "completion"),
        ({"prompt": "b", "completion": 4.5}, Reason.NOT_TEXT, "completion"),
        ({"prompt": "b", "completion": True}, Reason.NOT_TEXT, "completion"),
        ({"prompt": ["b"], "completion": "c"}, Reason.NOT_TEXT, "prompt"),
        ({"prompt": "c"}, Reason.MISSING_FIELD, "completion"),
        ({"prompt": None, "completion": "c"}, Reason.MISSING_FIELD, "prompt"),
        ({"prompt": "c", "completion": ""}, Reason.EMPTY_ANSWER, "completion"),
        ({"prompt": "c", "completion": " \n"}, Reason.EMPTY_ANSWER, "completion"),
        ({"prompt": "c", "completion": "a\ud800"}, Reason.INVALID_UNICODE, "completion"),
        ("text", Reason.NOT_A_MAPPING, None),
        ([1], Reason.NOT_A_MAPPING, None),
        (None, Reason.NOT_A_MAPPING, None),
    ],
)
def test_pair_that_is_not_two_texts_is_unusable(content: Any, reason: Reason, field: str | None) -> None:
    with pytest.raises(UnusableRowError) as caught:
        parse_row(content, PAIRS)
    assert (caught.value.reason, caught.value.field) == (reason, field)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (turns("user", "user", "assistant"), Reason.TURN_ORDER),
        (turns("assistant", "user", "assistant"), Reason.TURN_ORDER),
        (turns("user", "system", "assistant"), Reason.TURN_ORDER),
        (turns("system", "assistant"), Reason.TURN_ORDER),
        (turns("user", "assistant", "assistant"), Reason.TURN_ORDER),
        (turns("system", "system", "user", "assistant"), Reason.TURN_ORDER),
        (turns("human", "assistant"), Reason.UNKNOWN_ROLE),
        (turns("user", "tool", "assistant"), Reason.UNKNOWN_ROLE),
        (turns("user"), Reason.NO_ANSWER),
        (turns(), Reason.NO_ANSWER),
        ({"messages": "user: hi"}, Reason.NOT_TURNS),
        ({"messages": {"role": "user"}}, Reason.NOT_TURNS),
        ({"messages": ["hi"]}, Reason.NOT_TURNS),
        ({"messages": None}, Reason.MISSING_FIELD),
        ({"messages": [{"from": "human", "value": "hi"}]}, Reason.MISSING_FIELD),
        ({"messages": [{"role": "user"}]}, Reason.MISSING_FIELD),
        ({"messages": [{"role": 1, "content": "a"}]}, Reason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, Reason.NOT_TEXT),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
            Reason.MISSING_FIELD,
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}, Reason.EMPTY_ANSWER),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},
                ]
            },
            Reason.TOOL_CALL,
        ),
    ],
)
def test_chat_that_breaks_a_rule_is_unusable(content: Any, reason: Reason) -> None:
    with pytest.raises(UnusableRowError) as caught:
        parse_row(content, CHATS)
    assert caught.value.reason == reason


def test_turns_after_the_last_answer_are_cut() -> None:
    chat = parse_row(turns("system", "user", "assistant", "user"), CHATS)
    assert isinstance(chat, Chat)
    assert [turn.role for turn in chat.turns] == ["system", "user", "assistant"] and chat.num_cut_turns == 1


def test_empty_prompt_is_text() -> None:
    assert parse_row({"prompt": "", "completion": "a"}, PAIRS) == PromptCompletion(prompt="", completion="a")


@pytest.mark.parametrize(
    ("content", "fields", "kind", "columns"),
    [
        ({"messages": [], "text": ""}, {}, "messages", {"messages": "messages"}),
        (
            {"prompt": "", "completion": "", "id": 1},
            {},
            "prompt_completion",
            {"prompt": "prompt", "completion": "completion"},
        ),
        ({"text": ""}, {}, "text", {"text": "text"}),
        (
            {"q": "", "completion": ""},
            {"columns": {"prompt": "q"}},
            "prompt_completion",
            {"prompt": "q", "completion": "completion"},
        ),
        ({"body": "", "messages": []}, {"columns": {"text": "body"}, "format": "text"}, "text", {"text": "body"}),
    ],
)
def test_format_follows_the_columns(
    content: dict[str, Any], fields: dict[str, Any], kind: str, columns: dict[str, str]
) -> None:
    chosen = choose(content, **fields)
    assert (chosen.kind, chosen.columns) == (kind, columns)


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        ({"conversations": []}, {}, "into `messages`"),
        ({"question": "", "answer": ""}, {}, r"columns: \{prompt: question, completion: answer\}"),
        ({"x": ""}, {}, "got columns x"),
        ({}, {}, "got columns none"),
        ({"text": ""}, {"columns": {"prompt": "q"}}, r"data\.columns\.prompt: has no meaning"),
    ],
)
def test_columns_that_fit_no_format_are_refused_with_a_hint(
    content: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        choose(content, **fields)


def test_a_first_row_without_the_answer_does_not_hide_the_format() -> None:
    rows = [
        SourceRow(origin="a:1", content={"prompt": "c"}),
        SourceRow(origin="a:2", content={"prompt": "c", "completion": "d"}),
    ]
    assert choose_format(DataSection(source="a"), rows, "a").kind == "prompt_completion"


def test_ignored_columns_include_keys_of_turns() -> None:
    content = {"messages": [{"role": "user", "content": "a", "weight": 0}], "id": 1, "a\ud800\x1b": 2}
    assert CHATS.ignored_columns(content) == {"id", "messages[].weight", "a\\ud800\\x1b"}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "prompt", "completion", "text", "role", "content"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(json_values, st.sampled_from([PAIRS, CHATS, TEXTS]))
def test_any_json_value_parses_or_has_a_reason(content: Any, row_format: RowFormat) -> None:
    try:
        parse_row(content, row_format)
    except UnusableRowError as problem:
        str(problem).encode("utf-8")
    if isinstance(content, dict):
        row_format.ignored_columns(content)
