"""What a job is: one LoRA configuration, its id, the room that its adapter takes, how long it trains."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LrSchedule = Literal["constant", "linear", "cosine"]
Initialization = Literal["default", "pissa", "tlora"]
TrainedSides = Literal["both", "b_only"]
RankAllocation = Literal["uniform", "gradient", "sensitivity"]
MAX_RANK_RATIO = 2
"""Largest rank of a layer over the job's own where ranks differ by layer; so its room is known before they are."""


@dataclass(frozen=True, kw_only=True)
class LoraJob:
    """One LoRA configuration of a task. Two jobs with equal fields have equal ids."""

    learning_rate: float
    lora_rank: int
    lora_alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    """Probability that an element of a LoRA layer's input is dropped, in [0, 1)."""
    adapter_batch_size: int
    """Rows of this job in one joint step."""
    gradient_accumulation: int = 1
    """Joint steps per optimizer update."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradient norm of this job's adapter above which its gradient is scaled down; 0 turns clipping off."""
    lr_schedule: LrSchedule = "constant"
    lr_warmup_fraction: float = 0.0
    """Share of the job's own steps over which the learning rate rises linearly from 0."""
    target_modules: tuple[str, ...]
    """Name endings of the linear layers that get an adapter, for example `q_proj`."""
    seed: int = 0
    """Seeds the initial A matrices and the dropout masks."""
    beta: float | None = None
    """How hard a preference objective holds the job to its reference; None with other objectives."""
    lora_plus_ratio: float = 1.0
    """Learning rate of B over that of A (LoRA+)."""
    init: Initialization = "default"
    """How A and B start: as PEFT draws them; from the leading singular vectors of the frozen weight (`pissa`); or A
    from those of the weight times the covariance of its inputs (`tlora`)."""
    train: TrainedSides = "both"
    """`b_only` leaves A as it starts."""
    layer_share: float = 1.0
    """Share of the decoder layers that are adapted: those with the largest gradients at the start."""
    rank_allocation: RankAllocation = "uniform"
    """What the ranks of layers are in proportion to, with `lora_rank` as their mean by parameters: nothing, the
    gradient of their decoder layer, or their own sensitivity."""

    @property
    def job_id(self) -> str:
        """Readable and stable: the dimensions a reader looks for, then six digits of a digest over all fields."""
        digest = hashlib.sha256(json.dumps(self._given(), sort_keys=True).encode()).hexdigest()[:6]
        marks = "".join(f"-{mark}" for mark in self._variant_marks())
        return f"lr{self.learning_rate:g}-r{self.lora_rank}-b{self.rows_per_update}{marks}-{digest}"

    @property
    def scale(self) -> float:
        """Factor on the LoRA path: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    @property
    def rows_per_update(self) -> int:
        return self.adapter_batch_size * self.gradient_accumulation

    @property
    def trained_rows(self) -> int:
        """Rank rows that training moves: the largest rank that a layer may have."""
        return self.lora_rank * (1 if self.rank_allocation == "uniform" else MAX_RANK_RATIO)

    @property
    def rank_rows(self) -> int:
        """Rank rows that the adapter takes. With PiSSA its start takes as many again, which stay as they are."""
        return self.trained_rows * (2 if self.init == "pissa" else 1)

    @property
    def side_ratios(self) -> tuple[float, float]:
        """Learning rates of A and of B as multiples of the job's own."""
        return 1.0 if self.train == "both" else 0.0, self.lora_plus_ratio

    @property
    def needs_measures(self) -> bool:
        """Whether its adapter depends on what is measured of its task."""
        return self.layer_share < 1 or self.rank_allocation != "uniform" or self.init == "tlora"

    @property
    def plain(self) -> LoraJob:
        """A job of plain LoRA that takes the same room and time."""
        changes = {name: default for name, default in _TOLD_WHERE_SET.items() if name != "beta"}
        return dataclasses.replace(self, lora_rank=self.rank_rows, **changes)

    def params(self) -> dict[str, Any]:
        """The fields as MLflow parameters."""
        return {**self._given(), "target_modules": ",".join(self.target_modules)}

    def _variant_marks(self) -> Iterator[str]:
        """What sets the job apart from plain LoRA, in a word each."""
        if self.init != "default":
            yield self.init
        if self.train != "both":
            yield "bonly"
        if self.layer_share < 1:
            yield f"top{100 * self.layer_share:.3g}"
        if self.rank_allocation != "uniform":
            yield "uneven"
        if self.lora_plus_ratio != 1:
            yield f"plus{self.lora_plus_ratio:g}"

    def _given(self) -> dict[str, Any]:
        """All fields, but those that came later only where they are set: so ids stay what they were."""
        fields = dataclasses.asdict(self)
        return {k: v for k, v in fields.items() if k not in _TOLD_WHERE_SET or v != _TOLD_WHERE_SET[k]}


_TOLD_WHERE_SET: Mapping[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(LoraJob)
    if field.name in ("beta", "lora_plus_ratio", "init", "train", "layer_share", "rank_allocation")
}


@dataclass(frozen=True, kw_only=True)
class JobBudget:
    """How long one job trains. All counts are optimizer steps of the job itself, so jobs compare at equal fractions."""

    total_steps: int
    warmup_steps: int
    """The gate stands after this step."""
    eval_steps: tuple[int, ...]
    """Steps after which the job is evaluated, rising; holds `warmup_steps` and `total_steps`."""

    def fraction(self, step: int) -> float:
        return step / self.total_steps

    def step_at(self, fraction: float) -> int:
        """The step where a gate at this share of the budget stands: rounded, at least 1."""
        return min(self.total_steps, max(1, round(fraction * self.total_steps)))
