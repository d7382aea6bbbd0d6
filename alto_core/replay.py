"""What a policy would have saved and missed on a recorded sweep: `early_exit.replay` in numbers, over many settings.

The truth is the recording: the best job is the one with the lowest validation loss anywhere in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alto_core.curve_files import RecordedJob, Recording
from alto_core.domain import EARLY_EXITS, JobState, Verdict
from alto_core.early_exit.audit import (
    WARMUP_FRACTIONS,
    RankAgreement,
    best_difference,
    rank_agreement,
    top_quarter,
)
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.policy import Policy, make_policy
from alto_core.early_exit.replay import HeldGate, Replay, replay
from alto_core.errors import TaskFileError

GATE_SETTING = "gate_warmup_fraction"
"""The one setting that is no constant of a policy: where the warmup gate stands."""
DEFAULT_WARMUP = 0.05
UNFINISHED = "unfinished"
"""State of a job that the policy let go on to the end of its recording, which is not the end of its budget."""


@dataclass(frozen=True, kw_only=True)
class ReplayedJob:
    """What becomes of one job."""

    job_id: str
    state: str
    """A `JobState`, or `unfinished`."""
    step: int
    """Steps trained, by the file's own count."""
    fraction: float
    """Share of the budget trained."""
    samples: float
    """Rows trained on."""
    planned_samples: float
    best_val_loss: float | None
    """Of what was trained."""
    recorded_best_val_loss: float | None
    gate_rank: int | None
    """At the warmup gate."""
    verdict: Verdict | None
    """None for a job that trained to its end."""


@dataclass(frozen=True, kw_only=True)
class ReplaySummary:
    """What a policy would have done to a recorded sweep."""

    policy: str
    settings: Mapping[str, float]
    """What was set; the rest is as documented."""
    jobs: tuple[ReplayedJob, ...]
    """The chosen one first, then by loss."""
    gates: tuple[HeldGate, ...]
    agreement: tuple[RankAgreement, ...]
    """Of the recording, whatever the policy."""
    best_job: str | None
    """The truly best."""
    chosen_job: str | None
    """Lowest validation loss among the jobs that may give an adapter; None when every job was ended."""
    best_val_loss: float | None
    chosen_val_loss: float | None
    regret: float | None
    """Chosen minus best validation loss, nats per token."""
    regret_standard_error: float | None
    """Paired over validation rows; None without row losses."""
    top_quarter_coverage: float
    """Share of the true top quarter that trained to the end."""

    @property
    def best_kept(self) -> bool:
        """Whether the truly best job is the chosen one, or another with the same loss."""
        return self.regret == 0

    @property
    def within_noise(self) -> bool:
        """Whether the regret is 0, or at most its paired standard error."""
        return self.regret is not None and self.regret <= (self.regret_standard_error or 0.0)

    @property
    def val_loss_ratio(self) -> float | None:
        """Chosen over best validation loss."""
        if self.best_val_loss is None or self.chosen_val_loss is None or self.best_val_loss == 0:
            return None
        return self.chosen_val_loss / self.best_val_loss

    @property
    def samples_planned(self) -> float:
        return math.fsum(job.planned_samples for job in self.jobs)

    @property
    def samples_trained(self) -> float:
        return math.fsum(job.samples for job in self.jobs)

    @property
    def saved_by(self) -> Mapping[str, float]:
        """Share of all planned rows that verdicts of each state saved."""
        saved = {state.value: 0.0 for state in EARLY_EXITS}
        for job in self.jobs:
            if job.verdict is not None:
                saved[job.state] += (job.planned_samples - job.samples) / self.samples_planned
        return saved

    @property
    def samples_saved_share(self) -> float:
        return math.fsum(self.saved_by.values())


