"""Curves made by hand, for all tests of the early exit."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from alto_core.domain import RowLosses
from alto_core.early_exit import Curve

MakeCurve = Callable[..., Curve]


def _make_curve(
    val: Sequence[float | None],
    *,
    train: Sequence[float | None] | float | None = None,
    rows: Sequence[Sequence[float]] | None = None,
    job_id: str = "a",
    **fields: Any,
) -> Curve:
    """One step per evaluation, 100 steps of budget, warmup of 5.

    Args:
        val: validation losses.
        train: train losses, or one for all steps; the same as `val` when None.
        rows: per evaluation the loss of each row; rows have 10 labels, and `val` is then ignored but for its length.
    """
    steps = tuple(range(1, len(val) + 1))
    losses = val if train is None else [train] * len(val) if isinstance(train, int | float) else train
    by_step = {
        step: RowLosses(loss_sums=tuple(10 * loss for loss in row), num_labels=(10,) * len(row))
        for step, row in zip(steps, rows or (), strict=False)
    }
    measured = [by_step[step].mean for step in steps] if by_step else val
    defaults: dict[str, Any] = {"learning_rate": 1e-3, "total_steps": 100, "warmup_steps": 5, "row_losses": by_step}
    return Curve(
        job_id=job_id,
        train_steps=steps,
        train_losses=tuple(losses),  # type: ignore[arg-type]
        val_steps=steps,
        val_losses=tuple(measured),  # type: ignore[arg-type]
        **{**defaults, **fields},
    )


@pytest.fixture(scope="session")
def make_curve() -> MakeCurve:
    return _make_curve


@pytest.fixture(scope="session")
def noisy_rows() -> Callable[[Sequence[float], float], list[list[float]]]:
    """Eight rows whose mean is exactly the given loss, each with a deviation of its own at every evaluation.

    The paired standard error of any two evaluations is about half the given noise.
    """

    def rows(losses: Sequence[float], noise: float) -> list[list[float]]:
        draw = random.Random(0)
        deviations = [[draw.gauss(0, noise) for _ in range(8)] for _ in losses]
        return [
            [loss + deviation - statistics.mean(row) for deviation in row]
            for loss, row in zip(losses, deviations, strict=True)
        ]

    return rows
