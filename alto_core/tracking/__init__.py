"""The one MLflow room: logs and reads curves, keeps adapters and the model registry.

Everything goes through `MlflowClient` with explicit run ids. Nothing connects at import.
"""

from alto_core.tracking.adapters import RegisteredAdapter
from alto_core.tracking.client import Tracker
from alto_core.tracking.description import DatasetSummary
from alto_core.tracking.runs import TaskRuns

__all__ = ["DatasetSummary", "RegisteredAdapter", "TaskRuns", "Tracker"]
