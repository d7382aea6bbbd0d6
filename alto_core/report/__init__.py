"""What people look at after a task: leaderboard, samples saved, and one self-contained HTML page.

`build_report` is the way in. `values` holds what a page is made from, `load` gets it from the store and MLflow, the
rest turns it into text and pictures and knows neither.
"""

from __future__ import annotations

from alto_core.report.leaderboard import (
    LeaderboardRow,
    SampleCount,
    count_samples,
    leaderboard,
    leaderboard_table,
)
from alto_core.report.load import build_report, job_rows
from alto_core.report.values import JobRow, ReportData, StageTime, TaskFacts

__all__ = [
    "JobRow",
    "LeaderboardRow",
    "ReportData",
    "SampleCount",
    "StageTime",
    "TaskFacts",
    "build_report",
    "count_samples",
    "job_rows",
    "leaderboard",
    "leaderboard_table",
]
