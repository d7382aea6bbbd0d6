"""Variants of LoRA side by side: each trains as a plain torch loop does, alone as among others, and PEFT loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from alto_core.domain import LoraJob
from alto_core.engine.initialization import initial_a
from alto_core.engine.singular import leading_singular
from alto_core.engine.target_modules import LinearLayer, find_linear_layers, select_layers

STEPS = 5
LOSS_TOLERANCE = 2e-5
"""Nats per token, float32."""
CHANGE_TOLERANCE = 3e-3
"""Of a layer's change of weight, norm over norm; Adam's first steps react to rounding in single elements."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

Curve = tuple[list[float], dict[str, Tensor]]
"""Losses, and by layer what the adapter adds to its weight."""


class PlainLora(nn.Module):
    """A frozen layer with one adapter, as a user of torch writes it."""

    def __init__(self, base: Any, a_rI: Tensor, b_Or: Tensor, scale: float, *, takes_start_off: bool, trains_a: bool):
        super().__init__()
        self.base, self.scale = base, scale
        self.a_rI, self.b_Or = nn.Parameter(a_rI.clone(), requires_grad=trains_a), nn.Parameter(b_Or.clone())
        self.start_OI = scale * b_Or @ a_rI if takes_start_off else torch.zeros(b_Or.shape[0], a_rI.shape[1])

    def change(self) -> Tensor:
        return (self.scale * self.b_Or @ self.a_rI - self.start_OI).detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) - x @ self.start_OI.T + self.scale * (x @ self.a_rI.T) @ self.b_Or.T


def start_of(job: LoraJob, layer: LinearLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A and B by the papers' formulas, from a whole decomposition."""
    if job.init == "pissa":
        u, s, vt = torch.linalg.svd(weight.T if layer.is_conv1d else weight, full_matrices=False)
        root = (s[: job.lora_rank] / job.scale).sqrt()
        return root[:, None] * vt[: job.lora_rank], u[:, : job.lora_rank] * root
    return initial_a(layer, job.lora_rank, job.seed), torch.zeros(layer.d_out, job.lora_rank)


def run_plain(tiny: Any, family: str, job: LoraJob) -> Curve:
    model = tiny.plain_model(family).requires_grad_(False)
    loras: dict[str, PlainLora] = {}
    for layer in select_layers(find_linear_layers(model), job.target_modules):
        base = model.get_submodule(layer.name)
        a_rI, b_Or = start_of(job, layer, base.weight)
        parent, _, child = layer.name.rpartition(".")
        loras[layer.name] = PlainLora(
            base, a_rI, b_Or, job.scale, takes_start_off=job.init == "pissa", trains_a=job.side_ratios[0] > 0
        )
        setattr(model.get_submodule(parent), child, loras[layer.name])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [lora.a_rI for lora in loras.values() if lora.a_rI.requires_grad], "lr": job.learning_rate},
        {"params": [lora.b_Or for lora in loras.values()], "lr": job.learning_rate * job.lora_plus_ratio},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=job.weight_decay, foreach=False)
    rows, losses = tiny.rows(11), []
    for step in range(1, STEPS + 1):
        batch = tiny.batch(job, step, rows)
        loss = sum(tiny.loss_sums(model, batch)) / sum(row.num_labels for row in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: lora.change() for name, lora in loras.items()}


def run_engine(tiny: Any, family: str, jobs: Sequence[LoraJob], folder: Path) -> dict[str, Curve]:
    rows = tiny.rows(11)
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    with tiny.engine(family) as engine:
        for job in jobs:
            engine.admit(job, tiny.budget(STEPS))
        for step in range(1, STEPS + 1):
            for record in tiny.step(engine, {job.job_id: tiny.batch(job, step, rows) for job in jobs}):
                losses[record.job_id].append(record.train_loss)
        for job in jobs:
            engine.export(job.job_id, folder / job.job_id)
    return {job.job_id: (losses[job.job_id], changes_in(folder / job.job_id, job)) for job in jobs}


