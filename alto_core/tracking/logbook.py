"""Writes what a task logs into its spool, each point once.

A resumed job makes steps again that were logged before its process died. Where the numbers are the same, nothing is
written; where they differ, the new ones are written with a later time, by which readers tell the newer of two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alto_core.domain import StepRecord
from alto_core.tracking.messages import Steps, Values
from alto_core.tracking.spool import Spool

TOKENS = "tokens"

Step = tuple[float, float, float, int]
"""Train loss, gradient norm, learning rate and tokens of one optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What builds on all steps of a job so far."""

    step: int = 0
    ema: float | None = None
    """Smoothed train loss after that step; None before the first."""
    tokens: int = 0
    """Of all steps so far."""
    learning_rate: float = 0.0
    """Of that step."""

    def after(self, number: int, step: Step, alpha: float) -> Progress:
        """With one more step."""
        loss, _, learning_rate, tokens = step
        ema = loss if self.ema is None else alpha * loss + (1 - alpha) * self.ema
        return Progress(step=number, ema=ema, tokens=self.tokens + tokens, learning_rate=learning_rate)


class Logbook:
    """The writing side of one task's spool. Not safe for several threads.

    Args:
        spool: where to write.
        ema_alpha: weight of the newest loss in the smoothed train loss.
        read_progress: where runs stood after a step, whose steps are not all in the spool; by run id.
    """

    def __init__(
        self, spool: Spool, ema_alpha: float, read_progress: Callable[[Mapping[str, int]], Mapping[str, Progress]]
    ):
        self._spool, self._alpha, self._read_progress = spool, ema_alpha, read_progress
        self._progress: dict[str, Progress] = {}
        self._again: dict[str, dict[int, Step]] = {}
        """Steps that were logged before and may come again."""
        self._values: dict[tuple[str, int], dict[str, float]] = {}
        self._spooled_runs: set[str] = set()
        """Those with steps in the spool."""
        self._last_timestamp = 0
        self._knows_spool = False

    def now(self) -> int:
        """Milliseconds since 1970, later than all before: the machine's clock may be set back."""
        if not self._knows_spool:
            self._read_spool(())
        self._last_timestamp = max(self._last_timestamp + 1, int(time.time() * 1000))
        return self._last_timestamp

    def sums(self, run_id: str, step: int) -> dict[str, float]:
        """Metrics that build on all steps so far; none where this process did not log that step."""
        progress = self._progress.get(run_id)
        if progress is None or progress.step != step or progress.ema is None:
            return {}
        return {"train_loss_ema": progress.ema, "learning_rate": progress.learning_rate, TOKENS: float(progress.tokens)}

    def steps(self, records: Mapping[str, Sequence[StepRecord]]) -> list[Steps]:
        """What is to be written for steps, by run id, those of a run one after the other.

        Raises:
            TrackingError: a run whose first steps are not in the spool does not go on where it stood, and what was
                logged of it cannot be read.
        """
        timestamp = self.now()
        self._find_places({run_id: of_run[0].step for run_id, of_run in records.items()})
        messages = []
        for run_id, of_run in records.items():
            progress, known, fresh = self._progress[run_id], self._again.get(run_id, {}), dict[int, Step]()
            for r in of_run:
                step = (r.train_loss, r.grad_norm, r.learning_rate, r.num_tokens)
                progress = progress.after(r.step, step, self._alpha)
                if not _same(known.pop(r.step, ()), step):
                    fresh[r.step] = step
            self._progress[run_id] = progress
            messages += [_steps_message(run_id, timestamp, first, part) for first, part in _stretches(fresh)]
        self._spooled_runs |= records.keys()
        return messages

    def values(self, run_id: str, step: int, values: Mapping[str, float]) -> list[Values]:
        """What is to be written for metrics of a run at a step: those that are not there already."""
        timestamp = self.now()
        known = self._values.setdefault((run_id, step), {})
        fresh = {key: value for key, value in values.items() if not _same((known.get(key),), (value,))}
        known |= fresh
        return [Values(run_id=run_id, timestamp=timestamp, step=step, values=fresh)] if fresh else []

    def _find_places(self, first_steps: Mapping[str, int]) -> None:
        """Make sure that each run stands right before its first step."""
        moved = {
            run_id: first
            for run_id, first in first_steps.items()
            if run_id not in self._progress or self._progress[run_id].step != first - 1
        }
        self._read_spool(self._spooled_runs.intersection(moved))
        unknown = {}
        for run_id, first in moved.items():
            known, progress = self._again.get(run_id, {}), Progress()
            while progress.step < first - 1 and progress.step + 1 in known:
                progress = progress.after(progress.step + 1, known.pop(progress.step + 1), self._alpha)
            self._progress[run_id] = progress
            if progress.step < first - 1:
                unknown[run_id] = first - 1
        if unknown:
            self._progress |= self._read_progress(unknown)

    def _read_spool(self, run_ids: Iterable[str]) -> None:
        """Learn what was logged of these runs, and the first time of all that is not about steps."""
        again = {run_id: dict[int, Step]() for run_id in run_ids}
        if self._knows_spool and not again:
            return
        for line in self._spool.lines():
            message = line.message
            if isinstance(message, Steps | Values):
                self._last_timestamp = max(self._last_timestamp, message.timestamp)
            if isinstance(message, Steps):
                self._spooled_runs.add(message.run_id)
                if message.run_id in again:
                    again[message.run_id].update(_steps(message))
            elif isinstance(message, Values) and not self._knows_spool:
                self._values.setdefault((message.run_id, message.step), {}).update(message.values)
        self._again |= again
        self._knows_spool = True


def _steps(message: Steps) -> Iterator[tuple[int, Step]]:
    columns = message.train_losses, message.grad_norms, message.learning_rates, message.num_tokens
    return enumerate(zip(*columns, strict=True), message.first_step)


def _steps_message(run_id: str, timestamp: int, first: int, steps: Sequence[Step]) -> Steps:
    losses, norms, rates, tokens = zip(*steps, strict=True)
    return Steps(
        run_id=run_id,
        timestamp=timestamp,
        first_step=first,
        train_losses=losses,
        grad_norms=norms,
        learning_rates=rates,
        num_tokens=tokens,
    )


def _stretches(steps: Mapping[int, Step]) -> Iterator[tuple[int, list[Step]]]:
    """Runs of consecutive steps: the first number and the steps."""
    part: list[Step] = []
    first = 0
    for number, step in steps.items():
        if part and number != first + len(part):
            yield first, part
            part = []
        if not part:
            first = number
        part.append(step)
    if part:
        yield first, part


def _same(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether the numbers are equal; two that are no numbers are."""
    return len(a) == len(b) and all(
        x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y))
        for x, y in zip(a, b, strict=True)
    )
