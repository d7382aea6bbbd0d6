"""The one stage of an audit: run exited jobs to the end, and show the report among the flow run's artifacts."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from alto_core.auditing import AuditReport, audit, summary_line
from alto_core.workspace import Workspace


@task(name="audit exits", task_run_name="audit exits")
def audit_exits(task_id: str, share: float, seed: int) -> AuditReport:
    """Audits are repeated on purpose, so no result is kept."""
    report = audit(Workspace.open(task_id), share=share, seed=seed)
    create_markdown_artifact(key="audit", description=f"Audit of {task_id}", markdown=summary_line(report))
    create_table_artifact(
        key="audited-jobs",
        description=f"Exited jobs of {task_id} at the end of their budgets",
        table=[
            {
                "job_id": job.job_id,
                "exit_state": job.exit_state.value,
                "exit_val_loss": job.exit_val_loss,
                "final_val_loss": job.final_val_loss,
                "beats_winner": job.beats_winner,
            }
            for job in report.jobs
        ],
    )
    return report
