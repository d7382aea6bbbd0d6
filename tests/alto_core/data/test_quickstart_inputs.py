"""The quickstart's inputs: a model that answers, rows without overlap, and no work done twice."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "examples" / "prepare_quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_distinct_and_right_and_written_once(script: ModuleType, tmp_path: Path) -> None:
    script.write_rows(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    }
    assert [len(part) for part in rows.values()] == [400, 240]
    prompts = [row["prompt"] for part in rows.values() for row in part]
    assert len(set(prompts)) == len(prompts)
    for row in rows["train.jsonl"]:
        words = row["prompt"].removeprefix("Reverse this list of words: ").strip().split(", ")
        assert row["completion"] == ", ".join(reversed(words)) and len(words) in (3, 4)
    before = (tmp_path / "train.jsonl").stat().st_mtime_ns
    script.write_rows(tmp_path)
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.jsonl", "train.jsonl"]


@pytest.mark.smollm2
@pytest.mark.parametrize("chat_template", [None, False])
def test_quickstart_rows_with_the_real_tokenizer(quickstart_folder: Path, chat_template: bool | None) -> None:
    data = DataSection(
        source=str(quickstart_folder / "train.jsonl"),
        chat_template=chat_template,
        validation=SplitSection(rows=32),
        test=SplitSection(source=str(quickstart_folder / "test.jsonl")),
    )
    prepared = prepare_data(data, ModelSection(name=str(quickstart_folder / "model")))
    assert prepared.test is not None
    assert [len(split.rows) for split in prepared.splits] == [368, 32, 240]
    assert prepared.stop_token_ids == (2,) and prepared.report.left_out == ()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quickstart_folder / "model")
    for row, generation in zip(prepared.test.rows, prepared.test.generation_rows, strict=True):
        labels = [index for index, trained in zip(row.token_ids, row.label_mask, strict=True) if trained]
        assert tokenizer.decode(labels) == generation.reference + "<|im_end|>"
        assert row.token_ids == generation.prompt_ids + tuple(labels)
