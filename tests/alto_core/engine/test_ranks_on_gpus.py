"""Ranks on GPUs of one host, with a divided backbone and with whole ones, against one GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alto_core.domain import LoraJob
from alto_core.engine.adapter_parallel import AnyEngine, ParallelEngine
from alto_core.engine.engine import Engine
from alto_core.engine.ranks import RankGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices on this machine"),
    pytest.mark.filterwarnings("default"),  # torch warns of its own deprecations
    pytest.mark.xdist_group("ranks"),
]
TOLERANCE = 4e-2
"""Nats per token, of losses near 5: a rank packs other jobs together, and bfloat16 rounds other sums."""
SIZES = {"num_slots": 6, "max_lora_rank": 20, "max_row_tokens": 14}


def losses(tiny: Any, engine: AnyEngine, jobs: list[LoraJob]) -> dict[str, list[float]]:
    """Of each job over a few updates, then of its validation."""
    rows = tiny.rows(9)
    for job in jobs:
        engine.admit(job, tiny.budget())
    for _ in range(4):
        engine.step({job.job_id: tiny.batch(job, 1, rows) for job in jobs})
    found: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    for record in engine.take_records():
        found[record.job_id].append(record.train_loss)
    for job_id, measured in engine.evaluate(list(found), rows, max_tokens=64).items():
        found[job_id].append(measured.mean)
    return found


@pytest.mark.parametrize("sharded", [True, False])
def test_two_gpus_equal_one(tiny: Any, sharded: bool) -> None:
    jobs = [tiny.job(lora_rank=rank, adapter_batch_size=size) for rank, size in ((4, 1), (16, 3), (20, 4), (8, 2))]
    options = {**SIZES, "target_modules": tiny.targets("llama"), "max_pass_tokens": 32}
    with Engine(tiny.backbone(device="cuda", dtype="bfloat16"), rank_rows=48, **options) as engine:
        expected = losses(tiny, engine, jobs)
    ranks = RankGroup(tiny.section(dtype="bfloat16"), ["cuda:0", "cuda:1"], sharded=sharded)
    try:
        with ParallelEngine(ranks, rank_rows=48, **options) as parallel:
            got = losses(tiny, parallel, jobs)
    finally:
        ranks.close()
    for job_id, values in expected.items():
        assert len(got[job_id]) == len(values) == 5
        for value, other in zip(values, got[job_id], strict=True):
            assert math.isclose(value, other, abs_tol=TOLERANCE), job_id
