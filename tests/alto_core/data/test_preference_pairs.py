"""Preference pairs: every shape they come in, and every fault that would teach nothing or the opposite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.report import Reason
from alto_core.data.rows import PairRow, TaskData
from alto_core.data.storage import load_task_data, save_task_data
from alto_core.errors import DataError

ModelFolder = Callable[..., Path]
WriteLines = Callable[..., Path]
Texts = Callable[[TaskData], list[str]]

GOOD = [
    {"prompt": f"how many is {i}?", "chosen": f"the answer is {i}", "rejected": "i am a fox, good morning"}
    for i in range(20)
]


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> Path:
    return model_folder("chatml")


@pytest.fixture
def prepare(model: Path, write_lines: WriteLines) -> Callable[..., TaskData]:
    """`prepare(rows, **data)` prepares good pairs with these rows in front."""

    def run(rows: list[Any], *, good: list[Any] = GOOD, **data: Any) -> TaskData:
        fields = {"format": "preference", "validation": SplitSection(rows=2), **data}
        section = DataSection(source=str(write_lines([*rows, *good])), **fields)
        return prepare_data(section, ModelSection(name=str(model)))

    return run


def first_pair(data: TaskData) -> PairRow:
    (row,) = [row for split in data.splits for row in split.rows if row.row_id == 0]
    assert isinstance(row, PairRow)
    return row


@pytest.fixture
def texts(model: Path) -> Callable[[TaskData], list[str]]:
    """Prompt, chosen and rejected answer of the first row as text, control tokens spelled out."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def decode(data: TaskData) -> list[str]:
        row = first_pair(data)
        bounds = (0, row.prompt_length, row.rejected_start, len(row.token_ids))
        return [str(tokenizer.decode(row.token_ids[a:b])) for a, b in itertools.pairwise(bounds)]

    return decode


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [turn("user", "hello there?")]
SHAPES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "hello there?", "chosen": "yes", "rejected": "no"},
    "turns behind a text": {"prompt": "hello there?", "chosen": [turn("assistant", "yes")],
                            "rejected": [turn("assistant", "no")]},
    "texts behind turns": {"prompt": ASKED, "chosen": "yes", "rejected": "no"},
    "turns behind turns": {"prompt": ASKED, "chosen": [turn("assistant", "yes")],
                           "rejected": [turn("assistant", "no")]},
    "whole chats": {"chosen": [*ASKED, turn("assistant", "yes")], "rejected": [*ASKED, turn("assistant", "no")]},
    "whole chats behind their prompt": {"prompt": "hello there?", "chosen": [*ASKED, turn("assistant", "yes")],
                                        "rejected": [*ASKED, turn("assistant", "no")]},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_pair(prepare: Callable[..., TaskData], texts: Texts, shape: str) -> None:
    data = prepare([SHAPES[shape]])
    assert texts(data) == [
        "<|im_start|>user\nhello there?<|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
        "no<|im_end|>",
    ]
    row = first_pair(data)
    assert row.label_mask == tuple(i >= row.prompt_length for i in range(len(row.token_ids)))
    chosen, rejected = row.sides
    assert chosen.token_ids == row.token_ids[: row.rejected_start]
    assert rejected.token_ids == row.token_ids[: row.prompt_length] + row.token_ids[row.rejected_start :]
    (asked,) = [item for split in data.splits for item in split.generation_rows if item.row_id == 0]
    assert (asked.reference, asked.prompt_ids) == ("yes", row.token_ids[: row.prompt_length])
    assert any("read once for both" in note for note in data.report.notes)


def test_earlier_answers_of_a_chat_belong_to_the_prompt(prepare: Callable[..., TaskData], texts: Texts) -> None:
    begun = [turn("user", "hello"), turn("assistant", "good morning"), turn("user", "and now?")]
    chats = {side: [*begun, turn("assistant", text)] for side, text in (("chosen", "bye now"), ("rejected", "no"))}
    data = prepare([chats])
    assert "good morning" in texts(data)[0]
    assert not any(first_pair(data).label_mask[: first_pair(data).prompt_length])
    assert any("name no prompt" in note for note in data.report.notes)


