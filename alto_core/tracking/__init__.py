"""The one MLflow room: logs and reads curves, keeps adapters and the model registry.

Everything goes through `MlflowClient` with explicit run ids. Nothing connects at import.
"""

from alto_core.tracking import links
from alto_core.tracking.client import Tracker
from alto_core.tracking.description import OWNER, DatasetSummary
from alto_core.tracking.left_behind import LeftBehind, deliver_left_behind
from alto_core.tracking.packaging import ServingFacts
from alto_core.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS_TAG, RegisteredAdapter, Registry
from alto_core.tracking.runs import GATE_WAIT_SECONDS, TaskRuns
from alto_core.tracking.served_adapter import fingerprint

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "GATE_WAIT_SECONDS",
    "OWNER",
    "PREVIOUS_TAG",
    "DatasetSummary",
    "LeftBehind",
    "RegisteredAdapter",
    "Registry",
    "ServingFacts",
    "TaskRuns",
    "Tracker",
    "deliver_left_behind",
    "fingerprint",
    "links",
]
