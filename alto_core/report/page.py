"""From `ReportData` to one HTML page. Pure: no store, no MLflow, no clock.

Pictures are drawn twice, for a screen and for a phone, because text in a scaled-down picture cannot be read; the page
shows one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

from alto_core import wording
from alto_core.domain import JobState, TaskState
from alto_core.outcomes import AnswerSample, Score
from alto_core.report.curve_chart import curve_chart
from alto_core.report.exit_charts import fate_chart, samples_chart
from alto_core.report.gate_chart import gate_chart
from alto_core.report.gate_scatter import gate_points, gate_scatter, rank_correlation
from alto_core.report.heat_map import heat_map
from alto_core.report.leaderboard import SampleCount, count_samples, leaderboard
from alto_core.report.score_chart import loss_chart, metric_chart
from alto_core.report.svg import printable
from alto_core.report.values import ReportData
from alto_core.result import GateRecord

WIDE, NARROW = 880.0, 360.0
HALF = 420.0
MAX_SAMPLE = 500
"""Characters of a prompt or an answer that are shown."""
FATES = ("winner", "untuned", *(str(state) for state in JobState), "racing", "trained", "rest")
TASK_COLOURS = {
    TaskState.QUEUED: "waiting",
    TaskState.RUNNING: "running",
    TaskState.FINISHED: "finished",
    TaskState.FAILED: "failed",
    TaskState.CANCELLED: "cancelled",
}

Picture = tuple[Markup, Markup]


def render_page(data: ReportData) -> str:
    """The report as HTML text. All that users or data sets wrote is escaped; nothing is fetched."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("alto_core.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(rate=wording.rate, loss=wording.loss, duration=wording.duration)
    return printable(environment.get_template("page.html").render(**_content(data)))


def _content(data: ReportData) -> dict[str, Any]:
    result = data.result
    samples = count_samples(data.jobs, num_train_rows=result.num_train_rows)
    winner, untuned = result.score(result.winner, "test"), result.score(None, "test")
    has_scores = winner is not None and untuned is not None and result.winner is not None
    total_seconds = result.seconds or data.facts.seconds or max((e.seconds for e in data.exits), default=0.0)
    gates = [gate.fraction for gate in result.gates]
    board = leaderboard(data.jobs, result, choose_by=data.facts.choose_by)
    return {
        "facts": data.facts,
        "fates": FATES,
        "state_class": TASK_COLOURS[data.facts.state],
        "headline": _headline(data),
        "warnings": data.warnings,
        "tiles": _tiles(data, winner if has_scores else None, untuned),
        "winner_text": _winner_text(data),
        "score_pictures": _score_pictures(winner, untuned) if has_scores and winner and untuned else (),
        "curve_picture": _both(
            lambda width: curve_chart(data.jobs, data.curves, winner=result.winner, gates=gates, width=width)
        ),
        "legend": _legend(data),
        "gates": [_gate_section(gate, data) for gate in result.gates],
        "fate_picture": _both(
            lambda width: fate_chart(data.jobs, data.exits, data.stages, total_seconds=total_seconds, width=width)
        ),
        "samples_picture": _both(lambda width: samples_chart(samples, width=width)),
        "samples_text": _samples_text(samples),
        "cost_text": _cost_text(data, samples),
        "heat_picture": _both(lambda width: heat_map(data.jobs, winner=result.winner, width=width)),
        "answers": [_clipped(sample) for sample in result.samples],
        "comparison_text": _comparison_text(data),
        "log": data.log,
        "has_leads": any(line.winner_lead for line in board),
        "board": board,
        "chosen_by": (data.facts.metric or "metric").replace("_", " ")
        if data.facts.choose_by == "metric"
        else "validation loss",
        "has_metric": any(line.val_metric for line in board),
        "metric_name": (data.facts.metric or "metric").replace("_", " "),
        "facts_list": _facts_list(data),
        "data_table": data.data_table,
        "version": wording.alto_version(),
    }


def _both(draw: Callable[[float], str | None], wide: float = WIDE) -> Picture | None:
    large, small = draw(wide), draw(NARROW)
    return None if large is None or small is None else (Markup(large), Markup(small))  # noqa: S704 - our own SVG, escaped


def _score_pictures(winner: Score, untuned: Score) -> list[Picture]:
    pictures = [
        _both(lambda width: metric_chart(winner, untuned, width=width), HALF),
        _both(lambda width: loss_chart(winner, untuned, width=width), HALF),
    ]
    return [picture for picture in pictures if picture is not None]


def _headline(data: ReportData) -> str:
    facts = data.facts
    began = f" · started {facts.started:%Y-%m-%d %H:%M} UTC" if facts.started else ""
    return f"{wording.plural(len(data.jobs), 'job')} on {facts.model} · {facts.data} · {facts.owner}{began}"


