"""Curve files: what was written comes back, what others write is understood, what cannot be meant is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alto_core.curve_files import CurveRows, read_recording, write_recording
from alto_core.domain import RowLosses
from alto_core.early_exit import Curve
from alto_core.errors import DataError

NAN = math.nan
B_STEPS, B_FRACTIONS = [2, 8, 14, 20], [0.1, 0.4, 0.7, 1.0]
Write = Callable[..., Path]


def columns(**changed: Any) -> dict[str, Any]:
    """Two jobs, four rows each: 10 steps of budget, evaluated at irregular shares."""
    return {
        "job_id": ["a"] * 4 + ["b"] * 4,
        "learning_rate": [1e-3] * 4 + [1e-4] * 4,
        "lora_rank": [8] * 4 + [16] * 4,
        "adapter_batch_size": [4] * 4 + [2] * 4,
        "step": [1, 3, 7, 10, 2, 8, 14, 20],
        "fraction": [0.1, 0.3, 0.7, 1.0, 0.1, 0.4, 0.7, 1.0],
        "train_loss": [3.0, 2.0, 1.0, 0.9, 3.0, 2.5, 2.0, 1.9],
        "val_loss": [3.1, NAN, 1.2, 1.1, NAN, 2.6, NAN, 2.0],
        **changed,
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of these columns, as any program would, and gives its path."""

    def to_file(table: dict[str, Any], name: str = "sweep.parquet") -> Path:
        pq.write_table(pa.table(table), tmp_path / name)
        return tmp_path / name

    return to_file


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_recording(path)
    return str(caught.value)


def test_a_file_of_another_program_becomes_curves_on_their_own_budgets(write: Write) -> None:
    a, b = read_recording(write(columns())).jobs
    assert (a.curve.job_id, a.curve.total_steps, a.lora_rank, a.planned_samples) == ("a", 10, 8, 40)
    assert (a.curve.train_steps, a.curve.val_steps) == ((1, 3, 7, 10), (1, 7, 10))
    assert (b.curve.total_steps, b.curve.val_steps, b.curve.val_losses) == (20, (8, 20), (2.6, 2.0))
    assert b.curve.learning_rate == 1e-4


def test_the_order_of_rows_and_columns_and_extra_columns_change_nothing(write: Write) -> None:
    table = columns()
    shuffled = {name: [values[i] for i in (5, 0, 7, 2, 3, 4, 1, 6)] for name, values in reversed(table.items())}
    again = read_recording(write({**shuffled, "grad_norm": [0.0] * 8}, "shuffled.parquet"))
    assert sorted(again.curves, key=lambda c: c.job_id) == list(read_recording(write(table)).curves)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("job_id", pa.array(["a"] * 4 + ["b"] * 4).dictionary_encode()),
        ("job_id", pa.array(["a"] * 4 + ["b"] * 4, pa.large_string())),
        ("step", [1.0, 3.0, 7.0, 10.0, 2.0, 8.0, 14.0, 20.0]),
        ("lora_rank", pa.array([8] * 4 + [16] * 4, pa.uint8())),
        ("fraction", pa.array([0.1, 0.3, 0.7, 1.0, 0.1, 0.4, 0.7, 1.0], pa.float32())),
        ("val_loss", [3.1, None, 1.2, 1.1, None, 2.6, None, 2.0]),
        ("train_loss", pa.array([3, 2, 1, 1, 3, 2, 2, 2])),
    ],
)
def test_other_types_of_the_same_values_are_taken(write: Write, name: str, values: Any) -> None:
    (a, b), (c, d) = read_recording(write(columns(**{name: values}))).curves, read_recording(write(columns())).curves
    assert (a.val_losses, b.val_losses, a.val_steps, b.val_steps) == (
        c.val_losses,
        d.val_losses,
        c.val_steps,
        d.val_steps,
    )


def test_whole_numbers_serve_as_job_ids(write: Write) -> None:
    assert [c.job_id for c in read_recording(write(columns(job_id=[0] * 4 + [1] * 4))).curves] == ["0", "1"]


def test_train_and_validation_may_stand_in_rows_of_their_own(write: Write) -> None:
    table = {
        "job_id": ["a", "a", "a"],
        "learning_rate": [1e-3] * 3,
        "lora_rank": [8] * 3,
        "adapter_batch_size": [4] * 3,
        "step": [5, 5, 10],
        "fraction": [0.5, 0.5, 1.0],
        "train_loss": [2.0, NAN, 1.0],
        "val_loss": [NAN, 2.2, NAN],
    }
    (job,) = read_recording(write(table)).jobs
    assert (job.curve.train_losses, job.curve.val_losses, job.curve.val_steps) == ((2.0, 1.0), (2.2,), (5,))


