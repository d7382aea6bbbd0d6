"""`alto replay`: what policies would have saved and missed on recorded curves; `alto curves` writes such a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alto_core import wording
from alto_core.curve_files import Recording, read_recording
from alto_core.domain import JobState
from alto_core.early_exit.policy import PRESETS
from alto_core.errors import TaskFileError
from alto_core.replay import DEFAULT_WARMUP, GATE_SETTING, UNFINISHED, ReplayedJob, ReplaySummary, replay_grid
from alto_core.settings import load_settings
from flows.cli.live_view import STATE_STYLES
from flows.cli.output import console_for, dump, stdout_for
from flows.cli.tables import agreement_table, plain_table


def run_replay(file: Path, *, policies: Sequence[str], settings: Sequence[str], as_json: bool) -> None:
    """Replay every policy with every combination of the settings; one is shown job by job, several in a table.

    Raises:
        TaskFileError: an unknown policy or setting, or a value that cannot be.
        DataError: the file cannot be read.
    """
    unknown = [name for name in policies if name not in PRESETS]
    if unknown:
        raise TaskFileError("--policy", got=repr(unknown[0]), expected=f"one of {', '.join(PRESETS)}")
    wanted = parse_settings(settings)
    recording = read_recording(file)
    with stdout_for(as_json) as stream:
        if as_json:
            for summary in replay_grid(recording, policies, wanted):
                print(dump(replay_object(recording, summary)), file=stream, flush=True)
            return
        console = console_for(stream)
        summaries = list(replay_grid(recording, policies, wanted))
        for note in recording.notes:
            console.print(Text.assemble(("note  ", "yellow"), note), soft_wrap=True)
        if len(summaries) == 1:
            _print_one(recording, summaries[0], console)
        else:
            console.print(_grid_table(summaries))


def run_curves(task_id: str, file: Path) -> None:
    """Write the curve file of a task and say what is in it."""
    from alto_core.curve_export import export_curves
    from alto_core.workspace import Workspace

    num_jobs = export_curves(Workspace(task_id, load_settings()), file)
    console_for().print(f"{file}: {wording.plural(num_jobs, 'job')}", soft_wrap=True)


def parse_settings(settings: Sequence[str]) -> dict[str, list[float]]:
    """`key=value` or `key=value,value`; a key that is given again gets more values.

    Raises:
        TaskFileError: no `=`, no name, or no number.
    """
    found: dict[str, list[float]] = {}
    for text in settings:
        name, separator, values = text.partition("=")
        if not separator or not name.strip():
            raise TaskFileError("--set", got=repr(text), expected="NAME=VALUE or NAME=VALUE,VALUE")
        found.setdefault(name.strip(), []).extend(_number(text, value) for value in values.split(","))
    return found


def replay_object(recording: Recording, summary: ReplaySummary) -> dict[str, Any]:
    """One replay as one JSON object."""
    return {
        "event": "replay",
        "file": str(recording.path),
        "policy": summary.policy,
        "settings": summary.settings,
        "num_jobs": len(summary.jobs),
        "samples_planned": summary.samples_planned,
        "samples_trained": summary.samples_trained,
        "samples_saved_share": summary.samples_saved_share,
        "saved_by": summary.saved_by,
        "best_job": summary.best_job,
        "best_val_loss": summary.best_val_loss,
        "chosen_job": summary.chosen_job,
        "chosen_val_loss": summary.chosen_val_loss,
        "regret": summary.regret,
        "regret_standard_error": summary.regret_standard_error,
        "val_loss_ratio": summary.val_loss_ratio,
        "best_kept": summary.best_kept,
        "within_noise": summary.within_noise,
        "top_quarter_coverage": summary.top_quarter_coverage,
        "early_ranking": [dataclasses.asdict(agreement) for agreement in summary.agreement],
        "gates": [
            {"fraction": gate.fraction, "entries": [dataclasses.asdict(entry) for entry in gate.decision.entries]}
            for gate in summary.gates
        ],
        "verdicts": [_job_object(job) for job in summary.jobs],
        "notes": list(recording.notes),
    }


def _number(text: str, value: str) -> float:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise TaskFileError("--set", got=repr(text), expected=f"a number, not {value.strip()!r}") from None


def _job_object(job: ReplayedJob) -> dict[str, Any]:
    content = dataclasses.asdict(job)
    verdict = content.pop("verdict")
    reason = {JobState.FINISHED: "budget spent", UNFINISHED: "the recording ends here"}.get(job.state, "")
    return {
        **content,
        "reason": verdict["reason"] if verdict else reason,
        "evidence": verdict["evidence"] if verdict else {},
    }


def _print_one(recording: Recording, summary: ReplaySummary, console: Console) -> None:
    console.print(Text.assemble((summary.policy, "bold"), f" on {recording.path}, {len(summary.jobs)} jobs"))
    console.print()
    for name, value in _facts(summary):
        console.print(Text.assemble((f"  {name:<22}", "dim"), value), soft_wrap=True)
    console.print()
    console.print(agreement_table(summary.agreement))
    console.print()
    console.print(_job_table(summary))


def _facts(summary: ReplaySummary) -> list[tuple[str, str]]:
    saved_by = ", ".join(f"{state} {wording.share(share, digits=1)}" for state, share in summary.saved_by.items())
    regret = wording.NOTHING
    if summary.regret is not None:
        error = summary.regret_standard_error
        regret = f"{summary.regret:.4f}" + (f" (paired standard error {error:.4f})" if error is not None else "")
    ratio = summary.val_loss_ratio
    settings = ", ".join(f"{name} {value:g}" for name, value in summary.settings.items())
    fraction = summary.settings.get(GATE_SETTING, DEFAULT_WARMUP)
    gates = ", ".join(f"{100 * gate.fraction:g} %: {len(gate.decision.survivors)} go on" for gate in summary.gates)
    return [
        ("settings", settings or f"as documented, gate {fraction:g}"),
        ("training rows saved", f"{wording.share(summary.samples_saved_share, digits=1)} ({saved_by})"),
        ("gates", gates),
        ("best of all", f"{summary.best_job or wording.NOTHING}, {wording.loss(summary.best_val_loss)}"),
        ("chosen", f"{summary.chosen_job or wording.NOTHING}, {wording.loss(summary.chosen_val_loss)}"),
        ("regret", regret + (f", {ratio:.4f} of the best" if ratio is not None else "")),
        ("true top quarter", f"{wording.share(summary.top_quarter_coverage)} of it trained to the end"),
    ]


def _job_table(summary: ReplaySummary) -> Table:
    columns = ("job", "state", "step", "of budget", "val loss", "at its end", "why it ended")
    table = plain_table(*columns, left=("job", "state", "why it ended"), whole=("job",))
    for job in summary.jobs:
        style = STATE_STYLES[JobState(job.state)] if job.state != UNFINISHED else "dim"
        table.add_row(
            Text(job.job_id, style="bold" if job.job_id == summary.chosen_job else ""),
            Text(job.state, style=style),
            str(job.step),
            wording.share(job.fraction),
            wording.loss(job.best_val_loss),
            wording.loss(job.recorded_best_val_loss),
            Text(job.verdict.reason if job.verdict else "", style="dim", overflow="ellipsis", no_wrap=True),
        )
    return table


def _grid_table(summaries: Sequence[ReplaySummary]) -> Table:
    names = list(summaries[0].settings)
    columns = ("policy", *names, "saved", "regret", "ratio", "best kept", "top quarter")
    table = plain_table(*columns, left=("policy", "best kept"))
    for summary in summaries:
        ratio, regret = summary.val_loss_ratio, summary.regret
        table.add_row(
            summary.policy,
            *(f"{summary.settings[name]:g}" for name in names),
            wording.share(summary.samples_saved_share, digits=1),
            wording.NOTHING if regret is None else f"{regret:.4f}",
            wording.NOTHING if ratio is None else f"{ratio:.4f}",
            "yes" if summary.best_kept else "within noise" if summary.within_noise else "no",
            wording.share(summary.top_quarter_coverage),
        )
    return table
