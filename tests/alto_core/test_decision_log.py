"""The decision log: in order, each entry once, strict JSON."""

from __future__ import annotations

import json
from pathlib import Path

from alto_core.decision_log import DecisionLog, exit_entry, gate_entry
from alto_core.domain import GateDecision, GateEntry, JobState, Verdict


def verdict(job_id: str, state: JobState, step: int) -> Verdict:
    return Verdict(job_id=job_id, state=state, step=step, reason="because", evidence={"val_loss": 1.5})


def test_what_was_added_comes_back_in_order_from_another_process(tmp_path: Path) -> None:
    entry = GateEntry(job_id="a", gate_rank=1, val_loss=1.5, kept=False, reason="rank")
    gate = gate_entry("guarded", 0.05, GateDecision(entries=(entry,), verdicts=()))
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


def test_the_whole_log_is_one_json_array(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    assert json.loads(log.as_json()) == []
    log.add([exit_entry("paper", verdict("a", JobState.DIVERGING, 3), 40)])
    (content,) = json.loads(log.as_json())
    assert (content["kind"], content["state"], content["evidence"]) == ("exit", "diverging", {"val_loss": 1.5})
