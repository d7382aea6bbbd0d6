"""A job that is saved and restored goes on bit for bit; a damaged or foreign state is never taken."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alto_core.domain import StepRecord
from alto_core.engine.checkpoint import write_snapshot
from alto_core.engine.engine import Engine
from alto_core.errors import EngineError


def train(engine: Engine, tiny: Any, job: Any, steps: range) -> list[StepRecord]:
    return [tiny.step(engine, {job.job_id: tiny.batch(job, step, tiny.rows(7))})[0] for step in steps]


def state_of(engine: Engine, job: Any) -> list[torch.Tensor]:
    block = engine._of(job.job_id).block
    return [t.clone() for t in (block.params_rW, block.exp_avg_rW, block.exp_avg_sq_rW)]


@pytest.fixture
def job(tiny: Any) -> Any:
    return tiny.job(dropout=0.2, lr_schedule="cosine", gradient_accumulation=2, weight_decay=0.01)


@pytest.fixture
def saved(tiny: Any, job: Any, tmp_path: Path) -> Path:
    """States after steps 2 and 3."""
    folder = tmp_path / "state"
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        train(engine, tiny, job, range(1, 3))
        engine.keep_best(job.job_id, 1.5)
        engine.save(job.job_id, folder)
        train(engine, tiny, job, range(3, 4))
        engine.save(job.job_id, folder)
    return folder


def test_restored_job_goes_on_as_if_it_had_never_stopped(tiny: Any, job: Any, tmp_path: Path) -> None:
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        train(engine, tiny, job, range(1, 4))
        engine.keep_best(job.job_id, 1.5)
        unbroken = train(engine, tiny, job, range(4, 8))
        expected = state_of(engine, job)
        best = engine._of(job.job_id).block.best_rW
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        train(engine, tiny, job, range(1, 4))
        engine.keep_best(job.job_id, 1.5)
        engine.save(job.job_id, tmp_path / "state")
    with tiny.engine() as engine:
        # In other rank rows, beside another job that rests.
        engine.admit(tiny.job(lora_rank=5), tiny.budget())
        engine.restore(job, tiny.budget(), tmp_path / "state")
        assert train(engine, tiny, job, range(4, 8)) == unbroken
        assert all(torch.equal(e, g) for e, g in zip(expected, state_of(engine, job), strict=True))
        active = engine._of(job.job_id)
        assert torch.equal(active.block.best_rW, best)
        assert (active.best_val_loss, active.best_step) == (1.5, 3)
        assert not engine.keep_best(job.job_id, 1.6)


def test_the_best_adapter_has_a_file_where_it_is_of_another_step(tiny: Any, job: Any, saved: Path) -> None:
    assert [(folder.name, (folder / "best.safetensors").exists()) for folder in sorted(saved.glob("step-*"))] == [
        ("step-00000002", False),
        ("step-00000003", True),
    ]
    blocks = []
    for step in (2, 3):
        with tiny.engine() as engine:
            engine.restore(job, tiny.budget(), saved, step=step)
            block = engine._of(job.job_id).block
            blocks.append((block.params_rW.clone(), block.best_rW.clone()))
    (at_best, best), (later, still_best) = blocks
    assert torch.equal(at_best, best) and torch.equal(best, still_best) and not torch.equal(later, still_best)


def test_an_engine_with_other_layers_can_restore(tiny: Any, tmp_path: Path) -> None:
    job = tiny.job(target_modules=("q_proj", "v_proj"))
    curves = []
    for targets in (tiny.targets(), ("q_proj", "v_proj")):
        with tiny.engine() as engine:
            engine.admit(job, tiny.budget())
            train(engine, tiny, job, range(1, 3))
            engine.save(job.job_id, tmp_path / "state")
        with tiny.engine(target_modules=targets) as engine:
            engine.restore(job, tiny.budget(), tmp_path / "state")
            curves.append([record.train_loss for record in train(engine, tiny, job, range(3, 5))])
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)


def test_a_state_of_an_earlier_step_can_be_asked_for(tiny: Any, job: Any, saved: Path) -> None:
    with tiny.engine() as engine:
        assert engine.restore(job, tiny.budget(), saved, step=2) == 2
        engine.evict(job.job_id)
        assert engine.restore(job, tiny.budget(), saved, step=9) == 3
        engine.evict(job.job_id)
        with pytest.raises(EngineError, match="expected a whole state, got 0"):
            engine.restore(job, tiny.budget(), saved, step=1)


def test_a_job_gets_the_rank_rows_back_that_it_had(tiny: Any, job: Any, saved: Path) -> None:
    """Gaps between jobs decide which others fit, so a resume must leave the same ones."""
    with tiny.engine() as engine:
        engine.restore(job, tiny.budget(), saved, rank_start=3)
        assert engine.rank_start(job.job_id) == 3
        other = tiny.job(lora_rank=3)
        engine.admit(other, tiny.budget())
        assert engine.rank_start(other.job_id) == 0


def test_a_snapshot_is_not_changed_by_what_comes_after(tiny: Any, job: Any, tmp_path: Path) -> None:
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        train(engine, tiny, job, range(1, 3))
        state, expected = engine.snapshot(job.job_id), state_of(engine, job)
        train(engine, tiny, job, range(3, 5))
        engine.evict(job.job_id)
        write_snapshot(state, tmp_path)
        assert engine.restore(job, tiny.budget(), tmp_path) == 2
        assert all(torch.equal(e, g) for e, g in zip(expected, state_of(engine, job), strict=True))


def test_the_two_newest_states_are_kept(tiny: Any, job: Any, tmp_path: Path) -> None:
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        for step in range(1, 5):
            train(engine, tiny, job, range(step, step + 1))
            engine.save(job.job_id, tmp_path)
            engine.save(job.job_id, tmp_path)  # the same step again replaces it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.bin"))


def _cut_params(newest: Path) -> None:
    data = (newest / "params.safetensors").read_bytes()
    (newest / "params.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    "damage",
    [
        _cut_params,
        lambda newest: (newest / "exp_avg.safetensors").write_bytes(b""),
        lambda newest: (newest / "state.json").unlink(),
        lambda newest: (newest / "complete.json").unlink(),
        lambda newest: (newest / "complete.json").write_text("{"),
    ],
    ids=["cut", "empty", "no state", "no marker", "half a marker"],
)
def test_a_damaged_newest_state_gives_way_to_the_one_before(
    tiny: Any, job: Any, saved: Path, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    # K1; a temporary folder of a killed writer lies about as well.
    damage(saved / "step-00000003")
    (saved / ".writing-step-00000009").mkdir()
    with tiny.engine() as engine, caplog.at_level(logging.WARNING):
        engine.restore(job, tiny.budget(), saved)
        assert engine._of(job.job_id).step == 2
    assert "step-00000003 is damaged" in caplog.text


def test_no_whole_state_is_an_error_and_frees_the_slot(tiny: Any, job: Any, saved: Path) -> None:
    for state in saved.iterdir():
        _cut_params(state)
    with tiny.engine() as engine:
        with pytest.raises(EngineError, match="2 damaged"):
            engine.restore(job, tiny.budget(), saved)
        assert engine.job_ids == ()


def _rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a file and mend its checksum: the content is wrong, not the disk."""
    for state in folder.iterdir():
        save_file(change(load_file(state / name)), state / name)
        marker = json.loads((state / "complete.json").read_text())
        marker["sha256"][name] = hashlib.sha256((state / name).read_bytes()).hexdigest()
        (state / "complete.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "0.mlp.up_proj.lora_B" not in k},
            r"expected a tensor '.*up_proj.lora_B'",
        ),
        (lambda t: {k.replace("q_proj", "qq_proj"): v for k, v in t.items()}, r"expected a tensor '.*q_proj"),
        (lambda t: {**t, "extra": torch.zeros(1)}, "got a tensor 'extra'"),
        (lambda t: {k: v[:2].clone() for k, v in t.items()}, r"expected '.*' as torch.float32 \(4, "),
        (lambda t: {k: v.half() for k, v in t.items()}, r"got torch.float16"),
    ],
)
def test_tensors_that_do_not_match_are_named(tiny: Any, job: Any, saved: Path, change: Any, message: str) -> None:
    # K3
    for name in ("params.safetensors", "exp_avg_sq.safetensors"):
        _rewrite(saved, name, change)
        with tiny.engine() as engine, pytest.raises(EngineError, match=message):
            engine.restore(job, tiny.budget(), saved)


