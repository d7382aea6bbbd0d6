"""The decision log: in order, each entry once, strict JSON."""

from __future__ import annotations

import json
from pathlib import Path

from alto_core.decision_log import FILE_NAME, DecisionLog, GateLogEntry, exit_entry
from alto_core.domain import CurveSource, GateDecision, GateEntry, JobState, Verdict


def verdict(job_id: str, state: JobState, step: int) -> Verdict:
    return Verdict(job_id=job_id, state=state, step=step, reason="because", evidence={"val_loss": 1.5})


def test_what_was_added_comes_back_in_order_from_another_process(tmp_path: Path) -> None:
    entry = GateEntry(job_id="a", gate_rank=1, val_loss=1.5, kept=False, reason="rank")
    gate = GateLogEntry(policy="guarded", fraction=0.05, entries=(entry,))
    exit_ = exit_entry("guarded", verdict("a", JobState.UNDERPERFORMING, 2), 40, gate_fraction=0.05)
    back = exit_entry("none", verdict("a", JobState.RUNNING, 2), 40)
    DecisionLog(tmp_path).add([gate, exit_])
    DecisionLog(tmp_path).add([back])
    log = DecisionLog(tmp_path)
    assert log.read() == (gate, exit_, back)
    assert log.exits_of("a") == (exit_, back)
    assert log.exits_of("b") == ()
    assert exit_.fraction == 0.05


def test_an_entry_that_is_there_is_not_repeated(tmp_path: Path) -> None:
    """A stage that is run again after a crash decides the same again."""
    entry = exit_entry("paper", verdict("a", JobState.DIVERGING, 3), 40)
    for _ in range(2):
        DecisionLog(tmp_path).add([entry])
    assert DecisionLog(tmp_path).read() == (entry,)


def test_the_same_decision_on_another_copy_of_the_curve_is_not_repeated(tmp_path: Path) -> None:
    """The run before decided while MLflow was away."""
    spooled, read = (
        exit_entry("paper", verdict("a", JobState.DIVERGING, 3), 40, curve=source)
        for source in (CurveSource.SPOOL, CurveSource.MLFLOW)
    )
    DecisionLog(tmp_path).add([spooled])
    DecisionLog(tmp_path).add([read])
    assert DecisionLog(tmp_path).read() == (spooled,)
    assert json.loads(DecisionLog(tmp_path).as_json())[0]["curve"] == "spool"


def test_the_whole_log_is_one_json_array(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    assert json.loads(log.as_json()) == []
    log.add([exit_entry("paper", verdict("a", JobState.DIVERGING, 3), 40)])
    (content,) = json.loads(log.as_json())
    assert (content["kind"], content["state"], content["evidence"]) == ("exit", "diverging", {"val_loss": 1.5})


def test_a_gate_is_found_again_whole_or_not_at_all(tmp_path: Path) -> None:
    """Its own line comes last: a writer that was killed before has decided nothing."""
    entries = tuple(
        GateEntry(job_id=job_id, gate_rank=rank, val_loss=1.0, kept=rank == 1, reason="rank")
        for rank, job_id in enumerate("abc", start=1)
    )
    verdicts = tuple(verdict(job_id, JobState.UNDERPERFORMING, 2) for job_id in "bc")
    decision = GateDecision(entries=entries, verdicts=verdicts)
    steps, sources = dict.fromkeys("abc", 40), dict.fromkeys("abc", CurveSource.MLFLOW)
    log = DecisionLog(tmp_path)
    log.add_gate("guarded", 0.05, decision, steps, sources)
    assert DecisionLog(tmp_path).gate_at(0.05) == decision
    assert log.gate_at(0.2) is None
    content = (tmp_path / FILE_NAME).read_bytes()
    for length in range(len(content)):
        (tmp_path / FILE_NAME).write_bytes(content[:length])
        assert DecisionLog(tmp_path).gate_at(0.05) is None
    DecisionLog(tmp_path).add_gate("guarded", 0.05, decision, steps, sources)
    assert DecisionLog(tmp_path).gate_at(0.05) == decision
    assert len(DecisionLog(tmp_path).read()) == 3


def test_the_last_word_about_a_job_counts(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.add([exit_entry("guarded", verdict(job_id, JobState.UNDERPERFORMING, 2), 40) for job_id in "ab"])
    log.add([exit_entry("none", verdict("a", JobState.RUNNING, 2), 40)])
    assert set(log.last_exits()) == {"b"}
    log.add([exit_entry("none", verdict("a", JobState.FINISHED, 40), 40)])
    assert (log.last_exits()["a"].state, log.last_exits()["a"].verdict) == (
        JobState.FINISHED,
        verdict("a", JobState.FINISHED, 40),
    )
