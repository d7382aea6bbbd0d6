"""The one SQLModel room: tasks, their jobs, what happened to them, and measured profiles.

The store is the truth about states; MLflow and Prefect show it. Curves and adapters live in `alto_core.tracking`.
"""

from alto_core.store.records import EventDraft, EventRecord, JobRecord, JobUpdate, TaskRecord
from alto_core.store.store import Store

__all__ = ["EventDraft", "EventRecord", "JobRecord", "JobUpdate", "Store", "TaskRecord"]
