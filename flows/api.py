"""The Python API: what the command line does, as functions.

    from flows.api import leaderboard, load_task, tune

    result = tune(load_task("task.yaml"))
    print(leaderboard(result.task_id))

Settings come from the environment, as for the command line (see `alto_core.settings`).
"""

from __future__ import annotations

# flows.tune prepares the environment that libraries read when they are imported, so it comes first
# isort: off
from flows.tune import TuneResult, leaderboard, tune, tune_result
from flows.resume import resume
from alto_core.config import load_task, parse_task
from alto_core.preparation import plan_task
from alto_core.report import build_report
from alto_core.settings import load_settings
from alto_core.store import Store
# isort: on

__all__ = [
    "Store",
    "TuneResult",
    "build_report",
    "leaderboard",
    "load_settings",
    "load_task",
    "parse_task",
    "plan_task",
    "resume",
    "tune",
    "tune_result",
]
