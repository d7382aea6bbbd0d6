"""What else a user could run on several devices: FSDP2 over all ranks, one adapter at a time; a pipeline of stages.

Backbone, loss and optimizer are plain transformers and torch; LoRA is PEFT's arithmetic in the backbone's dtype, which
is faster than PEFT's own float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LORA_RANK = 16


class PlainLora(nn.Module):
    """A frozen linear layer and one adapter for each of a few jobs, of which one is on."""

    active = 0

    def __init__(self, base: nn.Linear, num_jobs: int):
        super().__init__()
        self.base = base
        make = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.ParameterList(torch.empty(LORA_RANK, base.in_features, **make) for _ in range(num_jobs))
        self.b = nn.ParameterList(torch.empty(base.out_features, LORA_RANK, **make) for _ in range(num_jobs))

    def forward(self, x: Tensor) -> Tensor:
        own = PlainLora.active
        return self.base(x) + 2.0 * nn.functional.linear(nn.functional.linear(x, self.a[own]), self.b[own])


def add_lora(model: Any, num_jobs: int = 1) -> None:
    """Adapters on all linear layers of the decoder layers."""
    for layer in model.model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, PlainLora(child, num_jobs))


def shard(model: Any, device: torch.device) -> None:
    """As FSDP2's users do: every decoder layer, then the rest, adapters included."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp_step(model: Any, rows: int, length: int, labels: int, device: torch.device) -> Callable[[], None]:
    """One update of one adapter; every rank has so many rows."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=labels + 1).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, -labels:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_step(
    model: Any, num_jobs: int, rows: int, length: int, labels: int, device: torch.device
) -> Callable[[], None]:
    """One update of every job: the batch of each is a micro batch that goes through the stages, first to last and back.

    Args:
        model: its decoder layers are those of this rank's stage, and stay on it whole.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    # One group for each direction, or a send would wait for the receive of the other.
    down, up = dist.new_group(), dist.new_group()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
    width, dtype = model.config.hidden_size, model.lm_head.weight.dtype
    if rank < last:
        model.model.norm = nn.Identity()

    def forward(job: int, sent: list[Any]) -> tuple[Tensor, Tensor]:
        PlainLora.active = job
        if rank == 0:
            given = model.model.embed_tokens(ids).detach().requires_grad_()
        else:
            given = torch.empty(rows, length, width, device=device, dtype=dtype)
            dist.recv(given, rank - 1, group=down)
            given.requires_grad_()
        hidden = model.model(inputs_embeds=given, use_cache=False).last_hidden_state
        if rank < last:
            leaving = hidden.detach()
            sent.append((leaving, dist.isend(leaving, rank + 1, group=down)))
            return given, hidden
        logits = model.lm_head(hidden[:, -labels - 1 : -1])
        return given, nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, -labels:].flatten())

    def backward(given: Tensor, result: Tensor, sent: list[Any]) -> None:
        if rank == last:
            result.backward()
        else:
            gradient = torch.empty_like(result)
            dist.recv(gradient, rank + 1, group=up)
            result.backward(gradient)
        if rank > 0:
            assert given.grad is not None
            sent.append((given.grad, dist.isend(given.grad, rank - 1, group=up)))

    def step() -> None:
        """One forward, one backward: no rank keeps the activations of more jobs than there are stages behind it."""
        sent: list[Any] = []
        open_jobs: deque[tuple[Tensor, Tensor]] = deque()
        for job in range(num_jobs):
            open_jobs.append(forward(job, sent))
            if len(open_jobs) > last - rank:
                backward(*open_jobs.popleft(), sent)
        while open_jobs:
            backward(*open_jobs.popleft(), sent)
        for _, work in sent:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()

    return step
