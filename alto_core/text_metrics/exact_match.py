"""Exact match: the answer is the reference."""

from __future__ import annotations


class ExactMatch:
    """1 where the texts are equal up to white space: runs of it count as one blank, and none counts at the ends."""

    def score(self, answer: str, reference: str) -> float:
        return float(" ".join(answer.split()) == " ".join(reference.split()))

    def reference_problem(self, reference: str) -> str | None:
        return None
