"""How an adapter starts: PEFT's distribution, drawn from the job's own seed.

A is uniform in +-1/sqrt(d_in) (what `kaiming_uniform_(a=sqrt(5))` gives), B is zero. Every layer draws from a stream of
its own, named by seed and layer, so that neither slot, nor device, nor other jobs or other adapted layers change it.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from alto_core.engine.target_modules import LinearLayer


def initial_a(layer: LinearLayer, lora_rank: int, seed: int) -> Tensor:
    """Initial lora_A of one layer, float32 [r, d_in] on the CPU."""
    digest = hashlib.sha256(f"{seed}/{layer.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1.0 / math.sqrt(layer.d_in)
    return torch.empty(lora_rank, layer.d_in).uniform_(-bound, bound, generator=generator)
