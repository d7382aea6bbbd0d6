"""The text metrics by their names in task files, and what each is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from alto_core.text_metrics.bleu import Bleu
from alto_core.text_metrics.exact_match import ExactMatch
from alto_core.text_metrics.numeric import Numeric
from alto_core.text_metrics.regex import Regex
from alto_core.text_metrics.rouge import RougeL
from alto_core.text_metrics.user_function import UserFunction


class TextMetric(Protocol):
    """Compares a generated answer with the reference of its row."""

    def score(self, answer: str, reference: str) -> float:
        """In [0, 1]; higher is better."""

    def reference_problem(self, reference: str) -> str | None:
        """Why a reference can never be reached; None where it can."""


class MetricOptions(Protocol):
    """What a task file says beside the metric's name; checked to be there for the metric that needs it."""

    @property
    def pattern(self) -> str | None: ...

    @property
    def function(self) -> str | None: ...

    @property
    def allow_function(self) -> bool: ...


TEXT_METRICS: dict[str, Callable[[MetricOptions], TextMetric]] = {
    "exact_match": lambda options: ExactMatch(),
    "numeric": lambda options: Numeric(),
    "regex": lambda options: Regex(options.pattern or ""),
    "rouge_l": lambda options: RougeL(),
    "bleu": lambda options: Bleu(),
    "function": lambda options: UserFunction(options.function or "", is_allowed=options.allow_function),
}
