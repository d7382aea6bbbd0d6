"""Measures the linear layers of a backbone on a task's rows: one forward and backward with fresh adapters everywhere.

Fresh adapters change nothing, so a layer's output gradient is that of the frozen model under the task's objective, and
with its input it tells of each layer

    dW = dY^T X          the gradient that its frozen weight W would have
    gradient             |dW| / sqrt(3 I): the root of the mean square that the gradient of B (rank 1, scale 1) has over
                         PEFT's distribution of A, whose elements have the variance 1 / (3 I)
    sensitivity          mean |W * dW|, as in TLoRA (arXiv 2604.18124)
    directions           leading right singular vectors of W C, C the covariance of X; TLoRA's start of A

Neither dW of two layers nor any C is held at the same time.

Shape suffixes: T tokens, I input width, O output width, k directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alto_core.data.rows import TokenRow
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.adapter_plan import LayerMeasure
from alto_core.engine.engine import Engine
from alto_core.engine.lora_linear import LoraLinear
from alto_core.engine.singular import leading_singular_of
from alto_core.errors import EngineError


def measure_layers(
    engine: Engine, model: nn.Module, target_modules: Sequence[str], rows: Sequence[TokenRow], *, num_directions: int
) -> dict[str, LayerMeasure]:
    """Measure every layer that the engine adapts.

    Args:
        engine: holds no job, replays nothing from CUDA graphs.
        model: its backbone's.
        target_modules: name endings of all its layers.
        rows: go through in one pass.
        num_directions: of each layer, or as many as its narrower side has; 0: none.

    Returns:
        By layer name.

    Raises:
        EngineError: a measurement is not finite.
    """
    job = LoraJob(
        learning_rate=0.0,
        lora_rank=1,
        lora_alpha=1.0,
        adapter_batch_size=len(rows),
        target_modules=tuple(target_modules),
    )
    engine.admit(job, JobBudget(total_steps=1, warmup_steps=1, eval_steps=(1,)))
    try:
        with _probed(model, num_directions) as measures:
            engine.step({job.job_id: rows})
            engine.take_records()
    finally:
        engine.evict(job.job_id)
    broken = next((name for name, m in measures.items() if not math.isfinite(m.gradient + m.sensitivity)), None)
    if broken:
        raise EngineError(f"expected finite gradients of the untuned model, got NaN or infinity in {broken}")
    return measures


@contextmanager
def _probed(model: nn.Module, num_directions: int) -> Iterator[dict[str, LayerMeasure]]:
    """Inside the block a backward pass fills in what it tells of each layer."""
    measures: dict[str, LayerMeasure] = {}

    def watch(module: LoraLinear, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs
        output.register_hook(partial(note, module, x.detach()))

    def note(module: LoraLinear, x: Tensor, dy: Tensor) -> None:
        layer, weight = module.layer, module.weight.detach()
        weight_OI = weight.T if layer.is_conv1d else weight
        x_TI, dy_TO = (values.reshape(-1, values.shape[-1]).float() for values in (x, dy))
        measures[layer.name] = _measure(weight_OI.float(), x_TI, dy_TO, num_directions)

    handles: list[Any] = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, LoraLinear)]
    try:
        yield measures
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _measure(weight_OI: Tensor, x_TI: Tensor, dy_TO: Tensor, num_directions: int) -> LayerMeasure:
    d_out, d_in = weight_OI.shape
    dw_OI = dy_TO.T @ x_TI
    gradient = float(torch.linalg.vector_norm(dw_OI)) / math.sqrt(3 * d_in)
    sensitivity = float(dw_OI.mul_(weight_OI).abs_().mean())
    directions_kI = x_TI.new_zeros(0, d_in)
    if num_directions:
        centered_TI = x_TI - x_TI.mean(0)
        _, _, directions_kI = leading_singular_of(
            lambda v_Ik: weight_OI @ (centered_TI.T @ (centered_TI @ v_Ik)),
            lambda u_Ok: centered_TI.T @ (centered_TI @ (weight_OI.T @ u_Ok)),
            weight_OI,
            min(num_directions, d_out, d_in),
        )
    return LayerMeasure(gradient=gradient, sensitivity=sensitivity, directions_kI=directions_kI.cpu())
