"""How numbers, durations and states are written for people, in the terminal as in the report. Needs no package."""

from __future__ import annotations

import math
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from alto_core.domain import GateDecision, JobState
from alto_core.scheduling.prediction import Forecast

STATE_MEANING: dict[JobState, str] = {
    JobState.WAITING: "has not started",
    JobState.RUNNING: "is training",
    JobState.FINISHED: "trained its whole budget",
    JobState.DIVERGING: "its loss rose or was no number",
    JobState.OVERFITTING: "its validation loss no longer followed its training loss",
    JobState.UNDERPERFORMING: "others were better at the gate",
    JobState.FAILED: "could not go on",
    JobState.CANCELLED: "was ended by a person",
}
NOTHING = "-"
KEPT_BECAUSE = {"tie": "equal within the error", "stratum": "best of its learning rate"}
"""Why a job goes on after a gate that is not among the best there."""


def rate(value: float) -> str:
    """A learning rate with its exponent: 0.002 is `2e-3`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def loss(value: float | None) -> str:
    """Nats per token, four digits after the point; long ones shorter; `nan` and `inf` by name."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def share(value: float | None, *, digits: int = 0) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """`8 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(value: float | None) -> str:
    """Thousands apart, by a thin space that does not break."""
    return NOTHING if value is None or not math.isfinite(value) else f"{round(value):,}".replace(",", "\u202f")


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def forecast(expected: Forecast) -> str:
    """`about 14 min 05 s, 60 jobs in 3 waves`."""
    packing = f"{plural(expected.num_jobs, 'job')} in {plural(expected.waves, 'wave')}"
    about = f"about {duration(expected.seconds)}, {packing}"
    if expected.seconds < 0.99 * expected.seconds_without_exit:
        about += f" ({duration(expected.seconds_without_exit)} if none ends early)"
    return about


def forecast_terms(expected: Forecast) -> str:
    """`training 12 min 40 s, evaluation 1 min 02 s, captures 23 s`: what it consists of if no job ends early."""
    terms = {name: seconds for name, seconds in asdict(expected.terms).items() if round(seconds) > 0}
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in terms.items())


def gate(decision: GateDecision) -> str:
    """Who goes on after a gate."""
    kept = [entry for entry in decision.entries if entry.kept]
    why = {entry.job_id: f" ({KEPT_BECAUSE[entry.reason]})" for entry in kept if entry.reason in KEPT_BECAUSE}
    return f"{len(kept)} go on: {', '.join(entry.job_id + why.get(entry.job_id, '') for entry in kept) or 'none'}"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def alto_version() -> str:
    """The installed version; says so when ALTO runs from a folder that was never installed."""
    try:
        return version("alto-lora")
    except PackageNotFoundError:
        return "(not installed)"


def short_name(source: str) -> str:
    """A local path by its last part, a hub id as it is."""
    return Path(source).name if Path(source).is_absolute() else source
