"""The eleven tasks of `plan_fig12.py` as real ones: models, rows, task files, and the order in which they come."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_cases import made_hosts
from plan_fig12 import EPOCHS, ORDERS, paper_tasks

from alto_core.config import TuningTask, parse_task
from alto_core.scheduling import list_scheduling
from alto_core.scheduling.simulator import SimulatedTask, listed, simulate

DATA_SETS = Path(__file__).resolve().parent / "plan_data_sets.csv"
LORA_RANK = 4
"""Small: what a job writes when it leaves does not shrink with its budget."""
PROFILING_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What stands for the paper's models, data sets and search space."""

    tiny_models: bool
    share: float
    """Of each data set's rows, by default."""
    token_share: float
    """Of the tokens of a row."""
    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    validation_rows: int


SCALES = {
    "tiny": Scale(
        tiny_models=True,
        share=1 / 1000,
        token_share=1 / 8,
        learning_rates=(1e-3, 1e-2),
        batch_sizes=(2, 4),
        validation_rows=4,
    ),
    "paper": Scale(
        tiny_models=False,
        share=1 / 200,
        token_share=1.0,
        learning_rates=(1e-5, 5e-5, 1e-4, 3e-4),
        batch_sizes=(1, 2, 4, 8),
        validation_rows=8,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, still without what a variant adds to it."""

    model: str
    data_set: str
    num_gpus: int

    @classmethod
    def of(cls, task: SimulatedTask) -> Case:
        model, data_set = task.task_id.split(" ")
        return cls(model=model, data_set=data_set, num_gpus=task.num_gpus)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.data_set}".replace(".", "-")  # MLflow takes no dots in names of models


def ordered_cases() -> list[Case]:
    """All tasks in the order of submission: of twenty, the one whose makespan without a scheduler is in the middle."""
    tasks = paper_tasks(batched=True, early_exit=False)
    orders = [random.Random(seed).sample(tasks, len(tasks)) for seed in range(ORDERS)]
    queue = listed(list_scheduling.fifo, backfill=False)
    orders.sort(key=lambda order: simulate(order, made_hosts(1), queue).makespan)
    return [Case.of(task) for task in orders[len(orders) // 2]]


class Inputs:
    """Models and rows of all cases, written where they are missing."""

    def __init__(self, scale: Scale, *, share: float, models: Path, rows: Path, depth: float = 1.0):
        self._scale, self._models, self._rows, self._depth = scale, models, rows, depth
        with DATA_SETS.open(newline="", encoding="utf-8") as source:
            self._data_sets = {row["data_set"]: row for row in csv.DictReader(source)}
        self._share = share

    def write(self, cases: list[Case]) -> None:
        from random_models import write_random_model  # here, because it takes torch

        for model in sorted({case.model for case in cases}):
            write_random_model(self._model(model), model, tiny=self._scale.tiny_models, depth=self._depth)
        for data_set in sorted({case.data_set for case in cases}):
            about = self._data_sets[data_set]
            tokens = float(about["tokens"]) * self._scale.token_share
            num_rows = max(2, round(float(about["rows"]) * self._share)) + self._scale.validation_rows
            lines = [json.dumps(_row(i, tokens)) for i in range(num_rows)]
            self._rows_of(data_set).write_text("\n".join(lines), encoding="utf-8")

    def task(self, case: Case, *, batched: bool, early_exit: bool) -> TuningTask:
        """A case as a variant has it: without batching, every GPU trains one job at a time."""
        return self._parse(
            case,
            budget={"epochs": EPOCHS, "eval_interval_fraction": 0.1},
            preset="guarded" if early_exit else "none",
            max_slots=None if batched else case.num_gpus,
        )

    def profiling_task(self, case: Case, *, batched: bool) -> TuningTask:
        """The least that makes ALTO measure a model, so that planned variants know their tasks' throughput."""
        return self._parse(
            case,
            budget={"steps": PROFILING_STEPS},
            preset="none",
            max_slots=None if batched else case.num_gpus,
        )

    def _parse(self, case: Case, *, budget: dict[str, Any], preset: str, max_slots: int | None) -> TuningTask:
        return parse_task(
            {
                "name": case.name,
                "model": {"name": str(self._model(case.model))},
                "data": {
                    "source": str(self._rows_of(case.data_set)),
                    "validation": {"rows": self._scale.validation_rows},
                },
                "search_space": {
                    "learning_rate": list(self._scale.learning_rates),
                    "adapter_batch_size": list(self._scale.batch_sizes),
                    "lora_rank": LORA_RANK,
                },
                "budget": budget,
                "early_exit": {"preset": preset, "parked_gib": 0},
                "cluster": {"num_gpus": case.num_gpus},
                "max_slots": max_slots,
            }
        )

    def _model(self, name: str) -> Path:
        return self._models / f"{name}-{self._depth:g}"

    def _rows_of(self, data_set: str) -> Path:
        return self._rows / f"{data_set}.jsonl"


def _row(number: int, tokens: float) -> dict[str, str]:
    """A row of so many bytes, which are tokens, in the mean of three: a third random letters, then one of them."""
    draw = random.Random(number)
    length = max(6, round(tokens * (0.5 + number % 3 / 2)))
    prompt = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length // 3))
    return {"prompt": prompt, "completion": prompt[0] * (length - len(prompt))}
