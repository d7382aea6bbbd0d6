"""`alto revive`, `alto audit` and `alto clean`: what can be done with the jobs that ended early."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from alto_core import wording
from alto_core.loading import loading
from alto_core.settings import load_settings, prepare_environment
from flows.cli.interruption import CANCELLED_EXIT_CODE, sigterm_as_ctrl_c
from flows.cli.output import console_for, dump, stdout_for
from flows.cli.tables import agreement_table, plain_table
from flows.cli.tune import quiet_settings

if TYPE_CHECKING:
    from alto_core.auditing import AuditReport
    from alto_core.cleaning import StoredState
    from alto_core.reviving import RevivedJob


def run_revive(task_id: str, job: str, *, as_json: bool) -> None:
    """Train a parked job to its end and hold it against the winner. Ctrl-C leaves it parked as it was."""
    settings = load_settings()
    prepare_environment(settings)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    with stdout_for(as_json) as stream, sigterm_as_ctrl_c():
        with loading():
            from alto_core.reviving import revive_job
            from alto_core.workspace import Workspace

        workspace = Workspace(task_id, settings)
        job_id = workspace.find_job(job)
        console = console_for(stream)
        if not as_json:
            console.print(Text(f"{job_id} goes on ...", style="dim"))
        try:
            revived = revive_job(workspace, job_id)
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED_EXIT_CODE) from None
        if as_json:
            print(dump({"event": "revived", **_revived_object(revived)}), file=stream)
        else:
            _print_revived(revived, console)


def run_audit(task_id: str, *, share: float, seed: int, as_json: bool) -> None:
    """Run the audit flow in this process and print its report."""
    quiet_settings()
    with stdout_for(as_json) as stream, sigterm_as_ctrl_c():
        with loading():
            from flows.audit import audit

        try:
            report = audit(task_id, share=share, seed=seed)
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED_EXIT_CODE) from None
        if as_json:
            print(dump({"event": "audit", **dataclasses.asdict(report)}), file=stream)
        else:
            _print_audit(report, console_for(stream))


def run_clean(task_id: str | None, *, days: float, free: bool, as_json: bool) -> None:
    """List the training states that ended tasks keep, and free those that are old enough."""
    from alto_core.cleaning import free_states, stored_states

    settings = load_settings()
    states = stored_states(settings, task_id)
    old = [state for state in states if (datetime.now(UTC) - state.written_at).total_seconds() >= 86400 * days]
    if free:
        free_states(old)
    if as_json:
        for state in states:
            print(dump({"event": "state", **dataclasses.asdict(state), "freed": free and state in old}))
        return
    _print_states(states, old, console_for(), free=free, days=days)


def _revived_object(revived: RevivedJob) -> dict:
    return {
        "task_id": revived.after.task_id,
        "job_id": revived.after.job_id,
        "state_before": str(revived.before.state),
        "step_before": revived.before.step,
        "state": str(revived.after.state),
        "step": revived.after.step,
        "best_val_loss_before": revived.before.best_val_loss,
        "best_val_loss": revived.after.best_val_loss,
        "score": dataclasses.asdict(revived.score) if revived.score else None,
        "winner_score": dataclasses.asdict(revived.winner_score) if revived.winner_score else None,
        "beats_the_winner": revived.beats_the_winner,
    }


def _print_revived(revived: RevivedJob, console: Console) -> None:
    before, after = revived.before, revived.after
    console.print(
        Text(
            f"{after.job_id}: {before.state} at step {before.step}, now {after.state} at step {after.step}; best "
            f"validation loss {wording.loss(before.best_val_loss)} before, {wording.loss(after.best_val_loss)} now"
        ),
        soft_wrap=True,
    )
    if revived.winner_score is not None:
        verdict = "would have won" if revived.beats_the_winner else "would not have won"
        winner = f"the winner {revived.winner_score.job_id} has {wording.loss(revived.winner_score.loss)}"
        console.print(Text(f"It {verdict}: {winner}. What is registered stays as it is."), soft_wrap=True)


def _print_audit(report: AuditReport, console: Console) -> None:
    console.print(Text.assemble(("audit", "bold"), f" of {report.task_id}"))
    facts = [
        ("exited jobs", f"{report.num_exited}, of {report.num_without_state} only the adapter was kept"),
        ("run to the end", f"{len(report.jobs)} ({wording.share(report.share)} of those with a state)"),
    ]
    if report.false_exits is not None:
        error = "" if report.regret_standard_error is None else f" ± {report.regret_standard_error:.4f}"
        facts += [
            ("false exits", f"{report.false_exits}: they beat the winner by more than the paired standard error"),
            ("regret", f"{report.regret:.4f}{error} nats per token of validation loss"),
        ]
    if report.metric_regret is not None:
        facts.append(("score missed", f"{report.metric_regret:.3f} on the validation rows"))
    for name, value in facts:
        console.print(Text.assemble((f"  {name:<16}", "dim"), value), soft_wrap=True)
    console.print()
    console.print(agreement_table(report.agreement))


def _print_states(
    states: list[StoredState], old: list[StoredState], console: Console, *, free: bool, days: float
) -> None:
    if not states:
        console.print("No ended task keeps a training state.")
        return
    columns = ("task", "job", "state", "size", "written", "")
    table = plain_table(*columns, left=("task", "job", "state", "written", ""), whole=columns[2:])
    for state in states:
        fate = ("freed" if free else "can be freed") if state in old else ""
        table.add_row(
            Text(state.task_id),
            Text(state.job_id),
            str(state.job_state),
            wording.size(state.num_bytes),
            f"{state.written_at:%Y-%m-%d %H:%M} UTC",
            fate,
        )
    console.print(table)
    size = wording.size(sum(state.num_bytes for state in old))
    if free:
        console.print(f"{size} freed. Adapters and curves are kept.")
    else:
        console.print(f"{size} are {days:g} days old or older. --free removes those states; adapters and curves stay.")
