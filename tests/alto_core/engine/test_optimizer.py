"""AdamW, clipping and schedules against torch's and transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from alto_core.engine.optimizer import adamw_update, gradient_norm, learning_rate
from alto_core.engine.slots import SlotBlock


def make_block(seed: int, rank: int = 3, width: int = 50) -> SlotBlock:
    torch.manual_seed(seed)
    return SlotBlock(
        slot=0,
        rank_start=0,
        params_rW=torch.randn(rank, width),
        grads_rW=torch.zeros(rank, width),
        exp_avg_rW=torch.zeros(rank, width),
        exp_avg_sq_rW=torch.zeros(rank, width),
        best_rW=torch.zeros(rank, width),
        shadow_rW=None,
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e9])
def test_update_equals_torch(weight_decay: float, max_grad_norm: float) -> None:
    block = make_block(0)
    theirs = torch.nn.Parameter(block.params_rW.clone())
    optimizer = torch.optim.AdamW([theirs], lr=3e-2, weight_decay=weight_decay, foreach=False)
    for step in range(1, 8):
        gradient = torch.randn_like(theirs) * 10 ** (step - 4)
        block.grads_rW.copy_(gradient)
        theirs.grad = gradient.clone()
        norm = gradient_norm(block)
        if max_grad_norm:
            assert float(torch.nn.utils.clip_grad_norm_([theirs], max_grad_norm)) == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        adamw_update(
            block, step=step, rate=3e-2, weight_decay=weight_decay, grad_norm=norm, max_grad_norm=max_grad_norm
        )
        assert (block.params_rW - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_equal_transformers(tiny: Any, schedule: str, warmup: float) -> None:
    steps = 17
    job = tiny.job(lr_schedule=schedule, lr_warmup_fraction=warmup, learning_rate=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    # transformers' TrainingArguments rounds the warmup up, too.
    theirs = transformers.get_scheduler(name, optimizer, -int(-steps * warmup // 1), steps)
    for step in range(1, steps + 1):
        assert learning_rate(job, tiny.budget(steps), step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
