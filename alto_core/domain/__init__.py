"""The values that the rooms of ALTO exchange while jobs train: jobs, states, measurements, decisions.

Frozen, free of torch, MLflow and Prefect. How they come about stands elsewhere: `search_space` makes jobs, `executor`
makes measurements, `early_exit` makes verdicts. What comes out of a task is in `outcomes`, where a task is between the
queue and the GPUs in `queue_states`.
"""

from alto_core.domain.decisions import GateDecision, GateEntry, Verdict
from alto_core.domain.jobs import (
    MAX_RANK_RATIO,
    Initialization,
    JobBudget,
    LoraJob,
    LrSchedule,
    RankAllocation,
    TrainedSides,
)
from alto_core.domain.measurements import Boundary, Evaluation, JobFailure, MemoryShortage, RowLosses, StepRecord
from alto_core.domain.states import EARLY_EXITS, CurveSource, JobState, Stage, TaskState

__all__ = [
    "EARLY_EXITS",
    "MAX_RANK_RATIO",
    "Boundary",
    "CurveSource",
    "Evaluation",
    "GateDecision",
    "GateEntry",
    "Initialization",
    "JobBudget",
    "JobFailure",
    "JobState",
    "LoraJob",
    "LrSchedule",
    "MemoryShortage",
    "RankAllocation",
    "RowLosses",
    "Stage",
    "StepRecord",
    "TaskState",
    "TrainedSides",
    "Verdict",
]
