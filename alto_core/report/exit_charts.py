"""Where the jobs went over time, and which training rows were never needed."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core import wording
from alto_core.domain import JobState
from alto_core.report.leaderboard import SampleCount
from alto_core.report.svg import Canvas, Scale, spread
from alto_core.report.values import ExitTime, JobRow, StageTime

STACK = (
    JobState.FINISHED,
    JobState.UNDERPERFORMING,
    JobState.OVERFITTING,
    JobState.DIVERGING,
    JobState.FAILED,
    JobState.CANCELLED,
)
"""From the bottom up, above the jobs that are still in the race."""


def fate_chart(
    jobs: Sequence[JobRow],
    exits: Sequence[ExitTime],
    stages: Sequence[StageTime],
    *,
    total_seconds: float,
    width: float,
) -> str | None:
    """Stacked areas: how many jobs were in the race and how many had ended, by fate, over wall time.

    Returns:
        SVG text; None when no job ended or no time passed.
    """
    states = {row.job_id: row.state for row in jobs}
    last = {e.job_id: e.seconds for e in sorted(exits, key=lambda e: e.seconds)}  # a revived job ends again
    ends = sorted((seconds, states[i]) for i, seconds in last.items() if i in states and states[i].is_end)
    if not ends or total_seconds <= 0:
        return None
    narrow = width < 560
    left, right, top, bottom = 34.0, 124.0 if narrow else 150.0, 28.0, 222.0
    canvas = Canvas(width, bottom + 40, "Jobs in the race and jobs ended over time")
    x = Scale(low=0, high=max(total_seconds, ends[-1][0]), start=left, end=width - right)
    y = Scale(low=0, high=len(jobs), start=bottom, end=top)
    _draw_layers(canvas, ends, x, y, len(jobs))
    for tick in y.ticks(5):
        if tick == int(tick):
            canvas.text(left - 6, y(tick) + 4, f"{tick:g}", "tick", "end")
    for tick in _time_ticks(x.high, 3 if narrow else 6):
        canvas.text(x(tick), bottom + 16, wording.duration(tick).replace(" 00 s", ""), "tick", "middle")
    canvas.text(left - 6, top - 14, "jobs", "axis", "end")
    canvas.text((x.start + x.end) / 2, bottom + 34, "wall time", "axis", "middle")
    _draw_stages(canvas, stages, x, top, bottom, narrow)
    return canvas.render()


def _draw_layers(canvas: Canvas, ends: Sequence[tuple[float, JobState]], x: Scale, y: Scale, num_jobs: int) -> None:
    """Step areas from the bottom: in the race first, so that its upper edge falls as jobs end."""
    times = [0.0, *(seconds for seconds, _ in ends), x.high]
    floor = [0.0] * len(times)
    names: list[tuple[str, float, str]] = []
    present = [state for state in STACK if any(s is state for _, s in ends)]
    for layer in (None, *present):
        counts = [
            _ended_until(ends, t, layer) if layer else num_jobs - len([1 for s, _ in ends if s <= t]) for t in times
        ]
        ceiling = [f + c for f, c in zip(floor, counts, strict=True)]
        css = f"area fate-{layer or 'racing'}"
        outline = [*_steps(times, ceiling), *reversed(_steps(times, floor))]
        word = str(layer) if layer else "in the race"
        canvas.polygon([(x(t), y(v)) for t, v in outline], css, f"{word}: {counts[-1]:g} at the end")
        if counts[-1] or layer:
            names.append((f"{counts[-1]:g} {word}", y((floor[-1] + ceiling[-1]) / 2), css))
        floor = ceiling
    heights = spread([height for _, height, _ in names], 14, y.end, y.start)
    for (text, _, css), height in zip(names, heights, strict=True):
        canvas.group(css.replace("area ", "")).text(x.end + 8, height + 4, text, "label")


def _ended_until(ends: Sequence[tuple[float, JobState]], seconds: float, state: JobState) -> int:
    return sum(1 for at, ended in ends if at <= seconds and ended is state)


def _steps(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """A value holds from its time until the next."""
    points = [(times[0], values[0])]
    for i in range(1, len(times)):
        points += [(times[i], values[i - 1]), (times[i], values[i])]
    return points


def _draw_stages(
    canvas: Canvas, stages: Sequence[StageTime], x: Scale, top: float, bottom: float, narrow: bool
) -> None:
    """Name a stage only where its name fits before the next one begins."""
    starts = [x(stage.seconds) for stage in stages]
    for stage, at, following in zip(stages, starts, [*starts, x.end + 60][1:], strict=True):
        canvas.line(at, top - 4, at, bottom, "gate-line")
        if following - at > 7 * len(stage.stage) + 8 and not (narrow and at > x.end - 20):
            canvas.text(at + 3, top - 6, stage.stage, "axis")


def _time_ticks(high: float, at_most: int) -> list[float]:
    step = next(
        (s for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400) if high / s <= at_most),
        high / at_most,
    )
    return [i * step for i in range(int(high / step) + 1)]


def samples_chart(count: SampleCount, *, width: float) -> str | None:
    """One bar of all planned training rows: trained by finished jobs, trained by ended ones, and saved, by reason."""
    if not count.planned:
        return None
    parts = [
        ("finished", "trained, finished", count.trained_by_finished),
        ("trained", "trained, then ended", count.trained - count.trained_by_finished),
        *((str(state), f"saved: {state}", rows) for state, rows in count.saved_by.items()),
        ("rest", "not trained", count.planned - count.trained - count.saved),
    ]
    parts = [part for part in parts if part[2] > 0]
    legend_height = 20.0
    canvas = Canvas(width, 44 + legend_height * len(parts), "Training rows trained and saved")
    scale = Scale(low=0, high=count.planned, start=0, end=width)
    done = 0
    for i, (css, text, rows) in enumerate(parts):
        group = canvas.group(f"bar fate-{css}", f"{text}: {wording.count(rows)} rows")
        group.rect(scale(done), 4, scale(done + rows) - scale(done) - 1.5, 26, "fill", radius=2)
        height = 52 + legend_height * i
        group.rect(0, height - 10, 11, 11, "fill", radius=2)
        group.text(18, height, f"{text}: {wording.share(rows / count.planned)}, {wording.count(rows)} rows", "label")
        done += rows
    return canvas.render()
