"""The yardstick: a job alone, the same among others, and PEFT with torch's AdamW give the same curve and adapter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alto_core.domain import LoraJob
from alto_core.engine.initialization import initial_a
from alto_core.engine.target_modules import find_linear_layers, select_layers

STEPS = 6
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2")
LOSS_TOLERANCE = 2e-5
"""Nats per token, float32, over six steps with learning rates up to 2e-2."""
WEIGHT_TOLERANCE = 2e-3
"""Largest difference of a weight over the adapter's largest change. Adam's first steps divide near-zero gradients by
themselves, so single weights react to rounding."""


def mixed_jobs(tiny: Any, family: str) -> list[LoraJob]:
    return [
        tiny.job(family, lora_rank=8, lora_alpha=16.0, learning_rate=2e-2, max_grad_norm=0.5),
        tiny.job(family, lora_rank=16, lora_alpha=16.0, use_rslora=True, weight_decay=0.1, lr_schedule="cosine"),
        tiny.job(family, lora_rank=5, lora_alpha=4.0, adapter_batch_size=2, gradient_accumulation=2, max_grad_norm=0.0),
        tiny.job(family, lora_rank=3, adapter_batch_size=1, lr_schedule="linear", lr_warmup_fraction=0.3),
        tiny.job(family, lora_rank=2, adapter_batch_size=4, target_modules=tiny.targets(family)[:1]),
    ]


def run_engine(
    tiny: Any, family: str, jobs: list[LoraJob], folder: Path, *, quantization: str = "none"
) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """Train the jobs side by side; gives each one's losses and exported adapter."""
    rows = tiny.rows(11)
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    with tiny.engine(family, quantization=quantization) as engine:
        for job in jobs:
            engine.admit(job, tiny.budget(STEPS))
        for step in range(1, STEPS + 1):
            for record in tiny.step(engine, {job.job_id: tiny.batch(job, step, rows) for job in jobs}):
                losses[record.job_id].append(record.train_loss)
        for job in jobs:
            engine.export(job.job_id, folder / job.job_id)
    return {
        job.job_id: (losses[job.job_id], load_file(folder / job.job_id / "adapter_model.safetensors")) for job in jobs
    }


