"""Reading files: true line numbers, reasons per row, and nothing but a DataError for a file that cannot be read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alto_core.data.report import Reason
from alto_core.data.row_source import SourceRow
from alto_core.data.source import read_source
from alto_core.errors import DataError


def read(path: Path, **options: object) -> list[SourceRow]:
    return list(read_source(str(path), **options))  # type: ignore[arg-type]


def test_bom_crlf_and_blank_lines_are_read_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}\r\n{"text": "c"}')
    rows = read(path)
    assert [(row.origin, row.content["text"]) for row in rows] == [
        ("a.jsonl:1", "a"), ("a.jsonl:4", "b"), ("a.jsonl:5", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut sh', Reason.BROKEN_LINE),
        (b'{"text": "\xff"}', Reason.INVALID_UNICODE),
        (b'{"text": "a", "text": "b"}', Reason.DUPLICATE_KEY),
        (b'{"m": [{"role": "user", "role": "system"}]}', Reason.DUPLICATE_KEY),
        (b'{"text": NaN}', Reason.BROKEN_LINE),
        (b'{"text": -Infinity}', Reason.BROKEN_LINE),
        (b'{"text": "a"} {"text": "b"}', Reason.BROKEN_LINE),
        (b'{"text": "tab\there"}', Reason.BROKEN_LINE),
        (b"[" * 100_000, Reason.BROKEN_LINE),
        (b'{"n": ' + b"9" * 5000 + b"}", Reason.BROKEN_LINE),
        (b"\x00", Reason.BROKEN_LINE),
    ],
)
def test_a_broken_line_has_its_number_and_reason_and_spares_its_neighbours(
    tmp_path: Path, line: bytes, reason: Reason
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    first, broken, last = read(path)
    assert (first.content, last.content) == ({"text": "a"}, {"text": "b"})
    assert broken.origin == "a.jsonl:2"
    assert broken.problem is not None and broken.problem.reason == reason


def test_json_array_is_read_with_the_line_each_row_starts_at(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n  {"text": "a"},\n\n  {"text":\n "b"}, {"text": "c"}\n]\n')
    assert [row.origin for row in read(path)] == ["a.json:2", "a.json:4", "a.json:5"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "text", ['[{"text": "a"}, {"text": "b"}]', '{"text": "a"}\n{"text": "b"}', '[\n{"text": "a"},{"text": "b"}\n]']
)
def test_content_counts_not_the_ending(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert [row.content for row in read(path)] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    "text", ['[{"a": 1}\n,\n{"a": 1', '[{"a": 1}\n\n{"a": 2}]', '[{"a": 1},\n\n{"a": 2, "a": 3}]', "[1]\n\nx"]
)
def test_broken_array_is_refused_with_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    if text.endswith("x"):  # the first line is a value of its own, so these are lines
        assert [row.origin for row in read(path)] == ["a.json:1", "a.json:3"]
        return
    with pytest.raises(DataError, match=r"a\.json:3: broken JSON array"):
        read(path)


def test_csv_keeps_text_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"a, b","c\nd"\r\n\r\n1,NA\r\n')
    assert [row.content for row in read(path)] == [
        {"prompt": "a, b", "completion": "c\nd"},
        {"prompt": "1", "completion": "NA"},
    ]


def test_csv_row_of_another_width_is_a_broken_line_and_long_cells_are_read(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,completion\na\n{'x' * 200_000},b\nc,d,e\n")
    rows = read(path)
    assert [row.problem and row.problem.reason for row in rows] == [Reason.BROKEN_LINE, None, Reason.BROKEN_LINE]
    assert len(rows[1].content["prompt"]) == 200_000
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\nok,\xff\n", r"a\.csv:2: byte 0xff"),
        (b"a,a\n1,2\n", "names a column twice"),
        (b'a,b\n1,"cut', r"a\.csv:2: broken CSV"),
    ],
)
def test_csv_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_parquet_rows_and_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "a"}], None], "n": [1, 2]}), path)
    rows = read(path)
    assert [row.origin for row in rows] == ["a.parquet row 1", "a.parquet row 2"]
    assert rows[0].content == {"messages": [{"role": "user", "content": "a"}], "n": 1}
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(path)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(5)))
    assert [row.content["text"] for row in read(path, limit=2)] == ["0", "1"]


def test_missing_file_unknown_ending_and_unreachable_hub_set_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nothing")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"ending in '\.txt'"):
        read(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"folder .*empty, split train: cannot be loaded .* name a file in it"):
        list(read_source(str(tmp_path / "empty")))
    with pytest.raises(DataError, match=r"hub data set some-owner/some-set, split train: cannot be loaded"):
        list(read_source("some-owner/some-set"))


def test_folder_of_files_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": f"{split} {i}", "completion": "a"}) for i in range(5)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    rows = list(read_source(str(folder), split="test", limit=2))
    assert [row.content["prompt"] for row in rows] == ["test 0", "test 1"]
    assert rows[1].origin.endswith("[test] row 2")
    with pytest.raises(DataError, match=r"folder .* split nothing: cannot be loaded as a data set"):
        list(read_source(str(folder), split="nothing"))


def test_utf16_is_told_once_and_not_line_by_line(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text('{"text": "a"}\n' * 3, encoding="utf-16")
        with pytest.raises(DataError, match=rf"{name}: got UTF-16, expected UTF-8. Save the file as UTF-8."):
            read(tmp_path / name)


@pytest.mark.parametrize(("mark", "shown"), [(";", "';'"), ("\t", r"'\\t'")], ids=["semicolon", "tab"])
def test_columns_that_no_comma_separates_are_told_by_their_mark(tmp_path: Path, mark: str, shown: str) -> None:
    (tmp_path / "a.csv").write_text(f"prompt{mark}completion\na{mark}b\n")
    with pytest.raises(DataError, match=f"columns stand apart by {shown}, expected commas"):
        read(tmp_path / "a.csv")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.one_of(
                st.binary(max_size=30), st.sampled_from([b"{}", b"[", b"]", b",", b'{"a": "b"}', b"\xef\xbb\xbf", b'"'])
            )
        ).map(b"\n".join),
    ),
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet"]),
)
def test_any_bytes_give_rows_or_a_data_error(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    try:
        rows = read(path)
    except DataError:
        return
    assert all(isinstance(row.content, dict) or row.problem is not None or name != "a.csv" for row in rows)