def test_a_job_without_any_validation_loss_counts_as_not_finite(write: Write) -> None:
    a, _ = read_recording(write(columns(val_loss=[NAN] * 4 + [1.0] * 4))).curves
    assert all(map(math.isnan, a.val_losses))


def test_infinite_losses_stay_infinite(write: Write) -> None:
    a, _ = read_recording(write(columns(val_loss=[1.0, math.inf, 1.0, 1.0] + [1.0] * 4))).curves
    assert not a.is_finite


def test_steps_out_of_proportion_are_laid_out_by_fraction(write: Write) -> None:
    """Steps that count evaluations: 1, 2, 3, 4."""
    recording = read_recording(write(columns(step=[1, 2, 3, 4] * 2)))
    a = recording.jobs[0]
    assert [step / a.curve.total_steps for step in a.curve.val_steps] == pytest.approx([0.1, 0.7, 1.0])
    assert [a.step_in_file(step) for step in a.curve.val_steps] == [1, 3, 4]
    assert a.planned_samples == 16
    assert "proportion" in recording.notes[0]


def test_rounded_fractions_keep_the_files_steps(write: Write) -> None:
    fractions = [round(step / 200, 2) for step in range(1, 201)]
    table = {
        "job_id": ["a"] * 200,
        "learning_rate": [1e-3] * 200,
        "lora_rank": [8] * 200,
        "adapter_batch_size": [4] * 200,
        "step": list(range(1, 201)),
        "fraction": fractions,
        "train_loss": [1.0] * 200,
        "val_loss": [1.0] * 200,
    }
    (job,) = read_recording(write(table)).jobs
    assert (job.curve.total_steps, job.curve.val_steps) == (200, tuple(range(1, 201)))


def test_a_changing_learning_rate_is_taken_by_its_peak(write: Write) -> None:
    recording = read_recording(write(columns(learning_rate=[1e-4, 1e-3, 5e-4, 0.0] + [1e-4] * 4)))
    assert recording.curves[0].learning_rate == 1e-3
    assert "its learning rate changes" in recording.notes[0]


@pytest.mark.parametrize(
    ("name", "values", "texts"),
    [
        ("fraction", [0.1, 0.3, 1.7, 1.0, *B_FRACTIONS], ("column fraction, row 3 of 8", "1.7")),
        ("fraction", [0.1, 0.3, 0.2, 1.0, *B_FRACTIONS], ("column fraction, row 3 of 8", "not below 0.3")),
        ("fraction", [0.1, 0.3, None, 1.0, *B_FRACTIONS], ("column fraction, row 3 of 8", "no value")),
        ("step", [1, 3, 7.5, 10, *B_STEPS], ("column step, row 3 of 8", "7.5", "a whole number")),
        ("step", [-1, 3, 7, 10, *B_STEPS], ("column step, row 1 of 8", "-1")),
        (
            "lora_rank",
            [8, 8, 9, 8] + [16] * 4,
            ("column lora_rank, row 3 of 8", "got 9", "8, as in the first row of a"),
        ),
        ("lora_rank", [8] * 4 + [0] * 4, ("column lora_rank, row 5 of 8", "1 or more")),
        ("learning_rate", [1e-3] * 4 + [1e-4, NAN, 1e-4, 1e-4], ("column learning_rate, row 6 of 8",)),
        ("learning_rate", [1e-3] * 4 + [1e-4, -1, 1e-4, 1e-4], ("column learning_rate, row 6 of 8", "-1")),
        ("job_id", ["a"] * 4 + ["b", None, "b", "b"], ("column job_id, row 6 of 8", "nothing")),
        ("val_loss", ["x"] * 8, ("column val_loss", "string", "numbers")),
        ("job_id", [0.5] * 8, ("column job_id", "double", "text")),
    ],
)
def test_what_cannot_be_meant_is_refused_by_file_column_and_row(
    write: Write, name: str, values: list[Any], texts: tuple[str, ...]
) -> None:
    path = write(columns(**{name: values}))
    message = refused(path)
    assert str(path) in message
    for text in texts:
        assert text in message


def test_two_values_of_one_step_are_refused(write: Write) -> None:
    table = columns(step=[1, 3, 3, 10, 2, 8, 14, 20], fraction=[0.1, 0.3, 0.3, 1.0, 0.1, 0.4, 0.7, 1.0])
    assert "column train_loss, row 3 of 8: got 1, expected 2 again" in refused(write(table))


