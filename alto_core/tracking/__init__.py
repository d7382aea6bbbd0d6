"""The one MLflow room: logs and reads curves, keeps adapters and the model registry.

Everything goes through `MlflowClient` with explicit run ids. Nothing connects at import.
"""

from alto_core.tracking import links
from alto_core.tracking.client import Tracker
from alto_core.tracking.description import OWNER, DatasetSummary
from alto_core.tracking.packaging import ServingFacts
from alto_core.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS_TAG, RegisteredAdapter, Registry
from alto_core.tracking.runs import TaskRuns
from alto_core.tracking.served_adapter import fingerprint

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "OWNER",
    "PREVIOUS_TAG",
    "DatasetSummary",
    "RegisteredAdapter",
    "Registry",
    "ServingFacts",
    "TaskRuns",
    "Tracker",
    "fingerprint",
    "links",
]
