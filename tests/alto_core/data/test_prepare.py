"""A whole data set: refused with reasons or split without leaks, the same way every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.report import DataReport, Reason
from alto_core.data.rows import SplitData, TaskData
from alto_core.errors import DataError, ModelError

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def chatml(model_folder: Callable[..., Path]) -> ModelSection:
    return ModelSection(name=str(model_folder("chatml")))


@pytest.fixture(scope="session")
def gpt2(model_folder: Callable[..., Path]) -> ModelSection:
    return ModelSection(name=str(model_folder("gpt2", n_positions=32)))


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"how many? {i}", "completion": f"the answer is {i}."} for i in range(start, start + count)]


def prepare(path: Path, model: ModelSection, **fields: Any) -> TaskData:
    for name in ("validation", "test"):
        if isinstance(fields.get(name), dict):
            fields[name] = SplitSection(**fields[name])
    return prepare_data(DataSection(source=str(path), **fields), model)


def texts_of(split: SplitData) -> set[tuple[int, ...]]:
    return {row.token_ids for row in split.rows}


def test_unusable_rows_are_counted_with_one_example_each(write_lines: Write, chatml: ModelSection) -> None:
    bad = ['{"prompt": "cut', {"prompt": "a", "completion": 42}, {"prompt": "a", "completion": 43}, {"prompt": "c"}]
    path = write_lines([*pairs(20), *bad, {"prompt": "a", "completion": ""}])
    report = prepare(path, chatml).report
    assert report.rows_read == {"train": 25}
    assert {item.reason: (item.count, item.origin) for item in report.left_out} == {
        Reason.BROKEN_LINE: (1, "train.jsonl:21"),
        Reason.NOT_TEXT: (2, "train.jsonl:22"),
        Reason.MISSING_FIELD: (1, "train.jsonl:24"),
        Reason.EMPTY_ANSWER: (1, "train.jsonl:25"),
    }
    text = report.as_text()
    assert "field `completion`: field is not text (got the number 42)" in text
    assert '{"prompt": "a", "completion": 42}' in text
    assert DataReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert report.count(Reason.NOT_TEXT) == 2 and report.count(Reason.TOO_LONG) == 0


def test_report_tells_sizes_stop_token_and_ignored_columns(write_lines: Write, chatml: ModelSection) -> None:
    rows = [{**row, "id": 1, "note": None} for row in pairs(20)]
    data = prepare(write_lines(rows), chatml)
    train, validation = data.report.splits
    assert (train.num_rows, validation.num_rows) == (18, 2)
    assert train.num_tokens == sum(len(row.token_ids) for row in data.train.rows)
    assert train.num_labels == sum(row.num_labels for row in data.train.rows)
    assert 0 < train.label_share < 1
    assert (
        train.median_tokens
        <= train.p95_tokens
        <= train.longest_tokens
        == max(len(r.token_ids) for r in data.train.rows)
    )
    assert data.report.ignored_columns == ("id", "note")
    assert any("<|im_end|>" in note for note in data.report.notes)


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (
            [{"prompt": "x " * 400, "completion": "a"}] * 3,
            {"max_length": 64},
            "no usable row.*raise data.max_length.*too long",
        ),
        ([{"messages": [{"role": "human", "content": "a"}]}] * 3, {}, "no usable row.*unknown role"),
        ([""], {}, "no row in it"),
        (["  "], {"format": "text"}, "no row in it"),
        (['{"cut'], {}, "no usable row.*broken line"),
        ([[1], "2"], {}, "no usable row.*not a mapping"),
    ],
)
def test_source_without_a_usable_row_is_refused_with_the_reasons(
    write_lines: Write, chatml: ModelSection, rows: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"(?s)train.jsonl.*{message}"):
        prepare(write_lines(rows), chatml, **fields)


def test_source_with_more_than_half_unusable_rows_is_refused(write_lines: Write, chatml: ModelSection) -> None:
    bad = [{"prompt": "a", "completion": i} for i in range(5)]
    assert prepare(write_lines([*pairs(5), *bad]), chatml).train.rows
    with pytest.raises(DataError, match=r"only 4 of 9 rows are usable; at least half must be"):
        prepare(write_lines([*pairs(4), *bad]), chatml)


def test_refusing_bad_rows_names_file_line_field_and_reason(write_lines: Write, chatml: ModelSection) -> None:
    path = write_lines([*pairs(5), "", {"prompt": "a", "completion": {"k": None}}])
    with pytest.raises(DataError, match=r"train\.jsonl:7: field `completion`: field is not text \(got an object\)"):
        prepare(path, chatml, bad_rows="refuse")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_tiny_set_has_a_row_in_each_split_or_is_refused(
    write_lines: Write, chatml: ModelSection, num_rows: int
) -> None:
    path = write_lines(pairs(num_rows))
    if num_rows == 1:
        with pytest.raises(DataError, match="no training row is left"):
            prepare(path, chatml)
        return
    data = prepare(path, chatml)
    assert (len(data.train.rows), len(data.validation.rows)) == (num_rows - 1, 1)
    with pytest.raises(DataError, match=r"data\.validation: asks for 4 of"):
        prepare(path, chatml, validation={"rows": 4})


def test_splits_share_no_row_and_repeat_for_the_same_seed(write_lines: Write, chatml: ModelSection) -> None:
    path = write_lines(pairs(50))
    fields: dict[str, Any] = {"validation": {"rows": 10}, "test": {"share": 0.2}}
    data, again, other = (prepare(path, chatml, **fields, seed=seed) for seed in (3, 3, 4))
    assert data.test is not None
    sizes = [len(split.rows) for split in data.splits]
    assert sizes == [30, 10, 10]
    assert len(texts_of(data.train) | texts_of(data.validation) | texts_of(data.test)) == 50
    assert data == again
    assert texts_of(data.validation) != texts_of(other.validation) and data.digest != other.digest
    assert [row.row_id for row in data.train.rows] == sorted(row.row_id for row in data.train.rows)


def test_more_rows_move_no_row_between_splits(write_lines: Write, chatml: ModelSection) -> None:
    few = prepare(write_lines(pairs(30)), chatml, validation={"rows": 8})
    more = prepare(write_lines([*pairs(3, start=100), *pairs(30)]), chatml, validation={"rows": 8})
    assert len(texts_of(few.validation) & texts_of(more.validation)) >= 5
    old_train = texts_of(few.train)
    assert not texts_of(more.validation) & old_train


def test_rows_equal_to_a_held_out_row_leave_the_training_split(write_lines: Write, chatml: ModelSection) -> None:
    train = write_lines([*pairs(20), *pairs(2, start=100)])
    test = write_lines([*pairs(1, start=100), *pairs(1, start=300)], "test.jsonl")
    data = prepare(train, chatml, validation={"rows": 4}, test={"source": str(test)})
    assert data.test is not None and len(data.test.rows) == 2
    assert not texts_of(data.test) & (texts_of(data.train) | texts_of(data.validation))
    assert data.report.count(Reason.HELD_OUT_DUPLICATE) == 1
    assert len({row.row_id for split in data.splits for row in split.rows}) == sum(len(s.rows) for s in data.splits)
    with pytest.raises(DataError, match="the train split has no row left"):
        prepare(train, chatml, validation={"source": str(train)})


def test_repeated_rows_do_not_leak_into_validation(write_lines: Write, chatml: ModelSection) -> None:
    data = prepare(write_lines(pairs(10) * 3), chatml, validation={"rows": 7})
    assert not texts_of(data.train) & texts_of(data.validation)
    assert len(data.train.rows) + len(data.validation.rows) + data.report.count(Reason.HELD_OUT_DUPLICATE) == 30


def test_own_validation_source_takes_its_first_rows(write_lines: Write, chatml: ModelSection) -> None:
    path = write_lines(pairs(20, start=200), "validation.jsonl")
    data = prepare(write_lines(pairs(10)), chatml, validation={"source": str(path), "rows": 5})
    assert [row.origin for row in data.validation.rows] == [f"validation.jsonl:{i}" for i in range(1, 6)]
    assert data.report.rows_read == {"train": 10, "validation": 5}


def test_row_longer_than_the_learned_positions_is_left_out(write_lines: Write, gpt2: ModelSection) -> None:
    rows = [*pairs(10), {"prompt": "how many? " * 15, "completion": "42 or 12 or 7"}]
    data = prepare(write_lines(rows), gpt2, max_length=4096)
    assert data.max_length == 32
    assert data.report.count(Reason.TOO_LONG) == 1
    assert any("not 4096" in note for note in data.report.notes)
    assert max(len(row.token_ids) for split in data.splits for row in split.rows) <= 32


def test_tokenizer_without_a_length_limit_gets_the_models(
    write_lines: Write, model_folder: Callable[..., Path]
) -> None:
    model = ModelSection(name=str(model_folder("chatml", max_position_embeddings=100_000)))
    assert prepare(write_lines(pairs(4)), model).max_length == 2048
    assert prepare(write_lines(pairs(4)), model, max_length=5000).max_length == 5000


def test_pad_token_outside_the_model_is_replaced(write_lines: Write, model_folder: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = model_folder("chatml")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_embeddings = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    data = prepare(write_lines([*pairs(6), {"prompt": "a <pad> b", "completion": "c"}]), ModelSection(name=str(folder)))
    assert data.pad_token_id == tokenizer.eos_token_id < num_embeddings
    assert not data.report.left_out  # the spelled pad token is characters
    assert any("the tokenizer has" in note for note in data.report.notes)


def test_chats_need_a_template_and_text_has_none(write_lines: Write, chatml: ModelSection, gpt2: ModelSection) -> None:
    chats = write_lines(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)}]} for i in range(4)]
    )
    assert prepare(chats, chatml).train.generation_rows
    with pytest.raises(DataError, match="has no chat template"):
        prepare(chats, gpt2)
    with pytest.raises(DataError, match="got false with format messages"):
        prepare(chats, chatml, chat_template=False)
    text = write_lines([{"text": f"the quick fox {i}"} for i in range(4)], "text.jsonl")
    assert prepare(text, chatml).train.generation_rows == ()
    with pytest.raises(DataError, match="got true with format text"):
        prepare(text, chatml, chat_template=True)
    with pytest.raises(DataError, match="has no chat template"):
        prepare(write_lines(pairs(4), "pairs.jsonl"), gpt2, chat_template=True)


def test_refused_system_turns_name_the_templates_rule(write_lines: Write, model_folder: Callable[..., Path]) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    with pytest.raises(DataError, match=r"(?s)no usable row.*template refused.*roles must alternate"):
        prepare(write_lines([{"messages": turns}] * 3), ModelSection(name=str(model_folder("mistral"))))


def test_file_with_hub_options_is_refused(write_lines: Write, chatml: ModelSection) -> None:
    path = write_lines(pairs(4))
    with pytest.raises(DataError, match=r"data\.split and data\.subset"):
        prepare(path, chatml, split="test")
    with pytest.raises(DataError, match=r"data\.test\.split: got 'test'"):
        prepare(path, chatml, test={"split": "test"})


def test_model_that_cannot_be_loaded_is_a_model_error(
    write_lines: Write, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    path = write_lines(pairs(4))
    with pytest.raises(ModelError, match="which is no folder"):
        prepare(path, ModelSection(name=str(tmp_path / "nothing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"configuration of .* cannot be loaded"):
        prepare(path, ModelSection(name=str(tmp_path / "empty")))
    folder = model_folder("chatml")
    (folder / "tokenizer.json").write_text('{"cut')
    with pytest.raises(ModelError, match=r"tokenizer of .* cannot be loaded"):
        prepare(path, ModelSection(name=str(folder)))


def test_code_in_a_model_folder_does_not_run(
    write_lines: Write, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    folder, marker = model_folder("chatml"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as EvilConfig\n")
    with pytest.raises(ModelError, match="configuration"):
        prepare(write_lines(pairs(4)), ModelSection(name=str(folder)))
    assert not marker.exists()


def test_digest_counts_tokens_and_splits_not_file_names(write_lines: Write, chatml: ModelSection) -> None:
    first = prepare(write_lines(pairs(10), "a.jsonl"), chatml)
    assert first.digest == prepare(write_lines(pairs(10), "b.jsonl"), chatml).digest
    changed = [*pairs(9), {"prompt": "how many? 9", "completion": "the answer is 8."}]
    assert first.digest != prepare(write_lines(changed, "a.jsonl"), chatml).digest
    assert first.digest != prepare(write_lines(pairs(10), "a.jsonl"), chatml, validation={"rows": 2}).digest