def run_peft(tiny: Any, family: str, job: LoraJob, **loading: Any) -> tuple[list[float], dict[str, Any]]:
    """The same training as a user of PEFT writes it, one row at a time without packing."""
    model = tiny.plain_model(family, **loading)
    layers = select_layers(find_linear_layers(model), job.target_modules)
    config = peft.LoraConfig(
        r=job.lora_rank,
        lora_alpha=job.lora_alpha,
        use_rslora=job.use_rslora,
        target_modules=list(job.target_modules),
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    tuned = peft.get_peft_model(model, config)
    if "quantization_config" in loading:
        tuned.train()  # else bitsandbytes packs the weights for inference on processors that know bfloat16
    for layer in layers:
        tuned.get_submodule(f"base_model.model.{layer.name}.lora_A.default").weight.data.copy_(
            initial_a(layer, job.lora_rank, job.seed)
        )
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=job.weight_decay, foreach=False)
    warmup = -(-job.lr_warmup_fraction * STEPS // 1)
    schedule = transformers.get_scheduler(job.lr_schedule, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS)
    if job.lr_schedule == "constant":
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    rows, losses = tiny.rows(11), []
    for step in range(1, STEPS + 1):
        batch = tiny.batch(job, step, rows)
        loss = sum(tiny.loss_sums(tuned, batch)) / sum(row.num_labels for row in batch)
        loss.backward()
        if job.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, job.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(tuned)


def assert_same(
    got: tuple[list[float], dict[str, Any]],
    expected: tuple[list[float], dict[str, Any]],
    tolerance: float = WEIGHT_TOLERANCE,
) -> None:
    assert max(abs(g - e) for g, e in zip(got[0], expected[0], strict=True)) < LOSS_TOLERANCE
    assert got[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        if "lora_B" in name:  # starts at zero, so its size is its change
            assert weight.abs().max() > 0, f"{name} did not move"
            assert (got[1][name] - weight).abs().max() < tolerance * weight.abs().max(), name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_batched_and_peft_agree(tiny: Any, family: str, tmp_path: Path) -> None:
    jobs = mixed_jobs(tiny, family)
    batched = run_engine(tiny, family, jobs, tmp_path / "batched")
    for job in jobs:
        alone = run_engine(tiny, family, [job], tmp_path / "alone")[job.job_id]
        assert_same(batched[job.job_id], alone)
        assert_same(batched[job.job_id], run_peft(tiny, family, job))


def test_a_model_in_4_bits_trains_as_transformers_bitsandbytes_and_peft_train_it(tiny: Any, tmp_path: Path) -> None:
    jobs = mixed_jobs(tiny, "llama")
    in_4_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    batched = run_engine(tiny, "llama", jobs, tmp_path / "4 bits", quantization="nf4")
    whole = run_engine(tiny, "llama", jobs, tmp_path / "whole")
    for job in jobs:
        assert_same(batched[job.job_id], run_peft(tiny, "llama", job, quantization_config=in_4_bits))
        assert abs(batched[job.job_id][0][0] - whole[job.job_id][0][0]) > 10 * LOSS_TOLERANCE


def test_dropout_gives_the_same_curve_alone_and_batched(tiny: Any, tmp_path: Path) -> None:
    jobs = [tiny.job(dropout=0.3, lora_rank=rank, adapter_batch_size=size) for rank, size in ((4, 2), (6, 3), (9, 4))]
    batched = run_engine(tiny, "llama", jobs, tmp_path / "batched")
    without = run_engine(tiny, "llama", [tiny.job(lora_rank=4, adapter_batch_size=2)], tmp_path / "without")
    for job in jobs:
        assert_same(batched[job.job_id], run_engine(tiny, "llama", [job], tmp_path / "alone")[job.job_id])
    assert batched[jobs[0].job_id][0][1:] != next(iter(without.values()))[0][1:]


def test_dropout_draws_new_masks_each_step_and_another_seed_other_masks(tiny: Any) -> None:
    rows = tiny.rows(3)
    curves = []
    for seed in (1, 2):
        # Learning rate as good as zero: only the masks differ between steps. B is filled, so that they matter.
        job = tiny.job(dropout=0.5, seed=seed, learning_rate=1e-12)
        with tiny.engine() as engine:
            engine.admit(job, tiny.budget())
            for _, _, b_rO in engine._slots.by_layer(engine._of(job.job_id).block.params_rW, engine._slots.layers):
                b_rO.fill_(0.1)
            curves.append([tiny.step(engine, {job.job_id: rows})[0].train_loss for _ in range(4)])
    assert len({round(loss, 6) for curve in curves for loss in curve}) == 8


def test_scale_of_every_job_in_a_batch_is_its_own_and_saved(tiny: Any, tmp_path: Path) -> None:
    # C2: base + s_i B_i A_i x with s = 2, 4, 0.25, 2, and the exported config gives the same under PEFT.
    jobs = [
        tiny.job(lora_rank=rank, lora_alpha=alpha, use_rslora=rslora)
        for rank, alpha, rslora in ((8, 16.0, False), (16, 16.0, True), (24, 6.0, False), (24, 48.0, False))
    ]
    assert [job.scale for job in jobs] == [2.0, 4.0, 0.25, 2.0]
    rows = tiny.rows(4)
    with tiny.engine() as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
            for _, _, b_rO in engine._slots.by_layer(engine._of(job.job_id).block.params_rW, engine._slots.layers):
                b_rO.copy_(torch.linspace(-0.1, 0.1, b_rO.numel()).view_as(b_rO))
            engine.export(job.job_id, tmp_path / job.job_id)
        losses = engine.evaluate([job.job_id for job in jobs], rows, max_tokens=10_000)
    for job in jobs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            tuned = peft.PeftModel.from_pretrained(tiny.plain_model(), tmp_path / job.job_id)
        with torch.no_grad():
            expected = [float(x) for x in tiny.loss_sums(tuned, rows)]
        assert losses[job.job_id].loss_sums == pytest.approx(expected, abs=1e-4)
