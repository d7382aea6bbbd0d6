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
from alto_core.engine.adapter_plan import AdaptedLayer, LayerMeasure, plan_adapter
from alto_core.engine.backbone import packed_logits
from alto_core.engine.initialization import initial_a
from alto_core.engine.layer_probe import measure_layers
from alto_core.engine.packed_attention import PackedRows
from alto_core.engine.singular import leading_singular
from alto_core.engine.target_modules import find_linear_layers, select_layers
from alto_core.errors import EngineError
from kernels.segments import make_segments

STEPS, WARMUP_STEPS = 5, 2
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


def start_of(job: LoraJob, adapted: AdaptedLayer, weight: Tensor, measure: LayerMeasure) -> tuple[Tensor, Tensor]:
    """A and B by the papers' formulas, from a whole decomposition."""
    layer, rank = adapted.layer, adapted.lora_rank
    if job.init == "pissa":
        u, s, vt = torch.linalg.svd(weight.T if layer.is_conv1d else weight, full_matrices=False)
        root = (s[:rank] / job.scale).sqrt()
        return root[:, None] * vt[:rank], u[:, :rank] * root
    a_rI = measure.directions_kI[:rank] if job.init == "tlora" else initial_a(layer, rank, job.seed)
    return a_rI, torch.zeros(layer.d_out, rank)


def measured(tiny: Any, family: str = "llama") -> dict[str, LayerMeasure]:
    with tiny.engine(family) as engine:
        model = tiny.backbone(family).model
        return measure_layers(engine, model, tiny.targets(family), tiny.rows(6, seed=5), num_directions=8)


def run_plain(tiny: Any, family: str, job: LoraJob, measures: dict[str, LayerMeasure]) -> Curve:
    model = tiny.plain_model(family).requires_grad_(False)
    loras: dict[str, PlainLora] = {}
    for adapted in plan_adapter(job, select_layers(find_linear_layers(model), job.target_modules), measures):
        name = adapted.layer.name
        base = model.get_submodule(name)
        loras[name] = PlainLora(
            base,
            *start_of(job, adapted, base.weight, measures[name]),
            job.scale * adapted.scale_ratio,
            takes_start_off=job.init == "pissa",
            trains_a=job.train == "both",
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, loras[name])
    trained = [p for p in model.parameters() if p.requires_grad]
    sides = [[lora.a_rI for lora in loras.values()], [lora.b_Or for lora in loras.values()]]
    groups = [{"params": side} for side in sides if side[0].requires_grad]
    ratios = [1.0, job.lora_plus_ratio][-len(groups) :]
    optimizer = torch.optim.AdamW(groups, weight_decay=job.weight_decay, foreach=False)
    rows, losses = tiny.rows(11), []
    for step in range(1, STEPS + 1):
        batch = tiny.batch(job, step, rows)
        loss = sum(tiny.loss_sums(model, batch)) / sum(row.num_labels for row in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.max_grad_norm)
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = job.learning_rate * ratio * min(1.0, (step - 1) / WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: lora.change() for name, lora in loras.items()}


def run_engine(
    tiny: Any, family: str, jobs: Sequence[LoraJob], folder: Path, measures: dict[str, LayerMeasure]
) -> dict[str, Curve]:
    rows = tiny.rows(11)
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    with tiny.engine(family, measures=measures, num_slots=9) as engine:
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
    """Of each kind one, and plain LoRA among them.

    Without a warmup Adam's first update is the gradient's sign, which for some element of PiSSA's B is rounding alone.
    """
    jobs = [
        tiny.job(family, lora_rank=4, max_grad_norm=0.5),
        tiny.job(family, lora_rank=3, lora_plus_ratio=8.0, weight_decay=0.1, max_grad_norm=0.5),
        tiny.job(family, lora_rank=4, init="pissa", weight_decay=0.1),
        tiny.job(family, lora_rank=2, init="pissa", use_rslora=True, lora_plus_ratio=0.5, adapter_batch_size=2),
        tiny.job(family, lora_rank=4, train="b_only", lora_plus_ratio=4.0, max_grad_norm=0.1, weight_decay=0.1),
        tiny.job(family, lora_rank=3, layer_share=0.5, rank_allocation="gradient"),
        tiny.job(family, lora_rank=4, init="tlora", train="b_only", rank_allocation="sensitivity", max_grad_norm=0.1),
        tiny.job(family, lora_rank=2, layer_share=0.5, init="pissa", rank_allocation="sensitivity"),
        tiny.job(family, lora_rank=3, init="tlora", target_modules=tiny.targets(family)[:2]),
    ]
    return [dataclasses.replace(job, lr_warmup_fraction=WARMUP_STEPS / STEPS) for job in jobs]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_alone_batched_and_a_plain_loop_agree(tiny: Any, family: str, tmp_path: Path) -> None:
    jobs, measures = variants(tiny, family), measured(tiny, family)
    batched = run_engine(tiny, family, jobs, tmp_path / "batched", measures)
    for job in jobs:
        assert_same(batched[job.job_id], run_engine(tiny, family, [job], tmp_path / "alone", measures)[job.job_id])
        assert_same(batched[job.job_id], run_plain(tiny, family, job, measures))


