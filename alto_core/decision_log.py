"""The decisions of one task in order, gates and exits, as JSON: what `alto explain` tells and anyone can check.

Written beside the task's other files as it goes, so that no process loses another's, and copied to MLflow as
`decisions.json` by whoever made the last entry.
"""

from __future__ import annotations

import dataclasses
import json
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


class DecisionLog:
    """The log of one task, in its folder."""

    def __init__(self, task_folder: Path):
        self._file = task_folder / FILE_NAME

    def add(self, entries: Sequence[GateLogEntry | ExitLogEntry]) -> None:
        """Append entries. One that is there already is not repeated, wherever its curve was read from."""
        there = {_decision(entry) for entry in self.read()}
        fresh = [entry for entry in entries if _decision(entry) not in there]
        new = [json.dumps(_plain(entry), allow_nan=False) for entry in fresh]
        if new:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as out:
                out.write("".join(f"{line}\n" for line in new))

    def read(self) -> tuple[GateLogEntry | ExitLogEntry, ...]:
        """All entries in order."""
        if not self._file.exists():
            return ()
        return tuple(_entry(json.loads(line)) for line in self._file.read_text(encoding="utf-8").splitlines())

    def exits_of(self, job_id: str) -> tuple[ExitLogEntry, ...]:
        return tuple(e for e in self.read() if isinstance(e, ExitLogEntry) and e.job_id == job_id)

    def as_json(self) -> str:
        """The whole log as one JSON array."""
        return json.dumps([_plain(entry) for entry in self.read()], indent=1, allow_nan=False)


def gate_entry(
    policy: str, fraction: float, decision: GateDecision, curve: CurveSource = CurveSource.MLFLOW
) -> GateLogEntry:
    return GateLogEntry(policy=policy, fraction=fraction, entries=decision.entries, curve=curve)


def exit_entry(
    policy: str,
    verdict: Verdict,
    total_steps: int,
    gate_fraction: float | None = None,
    curve: CurveSource | None = None,
) -> ExitLogEntry:
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
