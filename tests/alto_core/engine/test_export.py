"""Exported adapters: PEFT loads them and gives the logits of training; nothing else is in the folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from alto_core.engine.engine import UNTUNED
from alto_core.errors import EngineError, ModelError

FAMILIES = ("llama", "smollm", "qwen2", "mistral", "gemma2", "gemma3", "gpt2")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def trained(tiny: Any, family: str, job: Any, folder: Path, steps: int = 3) -> tuple[float, ...]:
    """Train, export, and give the losses that the exported adapter had in the engine."""
    rows = tiny.rows(4)
    with tiny.engine(family) as engine:
        engine.admit(job, tiny.budget())
        for _ in range(steps):
            tiny.step(engine, {job.job_id: rows[:3]})
        engine.export(job.job_id, folder)
        return tuple(engine.evaluate([job.job_id], rows, max_tokens=1000)[job.job_id].loss_sums)


def peft_losses(tiny: Any, family: str, folder: Path) -> list[float]:
    tuned = peft.PeftModel.from_pretrained(tiny.plain_model(family), folder)
    with torch.no_grad():
        return [float(loss) for loss in tiny.loss_sums(tuned, tiny.rows(4))]


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_it_and_gives_the_same_losses(tiny: Any, family: str, tmp_path: Path) -> None:
    job = tiny.job(family, lora_rank=5, use_rslora=family == "llama", learning_rate=2e-2)
    in_engine = trained(tiny, family, job, tmp_path / "adapter")
    with torch.no_grad():
        untuned = [float(x) for x in tiny.loss_sums(tiny.plain_model(family), tiny.rows(4))]
    assert peft_losses(tiny, family, tmp_path / "adapter") == pytest.approx(in_engine, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(untuned, in_engine, strict=True)) > 0.05, "the adapter changes something"


def test_merged_weights_equal_the_unmerged_adapter(tiny: Any, tmp_path: Path) -> None:
    # C4: GPT-2 stores its weights transposed, and its fused c_attn is 32 -> 96.
    in_engine = trained(tiny, "gpt2", tiny.job("gpt2", target_modules=("c_attn",)), tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")[
        "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
    ].shape == (96, 4)
    merged = peft.PeftModel.from_pretrained(tiny.plain_model("gpt2"), tmp_path).merge_and_unload()
    with torch.no_grad():
        assert [float(x) for x in tiny.loss_sums(merged, tiny.rows(4))] == pytest.approx(in_engine, abs=1e-4)


def test_config_is_the_jobs_and_names_no_path(tiny: Any, tmp_path: Path) -> None:
    job = tiny.job(lora_rank=6, lora_alpha=9.0, use_rslora=True, dropout=0.25, target_modules=("q_proj", "o_proj"))
    trained(tiny, "llama", job, tmp_path / "adapter", steps=1)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    text = (tmp_path / "adapter" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert str(tiny.folder()) not in text
    expected = {
        "base_model_name_or_path": "llama",
        "r": 6,
        "lora_alpha": 9,
        "use_rslora": True,
        "lora_dropout": 0.25,
        "target_modules": ["q_proj", "o_proj"],
        "fan_in_fan_out": False,
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
    }
    assert {key: config[key] for key in expected} == expected
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 2


def test_the_best_adapter_is_exported_unless_the_last_is_asked_for(tiny: Any, tmp_path: Path) -> None:
    job, rows = tiny.job(), tiny.rows(3)
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        tiny.step(engine, {job.job_id: rows})
        at_best = engine.evaluate([job.job_id], rows, max_tokens=100)[job.job_id]
        assert engine.keep_best(job.job_id, at_best.mean)
        tiny.step(engine, {job.job_id: rows})
        last = engine.evaluate([job.job_id], rows, max_tokens=100)[job.job_id]
        engine.export(job.job_id, tmp_path / "best")
        engine.export(job.job_id, tmp_path / "last", best=False)
    with tiny.engine() as engine:
        for folder, expected in ((tmp_path / "best", at_best), (tmp_path / "last", last)):
            engine.load_adapter(job, folder)
            assert engine.evaluate([job.job_id], rows, max_tokens=100)[job.job_id] == expected
            engine.evict(job.job_id)


def test_an_adapter_that_is_not_finite_is_not_written(tiny: Any, tmp_path: Path) -> None:
    # L6: and the folder that stands there stays.
    job = tiny.job()
    trained(tiny, "llama", job, tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        engine._of(job.job_id).block.params_rW[1, 40] = math.nan
        with pytest.raises(EngineError, match=r"NaN or infinity in base_model\.model\..*lora_"):
            engine.export(job.job_id, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_an_adapter_that_changes_nothing_is_told(tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tiny, "llama", tiny.job(), tmp_path / "moved")
        assert "changes nothing" not in caplog.text
        trained(tiny, "llama", tiny.job(), tmp_path / "fresh", steps=0)
    assert "changes nothing" in caplog.text


def test_a_job_starts_from_an_existing_adapter(tiny: Any, tmp_path: Path) -> None:
    job = tiny.job(learning_rate=2e-2)
    in_engine = trained(tiny, "llama", job, tmp_path)
    # Another alpha and rsLoRA: the start is the same function all the same.
    for other in (job, tiny.job(lora_alpha=20.0), tiny.job(use_rslora=True)):
        with tiny.engine() as engine:
            engine.admit(other, tiny.budget(), init_adapter=tmp_path)
            losses = engine.evaluate([other.job_id, UNTUNED], tiny.rows(4), max_tokens=1000)
            assert losses[other.job_id].loss_sums == pytest.approx(in_engine, abs=1e-4)
            assert losses[UNTUNED].loss_sums != pytest.approx(in_engine, abs=1e-3)
            tiny.step(engine, {other.job_id: tiny.rows(3)})


def test_an_adapter_saved_by_peft_itself_is_read(tiny: Any, tmp_path: Path) -> None:
    job = tiny.job("gpt2", lora_rank=3, lora_alpha=6.0)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=list(job.target_modules), fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(tiny.plain_model("gpt2"), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        expected = [float(loss) for loss in tiny.loss_sums(tuned, tiny.rows(4))]
    tuned.save_pretrained(tmp_path)
    with tiny.engine("gpt2") as engine:
        engine.load_adapter(job, tmp_path)
        losses = engine.evaluate([job.job_id], tiny.rows(4), max_tokens=1000)[job.job_id]
    assert losses.loss_sums == pytest.approx(expected, abs=1e-4)


def _edit_config(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _edit_weights(change: Any) -> Any:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return edit


def _pickle_instead(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_edit_config(r=8), r"r=8, expected 4"),
        (_edit_config(peft_type="LOHA"), "peft_type='LOHA'"),
        (_edit_config(use_dora=True), "use_dora"),
        (_edit_config(bias="all"), "bias='all'"),
        (_edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (_edit_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (_edit_config(alpha_pattern={"q_proj": 8}), "alpha_pattern"),
        (_edit_config(lora_alpha=None), "lora_alpha=None"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "expected a PEFT adapter folder"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "expected readable JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "expected a JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "expected a file adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20), "expected whole safetensors"),
        (_pickle_instead, "pickled"),
        (_edit_weights(lambda t: dict(list(t.items())[1:])), "expected a tensor"),
        (_edit_weights(lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(1)}), "lm_head"),
        # X3: a key prefix that would load nothing.
        (
            _edit_weights(lambda t: {k.replace("model.layers", "language_model.layers"): v for k, v in t.items()}),
            "expected",
        ),
        (_edit_weights(lambda t: {k: v[:, :3].clone() for k, v in t.items()}), "fits another model"),
        (_edit_weights(lambda t: {k: v.fill_(math.inf) for k, v in t.items()}), "finite"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(tiny: Any, tmp_path: Path, edit: Any, message: str) -> None:
    job = tiny.job()
    trained(tiny, "llama", job, tmp_path, steps=1)
    edit(tmp_path)
    with tiny.engine() as engine:
        with pytest.raises(ModelError, match=message):
            engine.admit(job, tiny.budget(), init_adapter=tmp_path)
        assert engine.job_ids == ()


def test_inference_refuses_an_adapter_of_another_scale(tiny: Any, tmp_path: Path) -> None:
    trained(tiny, "llama", tiny.job(), tmp_path, steps=1)
    with tiny.engine() as engine, pytest.raises(ModelError, match="scale 2, expected 4"):
        engine.load_adapter(tiny.job(lora_alpha=16.0), tmp_path)
