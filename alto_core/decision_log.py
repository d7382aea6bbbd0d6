"""The decisions of one task in order, gates and exits, as JSON: what `alto explain` tells and anyone can check.

Written beside the task's other files as it goes, so that no process loses another's, and copied to MLflow as
`decisions.json` by whoever made the last entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alto_core.domain import CurveSource, GateDecision, GateEntry, JobState, Verdict

FILE_NAME = "decisions.jsonl"
ARTIFACT_NAME = "decisions.json"


@dataclass(frozen=True, kw_only=True)
class GateLogEntry:
    """A gate that was held."""

    policy: str
    fraction: float
    """Where it stands, as a share of each job's own budget."""
    entries: tuple[GateEntry, ...]
    curve: CurveSource = CurveSource.MLFLOW
    """Where the curves were read from: the spool, if one of them was."""
    kind: str = "gate"


@dataclass(frozen=True, kw_only=True)
class ExitLogEntry:
    """A job that ended, or one that came back."""

    policy: str
    job_id: str
    state: JobState
    """`running` for a job that was revived."""
    step: int
    total_steps: int
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers compared, by name."""
    gate_fraction: float | None = None
    """The gate that ended it; None for a detector, a spent budget, a failure or a revival."""
    curve: CurveSource | None = None
    """Where the job's curve was read from; None where none was judged: a spent budget, a failure, a revival."""
    kind: str = "exit"

    @property
    def fraction(self) -> float:
        return self.step / self.total_steps

    @property
    def verdict(self) -> Verdict:
        return Verdict(
            job_id=self.job_id, state=self.state, step=self.step, reason=self.reason, evidence=dict(self.evidence)
        )


class DecisionLog:
    """The log of one task, in its folder."""

    def __init__(self, task_folder: Path):
        self._file = task_folder / FILE_NAME

    def add(self, entries: Sequence[GateLogEntry | ExitLogEntry]) -> None:
        """Append entries, on disk when the call returns.

        One that is there already is not repeated, wherever its curve was read from.
        """
        there = self._lines()
        decided = {_decision(_entry(json.loads(line))) for line in there}
        fresh = [entry for entry in entries if _decision(entry) not in decided]
        new = [json.dumps(_plain(entry), allow_nan=False) for entry in fresh]
        if new:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("r+b" if self._file.exists() else "w+b") as out:
                # what a killed writer left of its last line is no entry
                out.truncate(out.seek(sum(len(line.encode()) + 1 for line in there)))
                out.write("".join(f"{line}\n" for line in new).encode())
                out.flush()
                os.fsync(out.fileno())

    def read(self) -> tuple[GateLogEntry | ExitLogEntry, ...]:
        """All entries in order."""
        return tuple(_entry(json.loads(line)) for line in self._lines())

    def last_exits(self) -> Mapping[str, ExitLogEntry]:
        """The last word about each job, where it is that the job ended."""
        last = {entry.job_id: entry for entry in self.read() if isinstance(entry, ExitLogEntry)}
        return {job_id: entry for job_id, entry in last.items() if entry.state.is_end}

    def gate_at(self, fraction: float) -> GateDecision | None:
        """The decision of a gate that was held; see `add_gate`."""
        log = self.read()
        gates = [e for e in log if isinstance(e, GateLogEntry) and math.isclose(e.fraction, fraction)]
        if not gates:
            return None
        exits = {
            e.job_id: e.verdict
            for e in log
            if isinstance(e, ExitLogEntry) and e.gate_fraction is not None and math.isclose(e.gate_fraction, fraction)
        }
        return GateDecision(entries=gates[-1].entries, verdicts=tuple(exits.values()))

    def add_gate(
        self,
        policy: str,
        fraction: float,
        decision: GateDecision,
        total_steps: Mapping[str, int],
        curves: Mapping[str, CurveSource],
    ) -> None:
        """Append a gate, before anything comes of it. Its own entry is the last: where it stands, all exits do.

        Args:
            policy: that decided.
            fraction: where the gate stands, as a share of each job's own budget.
            decision: the places of all jobs, and who ends.
            total_steps: of each job.
            curves: where each job's curve was read from.
        """
        exits = [exit_entry(policy, v, total_steps[v.job_id], fraction, curves[v.job_id]) for v in decision.verdicts]
        source = CurveSource.SPOOL if CurveSource.SPOOL in curves.values() else CurveSource.MLFLOW
        gate = GateLogEntry(policy=policy, fraction=fraction, entries=decision.entries, curve=source)
        self.add([*exits, gate])

    def exits_of(self, job_id: str) -> tuple[ExitLogEntry, ...]:
        return tuple(e for e in self.read() if isinstance(e, ExitLogEntry) and e.job_id == job_id)

    def _lines(self) -> list[str]:
        """Whole lines only."""
        text = self._file.read_bytes() if self._file.exists() else b""
        return text[: text.rfind(b"\n") + 1].decode().splitlines()

    def as_json(self) -> str:
        """The whole log as one JSON array."""
        return json.dumps([_plain(entry) for entry in self.read()], indent=1, allow_nan=False)


def exit_entry(
    policy: str,
    verdict: Verdict,
    total_steps: int,
    gate_fraction: float | None = None,
    curve: CurveSource | None = None,
) -> ExitLogEntry:
    """A verdict as the log keeps it; see the fields of `ExitLogEntry`."""
    return ExitLogEntry(
        policy=policy,
        job_id=verdict.job_id,
        state=verdict.state,
        step=verdict.step,
        total_steps=total_steps,
        reason=verdict.reason,
        evidence=verdict.evidence,
        gate_fraction=gate_fraction,
        curve=curve,
    )


def _plain(entry: GateLogEntry | ExitLogEntry) -> dict[str, Any]:
    content = dataclasses.asdict(entry)
    return {"kind": content.pop("kind"), **content}


def _decision(entry: GateLogEntry | ExitLogEntry) -> str:
    """What was decided and on which numbers."""
    content = _plain(entry)
    del content["curve"]
    return json.dumps(content, allow_nan=False)


def _entry(content: dict[str, Any]) -> GateLogEntry | ExitLogEntry:
    if content.get("curve") is not None:
        content["curve"] = CurveSource(content["curve"])
    if content["kind"] == "gate":
        return GateLogEntry(**{**content, "entries": tuple(GateEntry(**entry) for entry in content["entries"])})
    return ExitLogEntry(**{**content, "state": JobState(content["state"])})
