"""An ended task's early exits held against the truth, in spare capacity, as a Prefect flow."""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())  # before torch, Prefect and MLflow read it

from prefect import flow

from alto_core.auditing import AuditReport
from tasks.audit_exits import audit_exits


@flow(name="audit", flow_run_name="audit {task_id}")
def audit(task_id: str, share: float = 0.2, seed: int = 0) -> AuditReport:
    """Run a random sample of a task's exited jobs to the end and report what early exit missed.

    Args:
        task_id: a task that has finished.
        share: of its exited jobs, in (0, 1].
        seed: draws the sample.
    """
    return audit_exits(task_id, share, seed)
