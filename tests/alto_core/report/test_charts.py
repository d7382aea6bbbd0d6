"""What came of the gate's ranking, and learning rate against rank."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from alto_core.domain import GateEntry, JobState, LoraJob
from alto_core.report import JobRow
from alto_core.report.exit_charts import fate_chart
from alto_core.report.gate_chart import gate_chart
from alto_core.report.gate_scatter import gate_points, gate_scatter, rank_correlation
from alto_core.report.heat_map import heat_map
from alto_core.report.values import ExitTime
from alto_core.result import GateRecord


def row(rate: float, lora_rank: int, loss: float | None, seed: int = 0, state: JobState = JobState.FINISHED) -> JobRow:
    job = LoraJob(
        learning_rate=rate, lora_rank=lora_rank, lora_alpha=8, adapter_batch_size=4, target_modules=("q",), seed=seed
    )
    return JobRow(job=job, state=state, total_steps=10, warmup_steps=1, step=10, best_val_loss=loss)


def gate(rows: list[JobRow], losses: list[float], kept: list[bool]) -> GateRecord:
    entries = [
        GateEntry(job_id=r.job_id, gate_rank=i + 1, val_loss=loss, kept=k, reason="top" if k else "rank")
        for i, (r, loss, k) in enumerate(zip(rows, losses, kept, strict=True))
    ]
    return GateRecord(fraction=0.1, entries=tuple(entries))


@pytest.mark.parametrize(
    ("at_gate", "final", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4], 1.0),
        ([1.0, 2.0, 3.0, 4.0], [0.4, 0.3, 0.2, 0.1], -1.0),
        ([1.0, 2.0, 3.0, 4.0], [0.2, 0.1, 0.4, 0.3], 0.6),
        ([1.0, 1.0, 2.0, 3.0], [0.1, 0.2, 0.3, 0.4], 0.9486833),
        ([1.0, 1.0, 1.0], [0.1, 0.2, 0.3], None),
        ([1.0, 2.0], [0.1, 0.2], None),
    ],
)
def test_rank_correlation_against_known_values(
    at_gate: list[float], final: list[float], expected: float | None
) -> None:
    rows = [row(1e-3, i + 1, loss) for i, loss in enumerate(final)]
    found = rank_correlation(gate_points(gate(rows, at_gate, [True] * len(rows)), rows))
    assert found == (expected if expected is None else pytest.approx(expected))


def test_jobs_that_the_gate_ended_are_strokes_and_losses_that_are_no_numbers_are_left_out() -> None:
    losses, ended = [0.1, 0.2, 0.3, 0.5, math.nan], JobState.UNDERPERFORMING
    rows = [row(1e-3, i + 1, loss, state=ended if i == 3 else JobState.FINISHED) for i, loss in enumerate(losses)]
    points = gate_points(gate(rows, [1.0, 2.0, 3.0, 4.0, 5.0], [True, True, True, False, True]), rows)
    assert [point.final for point in points] == [0.1, 0.2, 0.3, None]
    picture = gate_scatter(points, winner=rows[0].job_id, width=880)
    assert picture is not None
    tags = [e.tag.rpartition("}")[2] for e in ElementTree.fromstring(picture).iter() if "mark" in e.get("class", "")]
    assert (tags.count("circle"), tags.count("line")) == (3, 1)
    assert gate_scatter(points[:2], winner=None, width=880) is None


def test_a_revived_job_counts_once_and_is_shown_where_it_got_to() -> None:
    # The gate ended it, it came back and finished: two exits of one job.
    rows = [row(1e-3, rank, 0.1 * rank) for rank in (1, 2, 3)]
    made = gate(rows, [1.0, 2.0, 3.0], [True, True, False])
    assert [point.final for point in gate_points(made, rows)] == [row.best_val_loss for row in rows]
    assert "ended, revived later" in gate_chart(made, rows, width=880)
    exits = [ExitTime(job_id=rows[i].job_id, seconds=at) for i, at in ((2, 5.0), (0, 8.0), (2, 9.0), (1, 9.5))]
    picture = fate_chart(rows, exits, (), total_seconds=10.0, width=880)
    assert picture is not None and "3 finished" in picture and "in the race: 0 at the end" in picture


def heat(rows: list[JobRow], winner: str | None = None) -> tuple[list[str], list[float]]:
    picture = heat_map(rows, winner=winner, width=880)
    assert picture is not None
    elements = list(ElementTree.fromstring(picture).iter())
    texts = [e.text or "" for e in elements if (e.get("class") or "").startswith("label")]
    return texts, [float(e.get("fill-opacity", 1)) for e in elements if e.get("class") == "heat"]


def test_a_cell_shows_the_best_of_its_jobs_and_lower_losses_are_darker() -> None:
    rows = [row(1e-3, 8, 0.5), row(1e-3, 8, 0.4, seed=1), row(1e-3, 16, 0.9)]
    rows += [row(1e-2, 8, math.nan), row(1e-2, 16, None)]
    texts, opacities = heat(rows)
    assert sorted(texts) == ["0.400", "0.900"]
    assert sorted(zip(texts, opacities, strict=True)) == [("0.400", max(opacities)), ("0.900", min(opacities))]


def test_many_learning_rates_share_columns() -> None:
    rows = [row(10 ** (-5 + i / 10), 8, 1.0 + i) for i in range(31)]
    texts, _ = heat(rows)
    assert 3 <= len(texts) <= 8
    assert "1.000" in texts


def test_without_variation_there_is_no_map() -> None:
    assert heat_map([row(1e-3, 8, 0.5), row(1e-3, 8, 0.4, seed=1)], winner=None, width=880) is None
    assert heat_map([row(1e-3, 8, 0.5), row(1e-3, 16, 0.4)], winner=None, width=360) is not None
