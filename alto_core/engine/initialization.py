"""How an adapter starts: as its job's `init` says.

`default` is PEFT's distribution, drawn from the job's own seed: A is uniform in +-1/sqrt(d_in) (what
`kaiming_uniform_(a=sqrt(5))` gives), B is zero. Every layer draws from a stream of its own, named by seed and layer, so
that neither slot, nor device, nor other jobs or other adapted layers change it.

`pissa` (Meng et al., arXiv 2404.02948) gives A0 and B0 with scale B0 A0 = the frozen weight W's best approximation of
that rank. The paper takes it off W. Here W serves all jobs, so the job carries the difference itself, in rank rows
behind the trained ones that nobody updates:

    y = W x + scale ([B, -B0] [A; A0]) x  =  (W - scale B0 A0) x + scale B A x

No term without them would do: A moves, so A x and A0 x are two products. And what is exported is a plain adapter of
twice the rank on the original base, as PEFT's own conversion of a PiSSA adapter writes it.

Shape suffixes: r trained rank rows of a layer, I input width, O output width.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from alto_core.domain import LoraJob
from alto_core.engine.adapter_plan import AdaptedLayer, LayerMeasure
from alto_core.engine.singular import leading_singular
from alto_core.engine.target_modules import LinearLayer


def fill_start(
    job: LoraJob, adapted: AdaptedLayer, a_rI: Tensor, b_rO: Tensor, weight: Tensor, measure: LayerMeasure | None
) -> None:
    """Write one layer's start into the job's rank rows, which hold zeros.

    Rows beyond the layer's rank stay zero. Training leaves them so: where a row of A and of B are zero, so are their
    gradients.

    Args:
        job: whose adapter it is.
        adapted: the layer, with its rank.
        a_rI: all rank rows of A.
        b_rO: all rank rows of B, transposed.
        weight: the layer's frozen weight as the module stores it.
        measure: of the layer; None where the job needs none.
    """
    layer, rank = adapted.layer, adapted.lora_rank
    if job.init == "pissa":
        u_Or, s_r, vt_rI = leading_singular(weight.T if layer.is_conv1d else weight, rank)
        root_r1 = (s_r / job.scale).sqrt()[:, None]
        for start, sign in ((0, 1.0), (job.trained_rows, -1.0)):
            a_rI[start : start + rank] = root_r1 * vt_rI
            b_rO[start : start + rank] = sign * root_r1 * u_Or.T
        return
    if job.init == "tlora":
        assert measure is not None and len(measure.directions_kI) >= rank, "measured for smaller ranks"
        a_rI[:rank] = measure.directions_kI[:rank]
    else:
        a_rI[:rank] = initial_a(layer, rank, job.seed)
    a_rI.mul_(adapted.scale_ratio)


def initial_a(layer: LinearLayer, lora_rank: int, seed: int) -> Tensor:
    """Initial lora_A of one layer, float32 [r, d_in] on the CPU."""
    digest = hashlib.sha256(f"{seed}/{layer.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1.0 / math.sqrt(layer.d_in)
    return torch.empty(lora_rank, layer.d_in).uniform_(-bound, bound, generator=generator)
