"""Which adapter wins, and by how much."""

from __future__ import annotations

from alto_core.domain import RowLosses
from alto_core.evaluation import SplitResult
from alto_core.evaluation.intervals import wilson_interval
from alto_core.outcomes import Score
from alto_core.selection import compare_with_others, pick_winner


def score(job_id: str, loss: float, successes: int) -> Score:
    interval = wilson_interval(successes, 10)
    return Score(
        job_id=job_id, split="validation", loss=loss, loss_standard_error=0.1, metric="m", metric_value=interval
    )


def test_the_winner_has_the_lowest_loss_or_the_highest_metric() -> None:
    scores = [score("a", 0.5, 3), score("b", 0.6, 9), score("c", 0.7, 9)]
    assert pick_winner(scores, "val_loss") == "a"
    assert pick_winner(scores, "metric") == "b"


def result(job_id: str | None, split: str, loss: float, scores: tuple[float, ...]) -> SplitResult:
    losses = RowLosses(loss_sums=tuple(loss * n for n in (1, 2, 3)), num_labels=(1, 2, 3))
    return SplitResult(job_id=job_id, split=split, losses=losses, metric="exact_match", row_scores=scores)


def test_the_winner_is_compared_with_everybody_of_its_split() -> None:
    results = [
        result("a", "validation", 0.5, (1.0, 1.0, 0.0)),
        result("b", "validation", 0.75, (1.0, 0.0, 0.0)),
        result("a", "test", 0.5, (1.0, 1.0, 1.0)),
        result(None, "test", 2.5, (0.0, 0.0, 0.0)),
    ]
    found = {(c.other_id, c.split, c.quantity): c.difference for c in compare_with_others("a", results)}
    assert set(found) == {
        ("b", "validation", "loss"),
        ("b", "validation", "exact_match"),
        (None, "test", "loss"),
        (None, "test", "exact_match"),
    }
    assert found["b", "validation", "loss"].value == -0.25
    assert found[None, "test", "exact_match"].low == 1.0
