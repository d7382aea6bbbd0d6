"""Which metric a task file asks for, and whether it can be measured on the task's rows. Checked before any training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alto_core.config import PREFERENCE_METRICS, EvaluationSection
from alto_core.data.rows import GenerationRow
from alto_core.errors import TaskFileError
from alto_core.evaluation.multiple_choice import unknown_choice
from alto_core.text_metrics import TEXT_METRICS, TextMetric


def text_metric(evaluation: EvaluationSection) -> TextMetric | None:
    """The metric that compares texts; None where the task has none or measures likelihoods instead.

    Raises:
        TaskFileError: its library or function cannot be imported, or the task file does not allow it to run.
    """
    make = TEXT_METRICS.get(evaluation.metric or "")
    return make(evaluation) if make else None


def check_metric(evaluation: EvaluationSection, rows_by_split: Mapping[str, Iterable[GenerationRow]]) -> None:
    """Refuse a metric that cannot be measured here.

    Args:
        evaluation: section of the task file.
        rows_by_split: held-out rows to answer, by the name of their split.

    Raises:
        TaskFileError: there is nothing to generate from, a reference can never be reached, or something is missing.
    """
    if evaluation.metric is None or evaluation.metric in PREFERENCE_METRICS:
        return
    metric = text_metric(evaluation)
    for split, rows in rows_by_split.items():
        empty = True
        for row in rows:
            empty = False
            problem = (
                unknown_choice(evaluation.choices or (), row.reference)
                if metric is None
                else metric.reference_problem(row.reference)
            )
            if problem:
                raise TaskFileError(
                    "evaluation.metric",
                    got=f"{evaluation.metric}, and at {row.origin} a reference {problem}",
                    expected="references that this metric can compare with",
                    hint="Choose another metric, or mend the row.",
                )
        if empty:
            raise TaskFileError(
                "evaluation.metric",
                got=evaluation.metric,
                expected=f"null where no row of the {split} split has a prompt to answer, as in plain text",
                hint="Use prompt_completion or messages rows, or leave the metric out.",
            )