def replay_recording(
    recording: Recording, policy: Policy, *, warmup_fraction: float, settings: Mapping[str, float] | None = None
) -> ReplaySummary:
    """Replay one policy. `settings` are only noted."""
    done = replay(recording.curves, policy, warmup_fraction)
    whole = {curve.job_id: curve for curve in recording.curves}
    ranks = {entry.job_id: entry.gate_rank for entry in done.gates[0].decision.entries}
    jobs = {job.job_id: _replayed(job, done, ranks[job.job_id]) for job in recording.jobs}
    best = _lowest(whole.values())
    gated = {job_id for job_id, rank in ranks.items() if rank is not None}
    candidates = [done.trained[job_id] for job_id, job in jobs.items() if _may_win(job, job_id in gated)]
    chosen = _lowest(candidates)
    pair = best_difference(chosen, whole[best.job_id]) if chosen and best else None
    top = top_quarter(recording.curves)
    return ReplaySummary(
        policy=policy.name,
        settings=dict(settings or {}),
        jobs=tuple(sorted(jobs.values(), key=lambda job: _order(job, chosen))),
        gates=done.gates,
        agreement=tuple(rank_agreement(recording.curves, fraction) for fraction in WARMUP_FRACTIONS),
        best_job=best.job_id if best else None,
        chosen_job=chosen.job_id if chosen else None,
        best_val_loss=best.best_val if best else None,
        chosen_val_loss=chosen.best_val if chosen else None,
        regret=pair.difference if pair else None,
        regret_standard_error=pair.standard_error if pair and math.isfinite(pair.standard_error) else None,
        top_quarter_coverage=sum(jobs[j].verdict is None for j in top) / len(top) if top else math.nan,
    )


def replay_grid(
    recording: Recording, presets: Sequence[str], settings: Mapping[str, Sequence[float]]
) -> Iterator[ReplaySummary]:
    """Every preset with every combination of these settings, constants by name and `gate_warmup_fraction`.

    Raises:
        TaskFileError: an unknown preset or constant, or a value out of its range.
    """
    for preset, values in itertools.product(presets, itertools.product(*settings.values())):
        chosen = dict(zip(settings, values, strict=True))
        constants = {name: value for name, value in chosen.items() if name != GATE_SETTING}
        fraction = chosen.get(GATE_SETTING, DEFAULT_WARMUP)
        if not 0 < fraction < 1:
            raise TaskFileError(GATE_SETTING, got=f"{fraction:g}", expected="a share in (0, 1)")
        yield replay_recording(recording, make_policy(preset, constants), warmup_fraction=fraction, settings=chosen)


def _replayed(job: RecordedJob, done: Replay, gate_rank: int | None) -> ReplayedJob:
    trained, verdict = done.trained[job.job_id], done.verdicts.get(job.job_id)
    is_whole = job.curve.last_step >= job.curve.total_steps
    state = verdict.state.value if verdict else JobState.FINISHED.value if is_whole else UNFINISHED
    fraction = min(1.0, trained.last_step / trained.total_steps)
    return ReplayedJob(
        job_id=job.job_id,
        state=state,
        step=job.step_in_file(trained.last_step),
        fraction=fraction,
        samples=fraction * job.planned_samples,
        planned_samples=job.planned_samples,
        best_val_loss=trained.best_val,
        recorded_best_val_loss=job.curve.best_val,
        gate_rank=gate_rank,
        verdict=verdict and _in_steps_of_file(verdict, job),
    )


def _in_steps_of_file(verdict: Verdict, job: RecordedJob) -> Verdict:
    """The same verdict, its steps numbered as in the file."""
    if job.file_steps is None:
        return verdict
    return dataclasses.replace(
        verdict,
        step=job.step_in_file(verdict.step),
        reason=re.sub(r"\bstep (\d+)", lambda match: f"step {job.step_in_file(int(match[1]))}", verdict.reason),
        evidence={
            name: float(job.step_in_file(int(value))) if name.endswith("_step") else value
            for name, value in verdict.evidence.items()
        },
    )


def _may_win(job: ReplayedJob, was_ranked: bool) -> bool:
    """As live; and jobs of an unfinished recording that had passed the gate."""
    return was_ranked if job.state == UNFINISHED else JobState(job.state).may_win(was_ranked=was_ranked)


def _lowest(curves: Iterable[Curve]) -> Curve | None:
    found = [curve for curve in curves if curve.best_val is not None]
    return min(found, key=lambda curve: (curve.best_val, curve.job_id), default=None)


def _order(job: ReplayedJob, chosen: Curve | None) -> tuple[bool, float, str]:
    loss = math.inf if job.best_val_loss is None else job.best_val_loss
    return chosen is None or job.job_id != chosen.job_id, loss, job.job_id
