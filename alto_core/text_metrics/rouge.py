"""ROUGE-L by the package rouge-score: the longest common subsequence of words, as an F-measure."""

from __future__ import annotations

from alto_core.text_metrics.extra import import_extra


class RougeL:
    """F-measure of each answer against its reference; lower case, no stemming.

    Raises:
        TaskFileError: rouge-score is not installed.
    """

    def __init__(self) -> None:
        scorer = import_extra("rouge_score.rouge_scorer", metric="rouge_l")
        self._scorer = scorer.RougeScorer(["rougeL"], use_stemmer=False)

    def score(self, answer: str, reference: str) -> float:
        return float(self._scorer.score(target=reference, prediction=answer)["rougeL"].fmeasure)

    def reference_problem(self, reference: str) -> str | None:
        return None