def test_texts_without_a_prompt_share_what_both_begin_with(prepare: Callable[..., TaskData], texts: Texts) -> None:
    said = "user: how many?\nassistant: i am a"
    row = {"chosen": f"{said} fox, good", "rejected": f"{said} fowl"}
    data = prepare([row])
    # Up to a word's end, and as they stand: no template knows their turns.
    assert texts(data) == [said, " fox, good<|endoftext|>", " fowl<|endoftext|>"]


FAULTS: dict[str, tuple[dict[str, Any], Reason]] = {
    "identical sides": ({"prompt": "a?", "chosen": "yes", "rejected": " yes "}, Reason.IDENTICAL_SIDES),
    "only the chosen side": ({"prompt": "a?", "chosen": "yes"}, Reason.MISSING_FIELD),
    "a side that is null": ({"prompt": "a?", "chosen": "yes", "rejected": None}, Reason.MISSING_FIELD),
    "an empty side": ({"prompt": "a?", "chosen": "yes", "rejected": " "}, Reason.EMPTY_ANSWER),
    "a side that is a number": ({"prompt": "a?", "chosen": "yes", "rejected": 3}, Reason.NOT_TEXT),
    "scores that say otherwise": (
        {"prompt": "a?", "chosen": "yes", "rejected": "no", "score_chosen": 1, "score_rejected": 4.5},
        Reason.SIDES_SWAPPED,
    ),
    "the same two answers the other way round": (
        {"prompt": GOOD[3]["prompt"], "chosen": GOOD[3]["rejected"], "rejected": GOOD[3]["chosen"]},
        Reason.SIDES_SWAPPED,
    ),
    "the prompt in one answer only": (
        {"prompt": "what is the answer to it?", "chosen": "what is the answer to it? yes", "rejected": "no"},
        Reason.PROMPT_REPEATED,
    ),
    "the turns in one answer only": (
        {"prompt": ASKED, "chosen": [*ASKED, turn("assistant", "yes")], "rejected": [turn("assistant", "no")]},
        Reason.PROMPT_REPEATED,
    ),
    "sides that part before the last turn": (
        {"chosen": [*ASKED, turn("assistant", "yes")], "rejected": [turn("user", "bye"), turn("assistant", "no")]},
        Reason.PROMPTS_DIFFER,
    ),
    "texts that begin differently": ({"chosen": "yes it is", "rejected": "no it is not"}, Reason.NO_COMMON_PROMPT),
    "a text beside turns": (
        {"prompt": "a?", "chosen": "yes", "rejected": [turn("assistant", "no")]},
        Reason.SIDES_OF_TWO_KINDS,
    ),
    "no answer in the end": ({"chosen": ASKED, "rejected": [turn("user", "bye")]}, Reason.NO_ANSWER),
    "turns in disorder": (
        {"prompt": ASKED, "chosen": [turn("user", "a"), turn("assistant", "b")],
         "rejected": [turn("user", "a"), turn("assistant", "c")]},
        Reason.TURN_ORDER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pair_with_a_fault_is_left_out_and_counted(prepare: Callable[..., TaskData], fault: str) -> None:
    row, reason = FAULTS[fault]
    # The later of two pairs that contradict each other goes.
    data = prepare([], good=[*GOOD, row])
    assert data.report.count(reason) == 1
    assert sum(item.count for item in data.report.left_out) == 1
    with pytest.raises(DataError, match=reason.value):
        prepare([], good=[*GOOD, row], bad_rows="refuse")


def test_a_prompt_that_stands_in_both_answers_is_taken_off(prepare: Callable[..., TaskData], texts: Texts) -> None:
    prompt = "what is the answer to it?"
    data = prepare([{"prompt": prompt, "chosen": f"{prompt} yes", "rejected": f"{prompt} no"}])
    assert texts(data)[1:] == [" yes<|im_end|>", " no<|im_end|>"]
    assert any("1 pairs repeat their prompt" in note for note in data.report.notes)


def test_an_answer_may_begin_with_a_short_prompt(prepare: Callable[..., TaskData], texts: Texts) -> None:
    data = prepare([{"prompt": "hello", "chosen": "hello there", "rejected": "bye"}])
    assert texts(data)[1] == "hello there<|im_end|>"


def test_other_columns_are_ignored_and_named(prepare: Callable[..., TaskData]) -> None:
    row = {"prompt": "a?", "chosen": "yes", "rejected": "no", "meta": 3, "score_chosen": 4, "score_rejected": 4}
    assert prepare([row]).report.ignored_columns == ("meta", "score_chosen", "score_rejected")


def test_both_sides_end_at_the_longest_row_behind_the_same_prompt(prepare: Callable[..., TaskData]) -> None:
    # L5: one short answer and one that is far too long.
    row = {"prompt": "how many?", "chosen": "yes", "rejected": "the lazy dog " * 60}
    data = prepare([row], too_long="truncate", max_length=64)
    chosen, rejected = first_pair(data).sides
    assert len(chosen.token_ids) < len(rejected.token_ids) == 64
    length = first_pair(data).prompt_length
    assert chosen.token_ids[:length] == rejected.token_ids[:length]
    assert prepare([row], max_length=64).report.count(Reason.TOO_LONG) == 1


def test_a_pair_that_loses_a_side_or_its_difference_to_the_cut_is_left_out(prepare: Callable[..., TaskData]) -> None:
    long = "the quick brown fox jumps over the lazy dog " * 20
    rows = [
        {"prompt": long, "chosen": "yes", "rejected": "no"},
        {"prompt": "how many?", "chosen": long + "yes", "rejected": long + "no"},
    ]
    data = prepare(rows, too_long="truncate", max_length=64)
    assert data.report.count(Reason.NO_TRAINED_TOKEN) == 1
    assert data.report.count(Reason.IDENTICAL_SIDES) == 1


def test_columns_may_have_other_names(prepare: Callable[..., TaskData]) -> None:
    good = [{"question": row["prompt"], "better": row["chosen"], "worse": row["rejected"]} for row in GOOD]
    data = prepare([], good=good, columns={"prompt": "question", "chosen": "better", "rejected": "worse"})
    assert data.report.rows_read == {"train": 20}
    assert not data.report.left_out
    with pytest.raises(DataError, match=r"got columns question, better, worse; format preference expects"):
        prepare([], good=good)


def test_pairs_in_a_task_that_does_not_ask_for_them_get_a_hint(prepare: Callable[..., TaskData]) -> None:
    good = [{"chosen": row["chosen"], "rejected": row["rejected"]} for row in GOOD]
    with pytest.raises(DataError, match="set `objective: dpo`"):
        prepare([], good=good, format="auto")


def test_pairs_of_one_prompt_go_to_one_split(prepare: Callable[..., TaskData]) -> None:
    good = [{**row, "chosen": f"{row['chosen']} {word}"} for row in GOOD for word in ("yes", "no")]
    data = prepare([], good=good, validation=SplitSection(rows=8))
    prompts = [{row.split_key for row in split.rows} for split in data.splits]
    assert [len(split.rows) for split in data.splits] == [32, 8]
    assert not prompts[0] & prompts[1]


def test_a_saved_data_set_is_read_back_as_it_was(prepare: Callable[..., TaskData], tmp_path: Path) -> None:
    data = prepare([])
    save_task_data(data, tmp_path / "data")
    assert load_task_data(tmp_path / "data") == data
    assert prepare([]).digest == data.digest
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in GOOD]
    assert prepare([], good=swapped).digest != data.digest
