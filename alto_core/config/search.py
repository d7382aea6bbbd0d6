"""The search space: what grid and random search vary, or an explicit list of jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from alto_core.config.fields import (
    Count,
    Dropout,
    LoraRank,
    ModuleNames,
    NonNegative,
    Positive,
    Section,
    one_or_more,
    unique,
)
from alto_core.domain import LrSchedule


class LogRange(Section):
    """A range to draw from."""

    min: Positive
    max: Positive
    log: bool = True
    """Uniform in the logarithm."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max <= self.min:
            raise ValueError("`max` above `min`")
        return self


def _values(item: Any) -> Any:
    """A search dimension: one value or a list of distinct values."""
    return Annotated[list[item], BeforeValidator(one_or_more), Field(min_length=1), AfterValidator(unique)]


Rates = Annotated[
    list[Positive] | LogRange, BeforeValidator(lambda v: v if isinstance(v, dict | LogRange) else one_or_more(v))
]


def _refuse_two_alphas(section: Any) -> Any:
    if section.alpha_over_rank is not None and section.lora_alpha is not None:
        raise ValueError("only one of `lora_alpha` and `alpha_over_rank`")
    return section


class _Dimensions(Section):
    """What grid and random search vary."""

    learning_rate: Rates
    """AdamW's step size; for random search also a range `{min, max, log}`."""
    lora_rank: _values(LoraRank)  # type: ignore[valid-type]
    """Width r of the adapter."""
    adapter_batch_size: _values(Count) = [8]  # type: ignore[valid-type]
    """Rows of a job in one joint step."""
    alpha_over_rank: _values(Positive) | None = None  # type: ignore[valid-type]
    """lora_alpha as a multiple of the rank; 2 when neither is given."""
    lora_alpha: _values(Positive) | None = None  # type: ignore[valid-type]
    """Numerator of the scale alpha / r."""
    dropout: _values(Dropout) = [0.0]  # type: ignore[valid-type]
    """Probability that an element of a LoRA layer's input is dropped, in [0, 1)."""
    weight_decay: _values(NonNegative) = [0.0]  # type: ignore[valid-type]
    """AdamW's decoupled weight decay."""
    gradient_accumulation: _values(Count) = [1]  # type: ignore[valid-type]
    """Joint steps per update; the update sees `adapter_batch_size` times as many rows."""
    use_rslora: _values(bool) = [False]  # type: ignore[valid-type]
    """Scale alpha / sqrt(r) instead of alpha / r."""
    lr_schedule: _values(LrSchedule) = ["constant"]  # type: ignore[valid-type]
    """Course of the learning rate after its warmup: `constant`, `linear` to 0 or `cosine` to 0."""
    target_modules: Literal["all-linear"] | ModuleNames | Annotated[list[ModuleNames], Field(min_length=1)] = Field(
        "all-linear", union_mode="left_to_right"
    )
    """Names of linear layers, or a list of such lists to search over."""
    max_grad_norm: NonNegative = 1.0
    """Norm above which a job's gradient is scaled down; 0 turns clipping off."""
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the job's steps over which the learning rate rises from 0."""
    seed: int = 0
    """Seeds the initial adapters and the dropout masks."""

    _one_alpha = model_validator(mode="after")(_refuse_two_alphas)


class GridSpace(_Dimensions):
    """Every combination."""

    strategy: Literal["grid"] = "grid"

    @model_validator(mode="after")
    def _no_range(self) -> Self:
        if isinstance(self.learning_rate, LogRange):
            raise ValueError("a list of learning rates: a range needs `strategy: random`")
        return self


class RandomSpace(_Dimensions):
    """Distinct random combinations."""

    strategy: Literal["random"]
    num_jobs: Count
    """How many to draw."""
    search_seed: int = 0
    """Seeds the draws."""


class ListedJob(Section):
    """One job of an explicit list; the fields mean what they mean in a grid."""

    learning_rate: Positive
    lora_rank: LoraRank
    lora_alpha: Positive | None = None
    alpha_over_rank: Positive | None = None
    use_rslora: bool = False
    dropout: Dropout = 0.0
    adapter_batch_size: Count = 8
    gradient_accumulation: Count = 1
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0
    lr_schedule: LrSchedule = "constant"
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | ModuleNames = Field("all-linear", union_mode="left_to_right")
    seed: int = 0

    _one_alpha = model_validator(mode="after")(_refuse_two_alphas)


class ListSpace(Section):
    """Just these jobs."""

    strategy: Literal["list"]
    jobs: Annotated[list[ListedJob], Field(min_length=1)]
