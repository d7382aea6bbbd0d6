"""Measures a model on this device, or reads what was measured before, and says what a task gets there.

Models of memory and time are in `alto_core.scheduling`; here they meet an engine, a device and the store.
"""

from alto_core.profiling.forecasting import TaskAhead, forecast_task
from alto_core.profiling.layout import Layout, PackingQuestion
from alto_core.profiling.leaks import allocated_bytes, leaked_memory
from alto_core.profiling.measuring import measure_grid
from alto_core.profiling.shape import shape_of_backbone, shape_of_model
from alto_core.profiling.task_profile import (
    TaskRows,
    make_task_profile,
    memory_budget,
    plan_task_packing,
    profile_key,
)

__all__ = [
    "Layout",
    "PackingQuestion",
    "TaskAhead",
    "TaskRows",
    "allocated_bytes",
    "forecast_task",
    "leaked_memory",
    "make_task_profile",
    "measure_grid",
    "memory_budget",
    "plan_task_packing",
    "profile_key",
    "shape_of_backbone",
    "shape_of_model",
]
