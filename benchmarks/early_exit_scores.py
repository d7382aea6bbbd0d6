"""Test scores of the adapters of a sweep, row by row: losses of all, answers of the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from alto_core.data.rows import TaskData
from alto_core.engine.engine import Engine
from alto_core.text_metrics.exact_match import ExactMatch

MAX_GENERATION_ROWS = 1024
SCHEMA = pa.schema(
    [
        ("job_id", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int32()),
        ("loss_sum", pa.float32()),
        ("num_tokens", pa.int32()),
        ("correct", pa.bool_()),
    ]
)
"""Of a file of scores; `correct` is null for a job that did not generate."""
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,.]+)")


def score_adapters(
    engine: Engine,
    data: TaskData,
    job_ids: Sequence[str],
    *,
    decode: Callable[[Sequence[int]], str],
    num_generating: int,
    max_new_tokens: int,
    max_eval_tokens: int,
) -> list[dict[str, Any]]:
    """Losses of all adapters on the test rows, and whether the answers of those with the lowest losses are right."""
    test = data.test
    assert test is not None and len(test.rows) == len(test.generation_rows)
    losses = engine.evaluate(job_ids, test.rows, max_tokens=max_eval_tokens)
    best = sorted(job_ids, key=lambda job_id: losses[job_id].mean)[:num_generating]
    tokens = engine.generate(
        [(job_id, row.prompt_ids) for job_id in best for row in test.generation_rows],
        max_new_tokens=max_new_tokens,
        stop_token_ids=data.stop_token_ids,
        max_rows=MAX_GENERATION_ROWS,
    )
    references = [row.reference for _ in best for row in test.generation_rows]
    right = iter([is_right(decode(ids), reference) for ids, reference in zip(tokens, references, strict=True)])
    return [
        {
            "job_id": job_id,
            "row": number,
            "loss_sum": losses[job_id].loss_sums[number],
            "num_tokens": losses[job_id].num_labels[number],
            "correct": next(right) if job_id in best else None,
        }
        for job_id in (*best, *(other for other in job_ids if other not in best))
        for number in range(len(test.rows))
    ]


def is_right(answer: str, reference: str) -> bool:
    """GSM8K's worked solutions are compared by what stands after `####`, everything else by exact match."""
    wanted = _final_number(reference)
    if wanted is None:
        return ExactMatch().score(answer, reference) == 1.0
    return _final_number(answer) == wanted


def _final_number(text: str) -> str | None:
    found = FINAL_ANSWER.search(text)
    return found and found[1].replace(",", "").rstrip(".")
