"""Which layers a job adapts, and with what rank and scale in each: from the job and what was measured of its task.

Shape suffixes: k directions, I input width.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from alto_core.domain import LoraJob
from alto_core.engine.target_modules import LinearLayer, select_layers
from alto_core.errors import EngineError

_BLOCK = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMeasure:
    """What a short pass over a task's rows tells of one linear layer."""

    gradient: float
    """Norm that the gradient of a fresh adapter of rank 1 has on average over PEFT's distribution of A."""
    sensitivity: float
    """Mean of |weight x its gradient| over the elements of the frozen weight."""
    directions_kI: Tensor
    """Leading right singular vectors of weight x covariance of the inputs; none where no job asks for them."""


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """A job's share of one layer."""

    layer: LinearLayer
    lora_rank: int
    """Rank rows of the job that are in use here, from its first one on."""
    scale_ratio: float = 1.0
    """Scale over the job's own; multiplied into A, which is frozen where this is not 1."""


def plan_adapter(
    job: LoraJob, layers: Sequence[LinearLayer], measures: Mapping[str, LayerMeasure]
) -> tuple[AdaptedLayer, ...]:
    """The layers of a job's adapter, in their order.

    Args:
        job: whose adapter it is.
        layers: that its target modules match.
        measures: by layer name; empty where the job needs none.

    Raises:
        EngineError: the job asks for what was not measured.
    """
    if job.needs_measures:
        missing = next((layer.name for layer in layers if layer.name not in measures), None)
        if missing:
            raise EngineError(
                f"job {job.job_id}: expected measurements of {missing}, got none. Measure the task first."
            )
    if job.layer_share < 1:
        layers = _top_blocks(layers, measures, job.layer_share)
    if job.rank_allocation == "uniform":
        return tuple(AdaptedLayer(layer=layer, lora_rank=job.lora_rank) for layer in layers)
    if job.rank_allocation == "gradient":
        signals = block_signals(layers, measures)
        weights = [signals[block_of(layer)] for layer in layers]
    else:
        weights = [measures[layer.name].sensitivity for layer in layers]
    ranks = allot_ranks(
        weights,
        costs=[layer.d_in + layer.d_out for layer in layers],
        most=[min(job.trained_rows, layer.d_in, layer.d_out) for layer in layers],
        mean_rank=job.lora_rank,
    )
    return tuple(
        AdaptedLayer(layer=layer, lora_rank=lora_rank, scale_ratio=_scale_ratio(job, lora_rank))
        for layer, lora_rank in zip(layers, ranks, strict=True)
    )


def adapted_names(
    jobs: Iterable[LoraJob], layers: Sequence[LinearLayer], measures: Mapping[str, LayerMeasure]
) -> list[str]:
    """What an engine has to adapt for these jobs: endings, and the names of layers where jobs take a share of them.

    Layers that no job adapts stay as they are, and below the lowest adapted one there is no backward pass.
    """
    names: set[str] = set()
    for job in jobs:
        if job.layer_share < 1:
            names |= {
                adapted.layer.name for adapted in plan_adapter(job, select_layers(layers, job.target_modules), measures)
            }
        else:
            names |= set(job.target_modules)
    return sorted(names)


def block_of(layer: LinearLayer) -> str:
    """The decoder layer that a linear layer belongs to: its name up to the first number, else the name."""
    found = _BLOCK.match(layer.name)
    return found.group() if found else layer.name


def allot_ranks(
    weights: Sequence[float], *, costs: Sequence[int], most: Sequence[int], mean_rank: int
) -> tuple[int, ...]:
    """Ranks in proportion to weights, at least 1 each, within the parameters that `mean_rank` in all layers takes.

    Each further rank goes to the layer with the largest weight over its rank so far plus a half (Sainte-Lague), among
    those that may have it and that the budget still pays for.

    Args:
        weights: of the layers, none negative.
        costs: parameters per rank.
        most: largest rank of each.
        mean_rank: at least 1.
    """
    ranks = [1] * len(weights)
    left = mean_rank * sum(costs) - sum(costs)
    queue = [(-weight / 1.5, i) for i, weight in enumerate(weights)]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        if ranks[i] < most[i] and costs[i] <= left:
            ranks[i] += 1
            left -= costs[i]
            heapq.heappush(queue, (-weights[i] / (ranks[i] + 0.5), i))
    return tuple(ranks)


def _top_blocks(
    layers: Sequence[LinearLayer], measures: Mapping[str, LayerMeasure], share: float
) -> tuple[LinearLayer, ...]:
    """The layers in the decoder layers of the largest signal, at least one."""
    signals = block_signals(layers, measures)
    kept = sorted(signals, key=lambda block: -signals[block])[: max(1, round(share * len(signals)))]
    return tuple(layer for layer in layers if block_of(layer) in kept)


def block_signals(layers: Iterable[LinearLayer], measures: Mapping[str, LayerMeasure]) -> dict[str, float]:
    """Gradient norm of all adapters of each decoder layer together."""
    squares: dict[str, float] = {}
    for layer in layers:
        squares[block_of(layer)] = squares.get(block_of(layer), 0.0) + measures[layer.name].gradient ** 2
    return {block: math.sqrt(square) for block, square in squares.items()}


def _scale_ratio(job: LoraJob, lora_rank: int) -> float:
    """alpha in proportion to the rank, but never below the job's own; so a layer of few ranks has a larger scale.

    Only by sensitivity, and where A is frozen: there a factor on A is the same as one on the scale.
    """
    if job.rank_allocation != "sensitivity" or job.train == "both" or job.init == "pissa":
        return 1.0
    return max(1.0, job.lora_rank / lora_rank)
