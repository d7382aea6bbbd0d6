"""Runs adapters over a held-out split, all of a call in shared batches, and keeps what came out row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from alto_core.config import PREFERENCE_METRICS, EvaluationSection
from alto_core.data.rows import SplitData, TaskData
from alto_core.domain import RowLosses
from alto_core.engine.adapter_parallel import AnyEngine
from alto_core.engine.engine import UNTUNED
from alto_core.engine.sampling import Sampling
from alto_core.engine.validation import evaluation_tokens
from alto_core.errors import TaskFileError
from alto_core.evaluation.intervals import loss_standard_error, mean_interval
from alto_core.evaluation.metrics import text_metric
from alto_core.evaluation.multiple_choice import choice_rows, chosen
from alto_core.evaluation.preference import pair_scores
from alto_core.outcomes import Score


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    """A tokenizer's two ways."""

    encode: Callable[[str], Sequence[int]]
    """Without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Special tokens left out."""
    spell: Callable[[Sequence[int]], str]
    """Special tokens written out, so that encoding gives the same ids again."""


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """What one adapter (or the untuned model, `job_id` None) did on one split, row by row."""

    job_id: str | None
    split: str
    losses: RowLosses
    metric: str | None = None
    row_scores: tuple[float, ...] = ()
    """The metric of each row that has a prompt; empty without a metric."""
    answers: tuple[str, ...] = ()
    """To each row that has a prompt; empty where nothing was asked."""
    metric_fault: str = ""
    """Why there are no row scores: the user's own metric failed on one of these answers."""

    def score(self) -> Score:
        """The numbers over all rows."""
        return Score(
            job_id=self.job_id,
            split=self.split,
            loss=self.losses.mean,
            loss_standard_error=loss_standard_error(self.losses),
            metric=self.metric,
            metric_value=mean_interval(self.row_scores) if self.row_scores else None,
        )


def evaluate_adapters(
    engine: AnyEngine,
    data: TaskData,
    split: SplitData,
    job_ids: Sequence[str | None],
    *,
    evaluation: EvaluationSection,
    codec: TextCodec,
) -> tuple[SplitResult, ...]:
    """Evaluate adapters that the engine holds, and the untuned model (None), on one split.

    Args:
        engine: holds every job named.
        data: the task's rows and special tokens.
        split: which of its splits.
        job_ids: whose adapters; None is the untuned model.
        evaluation: the metric, and how answers are generated.
        codec: of the model's tokenizer.

    Returns:
        One result per id, in the order given. Where the user's own metric fails on the answers of one adapter, that one
        has no scores; the others have theirs.

    Raises:
        TaskFileError: the metric fails on the answers of every adapter.
    """
    names = [job_id or UNTUNED for job_id in job_ids]
    losses = engine.evaluate(names, split.rows, max_tokens=evaluation_tokens(engine.max_pass_tokens))
    answers: list[tuple[str, ...]] = [()] * len(job_ids)
    scores: list[tuple[float, ...]] = [()] * len(job_ids)
    faults: list[TaskFileError | None] = [None] * len(job_ids)
    metric = text_metric(evaluation)
    references = [row.reference for row in split.generation_rows]
    if metric is not None:
        answers = generate_answers(engine, data, split, job_ids, evaluation=evaluation, codec=codec)
        for index, given in enumerate(answers):
            try:
                scores[index] = tuple(map(metric.score, given, references))
            except TaskFileError as fault:
                faults[index] = fault
        if faults and all(faults) and faults[0]:
            raise faults[0]
    elif evaluation.metric == "multiple_choice":
        answers = _choose(engine, split, names, evaluation.choices or (), codec)
        wanted = [reference.strip() for reference in references]
        scores = [tuple(float(a == b) for a, b in zip(given, wanted, strict=True)) for given in answers]
    elif evaluation.metric in PREFERENCE_METRICS:
        scores = [pair_scores(losses[name], evaluation.metric) for name in names]
    return tuple(
        SplitResult(
            job_id=job_id,
            split=split.name,
            losses=losses[name],
            metric=evaluation.metric,
            row_scores=of_rows,
            answers=given,
            metric_fault=str(fault or ""),
        )
        for job_id, name, of_rows, given, fault in zip(job_ids, names, scores, answers, faults, strict=True)
    )


def generate_answers(
    engine: AnyEngine,
    data: TaskData,
    split: SplitData,
    job_ids: Sequence[str | None],
    *,
    evaluation: EvaluationSection,
    codec: TextCodec,
    num_rows: int | None = None,
) -> list[tuple[str, ...]]:
    """Answers of each adapter to the prompts of a split, rows of all adapters side by side.

    Args:
        num_rows: only the first so many prompts; None: all.
    """
    rows = split.generation_rows[:num_rows]
    sampling = None
    if evaluation.temperature > 0:
        sampling = Sampling(temperature=evaluation.temperature, top_p=evaluation.top_p, seed=evaluation.sampling_seed)
    generated = engine.generate(
        [(job_id, row.prompt_ids) for job_id in job_ids for row in rows],
        max_new_tokens=evaluation.max_new_tokens,
        stop_token_ids=data.stop_token_ids,
        sampling=sampling,
    )
    texts = [codec.decode(token_ids) for token_ids in generated]
    return [tuple(texts[i * len(rows) : (i + 1) * len(rows)]) for i in range(len(job_ids))]


def write_answers(results: Sequence[SplitResult], split: SplitData, file: Path) -> None:
    """Write what each adapter answered as a Parquet table: `job_id, row, origin, reference, answer, score`."""
    rows = split.generation_rows
    columns: dict[str, list[object]] = {
        "job_id": [result.job_id for result in results for _ in result.answers],
        "row": [row.row_id for result in results for row, _ in zip(rows, result.answers, strict=False)],
        "origin": [row.origin for result in results for row, _ in zip(rows, result.answers, strict=False)],
        "reference": [row.reference for result in results for row, _ in zip(rows, result.answers, strict=False)],
        "answer": [answer for result in results for answer in result.answers],
        "score": [score for result in results for score in result.row_scores or [None] * len(result.answers)],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, compression="zstd")


def _choose(
    engine: AnyEngine, split: SplitData, names: Sequence[str], choices: Sequence[str], codec: TextCodec
) -> list[tuple[str, ...]]:
    rows = choice_rows(split.generation_rows, split.rows, choices, codec.encode)
    losses = engine.evaluate(list(names), rows, max_tokens=evaluation_tokens(engine.max_pass_tokens))
    return [tuple(chosen(losses[name], choices)) for name in names]
