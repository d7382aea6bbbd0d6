"""The winner against the untuned model on the test split, with intervals."""

from __future__ import annotations

from alto_core.outcomes import Score
from alto_core.report.svg import Canvas, Scale


def metric_chart(winner: Score, untuned: Score, *, width: float) -> str | None:
    """Metric with its 95 % Wilson interval; None where no metric was measured."""
    if winner.metric_value is None or untuned.metric_value is None:
        return None
    rows = [
        (name, css, m.value, m.low, m.high, f"{m.value:.3f} [{m.low:.3f}, {m.high:.3f}]")
        for name, css, m in (("winner", "winner", winner.metric_value), ("untuned", "untuned", untuned.metric_value))
    ]
    title = f"{(winner.metric or 'metric').replace('_', ' ')}, {winner.metric_value.num_rows} test rows"
    return _interval_chart(title, rows, low=0, high=1, width=width)


def loss_chart(winner: Score, untuned: Score, *, width: float) -> str:
    """Loss with its 95 % interval (1.96 standard errors)."""
    rows = []
    for name, css, score in (("winner", "winner", winner), ("untuned", "untuned", untuned)):
        reach = score.loss_error
        text = f"{score.loss:.3f} ± {reach:.3f}"
        rows.append((name, css, score.loss, score.loss - reach, score.loss + reach, text))
    high = 1.08 * max(row[4] for row in rows)
    return _interval_chart("loss, nats per token", rows, low=0, high=high or 1, width=width)


def _interval_chart(
    title: str, rows: list[tuple[str, str, float, float, float, str]], *, low: float, high: float, width: float
) -> str:
    canvas = Canvas(width, 112, title)
    scale = Scale(low=low, high=high, start=70, end=width - 14)
    canvas.text(0, 14, title, "axis")
    for tick in scale.ticks(5):
        canvas.line(scale(tick), 24, scale(tick), 94, "grid")
        canvas.text(scale(tick), 108, f"{tick:g}", "tick", "middle")
    for i, (name, css, value, start, end, text) in enumerate(rows):
        y = 44 + 32 * i
        group = canvas.group(f"fate-{css}", f"{name}: {text}")
        group.text(0, y + 4, name, "label strong")
        group.line(scale(start), y, scale(end), y, "interval")
        group.circle(scale(value), y, 5.5, "mark")
        beyond = scale(end) > width / 2
        group.text(
            scale(start) - 8 if beyond else scale(end) + 8, y + 4, text, "label halo", "end" if beyond else "start"
        )
    return canvas.render()