def test_peft_loads_every_variant_and_gives_its_losses(tiny: Any, tmp_path: Path) -> None:
    jobs, rows = variants(tiny), tiny.rows(4)
    with tiny.engine(measures=measured(tiny), num_slots=9) as engine:
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
    jobs, rows, measures = variants(tiny), tiny.rows(11), measured(tiny)
    unbroken = run_engine(tiny, "llama", jobs, tmp_path / "unbroken", measures)
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    for steps in (range(1, 3), range(3, STEPS + 1)):
        with tiny.engine(measures=measures, num_slots=9) as engine:
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


def test_what_is_frozen_or_beyond_a_layers_rank_never_moves(tiny: Any) -> None:
    measures, rows = measured(tiny), tiny.rows(3)
    frozen = tiny.job(train="b_only", weight_decay=0.5, learning_rate=2e-2)
    uneven = tiny.job(rank_allocation="sensitivity", weight_decay=0.5, learning_rate=2e-2)
    with tiny.engine(measures=measures) as engine:
        for job in (frozen, uneven):
            engine.admit(job, tiny.budget())
        slots, blocks = engine._slots, [engine._of(job.job_id) for job in (frozen, uneven)]
        starts = [a_rI.clone() for _, a_rI, _ in slots.by_layer(blocks[0].block.params_rW, blocks[0].layers)]
        for _ in range(3):
            tiny.step(engine, {job.job_id: rows for job in (frozen, uneven)})
        moved = slots.by_layer(blocks[0].block.params_rW, blocks[0].layers)
        for start, (_, a_rI, b_rO) in zip(starts, moved, strict=True):
            assert torch.equal(a_rI, start)
            assert b_rO.any()
        ranks = {adapted.lora_rank for adapted in blocks[1].plan}
        assert len(ranks) > 1
        for adapted, (_, a_rI, b_rO) in zip(
            blocks[1].plan, slots.by_layer(blocks[1].block.params_rW, blocks[1].layers), strict=True
        ):
            assert not a_rI[adapted.lora_rank :].any() and not b_rO[adapted.lora_rank :].any()
            assert b_rO[: adapted.lora_rank].any(1).all()


def test_no_backward_pass_goes_below_the_lowest_adapted_layer(tiny: Any) -> None:
    measures = measured(tiny)
    low, high = (f"model.layers.{i}.mlp.down_proj" for i in (0, 1))
    measures = {n: dataclasses.replace(m, gradient=1.0 if ".1." in n else 0.1) for n, m in measures.items()}
    probed, plain = tiny.job(layer_share=0.5), tiny.job()
    with tiny.engine(measures=measures) as engine:
        for job in (probed, plain):
            engine.admit(job, tiny.budget())
        down = {name: tiny.backbone().model.get_submodule(name) for name in (low, high)}
        seen: dict[str, bool] = {}
        for name, module in down.items():
            module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.requires_grad}))
        for jobs, reaches_low in (([probed], False), ([probed, plain], True)):
            tiny.step(engine, {job.job_id: tiny.rows(3) for job in jobs})
            assert seen == {low: reaches_low, high: True}


def test_passes_routed_on_the_device_end_where_the_lowest_adapted_layer_is(tiny: Any) -> None:
    # As captured passes are routed, but with segments that the torch twin can read.
    measures = {n: dataclasses.replace(m, gradient=1.0 if ".1." in n else 0.1) for n, m in measured(tiny).items()}
    probed, plain, row = tiny.job(layer_share=0.5), tiny.job(), tiny.rows(1)[0]
    with tiny.engine(measures=measures) as engine:
        for job in (probed, plain):
            engine.admit(job, tiny.budget())
            tiny.step(engine, {job.job_id: tiny.rows(3)})
        first, second = (engine._of(job.job_id) for job in (plain, probed))
        assert (first.lowest_layer, second.lowest_layer) == (0, 7)
        model, length = tiny.backbone().model, len(row.token_ids)
        places = torch.arange(length)
        results = {}
        for lowest in (0, second.lowest_layer):
            second.block.grads_rW.zero_()
            segments = make_segments([second.segment(length)])
            with engine._routing.use_on_device(segments, accumulate=True, unfinished=None, lowest_layer=lowest):
                logits = packed_logits(model, torch.tensor(row.token_ids), places, PackedRows((length,), "cpu"), places)
            logits.square().sum().backward()
            results[lowest] = (logits.detach(), second.block.grads_rW.clone())
        (whole, whole_grads), (ended, ended_grads) = results.values()
        assert torch.equal(whole, ended)
        assert torch.allclose(whole_grads, ended_grads, rtol=1e-5) and ended_grads.any()
        below = [
            g for layer, *sides in engine._slots.by_layer(ended_grads, first.layers) for g in sides if layer.index < 7
        ]
        assert not any(g.any() for g in below)


def test_a_job_whose_layers_were_not_measured_is_refused(tiny: Any) -> None:
    with tiny.engine() as engine, pytest.raises(EngineError, match=r"expected measurements of model\.layers\.0"):
        engine.admit(tiny.job(layer_share=0.5), tiny.budget())


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
    assert dataclasses.replace(job, init="pissa").job_id.startswith("lr0.001-r8-b4-pissa-")
    tlora = dataclasses.replace(job, init="tlora", train="b_only", rank_allocation="sensitivity", layer_share=0.25)
    assert tlora.job_id.startswith("lr0.001-r8-b4-tlora-bonly-top25-uneven-")
    assert "init" not in job.params()
