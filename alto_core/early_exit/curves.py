"""Loss curves of jobs: what the detectors, the report and the tracking exchange, and the arithmetic they share.

Rules that judge a curve stand in `detectors` and `gate`; reading curves from MLflow is `alto_core.tracking`.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from alto_core.domain import JobState, RowLosses


class PairedDifference(NamedTuple):
    """Difference of two validation losses on the same rows, nats per token."""

    difference: float
    standard_error: float
    """NaN where it cannot be known: fewer than two rows with labels, no row losses, or a loss that is not finite."""

    @property
    def noise(self) -> float:
        """The standard error, or 0 where it is not known: without row losses any difference counts."""
        return self.standard_error if math.isfinite(self.standard_error) else 0.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one job measured so far.

    Steps are optimizer steps of the job itself, 1-based and rising. Losses are nats per token; they may be NaN or
    infinite, and None is taken as NaN.

    Raises:
        ValueError: steps do not rise, there are not as many losses as steps, or `ended` is no end state.
    """

    job_id: str
    learning_rate: float
    total_steps: int
    """Steps of the job's whole budget."""
    warmup_steps: int
    """The gate stands after this step."""
    train_steps: tuple[int, ...]
    train_losses: tuple[float, ...]
    val_steps: tuple[int, ...]
    val_losses: tuple[float, ...]
    row_losses: Mapping[int, RowLosses] = field(default_factory=dict)
    """By evaluation step, for paired standard errors; may lack some steps or all."""
    ended: JobState | None = None
    """The end state that the job reached after its last step; None while it may go on."""
    _emas: dict[float, tuple[float, ...]] = field(init=False, repr=False, compare=False)
    """Smoothed train losses by alpha, of this curve or of a longer one that it is the beginning of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_losses", _with_nan(self.train_losses))
        object.__setattr__(self, "val_losses", _with_nan(self.val_losses))
        if self.ended is not None and not self.ended.is_end:
            raise ValueError(f"{self.job_id}: got ended={self.ended}, expected an end state, or None while it runs")
        _check_series(self.job_id, "train", self.train_steps, self.train_losses)
        _check_series(self.job_id, "val", self.val_steps, self.val_losses)
        object.__setattr__(self, "_emas", {})

    @property
    def last_step(self) -> int:
        """The last step that anything was measured at; 0 before the first."""
        return max(self.train_steps[-1:] + self.val_steps[-1:], default=0)

    @property
    def last_val(self) -> float | None:
        """The latest validation loss; None before the first evaluation."""
        return self.val_losses[-1] if self.val_losses else None

    @property
    def best_val_step(self) -> int | None:
        """The evaluation step with the lowest finite validation loss, the earlier of equals; None without one."""
        finite = [
            (loss, step) for step, loss in zip(self.val_steps, self.val_losses, strict=True) if math.isfinite(loss)
        ]
        return min(finite)[1] if finite else None

    @property
    def best_val(self) -> float | None:
        """The lowest finite validation loss; None without one."""
        return min((loss for loss in self.val_losses if math.isfinite(loss)), default=None)

    @property
    def is_finite(self) -> bool:
        """Whether every loss measured so far is a finite number."""
        return all(map(math.isfinite, self.train_losses)) and all(map(math.isfinite, self.val_losses))

    def step_at(self, fraction: float) -> int:
        """Where a gate at this share of the job's budget stands: rounded, at least 1, as in `budget.job_budget`."""
        return min(self.total_steps, max(1, round(fraction * self.total_steps)))

    def until(self, fraction: float) -> Curve:
        """The curve as it was after step `step_at(fraction)`."""
        return self.through(self.step_at(fraction))

    def through(self, step: int) -> Curve:
        """The curve as it was after this step, evaluation included. `ended` is dropped if the job went on beyond it."""
        num_train, num_val = bisect_right(self.train_steps, step), bisect_right(self.val_steps, step)
        cut = dataclasses.replace(
            self,
            train_steps=self.train_steps[:num_train],
            train_losses=self.train_losses[:num_train],
            val_steps=self.val_steps[:num_val],
            val_losses=self.val_losses[:num_val],
            row_losses={s: rows for s, rows in self.row_losses.items() if s <= step},
            ended=self.ended if self.last_step <= step else None,
        )
        # a prefix is smoothed like the whole, so that judging at every evaluation smooths each loss once
        object.__setattr__(cut, "_emas", self._emas)
        return cut

    def prefixes(self) -> Iterator[Curve]:
        """The curve as it was at each of its evaluations, in order."""
        return (self.through(step) for step in self.val_steps)

    def ema(self, alpha: float) -> tuple[float, ...]:
        """The smoothed train loss, one value per train step; see `smoothed`."""
        known = self._emas.get(alpha, ())
        if len(known) < len(self.train_losses):
            known = self._emas[alpha] = smoothed(self.train_losses, alpha)
        return known[: len(self.train_losses)]

    def ema_at_evaluations(self, alpha: float) -> tuple[float, ...]:
        """The smoothed train loss at each evaluation step, that step included; NaN before the first train step."""
        ema = self.ema(alpha)
        counts = (bisect_right(self.train_steps, step) for step in self.val_steps)
        return tuple(ema[count - 1] if count else math.nan for count in counts)


