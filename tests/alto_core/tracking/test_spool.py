"""The spool: what is written down survives kills, full disks and clocks that are set back, and is written once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alto_core.domain import StepRecord
from alto_core.errors import TrackingError
from alto_core.tracking import logbook, spool
from alto_core.tracking.logbook import Logbook, Progress
from alto_core.tracking.messages import Message, Status, Steps, Tags, Upload, Values
from alto_core.tracking.spool import Spool

MESSAGES: tuple[Message, ...] = (
    Steps(
        run_id="a", timestamp=5, first_step=1, train_losses=[0.1, math.inf], grad_norms=[1.0, 2.0],
        learning_rates=[1e-3, 1e-3], num_tokens=[7, 8],
    ),
    Values(run_id="a", timestamp=6, step=2, values={"val_loss": 1 / 3, "tokens": 15.0}),
    Tags(run_id="b", tags={"alto.reason": "ein „Grund“\nin two lines"}),
    Status(run_id="b", status="FINISHED", end_time=7),
    Upload(run_id="c", path="tracking/files/x.json", folder=None),
)  # fmt: skip


def messages(written: Spool, start: int = 0) -> list[Message | None]:
    return [line.message for line in written.lines(start)]


def test_messages_come_back_as_they_were(tmp_path: Path) -> None:
    written = Spool(tmp_path / "spool")
    assert (written.end, written.cursor, messages(written)) == (0, 0, [])
    written.append(MESSAGES[:2])
    middle = written.end
    written.append(MESSAGES[2:])
    again = Spool(tmp_path / "spool")
    assert messages(again) == list(MESSAGES)
    assert messages(again, middle) == list(MESSAGES[2:])
    again.set_cursor(middle)
    assert written.cursor == middle


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 600), flipped=st.none() | st.integers(0, 600), value=st.integers(0, 255))
def test_a_damaged_file_costs_only_the_damaged_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flipped: int | None, value: int
) -> None:
    """Cut anywhere as by a kill, one byte changed as by a bad disk: every line that was not touched comes back."""
    written = Spool(tmp_path_factory.mktemp("spool"))
    written.append(MESSAGES)
    file = written.folder / "spool.jsonl"
    content = bytearray(file.read_bytes())
    ends = [line.end for line in written.lines()]
    if flipped is not None and flipped < len(content):
        content[flipped] = value
    cut = min(cut, len(content))
    file.write_bytes(content[:cut])
    untouched = [
        message
        for start, end, message in zip([0, *ends], ends, MESSAGES, strict=False)
        if end <= cut and (flipped is None or not start - 1 <= flipped < end)
    ]
    written.append([MESSAGES[0]])
    found = [message for message in messages(written) if message is not None]
    assert [message for message in found if message in untouched][: len(untouched)] == untouched
    assert found[-1] == MESSAGES[0]
    assert written.end == file.stat().st_size


@pytest.mark.parametrize("content", ["", "12", "12 00000000", "x y", "999999999 31c3f7d5", "12 zz zz"])
def test_a_cursor_that_is_not_readable_is_the_beginning(tmp_path: Path, content: str) -> None:
    written = Spool(tmp_path)
    written.append(MESSAGES)
    (tmp_path / "cursor").write_text(content)
    assert written.cursor == 0


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """/dev/full takes nothing and says so as a full disk does."""
    written, file = Spool(tmp_path), tmp_path / "spool.jsonl"
    file.symlink_to("/dev/full")
    assert written.append(MESSAGES[:2]) == 0
    assert written.append(MESSAGES[2:3]) == 0
    assert written.has_unwritten
    file.unlink()
    assert written.append([]) == written.end > 0
    assert not written.has_unwritten
    assert messages(written) == list(MESSAGES[:3])


def test_a_disk_that_stays_full_ends_the_task_before_the_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_UNWRITTEN_BYTES", 1000)
    (tmp_path / "spool.jsonl").symlink_to("/dev/full")
    written = Spool(tmp_path)
    with pytest.raises(TrackingError, match=r"No space left.*Free space"):
        for _ in range(100):
            written.append(MESSAGES)


def records(first: int, last: int, offset: float = 0.0) -> list[StepRecord]:
    return [
        StepRecord(
            job_id="a", step=step, train_loss=offset + 2 / step, learning_rate=1e-3, grad_norm=0.5, num_tokens=100
        )
        for step in range(first, last + 1)
    ]


def open_book(folder: Path) -> tuple[Spool, Logbook]:
    """A process that logs to this spool; it may not ask MLflow."""

    def ask(last_steps: object) -> dict[str, Progress]:
        raise AssertionError(f"asked for {last_steps}")

    written = Spool(folder)
    return written, Logbook(written, 0.1, ask)


def logged_steps(written: Spool) -> list[int]:
    """Every step as often as it was written."""
    found = [message for message in messages(written) if isinstance(message, Steps)]
    return [step for m in found for step in range(m.first_step, m.first_step + len(m.train_losses))]


def test_steps_that_a_resume_repeats_are_written_once(tmp_path: Path) -> None:
    written, book = open_book(tmp_path)
    written.append(book.steps({"a": records(1, 30), "b": records(1, 20)}))
    written.append(book.values("a", 30, {"val_loss": 1.0}))
    whole = book.sums("a", 30)
    for start in (11, 1, 25):  # killed again and again; the checkpoints are of steps 10, 0 and 24
        written, book = open_book(tmp_path)
        assert book.steps({"a": records(start, 30)}) == []
        assert book.values("a", 30, {"val_loss": 1.0}) == []
        assert book.sums("a", 30) == whole
    written.append(book.steps({"a": records(31, 35)}))
    assert sorted(logged_steps(written)) == sorted([*range(1, 36), *range(1, 21)])


def test_steps_that_come_out_differently_are_written_again_and_are_newer(tmp_path: Path) -> None:
    written, book = open_book(tmp_path)
    written.append(book.steps({"a": records(1, 30)}))
    _, book = open_book(tmp_path)
    again = records(21, 24) + records(25, 30, offset=1.0)
    (fresh,) = book.steps({"a": again})
    assert (fresh.first_step, len(fresh.train_losses)) == (25, 6)
    (old,) = (message for message in messages(written) if isinstance(message, Steps))
    assert fresh.timestamp > old.timestamp


def test_values_are_written_again_only_where_they_differ(tmp_path: Path) -> None:
    written, book = open_book(tmp_path)
    written.append(book.values("a", 3, {"x": 1.0, "y": math.nan}))
    _, book = open_book(tmp_path)
    assert book.values("a", 3, {"x": 1.0, "y": math.nan}) == []
    (fresh,) = book.values("a", 3, {"x": 2.0, "y": math.nan})
    assert fresh.values == {"x": 2.0}
    assert book.values("a", 4, {"x": 2.0})[0].values == {"x": 2.0}


def test_time_goes_on_where_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1_000.0, 500.0, 400.0, 2_000.0, 1.0))
    monkeypatch.setattr(logbook.time, "time", lambda: next(times))
    written, book = open_book(tmp_path)
    stamps = []
    for step in range(1, 5):
        written.append(book.values("a", step, {"x": 1.0}))
        stamps.append(book._last_timestamp)
    _, book = open_book(tmp_path)
    stamps.append(book.now())
    assert stamps == [1_000_000, 1_000_001, 1_000_002, 2_000_000, 2_000_001]
