"""The dimensions of a search space, and the jobs that combine their values: what grid and random search share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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
from alto_core.config.search.space import (
    DEFAULT_ALPHA_OVER_RANK,
    SearchSpace,
    alpha_of,
    module_choices,
    refuse_two_alphas,
)
from alto_core.config.search.variants import (
    Allocation,
    LayerChoice,
    UseDora,
    layer_choices,
    refuse_two_allocations,
)
from alto_core.domain import Initialization, LoraJob, LrSchedule, TrainedSides
from alto_core.errors import TaskFileError

MAX_COMBINATIONS = 10_000
"""Of one space: more jobs than any cluster trains, and laying them all out must not take minutes."""


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


class Dimensions(SearchSpace):
    """A list of values for each."""

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
    use_dora: UseDora = False
    """Only `false`: DoRA cannot share the frozen layers' work between jobs."""
    lora_plus_ratio: _values(Positive) = [1.0]  # type: ignore[valid-type]
    """Learning rate of B over that of A, which is `learning_rate` (LoRA+)."""
    init: _values(Initialization) = ["default"]  # type: ignore[valid-type]
    """How A and B start: `default` as in PEFT, `pissa`, or `tlora`; see docs/variants.md."""
    train: _values(TrainedSides) = ["both"]  # type: ignore[valid-type]
    """`b_only` leaves A as it starts, and trains half as many parameters."""
    layers: _values(LayerChoice) = ["all"]  # type: ignore[valid-type]
    """Decoder layers that are adapted: `all`, or `{probe: {share, allocation}}`; see docs/variants.md."""
    rank_allocation: _values(Allocation) = ["uniform"]  # type: ignore[valid-type]
    """Ranks of the adapted layers: all `lora_rank`, or by each layer's `sensitivity` with `lora_rank` as their mean."""
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

    _one_alpha = model_validator(mode="after")(refuse_two_alphas)
    _one_allocation = model_validator(mode="after")(refuse_two_allocations)

    def combinations(
        self, learning_rates: Sequence[float], all_linear: tuple[str, ...], betas: Sequence[float | None]
    ) -> Iterator[LoraJob]:
        """Every combination of the values, with these learning rates; for the other arguments see `expand`."""
        for (
            rate,
            lora_rank,
            batch_size,
            (alpha, over_rank),
            dropout,
            decay,
            accumulation,
            rslora,
            schedule,
            modules,
            plus_ratio,
            init,
            train,
            layers,
            beta,
        ) in itertools.product(*self._choices(learning_rates, all_linear, betas)):
            yield LoraJob(
                learning_rate=float(rate),
                lora_rank=lora_rank,
                lora_alpha=alpha_of(alpha, over_rank, lora_rank),
                use_rslora=rslora,
                dropout=float(dropout),
                adapter_batch_size=batch_size,
                gradient_accumulation=accumulation,
                weight_decay=float(decay),
                max_grad_norm=float(self.max_grad_norm),
                lr_schedule=schedule,
                lr_warmup_fraction=float(self.lr_warmup_fraction),
                target_modules=modules,
                seed=self.seed,
                beta=beta,
                lora_plus_ratio=float(plus_ratio),
                init=init,
                train=train,
                **layers,
            )

    def count_combinations(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> int:
        """How many `combinations` gives; a range of learning rates counts as one value.

        Raises:
            TaskFileError: more than `MAX_COMBINATIONS`.
        """
        rates = [0.0] if isinstance(self.learning_rate, LogRange) else self.learning_rate
        count = math.prod(map(len, self._choices(rates, all_linear, betas)))
        if count > MAX_COMBINATIONS:
            raise TaskFileError(
                "search_space",
                got=f"{count} combinations of its values",
                expected=f"at most {MAX_COMBINATIONS}",
                hint="Leave values out.",
            )
        return count

    def _choices(
        self, learning_rates: Sequence[float], all_linear: tuple[str, ...], betas: Sequence[float | None]
    ) -> tuple[Sequence[Any], ...]:
        return (
            learning_rates,
            self.lora_rank,
            self.adapter_batch_size,
            self._alpha_choices(),
            self.dropout,
            self.weight_decay,
            self.gradient_accumulation,
            self.use_rslora,
            self.lr_schedule,
            module_choices(self.target_modules, all_linear),
            self.lora_plus_ratio,
            self.init,
            self.train,
            layer_choices(self.layers, self.rank_allocation),
            betas,
        )

    def _alpha_choices(self) -> list[tuple[float | None, float | None]]:
        """Pairs of `lora_alpha` and `alpha_over_rank`, one of them None."""
        if self.lora_alpha is not None:
            return [(alpha, None) for alpha in self.lora_alpha]
        return [(None, ratio) for ratio in self.alpha_over_rank or [DEFAULT_ALPHA_OVER_RANK]]
