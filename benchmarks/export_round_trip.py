"""Exported adapters in PEFT: how far its logits are from those of the engine that trained them.

    python benchmarks/export_round_trip.py

Tiny random models of five families in float32 on the CPU, some with tied embeddings, ranks and rsLoRA mixed. Each
adapter is trained for a few steps, exported, and loaded by PEFT on the model as transformers loads it. Writes
benchmarks/results/export.csv and the bar `export.max_logit_diff`, the largest difference of any logit; under a minute.
"""

from __future__ import annotations

import csv
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import transformers

from alto_core.config import ModelSection
from alto_core.data.rows import TokenRow
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone, packed_logits, release_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.packed_attention import PackedRows
from alto_core.engine.target_modules import linear_endings
from benchmarks.bars import RESULTS, record_bar

TARGET = 1e-4
VOCABULARY, LENGTH, STEPS = 96, 24, 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**COMMON, **SPECIAL),
    "llama, tied embeddings": transformers.LlamaConfig(**COMMON, **SPECIAL, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**COMMON, **SPECIAL),
    "mistral": transformers.MistralConfig(**COMMON, **SPECIAL, sliding_window=9),
    "gemma": transformers.GemmaConfig(**COMMON, **SPECIAL, head_dim=8),
    "gpt2": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **SPECIAL),
}


def make_model(config: Any, folder: Path) -> None:
    """Random weights, wider than usual, so that adapters matter in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)


def make_rows(count: int) -> list[TokenRow]:
    draw = random.Random(0)
    mask = (False,) + (True,) * (LENGTH - 1)
    return [
        TokenRow(
            row_id=i,
            origin=f"row {i}",
            token_ids=tuple(draw.randrange(3, VOCABULARY) for _ in range(LENGTH)),
            label_mask=mask,
        )
        for i in range(count)
    ]


def measure(name: str, lora_rank: int, use_rslora: bool, root: Path) -> tuple[float, float]:
    """Largest difference to PEFT of any logit, and the largest change that the adapter makes."""
    folder, adapter = root / name.replace(", ", "-").replace(" ", "-"), root / "adapter"
    make_model(FAMILIES[name], folder)
    section, rows = ModelSection(name=str(folder)), make_rows(4)
    targets = linear_endings(section)
    job = LoraJob(
        learning_rate=2e-2,
        lora_rank=lora_rank,
        lora_alpha=2.0 * lora_rank,
        use_rslora=use_rslora,
        adapter_batch_size=4,
        target_modules=targets,
    )
    with Engine(load_backbone(section, "cpu"), target_modules=targets, num_slots=1, rank_rows=lora_rank) as engine:
        engine.admit(job, JobBudget(total_steps=STEPS, warmup_steps=1, eval_steps=(STEPS,)))
        for _ in range(STEPS):
            engine.step({job.job_id: rows})
        engine.export(job.job_id, adapter, best=False)
        ours = engine_logits(engine, job, rows[0])
    release_backbone()
    ids = torch.tensor([rows[0].token_ids])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        untuned = base(input_ids=ids).logits[0]
        tuned = peft.PeftModel.from_pretrained(base, adapter).eval()(input_ids=ids).logits[0]
    return float((ours - tuned).abs().max()), float((tuned - untuned).abs().max())


@torch.no_grad()
def engine_logits(engine: Engine, job: LoraJob, row: TokenRow) -> torch.Tensor:
    """Logits [L, V] of one row under a job's adapter, by the engine's own packed forward."""
    from kernels.segments import make_segments

    active, backbone = engine._of(job.job_id), engine._backbone
    positions = torch.arange(len(row.token_ids))
    layout = PackedRows((len(row.token_ids),), "cpu")
    with engine._routing.use(make_segments([active.segment(len(row.token_ids))], "cpu"), [active.layer_indices]):
        return packed_logits(backbone.model, torch.tensor(row.token_ids), positions, layout, positions)


def main() -> None:
    cases = [(name, rank, rslora) for name in FAMILIES for rank, rslora in ((4, False), (7, True))]
    table = []
    with tempfile.TemporaryDirectory() as temporary:
        for i, (name, lora_rank, use_rslora) in enumerate(cases):
            difference, change = measure(name, lora_rank, use_rslora, Path(temporary) / str(i))
            table.append((name, lora_rank, use_rslora, f"{difference:.3g}", f"{change:.3g}"))
            print(*table[-1], flush=True)
    with RESULTS.with_name("export.csv").open("w", newline="", encoding="utf-8") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(("model", "lora_rank", "use_rslora", "max_logit_diff", "max_logit_change"))
        writer.writerows(table)
    worst = max(float(row[3]) for row in table)
    record_bar("export.max_logit_diff", worst, target=f"<= {TARGET:g}", unit="logits")
    print(f"{worst:.3g}, target {TARGET:g}")


if __name__ == "__main__":
    main()
