"""The task file: a `TuningTask` in YAML, checked field by field before anything is loaded.

What needs the data or the model (layer names, row counts) is checked later, by `preparation`.
"""

from alto_core.config.changes import with_changes
from alto_core.config.fields import NAME_PATTERN
from alto_core.config.loading import load_task, parse_task
from alto_core.config.search import GridSpace, ListedJob, ListSpace, LogRange, RandomSpace
from alto_core.config.task import (
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
    "NAME_PATTERN",
    "BudgetSection",
    "ClusterSection",
    "DataSection",
    "EarlyExitSection",
    "EvaluationSection",
    "GridSpace",
    "ListSpace",
    "ListedJob",
    "LogRange",
    "ModelSection",
    "RandomSpace",
    "SplitSection",
    "TuningTask",
    "load_task",
    "parse_task",
    "with_changes",
]