def smoothed(losses: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Exponential moving average per optimizer step: `ema_t = alpha * loss_t + (1 - alpha) * ema_{t-1}`.

    It starts at the first loss (paper, section 5). After a NaN all that follows is NaN.
    """
    ema: list[float] = []
    for loss in losses:
        ema.append(alpha * loss + (1 - alpha) * ema[-1] if ema else loss)
    return tuple(ema)


def paired_difference(a: RowLosses, b: RowLosses) -> PairedDifference:
    """Loss of `a` minus loss of `b` over the same rows, with its standard error.

    Rows have different label counts, so the difference of the two token means is a ratio of sums over rows. With
    `x_i` the difference of row i's loss sums, `n_i` its labels, N the sum of all `n_i` and R the rows that have labels:

        d = sum_i x_i / N,    e_i = x_i - d * n_i,    standard error = sqrt(R / (R - 1) * sum_i e_i^2) / N

    the usual linearised variance of a ratio estimator, rows being the sampled units.

    Raises:
        ValueError: the two were not measured on the same rows.
    """
    if a.num_labels != b.num_labels:
        raise ValueError(
            f"got row losses over {len(a.num_labels)} and {len(b.num_labels)} rows with differing label counts, "
            "expected the same rows on both sides; evaluate both jobs on one validation split"
        )
    total_labels = sum(b.num_labels)
    if total_labels == 0 or not all(map(math.isfinite, (*a.loss_sums, *b.loss_sums))):
        return PairedDifference(math.nan, math.nan)
    differences = [x - y for x, y in zip(a.loss_sums, b.loss_sums, strict=True)]
    # not fsum, hypot not squares: losses of a job about to overflow must give infinity here, no OverflowError
    mean = sum(differences) / total_labels
    residuals = [x - mean * labels for x, labels in zip(differences, b.num_labels, strict=True) if labels]
    num_rows = len(residuals)
    if num_rows < 2 or not math.isfinite(mean):
        return PairedDifference(mean, math.nan)
    return PairedDifference(mean, math.sqrt(num_rows / (num_rows - 1)) * math.hypot(*residuals) / total_labels)


def validation_difference(a: Curve, step_a: int, b: Curve, step_b: int) -> PairedDifference:
    """Validation loss of `a` after `step_a` minus that of `b` after `step_b`, paired over rows.

    Where one of them has no row losses there, the plain difference with standard error NaN. `a` and `b` may be one job
    at two steps.
    """
    rows_a, rows_b = a.row_losses.get(step_a), b.row_losses.get(step_b)
    if rows_a is not None and rows_b is not None:
        return paired_difference(rows_a, rows_b)
    loss_a, loss_b = a.val_losses[a.val_steps.index(step_a)], b.val_losses[b.val_steps.index(step_b)]
    return PairedDifference(loss_a - loss_b, math.nan)


def _with_nan(losses: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if loss is None else loss for loss in losses)


def _check_series(job_id: str, name: str, steps: Sequence[int], losses: Sequence[float]) -> None:
    if len(steps) != len(losses):
        raise ValueError(
            f"{job_id}: got {len(steps)} {name}_steps and {len(losses)} {name}_losses, expected as many of each"
        )
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(
            f"{job_id}: got {name}_steps that do not rise, expected each step once; keep the latest value of a step"
        )
