"""`alto explain`: why a job stopped, with its neighbours at that moment and a small picture."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.text import Text

from alto_core import wording
from alto_core.domain import JobState
from alto_core.early_exit.curves import Curve
from alto_core.explaining import Explanation, explain
from alto_core.settings import load_settings
from alto_core.workspace import Workspace
from flows.cli.live_view import STATE_STYLES
from flows.cli.output import console_for, dump, stdout_for
from flows.cli.tables import plain_table
from flows.cli.text_plot import Series, plot

PLOT_WIDTH, PLOT_HEIGHT = 76, 12


def run_explain(task_id: str, job: str, *, as_json: bool) -> None:
    """Print the explanation of one job."""
    workspace = Workspace(task_id, load_settings())
    with stdout_for(as_json) as stream:
        explanation = explain(workspace, workspace.find_job(job))
        if as_json:
            print(dump(explanation_object(explanation)), file=stream)
        else:
            print_explanation(explanation, console_for(stream))


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """The same as one JSON object."""
    record, last = explanation.record, explanation.last_exit
    return {
        "event": "explanation",
        "task_id": record.task_id,
        "job_id": record.job_id,
        "state": str(record.state),
        "step": record.step,
        "total_steps": record.total_steps,
        "reason": last.reason if last else record.reason,
        "evidence": last.evidence if last else {},
        "policy": last.policy if last else None,
        "gate_fraction": last.gate_fraction if last else None,
        "fraction": explanation.fraction,
        "num_compared": explanation.num_compared,
        "neighbours": [dataclasses.asdict(neighbour) for neighbour in explanation.neighbours],
        "history": [dataclasses.asdict(entry) for entry in explanation.exits],
    }


def print_explanation(explanation: Explanation, console: Console) -> None:
    record = explanation.record
    share = wording.share(record.step / record.total_steps)
    console.print(
        Text.assemble(
            (record.job_id, "bold"),
            "  ",
            (str(record.state), STATE_STYLES[record.state]),
            f"  {wording.STATE_MEANING[record.state]}",
        )
    )
    console.print(Text(f"  step {record.step} of {record.total_steps}, {share} of its budget", style="dim"))
    for entry in explanation.exits:
        when = f"step {entry.step}"
        word = "went on" if entry.state is JobState.RUNNING else str(entry.state)
        console.print(Text(f"  {when}, {word} ({entry.policy}): {entry.reason}"), soft_wrap=True)
    if not explanation.exits and record.reason:
        console.print(Text(f"  {record.reason}"), soft_wrap=True)
    _print_evidence(explanation, console)
    _print_neighbours(explanation, console)
    _print_plot(explanation, console)


def _print_evidence(explanation: Explanation, console: Console) -> None:
    last = explanation.last_exit
    if last is None or not last.evidence:
        return
    console.print()
    console.print(Text("The numbers compared", style="bold"))
    width = max(len(name) for name in last.evidence)
    for name, value in last.evidence.items():
        console.print(Text.assemble((f"  {name:<{width}}  ", "dim"), f"{value:.6g}"))


def _print_neighbours(explanation: Explanation, console: Console) -> None:
    if not explanation.neighbours or explanation.fraction is None:
        return
    console.print()
    title = f"At {100 * explanation.fraction:.3g} % of each job's budget, of {explanation.num_compared} jobs"
    console.print(Text(title, style="bold"))
    columns = ("  place", "job", "val loss", "")
    table = plain_table(*columns, left=("job", ""), whole=columns)
    before = 0
    for neighbour in explanation.neighbours:
        if neighbour.place > before + 1 and before:
            table.add_row("", "...", "", "")
        before = neighbour.place
        is_it = neighbour.job_id == explanation.record.job_id
        fate = "" if neighbour.kept is None else "went on" if neighbour.kept else "ended"
        loss = wording.loss(neighbour.val_loss)
        table.add_row(str(neighbour.place), neighbour.job_id, loss, fate, style="bold" if is_it else "")
    console.print(table)


def _print_plot(explanation: Explanation, console: Console) -> None:
    best = explanation.best_curve
    series = [Series(sign="·", points=_points(best))] if best else []
    lines = plot(
        [*series, Series(sign="●", points=_points(explanation.curve))],
        width=min(PLOT_WIDTH, console.size.width),
        height=PLOT_HEIGHT,
        marks=explanation.gates,
    )
    if not lines:
        return
    console.print()
    console.print(Text("Validation loss", style="bold"))
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=True)
    legend = f"  ● {explanation.record.job_id}" + (f"   · {best.job_id}, the best there" if best else "")
    console.print(Text(legend + ("   ┆ gate" if explanation.gates else ""), style="dim"), soft_wrap=True)


def _points(curve: Curve) -> list[tuple[float, float]]:
    return [(step / curve.total_steps, loss) for step, loss in zip(curve.val_steps, curve.val_losses, strict=True)]
