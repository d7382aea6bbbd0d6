"""Strategy `list`: just the jobs that the task file writes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from alto_core.config.fields import Count, Dropout, LoraRank, ModuleNames, NonNegative, Positive, Section
from alto_core.config.search.space import SearchSpace, alpha_of, module_choices, refuse_two_alphas
from alto_core.config.search.variants import Allocation, LayerChoice, UseDora, layer_fields, refuse_two_allocations
from alto_core.domain import Initialization, LoraJob, LrSchedule, TrainedSides
from alto_core.errors import TaskFileError


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
    use_dora: UseDora = False
    lora_plus_ratio: Positive = 1.0
    init: Initialization = "default"
    train: TrainedSides = "both"
    layers: LayerChoice = "all"
    rank_allocation: Allocation = "uniform"

    _one_alpha = model_validator(mode="after")(refuse_two_alphas)
    _one_allocation = model_validator(mode="after")(refuse_two_allocations)

    def job(self, all_linear: tuple[str, ...]) -> LoraJob:
        resolved = {"lora_alpha", "alpha_over_rank", "target_modules", "use_dora", "layers", "rank_allocation"}
        fields = self.model_dump(exclude=resolved) | layer_fields(self.layers, self.rank_allocation)
        (modules,) = module_choices(self.target_modules, all_linear)
        alpha = alpha_of(self.lora_alpha, self.alpha_over_rank, self.lora_rank)
        return LoraJob(**fields, lora_alpha=alpha, target_modules=modules)


class ListSpace(SearchSpace):
    """Just these jobs."""

    in_words: ClassVar[str] = "as listed"
    strategy: Literal["list"]
    jobs: Annotated[list[ListedJob], Field(min_length=1)]

    def expand(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
        jobs = [listed.job(all_linear) for listed in self.jobs]
        for i, job in enumerate(jobs):
            if job in jobs[:i]:
                first = jobs.index(job)
                raise TaskFileError(
                    f"search_space.jobs[{i}]", got=f"the same as jobs[{first}]", expected="a job of its own"
                )
        return tuple(dataclasses.replace(job, beta=beta) for job in jobs for beta in betas)
