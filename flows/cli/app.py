"""`alto`: the commands, their options, and how errors leave. What a command does stands in the module of its name.

Exit codes: 0 done, 1 an error without a class of its own, 2 task file or usage, 3 data, 4 model, 5 engine, 6 tracking,
7 store, 8 someone else's, 130 cancelled by Ctrl-C or SIGTERM. An exception that is no `AltoError` is a bug and keeps
its traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from alto_core.errors import AltoError, TaskFileError
from flows.cli.interruption import CANCELLED_EXIT_CODE

JSON_REQUESTED = "alto.json"


class _AltoGroup(TyperGroup):
    """Turns an `AltoError` into one message and its exit code, the same under `main` and under a test runner."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AltoError as error:
            if ctx.meta.get(JSON_REQUESTED):
                content = {
                    "event": "error",
                    "kind": type(error).__name__,
                    "text": str(error),
                    "exit_code": error.exit_code,
                }
                print(json.dumps(content))
            print(f"alto: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED_EXIT_CODE) from None


app = typer.Typer(
    cls=_AltoGroup,
    name="alto",
    help="Finds the best LoRA adapter for a task: trains all candidates together, ends the hopeless ones early.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TaskFile = Annotated[Path, typer.Argument(metavar="FILE", help="Task file in YAML.")]
TaskId = Annotated[
    str, typer.Argument(metavar="TASK", help="Task id, for example quickstart-1; `alto status` lists them.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id, or the beginning of one.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, for machines.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from alto_core.wording import alto_version

        typer.echo(f"alto {alto_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Declares what stands before a command."""


@app.command()
def tune(
    ctx: typer.Context,
    file: TaskFile,
    as_json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event, as when output is no terminal.")] = False,
    no_graph: Annotated[
        bool, typer.Option("--no-graph", help="On a GPU run operations one by one, for debugging: ALTO_CUDA_GRAPH=0.")
    ] = False,
) -> None:
    """Tune a task: train all its jobs, end the hopeless ones early, register the best adapter."""
    from flows.cli.tune import run_tune

    ctx.meta[JSON_REQUESTED] = as_json
    run_tune(file, as_json=as_json, plain=plain, cuda_graph=not no_graph)


@app.command()
def resume(
    ctx: typer.Context,
    task: TaskId,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Do not look whether the task file and its files have changed.")
    ] = False,
    as_json: Json = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event, as when output is no terminal.")] = False,
) -> None:
    """Let a task that was killed, failed or was cancelled go on from its last checkpoint."""
    from flows.cli.resume import run_resume

    ctx.meta[JSON_REQUESTED] = as_json
    run_resume(task, as_recorded=as_recorded, as_json=as_json, plain=plain)


@app.command()
def validate(ctx: typer.Context, file: TaskFile, as_json: Json = False) -> None:
    """Check a task file with its data and its model, without training, and say what it means."""
    from flows.cli.validate import run_validate

    ctx.meta[JSON_REQUESTED] = as_json
    run_validate(file, as_json=as_json)


@app.command()
def estimate(
    ctx: typer.Context,
    file: TaskFile,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="KIND", help="A GPU that is not here, for example h100-80.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how much memory and time a task will take, and what would make it fit, without training."""
    from flows.cli.estimate import run_estimate

    ctx.meta[JSON_REQUESTED] = as_json
    run_estimate(file, gpu=gpu, as_json=as_json)


@app.command()
def status(
    ctx: typer.Context,
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Task id; all tasks when left out.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the task has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show all tasks, or one task's jobs."""
    from flows.cli.status import run_status

    ctx.meta[JSON_REQUESTED] = as_json
    run_status(task, follow=follow, as_json=as_json)


@app.command()
def report(
    task: TaskId,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write it.")] = None,
) -> None:
    """Write a task's report: one HTML file with curves, gate, leaderboard and savings."""
    from alto_core.report import build_report
    from alto_core.settings import load_settings

    typer.echo(str(build_report(task, load_settings(), out)))


@app.command()
def explain(
    ctx: typer.Context,
    task: TaskId,
    job: JobId,
    as_json: Json = False,
) -> None:
    """Say why a job stopped, with the numbers compared and its neighbours at that moment."""
    from flows.cli.explain import run_explain

    ctx.meta[JSON_REQUESTED] = as_json
    run_explain(task, job, as_json=as_json)


@app.command()
def revive(ctx: typer.Context, task: TaskId, job: JobId, as_json: Json = False) -> None:
    """Let a job that ended early go on to the end of its budget, and hold it against the winner."""
    from flows.cli.parked import run_revive

    ctx.meta[JSON_REQUESTED] = as_json
    run_revive(task, job, as_json=as_json)


@app.command()
def audit(
    ctx: typer.Context,
    task: TaskId,
    share: Annotated[float, typer.Option("--share", help="Share of the exited jobs to run to the end.")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", help="Draws the sample.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a random sample of the jobs that ended early to the end, and report what early exit missed."""
    from flows.cli.parked import run_audit

    ctx.meta[JSON_REQUESTED] = as_json
    if not 0 < share <= 1:
        raise TaskFileError("--share", got=f"{share:g}", expected="a share in (0, 1]")
    run_audit(task, share=share, seed=seed, as_json=as_json)


@app.command()
def curves(
    task: TaskId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Curve file to write, ends in .parquet.")],
) -> None:
    """Write a task's curves from MLflow into a file that `alto replay` reads."""
    from flows.cli.replay import run_curves

    run_curves(task, file)


@app.command()
def clean(
    ctx: typer.Context,
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK]", help="Task id; all ended tasks when left out.")
    ] = None,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="Free only states this old.")
    ] = 14,
    free: Annotated[bool, typer.Option("--free", help="Remove them; without this they are only listed.")] = False,
    as_json: Json = False,
) -> None:
    """Show the training states that ended tasks keep on disk, and free them. Adapters and curves stay."""
    from flows.cli.parked import run_clean

    ctx.meta[JSON_REQUESTED] = as_json
    run_clean(task, days=older_than, free=free, as_json=as_json)


@app.command()
def replay(
    ctx: typer.Context,
    curves: Annotated[Path, typer.Argument(metavar="CURVES", help="Curve file; see docs/early-exit.md.")],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Preset to replay, again for several. Default: guarded.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A constant of the policy, or gate_warmup_fraction. Values apart by commas make a grid.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what an early-exit policy would have saved and missed on recorded curves."""
    from flows.cli.replay import run_replay

    ctx.meta[JSON_REQUESTED] = as_json
    run_replay(curves, policies=policy or ["guarded"], settings=setting or [], as_json=as_json)


@app.command()
def promote(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered model.")],
    margin: Annotated[
        float, typer.Option("--margin", min=0.0, help="How much better, beyond the 95 % interval, it must be.")
    ] = 0.0,
    accept_other_rows: Annotated[
        bool, typer.Option("--accept-other-rows", help="Compare even where the champion was held out other rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the challenger with the champion on the same held-out rows; the better one serves."""
    from flows.cli.promote import run_promote

    ctx.meta[JSON_REQUESTED] = as_json
    run_promote(name, margin=margin, accept_other_rows=accept_other_rows, as_json=as_json)


@app.command()
def rollback(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered model.")],
    as_json: Json = False,
) -> None:
    """Let the version serve that was champion before the last promotion."""
    from flows.cli.promote import run_rollback

    ctx.meta[JSON_REQUESTED] = as_json
    run_rollback(name, as_json=as_json)


@app.command()
def export(
    ctx: typer.Context,
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@ALIAS]", help="Registered model: name@alias, name/version, or its champion.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write.")],
    merged: Annotated[bool, typer.Option("--merged", help="Also write DIR/merged, the whole model.")] = False,
    padded: Annotated[
        bool, typer.Option("--pad-rank", help="Fill the rank up with zeros to the next limit that vLLM has.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a registered adapter as a PEFT folder, checked, with a card."""
    from flows.cli.export import run_export

    ctx.meta[JSON_REQUESTED] = as_json
    run_export(reference, folder, merged=merged, padded=padded, as_json=as_json)


@app.command()
def ui(
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of MLflow's UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535, help="Port of Prefect's UI.")] = 4200,
) -> None:
    """Start MLflow's and Prefect's UIs on this machine, until Ctrl-C."""
    from flows.cli.ui import run_ui

    run_ui(mlflow_port=mlflow_port, prefect_port=prefect_port)


@app.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Say what is installed, which devices and services answer, and what is missing."""
    from flows.cli.doctor import run_doctor

    ctx.meta[JSON_REQUESTED] = as_json
    run_doctor(as_json=as_json)


Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the task, e.g. budget.epochs=2. Repeatable."),
]


@app.command()
def up(
    host: Annotated[str | None, typer.Option("--host", help="Name of this host; its host name when left out.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="GPUs to use, e.g. 0,1; all when left out.")] = None,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of MLflow's UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535, help="Port of Prefect's UI.")] = 4200,
) -> None:
    """Run queued tasks on this machine's GPUs, with scheduler and servers, until Ctrl-C."""
    from flows.cli.up import run_up

    run_up(host=host, gpus=gpus, mlflow_port=mlflow_port, prefect_port=prefect_port)


@app.command()
def submit(ctx: typer.Context, file: TaskFile, changes: Changes = None, as_json: Json = False) -> None:
    """Check a task file and put its task into the queue of the cluster."""
    from flows.cli.submit import run_submit

    ctx.meta[JSON_REQUESTED] = as_json
    run_submit(file, changes=changes or (), as_json=as_json)


@app.command()
def clone(
    ctx: typer.Context,
    task: TaskId,
    changes: Changes = None,
    from_winner: Annotated[
        bool, typer.Option("--from-winner", help="Start every job from the adapter that won the task.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a copy of a task into the queue, with changed values, to repeat it or to go on from its winner."""
    from flows.cli.submit import run_clone

    ctx.meta[JSON_REQUESTED] = as_json
    run_clone(task, changes=changes or (), from_winner=from_winner, as_json=as_json)


@app.command()
def queue(ctx: typer.Context, as_json: Json = False) -> None:
    """Show what runs, what waits and until when, and the hosts."""
    from flows.cli.queue import run_queue

    ctx.meta[JSON_REQUESTED] = as_json
    run_queue(as_json=as_json)


@app.command()
def plan(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the chart there too, as .svg or .html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan the queue as it is now and show the plan as a Gantt chart. Nothing is started."""
    from flows.cli.plan import run_plan

    ctx.meta[JSON_REQUESTED] = as_json
    run_plan(out=out, as_json=as_json)


@app.command()
def cancel(
    task: TaskId,
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="End this job alone, at the next evaluation; the others go on."),
    ] = None,
) -> None:
    """End a task of the queue; its GPUs are free when the command returns, its checkpoints stay. Or one job of any."""
    from alto_core.domain import StopRequest
    from flows.cli.stop import run_cancel_job, run_stop

    if job is not None:
        run_cancel_job(task, job)
    else:
        run_stop(task, StopRequest.CANCEL)


@app.command()
def pause(task: TaskId) -> None:
    """Take a task off its GPUs at a checkpoint, and keep it in the queue."""
    from alto_core.domain import StopRequest
    from flows.cli.stop import run_stop

    run_stop(task, StopRequest.PAUSE)


@app.command()
def unpause(task: TaskId) -> None:
    """Let a paused task wait for GPUs again; it goes on from its checkpoint."""
    from flows.cli.stop import run_unpause

    run_unpause(task)


@app.command()
def reconcile(ctx: typer.Context, as_json: Json = False) -> None:
    """Find dead runs, dead hosts and GPUs that they hold; put their tasks back into the queue."""
    from flows.cli.reconcile import run_reconcile

    ctx.meta[JSON_REQUESTED] = as_json
    run_reconcile(as_json=as_json)


def main() -> None:
    """Entry point of the console script."""
    app()
