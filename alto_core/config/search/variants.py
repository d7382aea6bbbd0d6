"""What search spaces share of LoRA's variants: types of their fields, and what cannot be. See docs/variants.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from alto_core.config.fields import Section
from alto_core.domain import RankAllocation


class Probe(Section):
    """Adapt those decoder layers alone whose adapters have the largest gradients at the start."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of all decoder layers; at least one is adapted."""
    allocation: Literal["uniform", "proportional"] = "uniform"
    """Ranks of the adapted layers: all `lora_rank`, or in proportion to the gradients, with that as their mean."""

    @model_validator(mode="after")
    def _chooses(self) -> Self:
        if self.share == 1 and self.allocation == "uniform":
            raise ValueError("a `share` below 1, or `allocation: proportional`; else write `layers: all`")
        return self


class ProbedLayers(Section):
    """Layers that a probe of the task's rows chooses."""

    probe: Probe


def _kind(value: Any) -> str:
    return "[probe]" if isinstance(value, dict | ProbedLayers) else "[all]"


LayerChoice = Annotated[
    Annotated[Literal["all"], Tag("[all]")] | Annotated[ProbedLayers, Tag("[probe]")], Discriminator(_kind)
]
"""`all`, or `{probe: {share: 0.5, allocation: proportional}}`."""
Allocation = Literal["uniform", "sensitivity"]


def layer_fields(choice: str | ProbedLayers, allocation: Allocation) -> dict[str, Any]:
    """The fields of a job that say which layers it adapts, and by what their ranks differ."""
    if not isinstance(choice, ProbedLayers):
        return {"rank_allocation": allocation}
    by: RankAllocation = "gradient" if choice.probe.allocation == "proportional" else allocation
    return {"layer_share": float(choice.probe.share), "rank_allocation": by}


def layer_choices(layers: Iterable[str | ProbedLayers], allocations: Iterable[Allocation]) -> list[dict[str, Any]]:
    return [layer_fields(choice, allocation) for choice, allocation in itertools.product(layers, allocations)]


def refuse_two_allocations(section: Any) -> Any:
    """Of ranks, in one space or job."""
    layers, allocations = (v if isinstance(v, list) else [v] for v in (section.layers, section.rank_allocation))
    by_gradient = any(isinstance(v, ProbedLayers) and v.probe.allocation == "proportional" for v in layers)
    if by_gradient and "sensitivity" in allocations:
        raise ValueError("only one of `rank_allocation: sensitivity` and `layers.probe.allocation: proportional`")
    return section


def _refuse_dora(value: bool) -> bool:
    if value:
        raise ValueError(
            "false: DoRA scales every output by a norm of W + BA, so each job would run the frozen weights by itself, "
            "and nothing could be shared. `init: pissa` and `use_rslora: true` are the variants for high ranks"
        )
    return value


UseDora = Annotated[bool, AfterValidator(_refuse_dora)]
"""Taken only as `false`, as PEFT's configurations have it."""
