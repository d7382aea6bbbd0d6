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
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from alto_core.domain import LoraJob
from alto_core.engine.adapter_plan import AdaptedLayer, LayerMeasure
from alto_core.engine.singular import leading_singular
from alto_core.engine.target_modules import LinearLayer


class AdapterStarts:
    """Writes how jobs of an engine start. What several of them start from is computed once.

    Args:
        model: the frozen one.
        measures: of the task's layers, by name.
    """

    def __init__(self, model: nn.Module, measures: Mapping[str, LayerMeasure]):
        self._model, self._measures = model, measures
        self._factors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fill(self, job: LoraJob, adapted: AdaptedLayer, a_rI: Tensor, b_rO: Tensor) -> None:
        """Write one layer's start into the job's rank rows, which hold zeros.

        Rows beyond the layer's rank stay zero. Training leaves them so: where a row of A and of B are zero, so are
        their gradients.

        Args:
            job: whose adapter it is.
            adapted: the layer, with its rank.
            a_rI: all rank rows of A.
            b_rO: all rank rows of B, transposed.
        """
        layer, lora_rank = adapted.layer, adapted.lora_rank
        if job.init == "pissa":
            left_rO, right_rI = self._factors_of(layer, lora_rank)
            for start, sign in ((0, 1.0), (job.trained_rows, -1.0)):
                a_rI[start : start + lora_rank] = right_rI * job.scale**-0.5
                b_rO[start : start + lora_rank] = left_rO * (sign * job.scale**-0.5)
            return
        if job.init == "tlora":
            directions_kI = self._measures[layer.name].directions_kI
            assert len(directions_kI) >= lora_rank, "measured for smaller ranks"
            a_rI[:lora_rank] = directions_kI[:lora_rank]
        else:
            a_rI[:lora_rank] = initial_a(layer, lora_rank, job.seed)
        a_rI.mul_(adapted.scale_ratio)

    def _factors_of(self, layer: LinearLayer, lora_rank: int) -> tuple[Tensor, Tensor]:
        """sqrt(S) U^T [r, O] and sqrt(S) V^T [r, I] of the frozen weight, in host memory."""
        key = (layer.index, lora_rank)
        if key not in self._factors:
            weight = self._model.get_submodule(layer.name).weight
            assert isinstance(weight, Tensor)
            u_Or, s_r, vt_rI = leading_singular(weight.T if layer.is_conv1d else weight, lora_rank)
            root_r1 = s_r.sqrt()[:, None]
            self._factors[key] = ((root_r1 * u_Or.T).cpu(), (root_r1 * vt_rI).cpu())
        return self._factors[key]


def initial_a(layer: LinearLayer, lora_rank: int, seed: int) -> Tensor:
    """Initial lora_A of one layer, float32 [r, d_in] on the CPU."""
    digest = hashlib.sha256(f"{seed}/{layer.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1.0 / math.sqrt(layer.d_in)
    return torch.empty(lora_rank, layer.d_in).uniform_(-bound, bound, generator=generator)
