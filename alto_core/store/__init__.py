"""The one SQLModel room: tasks, their jobs, what happened to them, measured profiles; the cluster's queue and hosts.

The store is the truth about states; MLflow and Prefect show it. Curves and adapters live in `alto_core.tracking`.
"""

from alto_core.store.fleet import Fleet
from alto_core.store.queue import Queue
from alto_core.store.queue_records import Demand, HostRecord, KeptPlacement, KeptPlan, QueueEntry, QueueEvent
from alto_core.store.records import EventDraft, EventRecord, JobRecord, JobUpdate, TaskRecord
from alto_core.store.store import Store

__all__ = [
    "Demand",
    "EventDraft",
    "EventRecord",
    "Fleet",
    "HostRecord",
    "JobRecord",
    "JobUpdate",
    "KeptPlacement",
    "KeptPlan",
    "Queue",
    "QueueEntry",
    "QueueEvent",
    "Store",
    "TaskRecord",
]
