"""BLEU by the package sacrebleu, sentence by sentence, so that every row has a score of its own.

The mean over rows is not corpus BLEU, which weighs rows by length and has no row scores to compare in pairs.
"""

from __future__ import annotations

from alto_core.text_metrics.extra import import_extra


class Bleu:
    """Sentence BLEU of each answer, in [0, 1]; n-grams longer than the answer are left out (effective order).

    Raises:
        TaskFileError: sacrebleu is not installed.
    """

    def __init__(self) -> None:
        self._bleu = import_extra("sacrebleu.metrics", metric="bleu").BLEU(effective_order=True)

    def score(self, answer: str, reference: str) -> float:
        return min(1.0, float(self._bleu.sentence_score(answer, [reference]).score) / 100)

    def reference_problem(self, reference: str) -> str | None:
        return None
