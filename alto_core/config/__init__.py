"""The task file: a `TuningTask` in YAML, checked field by field before anything is loaded.

What needs the data or the model (layer names, row counts) is checked later, by `preparation`.
"""

from alto_core.config.changes import with_changes
from alto_core.config.dpo import DPO_LEARNING_RATES, DpoSection
from alto_core.config.fields import NAME_PATTERN
from alto_core.config.loading import load_task, parse_task
from alto_core.config.search import GridSpace, ListedJob, ListSpace, LogRange, RandomSpace, SearchSpace
from alto_core.config.task import (
    PREFERENCE_METRICS,
    BudgetSection,
    ClusterSection,
    DataSection,
    EarlyExitSection,
    EvaluationSection,
    ModelSection,
    SplitSection,
    TuningTask,
)

__all__ = [
    "DPO_LEARNING_RATES",
    "NAME_PATTERN",
    "PREFERENCE_METRICS",
    "BudgetSection",
    "ClusterSection",
    "DataSection",
    "DpoSection",
    "EarlyExitSection",
    "EvaluationSection",
    "GridSpace",
    "ListSpace",
    "ListedJob",
    "LogRange",
    "ModelSection",
    "RandomSpace",
    "SearchSpace",
    "SplitSection",
    "TuningTask",
    "load_task",
    "parse_task",
    "with_changes",
]
