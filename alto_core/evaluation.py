"""Scores of adapters on held-out rows: loss per token with its standard error, exact match by generation.

All adapters of one call share each batch. Which rows are held out is decided by `data`; which score picks the
winner, by `selection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from alto_core.data.rows import SplitData, TaskData
from alto_core.domain import Interval, RowLosses, Score
from alto_core.engine.engine import UNTUNED, Engine

MAX_EVAL_TOKENS = 8192
MAX_GENERATION_ROWS = 256
"""Rows that generate side by side."""


def score_adapters(
    engine: Engine,
    data: TaskData,
    split: SplitData,
    job_ids: Sequence[str | None],
    *,
    metric: str | None,
    max_new_tokens: int,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Score, ...]:
    """Score adapters that the engine holds, and the untuned model (None), on one split.

    Args:
        engine: holds every job named.
        data: the task's rows and special tokens.
        split: which of its splits.
        job_ids: whose adapters; None is the untuned model.
        metric: `exact_match`, or None for losses alone.
        max_new_tokens: longest answer.
        decode: turns token ids into text, special tokens left out.

    Returns:
        One score per id, in the order given.
    """
    losses = engine.evaluate([job_id or UNTUNED for job_id in job_ids], split.rows, max_tokens=MAX_EVAL_TOKENS)
    answers: dict[str | None, list[str]] = {}
    if metric is not None:
        answers = _generate(engine, data, split, job_ids, max_new_tokens, decode)
    return tuple(
        Score(
            job_id=job_id,
            split=split.name,
            loss=losses[job_id or UNTUNED].mean,
            loss_standard_error=loss_standard_error(losses[job_id or UNTUNED]),
            metric=metric,
            metric_value=_share_of_matches(answers[job_id], split) if answers else None,
        )
        for job_id in job_ids
    )


def is_exact_match(prediction: str, reference: str) -> bool:
    """Equal up to white space: runs of it count as one blank, and none counts at the ends."""
    return " ".join(prediction.split()) == " ".join(reference.split())


def wilson_interval(successes: int, num_rows: int) -> Interval:
    """Share of successes with its 95 % score interval (Wilson 1927), which is not empty at 0 or 1."""
    z = 1.959963984540054
    share = successes / num_rows
    centre = (share + z * z / (2 * num_rows)) / (1 + z * z / num_rows)
    half = z * math.sqrt(share * (1 - share) / num_rows + z * z / (4 * num_rows**2)) / (1 + z * z / num_rows)
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half), num_rows=num_rows)


def loss_standard_error(losses: RowLosses) -> float:
    """Standard error of the loss per token over rows: sqrt(n / (n - 1) * sum (l_i - mean * m_i)^2) / sum m_i.

    l_i is a row's loss sum and m_i its trained tokens: the ratio estimator's linearization. NaN for a single row.
    """
    count = len(losses.loss_sums)
    if count < 2:
        return math.nan
    mean = losses.mean
    squares = math.fsum(
        (loss - mean * labels) ** 2 for loss, labels in zip(losses.loss_sums, losses.num_labels, strict=True)
    )
    return math.sqrt(count / (count - 1) * squares) / sum(losses.num_labels)


def _generate(
    engine: Engine,
    data: TaskData,
    split: SplitData,
    job_ids: Sequence[str | None],
    max_new_tokens: int,
    decode: Callable[[Sequence[int]], str],
) -> dict[str | None, list[str]]:
    """Answers of each adapter to every prompt of the split, rows of all adapters side by side."""
    prompts = [(job_id, row.prompt_ids) for job_id in job_ids for row in split.generation_rows]
    generated = engine.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        stop_token_ids=data.stop_token_ids,
        pad_token_id=data.pad_token_id,
        max_rows=MAX_GENERATION_ROWS,
    )
    answers: dict[str | None, list[str]] = {job_id: [] for job_id in job_ids}
    for (job_id, _), token_ids in zip(prompts, generated, strict=True):
        answers[job_id].append(decode(token_ids))
    return answers


def _share_of_matches(answers: Sequence[str], split: SplitData) -> Interval:
    pairs = zip(answers, split.generation_rows, strict=True)
    matches = sum(is_exact_match(answer, row.reference) for answer, row in pairs)
    return wilson_interval(matches, len(answers))