def test_no_file_no_parquet_and_missing_columns_are_refused(write: Write, tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.parquet")
    assert "a folder" in refused(tmp_path)
    (tmp_path / "text.parquet").write_text("job_id,step\n")
    assert "cannot be read as Parquet" in refused(tmp_path / "text.parquet")
    table = columns()
    del table["fraction"], table["val_loss"]
    assert "no column fraction and no column val_loss" in refused(write(table))
    assert "no rows" in refused(write({name: pa.array(values)[:0] for name, values in columns().items()}))


def rows_table(**changed: Any) -> dict[str, Any]:
    return {
        "job_id": ["a", "a", "b", "b"],
        "step": [7, 7, 8, 8],
        "row": [1, 0, 0, 1],
        "loss_sum": [4.0, 2.0, 3.0, 5.0],
        "num_tokens": [2, 1, 1, 2],
        **changed,
    }


def test_row_losses_beside_a_file_are_found_and_sorted(write: Write) -> None:
    path = write(columns())
    write(rows_table(), "sweep.rows.parquet")
    a, b = read_recording(path).curves
    assert a.row_losses == {7: RowLosses(loss_sums=(2.0, 4.0), num_labels=(1, 2))}
    assert b.row_losses == {8: RowLosses(loss_sums=(3.0, 5.0), num_labels=(1, 2))}


def test_evaluations_of_other_rows_are_left_out_and_told(write: Write) -> None:
    path = write(columns())
    more = {"job_id": ["a"], "step": [10], "row": [5], "loss_sum": [1.0], "num_tokens": [1]}
    write({name: [*values, *more[name]] for name, values in rows_table().items()}, "sweep.rows.parquet")
    recording = read_recording(path)
    assert set(recording.curves[0].row_losses) == {7}
    assert "1 of 3 evaluations cover other rows" in recording.notes[0]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"row": [1, 1, 0, 1]}, "column row, row 2 of 4: got 1 again"),
        ({"num_tokens": [2, -1, 1, 2]}, "column num_tokens, row 2 of 4"),
        ({"loss_sum": ["x"] * 4}, "column loss_sum"),
    ],
)
def test_wrong_row_losses_are_refused(write: Write, changed: dict[str, Any], text: str) -> None:
    path = write(columns())
    write(rows_table(**changed), "sweep.rows.parquet")
    message = refused(path)
    assert text in message
    assert "sweep.rows.parquet" in message


def a_curve(losses: tuple[float, ...]) -> Curve:
    steps = tuple(range(1, len(losses) + 1))
    rows = {step: RowLosses(loss_sums=(loss, loss / 3), num_labels=(1, 2)) for step, loss in zip(steps, losses)}  # noqa: B905
    return Curve(
        job_id="x", learning_rate=3e-4, total_steps=7, warmup_steps=1, train_steps=steps,
        train_losses=tuple(loss / 7 for loss in losses), val_steps=steps[1::2], val_losses=losses[1::2],
        row_losses={step: rows[step] for step in steps[1::2]},
    )  # fmt: skip


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    curve = a_curve((1 / 3, 2 / 7, 0.1, 1e-12, 123456.789))
    write_recording(tmp_path / "x.parquet", [CurveRows(curve=curve, lora_rank=8, adapter_batch_size=4)])
    (job,) = read_recording(tmp_path / "x.parquet").jobs
    assert (job.curve, job.lora_rank, job.adapter_batch_size) == (curve, 8, 4)


def test_a_compact_file_stays_the_same_when_written_again_and_is_close(tmp_path: Path) -> None:
    curve = a_curve((1 / 3, 2 / 7, 0.1, 0.7, 12.789))
    for name in ("first", "second"):
        write_recording(
            tmp_path / f"{name}.parquet", [CurveRows(curve=curve, lora_rank=8, adapter_batch_size=4)], compact=True
        )
        (job,) = read_recording(tmp_path / f"{name}.parquet").jobs
        again, curve = curve, job.curve
    assert curve == again
    original = a_curve((1 / 3, 2 / 7, 0.1, 0.7, 12.789))
    assert curve.val_losses == pytest.approx(original.val_losses, rel=1e-6)
    for step, rows in original.row_losses.items():
        assert curve.row_losses[step].loss_sums == pytest.approx(rows.loss_sums, rel=1 / 4000)


def test_a_loss_that_was_no_number_is_written_as_infinity(tmp_path: Path) -> None:
    curve = a_curve((1.0, math.nan, 1.0))
    write_recording(tmp_path / "x.parquet", [CurveRows(curve=curve, lora_rank=8, adapter_batch_size=4)])
    assert read_recording(tmp_path / "x.parquet").curves[0].val_losses == (math.inf,)
