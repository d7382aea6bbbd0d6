"""A frozen backbone divided over ranks: each holds a part of every decoder layer and gathers it just before it is used.

FSDP2 does the gathering, forward and again backward, one layer ahead of the computation. Frozen weights have no
gradients, so nothing is reduced. What stands outside of the decoder layers (embeddings, last norm, head) is whole on
every rank: the loss reads the head in chunks, and gathering it would be waited for.

A gather needs all ranks. Ranks train different jobs, so they have different numbers of passes; before each one they
agree on what comes next, and who has nothing to compute gathers along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from alto_core.engine.decoder_layers import decoder_layers
from alto_core.errors import EngineError, ModelError

NOTHING, FORWARD, FORWARD_AND_BACKWARD = 0, 1, 2
"""What a rank wants to run next. The highest wish of all ranks is what all do."""


class ShardedLayers:
    """The decoder layers of a model, divided over all ranks of the default process group.

    Args:
        model: a frozen transformers model in host memory; its layers move to the device, each rank's part of them.
        device: of this rank.

    Raises:
        ModelError: the layers of the model are not found.
    """

    def __init__(self, model: Any, device: torch.device):
        self._layers = _shard(model, device)
        self._agreed = torch.zeros(1, dtype=torch.int64)
        self.is_broken = False
        """A pass ended in the middle: this rank can take part in no other."""

    @contextmanager
    def taking_part(self, *, gradients: bool) -> Iterator[None]:
        """One pass of the model, forward or forward and backward, inside the block.

        Raises:
            EngineError: an earlier pass ended in the middle.
        """
        if self.is_broken:
            raise EngineError("an earlier pass ended in the middle")
        wanted = FORWARD_AND_BACKWARD if gradients else FORWARD
        while (agreed := self._agree(wanted)) != wanted:
            self._gather_along(agreed)
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    def finish(self) -> None:
        """Take part in the passes of the others until nobody has any left. Every rank calls it after its own."""
        while (agreed := self._agree(NOTHING)) != NOTHING:
            self._gather_along(agreed)

    def _agree(self, wanted: int) -> int:
        # On the host, so that no rank waits for its device.
        self._agreed.fill_(wanted)
        dist.all_reduce(self._agreed, dist.ReduceOp.MAX)
        return int(self._agreed)

    def _gather_along(self, what: int) -> None:
        for layer in self._layers:
            layer.unshard()
            layer.reshard()
        for layer in reversed(self._layers) if what == FORWARD_AND_BACKWARD else ():
            layer.unshard()
            layer.reshard()


def _shard(model: Any, device: torch.device) -> list[FSDPModule]:
    layers, backbone = decoder_layers(model), model.base_model
    if not layers:
        raise ModelError(
            f"the decoder layers of {type(model).__name__} are not found, so it cannot be divided over GPUs. Use GPUs "
            "that hold it whole, or another model."
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    divided = {parameter for layer in layers for parameter in layer.parameters()}
    whole = {parameter for parameter in backbone.parameters() if parameter not in divided}
    sharded = [fully_shard(layer, mesh=mesh, reshard_after_forward=True) for layer in layers]
    fully_shard(backbone, mesh=mesh, ignored_params=whole)  # one root, so that layers are gathered ahead
    for layer, following in itertools.pairwise(sharded):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    # Left to itself the first layer fetches what an earlier forward pass without backward ended with.
    sharded[0].set_modules_to_backward_prefetch([backbone])
    # Else a layer below a rank's first adapter would be gathered backward by the others alone.
    model.get_input_embeddings().register_forward_hook(_require_gradient)
    return sharded


def _require_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
