"""Preference tuning on a GPU: prompts shared in flash attention, the captured step against the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alto_core.engine.engine import UNTUNED
from alto_core.engine.packed_attention import shares_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.filterwarnings("default"),
]

TOLERANCE = 0.1
"""Nats, of sums over up to six tokens near 5 each: a bfloat16 model against the same weights in float32."""


def test_flash_attention_places_a_rejected_answer_behind_its_prompt() -> None:
    # Else prompts are read twice, which is right as well, and slower.
    assert shares_prompts(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_shared_prompt_changes_no_step(tiny: Any, family: str, cuda_graph: bool) -> None:
    pairs, job = tiny.pairs(8), tiny.job(family, beta=0.5, adapter_batch_size=4)
    sums, curves = {}, {}
    for place in ("shared", "apart", "cpu"):
        on_gpu = place != "cpu"
        backbone = tiny.backbone(family, **({"device": "cuda", "dtype": "bfloat16"} if on_gpu else {}))
        with tiny.preferring(
            pairs,
            family=family,
            share_prompts=place == "shared",
            backbone=backbone,
            cuda_graph=cuda_graph and on_gpu,
            max_row_tokens=14,
        ) as engine:
            sums[place] = engine.side_losses(UNTUNED, pairs, max_tokens=64)
            engine.admit(job, tiny.budget())
            for step in (1, 2, 1, 2, 1, 2):
                engine.step({job.job_id: tiny.batch(job, step, pairs)})
            curves[place] = [record.train_loss for record in engine.take_records()]
    assert sums["shared"] == pytest.approx(sums["apart"], abs=TOLERANCE)
    assert sums["shared"] == pytest.approx(sums["cpu"], abs=TOLERANCE)
    assert curves["shared"][0] == pytest.approx(math.log(2), abs=0.02)
    assert curves["shared"] == pytest.approx(curves["apart"], abs=TOLERANCE)
    assert curves["shared"] == pytest.approx(curves["cpu"], abs=TOLERANCE)
    assert curves["cpu"][-1] < curves["cpu"][0] - 0.05, "wrong gradients would show"