def changes_in(folder: Path, job: LoraJob) -> dict[str, Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    ending = ".lora_A.weight"
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    return {
        name.removeprefix("base_model.model."): job.scale * tensors[f"{name}.lora_B.weight"] @ tensors[name + ending]
        for name in names
    }


def assert_same(got: Curve, expected: Curve) -> None:
    assert max(abs(g - e) for g, e in zip(got[0], expected[0], strict=True)) < LOSS_TOLERANCE
    assert got[1].keys() == expected[1].keys()
    for name, change in expected[1].items():
        assert change.norm() > 0, f"{name} did not move"
        assert (got[1][name] - change).norm() < CHANGE_TOLERANCE * change.norm(), name


def variants(tiny: Any, family: str = "llama") -> list[LoraJob]:
    """Of each kind one, and plain LoRA among them."""
    return [
        tiny.job(family, lora_rank=4, max_grad_norm=0.5),
        tiny.job(family, lora_rank=3, lora_plus_ratio=8.0, weight_decay=0.1, max_grad_norm=0.5),
        tiny.job(family, lora_rank=5, init="pissa", weight_decay=0.1),
        tiny.job(family, lora_rank=2, init="pissa", use_rslora=True, lora_plus_ratio=0.5, adapter_batch_size=2),
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_alone_batched_and_a_plain_loop_agree(tiny: Any, family: str, tmp_path: Path) -> None:
    jobs = variants(tiny, family)
    batched = run_engine(tiny, family, jobs, tmp_path / "batched")
    for job in jobs:
        assert_same(batched[job.job_id], run_engine(tiny, family, [job], tmp_path / "alone")[job.job_id])
        assert_same(batched[job.job_id], run_plain(tiny, family, job))


def test_peft_loads_every_variant_and_gives_its_losses(tiny: Any, tmp_path: Path) -> None:
    jobs, rows = variants(tiny), tiny.rows(4)
    with tiny.engine() as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
        for _ in range(3):
            engine.step({job.job_id: rows[:3] for job in jobs})
        for job in jobs:
            engine.export(job.job_id, tmp_path / job.job_id)
        in_engine = engine.evaluate([job.job_id for job in jobs], rows, max_tokens=1000)
        for job in jobs:
            engine.evict(job.job_id)
            engine.load_adapter(job, tmp_path / job.job_id)
        again = engine.evaluate([job.job_id for job in jobs], rows, max_tokens=1000)
    for job in jobs:
        tuned = peft.PeftModel.from_pretrained(tiny.plain_model(), tmp_path / job.job_id)
        with torch.no_grad():
            losses = [float(loss) for loss in tiny.loss_sums(tuned, rows)]
        assert losses == pytest.approx(in_engine[job.job_id].loss_sums, abs=1e-4)
        assert again[job.job_id].loss_sums == pytest.approx(in_engine[job.job_id].loss_sums, abs=1e-5)


def test_a_variant_goes_on_from_its_state_as_if_it_had_never_stopped(tiny: Any, tmp_path: Path) -> None:
    jobs, rows = variants(tiny), tiny.rows(11)
    unbroken = run_engine(tiny, "llama", jobs, tmp_path / "unbroken")
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    for steps in (range(1, 3), range(3, STEPS + 1)):
        with tiny.engine() as engine:
            for job in jobs:
                if steps[0] == 1:
                    engine.admit(job, tiny.budget(STEPS))
                else:
                    engine.restore(job, tiny.budget(STEPS), tmp_path / "states" / job.job_id)
            for step in steps:
                for record in tiny.step(engine, {job.job_id: tiny.batch(job, step, rows) for job in jobs}):
                    losses[record.job_id].append(record.train_loss)
            for job in jobs:
                engine.save(job.job_id, tmp_path / "states" / job.job_id)
                engine.export(job.job_id, tmp_path / "resumed" / job.job_id)
    for job in jobs:
        assert losses[job.job_id] == unbroken[job.job_id][0]
        resumed = changes_in(tmp_path / "resumed" / job.job_id, job)
        assert all(torch.equal(change, resumed[name]) for name, change in unbroken[job.job_id][1].items())


def test_pissa_starts_as_the_untuned_model_and_keeps_what_it_takes_off(tiny: Any) -> None:
    job, rows = tiny.job(lora_rank=4, init="pissa", learning_rate=2e-2), tiny.rows(3)
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        losses = engine.evaluate(["", job.job_id], rows, max_tokens=1000)
        assert losses[job.job_id].loss_sums == pytest.approx(losses[""].loss_sums, abs=1e-4)
        block = engine._of(job.job_id).block
        start = block.params_rW.clone()
        assert block.lora_rank == 8
        for _ in range(3):
            tiny.step(engine, {job.job_id: rows})
        assert torch.equal(block.params_rW[4:], start[4:])
        assert not block.exp_avg_rW[4:].any()
        assert not torch.equal(block.params_rW[:4], start[:4])


def test_leading_singular_vectors_are_those_of_a_whole_decomposition() -> None:
    torch.manual_seed(3)
    for shape, count in (((40, 100), 7), ((90, 30), 30), ((5, 5), 1)):
        matrix = torch.randn(shape) * torch.logspace(0, -2, shape[1])
        u, s, vt = leading_singular(matrix, count)
        whole_u, whole_s, whole_vt = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.allclose(s, whole_s[:count], rtol=1e-4)
        signs = (vt * whole_vt[:count]).sum(1)
        assert torch.allclose(signs.abs(), torch.ones(count), atol=1e-3)
        assert torch.allclose((u * s) @ vt, (whole_u[:, :count] * whole_s[:count]) @ whole_vt[:count], atol=2e-3)


def test_fields_of_variants_leave_the_ids_of_other_jobs_alone() -> None:
    # As they stand in workspaces of earlier versions.
    job = LoraJob(learning_rate=1e-3, lora_rank=8, lora_alpha=16.0, adapter_batch_size=4, target_modules=("q_proj",))
    ids = [job.job_id, dataclasses.replace(job, beta=0.1).job_id]
    assert ids == ["lr0.001-r8-b4-80929f", "lr0.001-r8-b4-35d677"]
    assert dataclasses.replace(job, init="pissa").job_id not in ids
    assert "init" not in job.params()
