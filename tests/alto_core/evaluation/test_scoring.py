"""Adapters over a split: answers, scores and choices, each adapter as if it were alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from alto_core.config import DataSection, EvaluationSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TaskData
from alto_core.data.tokenizer import load_model_tokenizer
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone, release_backbone
from alto_core.engine.engine import Engine
from alto_core.errors import TaskFileError
from alto_core.evaluation import SplitResult, TextCodec, evaluate_adapters, write_answers

JOB = LoraJob(
    learning_rate=2e-2, lora_rank=4, lora_alpha=8, adapter_batch_size=8, target_modules=("q_proj", "v_proj", "up_proj")
)


@pytest.fixture(scope="module")
def data(tiny_model: Path, tiny_rows: Path) -> TaskData:
    section = DataSection(source=str(tiny_rows), validation=SplitSection(rows=8))
    return prepare_data(section, ModelSection(name=str(tiny_model)))


@pytest.fixture(scope="module")
def codec(tiny_model: Path) -> TextCodec:
    tokenizer = load_model_tokenizer(ModelSection(name=str(tiny_model))).tokenizer
    return TextCodec(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        spell=lambda ids: str(tokenizer.decode(ids)),
    )


@pytest.fixture(scope="module")
def engine(tiny_model: Path, data: TaskData) -> Any:
    """Holds one adapter that has learned the rows a little."""
    backbone = load_backbone(ModelSection(name=str(tiny_model)), "cpu")
    with Engine(backbone, target_modules=JOB.target_modules, num_slots=1, rank_rows=4) as engine:
        engine.admit(JOB, JobBudget(total_steps=60, warmup_steps=1, eval_steps=(60,)))
        for step in range(60):
            start = step * 8 % 48
            engine.step({JOB.job_id: data.train.rows[start : start + 8]})
        yield engine
    release_backbone()


def test_a_metric_by_generation_scores_each_row(engine: Any, data: TaskData, codec: TextCodec, tmp_path: Path) -> None:
    evaluation = EvaluationSection(metric="exact_match", max_new_tokens=6)
    ids = [JOB.job_id, None]
    both = evaluate_adapters(engine, data, data.validation, ids, evaluation=evaluation, codec=codec)
    alone = [
        evaluate_adapters(engine, data, data.validation, [job_id], evaluation=evaluation, codec=codec)[0]
        for job_id in ids
    ]
    assert [r.answers for r in both] == [r.answers for r in alone]
    tuned, untuned = both
    assert tuned.losses.mean < untuned.losses.mean - 0.5
    references = [row.reference for row in data.validation.generation_rows]
    assert tuned.row_scores == tuple(float(a == b) for a, b in zip(tuned.answers, references, strict=True))
    score = tuned.score()
    assert score.metric_value is not None
    assert score.metric_value.value == sum(tuned.row_scores) / 8

    write_answers(both, data.validation, tmp_path / "answers" / "validation.parquet")
    table = pq.read_table(tmp_path / "answers" / "validation.parquet").to_pylist()
    assert len(table) == 16
    assert (table[0]["job_id"], table[0]["reference"], table[0]["answer"]) == (
        JOB.job_id,
        references[0],
        tuned.answers[0],
    )
    assert table[-1]["job_id"] is None


def test_a_metric_that_fails_on_one_adapters_answers_leaves_the_others_their_scores(
    engine: Any, data: TaskData, codec: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [JOB.job_id, None]
    sound = EvaluationSection(metric="exact_match", max_new_tokens=6)
    expected = evaluate_adapters(engine, data, data.validation, ids, evaluation=sound, codec=codec)
    (tuned, untuned) = (result.answers for result in expected)
    bad = next(answer for answer in untuned if answer not in tuned)
    (tmp_path / "crashing.py").write_text(
        f"def some(answer, reference):\n    return float(answer == reference) / (answer != {bad!r})\n"
        "def all(answer, reference):\n    raise KeyError('boom')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def evaluate(name: str) -> tuple[SplitResult, ...]:
        evaluation = EvaluationSection(
            metric="function", function=f"crashing:{name}", allow_function=True, max_new_tokens=6
        )
        return evaluate_adapters(engine, data, data.validation, ids, evaluation=evaluation, codec=codec)

    ours, theirs = evaluate("some")
    assert (ours.row_scores, ours.losses, ours.metric_fault) == (expected[0].row_scores, expected[0].losses, "")
    assert (theirs.row_scores, theirs.losses) == ((), expected[1].losses)
    assert "ZeroDivisionError" in theirs.metric_fault and "crashing:some" in theirs.metric_fault
    assert theirs.score().metric_value is None
    write_answers([ours, theirs], data.validation, tmp_path / "answers.parquet")
    with pytest.raises(TaskFileError, match="KeyError: 'boom' from crashing:all"):
        evaluate("all")
    sys.modules.pop("crashing")


def test_without_a_metric_nothing_is_generated(engine: Any, data: TaskData, codec: TextCodec) -> None:
    (result,) = evaluate_adapters(
        engine, data, data.validation, [JOB.job_id], evaluation=EvaluationSection(), codec=codec
    )
    assert (result.answers, result.row_scores, result.score().metric_value) == ((), (), None)


def test_multiple_choice_takes_the_likeliest_answer(engine: Any, data: TaskData, codec: TextCodec) -> None:
    split = data.validation
    references = sorted({row.reference for row in split.generation_rows})
    choices = [*references, "zzzz"]
    evaluation = EvaluationSection(metric="multiple_choice", choices=choices)
    (result,) = evaluate_adapters(engine, data, split, [JOB.job_id], evaluation=evaluation, codec=codec)
    rows = {row.row_id: row for row in split.rows}
    for prompt, answer in zip(split.generation_rows, result.answers, strict=True):
        # each choice put into the row by hand, and run alone
        losses = {}
        for choice in choices:
            ids = (*prompt.prompt_ids, *codec.encode(choice), rows[prompt.row_id].token_ids[-1])
            mask = tuple(i >= len(prompt.prompt_ids) for i in range(len(ids)))
            row = dataclasses.replace(rows[prompt.row_id], token_ids=ids, label_mask=mask)
            losses[choice] = engine.evaluate([JOB.job_id], [row], max_tokens=100)[JOB.job_id].loss_sums[0]
        assert answer == min(choices, key=lambda c: losses[c])
    assert 0 < sum(result.row_scores) <= 8


def test_drawn_answers_repeat_with_their_seed(engine: Any, data: TaskData, codec: TextCodec) -> None:
    def answers(**fields: Any) -> tuple[str, ...]:
        evaluation = EvaluationSection(metric="exact_match", max_new_tokens=6, **fields)
        (result,) = evaluate_adapters(engine, data, data.validation, [JOB.job_id], evaluation=evaluation, codec=codec)
        return result.answers

    assert answers(temperature=1.5) == answers(temperature=1.5)
    assert answers(temperature=1.5) != answers(temperature=1.5, sampling_seed=1)
    assert answers(temperature=1e-6) == answers()
