"""Rank rows are given out first-fit, zeroed when they come back, and a re-used slot shows no trace of its last job."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alto_core.engine.engine import UNTUNED
from alto_core.engine.slots import AdapterSlots
from alto_core.engine.target_modules import LinearLayer
from alto_core.errors import EngineError, ModelError

LAYERS = [
    LinearLayer(name="a", index=0, d_in=5, d_out=3, is_conv1d=False),
    LinearLayer(name="b", index=4, d_in=17, d_out=16, is_conv1d=False),
]


def make_slots(num_slots: int = 3, rank_rows: int = 12) -> AdapterSlots:
    return AdapterSlots(LAYERS, num_slots=num_slots, rank_rows=rank_rows, device=torch.device("cpu"))


def test_first_gap_that_is_large_enough_is_taken() -> None:
    slots = make_slots()
    first, second, third = slots.take(4), slots.take(2), slots.take(5)
    assert [block.rank_start for block in (first, second, third)] == [0, 4, 6]
    assert slots.find(1) is None, "no slot is free, though a rank row is"
    slots.give_back(second)
    assert slots.find(3) is None, "no gap of three neighbouring rows"
    assert slots.find(2) == 4
    slots.give_back(first)
    assert slots.find(6) == 0, "neighbouring gaps are one gap"


def test_a_block_is_contiguous_and_layers_start_at_64_bytes() -> None:
    slots = make_slots()
    block = slots.take(4)
    for buffer in (block.params_rW, block.grads_rW, block.exp_avg_rW, block.exp_avg_sq_rW):
        assert buffer.is_contiguous()
        for layer, a_rI, b_rO in slots.by_layer(buffer, LAYERS):
            assert (a_rI.shape, b_rO.shape) == ((4, layer.d_in), (4, layer.d_out))
            assert a_rI.storage_offset() % 16 == b_rO.storage_offset() % 16 == 0


def test_leaves_share_storage_with_the_block() -> None:
    slots = make_slots()
    slots.take(2)
    block = slots.take(3)
    adapters = slots.of_layer(LAYERS[1])
    block.params_rW.fill_(2.0)
    adapters.gradient_sinks[1][2:5].fill_(3.0)
    assert adapters.a_RI[2:5].eq(2).all()
    assert not adapters.a_RI[:2].any()
    assert block.grads_rW.sum() == 3 * 3 * 16
    slots.give_back(block)
    assert not adapters.a_RI.any()
    assert not adapters.gradient_sinks[1].any()


def test_reused_slot_equals_a_fresh_engine_bit_for_bit(tiny: Any) -> None:
    # K4: rank 24 first, then rank 3 in the same rows.
    first, second = tiny.job(lora_rank=24, learning_rate=0.1), tiny.job(lora_rank=3, lr_schedule="linear", dropout=0.1)
    results = []
    for reuse in (False, True):
        with tiny.engine() as engine:
            if reuse:
                engine.admit(first, tiny.budget())
                for _ in range(3):
                    tiny.step(engine, {first.job_id: tiny.rows(3)})
                engine.keep_best(first.job_id, 1.0)
                engine.evict(first.job_id)
            engine.admit(second, tiny.budget())
            records = [tiny.step(engine, {second.job_id: tiny.rows(3)}) for _ in range(4)]
            active = engine._of(second.job_id)
            assert active.block.rank_start == 0
            assert active.best_val_loss is None
            results.append((records, active.block))
    (fresh_records, fresh), (reused_records, reused) = results
    assert fresh_records == reused_records
    for name in ("params_rW", "grads_rW", "exp_avg_rW", "exp_avg_sq_rW"):
        assert torch.equal(getattr(fresh, name), getattr(reused, name))


def test_place_of_a_job_does_not_change_it(tiny: Any) -> None:
    job, filler = tiny.job(lora_rank=5), tiny.job(lora_rank=7)
    curves = []
    for before in ((), (filler,)):
        with tiny.engine() as engine:
            for other in before:
                engine.admit(other, tiny.budget())
            engine.admit(job, tiny.budget())
            curves.append([tiny.step(engine, {job.job_id: tiny.rows(3)})[0] for _ in range(4)])
    assert curves[0] == curves[1]


def test_jobs_that_come_and_go_leave_the_others_curve(tiny: Any) -> None:
    stay = tiny.job(lora_rank=4)
    with tiny.engine() as engine:
        engine.admit(stay, tiny.budget())
        alone = [tiny.step(engine, {stay.job_id: tiny.rows(3)})[0].train_loss for _ in range(6)]
    with tiny.engine() as engine:
        guest = tiny.job(lora_rank=6, learning_rate=0.1)
        engine.admit(guest, tiny.budget())
        engine.admit(stay, tiny.budget())
        curve = []
        for step in range(6):
            if step == 2:
                engine.evict(guest.job_id)
            if step == 4:
                engine.admit(guest, tiny.budget())
            curve.append(tiny.step(engine, {job_id: tiny.rows(3) for job_id in engine.job_ids}))
    losses = [next(r.train_loss for r in records if r.job_id == stay.job_id) for records in curve]
    assert losses == pytest.approx(alone, abs=1e-5)


def test_fits_admit_and_evict_agree(tiny: Any) -> None:
    large, small = tiny.job(lora_rank=8), tiny.job(lora_rank=2)
    with tiny.engine(num_slots=2, rank_rows=9) as engine:
        assert engine.fits(large)
        engine.admit(large, tiny.budget())
        assert not engine.fits(small)
        with pytest.raises(EngineError, match="does not fit"):
            engine.admit(small, tiny.budget())
        with pytest.raises(EngineError, match="holds a slot already"):
            engine.admit(large, tiny.budget())
        engine.evict(large.job_id)
        assert engine.fits(small)
        with pytest.raises(EngineError, match=r"holds no slot; those that do: none"):
            tiny.step(engine, {large.job_id: tiny.rows(1)})


def test_layers_that_the_engine_does_not_adapt_are_refused(tiny: Any) -> None:
    with tiny.engine(target_modules=("q_proj",)) as engine:
        with pytest.raises(ModelError, match="expected layers that the engine adapts"):
            engine.admit(tiny.job(target_modules=("q_proj", "k_proj")), tiny.budget())
        assert engine.fits(tiny.job(lora_rank=80)), "the refused job holds nothing"
    with pytest.raises(ModelError, match="no linear layer"):
        tiny.engine(target_modules=("nothing",))


def test_closing_leaves_the_backbone_as_it_was(tiny: Any) -> None:
    backbone = tiny.backbone()
    names = [name for name, _ in backbone.model.named_modules()]
    state = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    rows = tiny.rows(3)
    with tiny.engine() as engine:
        before = engine.evaluate([UNTUNED], rows, max_tokens=100)
        engine.admit(tiny.job(), tiny.budget())
        tiny.step(engine, {tiny.job().job_id: rows})
    assert [name for name, _ in backbone.model.named_modules()] == names
    assert all(torch.equal(state[name], tensor) for name, tensor in backbone.model.state_dict().items())
    with tiny.engine() as engine:
        assert engine.evaluate([UNTUNED], rows, max_tokens=100) == before


def test_initial_adapter_is_pefts_and_depends_on_seed_and_layer_alone(tiny: Any) -> None:
    def initial(**changes: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        job = tiny.job(**changes)
        with tiny.engine() as engine:
            engine.admit(tiny.job(lora_rank=1, seed=77), tiny.budget())
            engine.admit(job, tiny.budget())
            active = engine._of(job.job_id)
            found = engine._slots.by_layer(active.block.params_rW, active.layers)
            return {layer.name: (a.clone(), b.clone()) for layer, a, b in found}

    base = initial(lora_rank=16)
    for name, (a_rI, b_rO) in base.items():
        bound = a_rI.shape[1] ** -0.5
        assert not b_rO.any()
        assert a_rI.abs().max() <= bound
        assert a_rI.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), name
    one_layer = initial(lora_rank=16, target_modules=("o_proj",), learning_rate=1e-4)
    assert all(torch.equal(one_layer[name][0], base[name][0]) for name in one_layer)
    other_seed = initial(lora_rank=16, seed=2)
    assert not any(torch.equal(other_seed[name][0], base[name][0]) for name in base)
    matrices = [a for a, _ in base.values() if a.shape == (16, 32)]
    assert len({tuple(a.flatten().tolist()) for a in matrices}) == len(matrices), "layers differ"