def _tiles(data: ReportData, winner: Score | None, untuned: Score | None) -> list[tuple[str, str]]:
    result = data.result
    samples = count_samples(data.jobs, num_train_rows=result.num_train_rows)
    tiles = []
    if winner is not None and untuned is not None:
        if winner.metric_value and untuned.metric_value:
            name = f"test {(winner.metric or 'metric').replace('_', ' ')}, untuned {untuned.metric_value.value:.3f}"
            tiles.append((f"{winner.metric_value.value:.3f}", name))
        else:
            tiles.append((wording.loss(winner.loss), f"test loss, untuned {wording.loss(untuned.loss)}"))
    tiles.append((wording.share(samples.saved_share), "training rows saved"))
    seconds = result.seconds or data.facts.seconds
    if seconds is not None:
        tiles.append((wording.duration(seconds), "wall time"))
    finished = sum(row.state is JobState.FINISHED for row in data.jobs)
    tiles.append((f"{finished} of {len(data.jobs)}", "jobs trained to the end"))
    if data.tokens_per_second is not None:
        tiles.append((wording.count(data.tokens_per_second), "tokens per second"))
    if result.tracking_share is not None:
        tiles.append((wording.share(result.tracking_share, digits=1), "of the time for tracking"))
    return tiles


def _samples_text(samples: SampleCount) -> str:
    if not samples.saved:
        return "No training rows were saved by early exit."
    counts = f"{wording.count(samples.saved)} of {wording.count(samples.planned)} training rows"
    return f"Early exit saved {counts} ({wording.share(samples.saved_share)}), counted over all epochs of all jobs."


def _cost_text(data: ReportData, samples: SampleCount) -> str:
    """What early exit saved in time: the rows that it spared, at the speed of those that were trained."""
    begins = {stage.stage: stage.seconds for stage in data.stages}
    if not samples.saved or not samples.trained or "warmup" not in begins or "evaluate" not in begins:
        return ""
    seconds = begins["evaluate"] - begins["warmup"]
    unit = "GPU" if (data.device or "").startswith("cuda") else "machine"
    saved = wording.duration(seconds * samples.saved / samples.trained)
    return (
        f"Training took {wording.duration(seconds)} of {unit} time; at that speed the spared rows would have taken "
        f"another {saved}."
    )


def _comparison_text(data: ReportData) -> str:
    """Winner against the untuned model, row by row."""
    told = []
    for quantity in ("loss", data.facts.metric or ""):
        found = data.result.comparison(None, "test", quantity)
        if found is not None:
            d = found.difference
            told.append(f"{quantity.replace('_', ' ')} {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]")
    return f"Winner minus untuned, paired over {d.num_rows} rows: {', '.join(told)}." if told else ""


def _clipped(sample: AnswerSample) -> dict[str, str]:
    texts = {name: str(value).strip("\n") for name, value in vars(sample).items()}
    return {name: text if len(text) <= MAX_SAMPLE else f"{text[:MAX_SAMPLE]} ..." for name, text in texts.items()}


def _winner_text(data: ReportData) -> str:
    row = next((row for row in data.jobs if row.job_id == data.result.winner), None)
    return (
        "" if row is None else f"The winner is {row.job_id} (best validation loss {wording.loss(row.best_val_loss)})."
    )


def _legend(data: ReportData) -> list[tuple[str, str]]:
    present = {row.state for row in data.jobs}
    entries = [("winner", "winner")] if data.result.winner else []
    return entries + [(str(s), f"{s}: {wording.STATE_MEANING[s]}") for s in JobState if s in present]


def _gate_section(gate: GateRecord, data: ReportData) -> dict[str, Any]:
    kept = sum(entry.kept for entry in gate.entries)
    ranked = sum(entry.gate_rank is not None for entry in gate.entries)
    before = len(gate.entries) - ranked
    text = f"{kept} of {wording.plural(ranked, 'job')} went on"
    text += f"; {wording.plural(before, 'job')} had ended before." if before else "."
    points = gate_points(gate, data.jobs)
    correlation = rank_correlation(points)
    return {
        "at": wording.share(gate.fraction),
        "text": text,
        "picture": _both(lambda width: gate_chart(gate, data.jobs, width=width)),
        "scatter": _both(lambda width: gate_scatter(points, winner=data.result.winner, width=width)),
        "correlation": None if correlation is None else f"{correlation:.2f}",
    }


def _facts_list(data: ReportData) -> list[tuple[str, str]]:
    facts, result = data.facts, data.result
    candidates = [
        ("task", f"{facts.task_id} of {facts.owner}"),
        ("model", facts.model),
        ("data", facts.data),
        ("winner", result.winner),
        ("adapter", result.adapter_folder),
        ("registered", str(result.registered) if result.registered else None),
        ("peak memory", wording.size(result.peak_bytes) if result.peak_bytes else None),
        ("MLflow run", facts.parent_run_id),
        ("task digest", facts.task_digest),
    ]
    return [(name, value) for name, value in candidates if value]