def test_a_state_without_optimizer_file_is_not_taken(tiny: Any, job: Any, saved: Path) -> None:
    for state in saved.iterdir():
        (state / "exp_avg.safetensors").unlink()
        marker = json.loads((state / "complete.json").read_text())
        del marker["sha256"]["exp_avg.safetensors"]
        (state / "complete.json").write_text(json.dumps(marker))
    with tiny.engine() as engine, pytest.raises(EngineError, match=r"expected a file exp_avg\.safetensors"):
        engine.restore(job, tiny.budget(), saved)


def test_a_state_of_a_version_that_knew_no_variants_is_the_plain_jobs(tiny: Any, job: Any, saved: Path) -> None:
    for state in saved.iterdir():
        content = json.loads((state / "state.json").read_text())
        for later in ("lora_plus_ratio", "init", "train", "layer_share", "rank_allocation"):
            del content["job"][later]
        (state / "state.json").write_text(json.dumps(content))
        marker = json.loads((state / "complete.json").read_text())
        marker["sha256"]["state.json"] = hashlib.sha256((state / "state.json").read_bytes()).hexdigest()
        (state / "complete.json").write_text(json.dumps(marker))
    with tiny.engine() as engine:
        assert engine.restore(job, tiny.budget(), saved) == 3
    variant = dataclasses.replace(job, lora_plus_ratio=2.0)
    with tiny.engine() as engine, pytest.raises(EngineError, match=r"lora_plus_ratio=1\.0, expected 2"):
        engine.restore(variant, tiny.budget(), saved)


def test_another_jobs_state_is_refused(tiny: Any, saved: Path) -> None:
    with tiny.engine() as engine, pytest.raises(EngineError, match=r"gradient_accumulation=2, expected 1"):
        engine.restore(tiny.job(dropout=0.2), tiny.budget(), saved)


def test_a_writer_that_fails_leaves_the_old_state(tiny: Any, job: Any, saved: Path) -> None:
    with tiny.engine() as engine:
        engine.restore(job, tiny.budget(), saved)
        train(engine, tiny, job, range(4, 5))
        num_bytes = engine.snapshot(job.job_id).num_bytes
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk, in the same system calls
        try:
            with pytest.raises(EngineError) as told:
                engine.save(job.job_id, saved)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"checkpoint {saved}/step-00000004: {num_bytes} bytes could not be written" in str(told.value)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000002", "step-00000003"]


def test_keep_best_takes_only_a_lower_finite_loss(tiny: Any, job: Any) -> None:
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        kept = [engine.keep_best(job.job_id, loss) for loss in (float("nan"), float("inf"), 2.0, 2.0, 1.0, 3.0)]
    assert kept == [False, False, True, False, True, False]
