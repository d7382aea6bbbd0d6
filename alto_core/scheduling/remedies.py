"""Why a job does not fit, in numbers, and the changes that would make it fit: each of them is tried on the model."""

from __future__ import annotations

import dataclasses

from alto_core.scheduling.intra_task import JobSize, alone_bytes
from alto_core.scheduling.memory_model import MemoryModel, PassSize

GIB = 2**30


def arithmetic(model: MemoryModel, job: JobSize, *, budget_bytes: float, longest_row: int, label_share: float) -> str:
    """The sum of what a job needs when it is alone, against what there is."""
    tokens = job.adapter_batch_size * longest_row
    size = PassSize(tokens=tokens, labels=round(tokens * label_share), lora_rank=job.lora_rank)
    parts = (
        (model.shape.backbone_bytes, "backbone"),
        (model.slot_bytes(job.lora_rank), f"adapter of rank {job.lora_rank} with gradient and moments"),
        (
            model.pass_bytes(size),
            f"one pass of {tokens} tokens ({job.adapter_batch_size} rows of at most {longest_row})",
        ),
    )
    needed = alone_bytes(model, job, longest_row, label_share)
    terms = " + ".join(f"{part / GIB:.3g} GiB {what}" for part, what in parts)
    return f"{terms} = {needed / GIB:.3g} GiB, but {budget_bytes / GIB:.3g} GiB may be used"


def remedies(
    model: MemoryModel, job: JobSize, *, budget_bytes: float, longest_row: int, label_share: float
) -> tuple[str, ...]:
    """Single changes with each of which this job fits, as a user would write them."""

    def fits(changed: JobSize, longest: int = longest_row, tried: MemoryModel = model) -> bool:
        return alone_bytes(tried, changed, longest, label_share) <= budget_bytes

    found = []
    smaller = (size for size in range(job.adapter_batch_size - 1, 0, -1))
    batch = next((b for b in smaller if fits(dataclasses.replace(job, adapter_batch_size=b))), None)
    if batch is not None:
        found.append(f"adapter_batch_size: {batch}")
    length = longest_row // 2
    while length >= 16 and not fits(job, length):
        length //= 2
    if length >= 16:
        found.append(f"data.max_length: {length}")
    rank = job.lora_rank // 2
    while rank >= 1 and not fits(dataclasses.replace(job, lora_rank=rank)):
        rank //= 2
    if rank >= 1:
        found.append(f"lora_rank: {rank}")
    if model.shape.recomputed != "layers":
        recomputed = dataclasses.replace(model, shape=dataclasses.replace(model.shape, recomputed="layers"))
        if fits(job, longest_row, recomputed):
            found.append("activation_checkpointing: layers")
    if model.shape.element_bytes > 2:
        halved = dataclasses.replace(model, shape=dataclasses.replace(model.shape, element_bytes=2))
        if fits(job, longest_row, halved):
            found.append("model.dtype: bfloat16")
    if not model.shape.quantized_parameters and model.shape.num_ranks == 1:
        # Nearly all parameters of decoder layers are linear ones.
        shape = dataclasses.replace(model.shape, quantized_parameters=model.shape.layer_parameters)
        if fits(job, longest_row, dataclasses.replace(model, shape=shape)):
            found.append("model.quantization: nf4")
    return tuple(found)
