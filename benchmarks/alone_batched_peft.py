"""A job alone, the same job among others, and PEFT with torch's AdamW: how far apart are curves and adapters?

    python benchmarks/alone_batched_peft.py MODEL_FOLDER DATA.jsonl [--steps 50]

Trains 50 steps in float32 on the CPU, jobs mixed in rank, learning rate, batch size, accumulation, rsLoRA, decay and
schedule: on tiny random models of four families, and on the model of MODEL_FOLDER with the shortest rows of DATA.jsonl
(prompt, completion). As a control PEFT trains each job twice, with transformers' SDPA and with its eager attention: the
same mathematics, added up in another order. Writes docs/parity.md and the bar `main.alone_vs_peft_max_diff`; about 6
minutes on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from bars import record_bar
from safetensors.torch import load_file

from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TokenRow
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.initialization import initial_a
from alto_core.engine.target_modules import find_linear_layers, select_layers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parity.md"
TARGET = 1e-4
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training of one job gave."""

    losses: list[float]
    adapter: Weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, the jobs trained on it, and their rows."""

    name: str
    section: ModelSection
    jobs: list[LoraJob]
    rows: list[TokenRow]
    counts: bool = True
    """Whether the bar is held against it."""

    def batch(self, job: LoraJob, step: int) -> list[TokenRow]:
        start = (step - 1) * job.rows_per_update
        return [self.rows[(start + i) % len(self.rows)] for i in range(job.rows_per_update)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a pretrained model")
    parser.add_argument("data", type=Path, help="jsonl with prompt and completion")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    # PEFT and transformers disagree about the name of a method; nothing to do with what is measured.
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        cases = [*tiny_cases(Path(folder)), *pretrained_cases(options.model, options.data)]
        table = [row for case in cases for row in compare(case, options.steps, Path(folder))]
    text = page(table, options.steps)
    print(text)
    PAGE.write_text(text, encoding="utf-8")
    record_bar(
        "main.alone_vs_peft_max_diff",
        max(row.loss_to_peft for row in table if row.counts),
        target=f"<= {TARGET:g}",
        unit="nats per token",
        command="python benchmarks/alone_batched_peft.py quickstart/model quickstart/train.jsonl",
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: largest differences over the steps."""

    model: str
    counts: bool
    job: LoraJob
    first_loss: float
    last_loss: float
    loss_to_alone: float
    loss_to_peft: float
    loss_control: float
    """PEFT with eager attention to PEFT with SDPA."""
    adapter_to_alone: float
    adapter_to_peft: float
    adapter_control: float


def compare(case: Case, steps: int, folder: Path) -> list[Row]:
    started = time.perf_counter()
    batched = train_engine(case, case.jobs, steps, folder)
    rows = []
    for job, in_batch in zip(case.jobs, batched, strict=True):
        (alone,) = train_engine(case, [job], steps, folder)
        by_peft, control = (train_peft(case, job, steps, attention=name) for name in ("sdpa", "eager"))
        rows.append(
            Row(
                model=case.name,
                counts=case.counts,
                job=job,
                first_loss=in_batch.losses[0],
                last_loss=in_batch.losses[-1],
                loss_to_alone=loss_difference(in_batch, alone),
                loss_to_peft=max(loss_difference(in_batch, by_peft), loss_difference(alone, by_peft)),
                loss_control=loss_difference(control, by_peft),
                adapter_to_alone=adapter_difference(in_batch, alone),
                adapter_to_peft=adapter_difference(in_batch, by_peft),
                adapter_control=adapter_difference(control, by_peft),
            )
        )
        print(
            f"{case.name} {job.job_id}: {rows[-1].loss_to_peft:.1e}, {time.perf_counter() - started:.0f} s", flush=True
        )
    return rows


def loss_difference(one: Run, other: Run) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def adapter_difference(one: Run, other: Run) -> float:
    """Euclidean distance of all B matrices over their length, which is how far training took them from zero."""
    names = [name for name in one.adapter if "lora_B" in name]
    distance = math.fsum(float((one.adapter[name] - other.adapter[name]).double().square().sum()) for name in names)
    length = math.fsum(float(other.adapter[name].double().square().sum()) for name in names)
    return math.sqrt(distance / length)


def train_engine(case: Case, jobs: Sequence[LoraJob], steps: int, folder: Path) -> list[Run]:
    targets = sorted({name for job in jobs for name in job.target_modules})
    budget = JobBudget(total_steps=steps, warmup_steps=1, eval_steps=(steps,))
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    rank_rows = sum(job.lora_rank for job in jobs)
    backbone = load_backbone(case.section, "cpu")
    with Engine(backbone, target_modules=targets, num_slots=len(jobs), rank_rows=rank_rows) as engine:
        for job in jobs:
            engine.admit(job, budget)
        for step in range(1, steps + 1):
            engine.step({job.job_id: case.batch(job, step) for job in jobs})
            for record in engine.take_records():
                losses[record.job_id].append(record.train_loss)
        for job in jobs:
            engine.export(job.job_id, folder / "adapters" / job.job_id)
    return [
        Run(
            losses=losses[job.job_id],
            adapter=load_file(folder / "adapters" / job.job_id / "adapter_model.safetensors"),
        )
        for job in jobs
    ]


def train_peft(case: Case, job: LoraJob, steps: int, *, attention: str) -> Run:
    """The same training as a user of PEFT writes it: right-padded batches, one optimizer, only the start is ours."""
    if "gemma2" in transformers.AutoConfig.from_pretrained(case.section.name).model_type:
        attention = "eager"  # the only one that transformers has for it
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case.section.name, dtype=torch.float32, attn_implementation=attention
    ).eval()
    layers = select_layers(find_linear_layers(model), job.target_modules)
    config = peft.LoraConfig(
        r=job.lora_rank,
        lora_alpha=job.lora_alpha,
        use_rslora=job.use_rslora,
        target_modules=list(job.target_modules),
        fan_in_fan_out=any(layer.is_conv1d for layer in layers),
        task_type="CAUSAL_LM",
    )
    tuned = peft.get_peft_model(model, config)
    for layer in layers:
        lora_a = tuned.get_submodule(f"base_model.model.{layer.name}.lora_A.default").weight
        lora_a.data.copy_(initial_a(layer, job.lora_rank, job.seed))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=job.weight_decay)
    name = "constant_with_warmup" if job.lr_schedule == "constant" else job.lr_schedule
    warmup = math.ceil(job.lr_warmup_fraction * steps)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    losses = []
    for step in range(1, steps + 1):
        loss = padded_loss(tuned, case.batch(job, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses=losses, adapter=peft.get_peft_model_state_dict(tuned))


def padded_loss(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        length = len(row.token_ids)
        ids[i, :length] = torch.tensor(row.token_ids)
        mask[i, :length] = 1
        labels[i, :length] = ids[i, :length].masked_fill(~torch.tensor(row.label_mask), -100)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def pretrained_cases(folder: Path, data: Path) -> list[Case]:
    section = ModelSection(name=str(folder))
    split = SplitSection(rows=50)
    task_data = prepare_data(DataSection(source=str(data), chat_template=False, validation=split), section)
    rows = sorted(task_data.train.rows, key=lambda row: (len(row.token_ids), row.row_id))[:120]
    random.Random(0).shuffle(rows)
    targets = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    jobs = [
        make_job(targets, learning_rate=1e-4, lora_rank=8, adapter_batch_size=3),
        make_job(targets, learning_rate=5e-5, lora_rank=16, lora_alpha=16.0, adapter_batch_size=2, use_rslora=True),
        make_job(("q_proj", "v_proj"), learning_rate=2e-4, lora_rank=4, adapter_batch_size=1, lr_schedule="cosine"),
    ]
    large_steps = [make_job(targets, learning_rate=1e-3, lora_rank=8, adapter_batch_size=2)]
    tokens = sum(len(row.token_ids) for row in rows) / len(rows)
    config = transformers.AutoConfig.from_pretrained(folder)
    name = f"pretrained, {config.num_hidden_layers} layers of width {config.hidden_size}, {tokens:.0f} tokens a row"
    return [
        Case(name=name, section=section, jobs=jobs, rows=rows),
        Case(name=name, section=section, jobs=large_steps, rows=rows, counts=False),
    ]


def tiny_cases(root: Path) -> list[Case]:
    """Two layers, width 32, random weights and random rows."""
    size: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    linear = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    configs = {
        "tiny Llama": (transformers.LlamaConfig(**size), linear),
        "tiny Qwen2": (transformers.Qwen2Config(**size), linear),
        "tiny Gemma 2": (transformers.Gemma2Config(**size, head_dim=8, sliding_window=5), linear),
        "tiny GPT-2": (
            transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **special),
            ("c_attn", "c_fc", "c_proj"),
        ),
    }
    cases = []
    for name, (config, targets) in configs.items():
        torch.manual_seed(7)
        folder = root / name
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        jobs = [
            make_job(targets, learning_rate=4e-3, lora_rank=8, adapter_batch_size=3, gradient_accumulation=2),
            make_job(targets, learning_rate=2e-3, lora_rank=12, lora_alpha=12.0, use_rslora=True, weight_decay=0.1),
            make_job(targets[:1], learning_rate=2e-3, lora_rank=3, adapter_batch_size=1, lr_schedule="linear"),
        ]
        section = ModelSection(name=str(folder))
        cases.append(Case(name=name, section=section, jobs=jobs, rows=counting_rows(48)))
        if name == "tiny GPT-2":
            wild = make_job(targets, learning_rate=1e-2, lora_rank=12, lora_alpha=12.0, use_rslora=True)
            noise = [dataclasses.replace(row, token_ids=shuffled(row)) for row in counting_rows(48)]
            cases.append(Case(name=f"{name}, random labels", section=section, jobs=[wild], rows=noise, counts=False))
    return cases


def make_job(targets: Sequence[str], **changes: Any) -> LoraJob:
    rank = changes["lora_rank"]
    return LoraJob(**{"lora_alpha": 2.0 * rank, "adapter_batch_size": 4, "target_modules": tuple(targets), **changes})


def counting_rows(count: int) -> list[TokenRow]:
    """Rows that count up in steps of 1 to 4: something to learn, as real data is."""
    draw = random.Random(0)
    rows = []
    for i in range(count):
        length, first, increment = draw.randint(4, 14), draw.randrange(93), draw.randint(1, 4)
        start = draw.randint(2, length - 1)
        token_ids = tuple(3 + (first + increment * position) % 93 for position in range(length))
        mask = tuple(position >= start for position in range(length))
        rows.append(TokenRow(row_id=i, origin="counting", token_ids=token_ids, label_mask=mask))
    return rows


def shuffled(row: TokenRow) -> tuple[int, ...]:
    draw = random.Random(row.row_id)
    return tuple(draw.randrange(3, 96) for _ in row.token_ids)


def page(table: Sequence[Row], steps: int) -> str:
    lines = [
        "# Alone = batched = PEFT",
        "",
        f"Each job was trained for {steps} steps in float32 on the CPU three times: side by side with the other jobs",
        "of its model, alone in the engine, and with PEFT and torch's AdamW on right-padded batches. Same rows, same",
        "initial A. Loss: largest difference over all steps, nats per token. Adapter: Euclidean distance of all B",
        "matrices after the last step, over their length.",
        "",
        "Control: PEFT with transformers' eager attention against PEFT with SDPA, the same mathematics in another",
        "order of additions (Gemma 2 has eager attention alone).",
        "",
        *table_of([row for row in table if row.counts]),
        "",
        f"Largest difference in train loss to PEFT: {max(row.loss_to_peft for row in table if row.counts):.1e} "
        f"(bar: at most {TARGET:g}).",
        "",
        "With large steps, or nothing to learn, training amplifies the rounding of float32 from step to step, and no",
        "two orders of addition stay together, PEFT's own included; not counted above:",
        "",
        *table_of([row for row in table if not row.counts]),
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}. Made by",
        "`python benchmarks/alone_batched_peft.py quickstart/model quickstart/train.jsonl`.",
        "",
    ]
    return "\n".join(lines)


def table_of(rows: Sequence[Row]) -> list[str]:
    return [
        "| model | job | loss, first and last step | loss: batched - alone | loss: either - PEFT | loss: control "
        "| adapter: batched - alone | adapter: batched - PEFT | adapter: control |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row.model} | {describe(row.job)} | {row.first_loss:.3f}, {row.last_loss:.3f} "
            f"| {row.loss_to_alone:.1e} | {row.loss_to_peft:.1e} | {row.loss_control:.1e} "
            f"| {row.adapter_to_alone:.1e} | {row.adapter_to_peft:.1e} | {row.adapter_control:.1e} |"
            for row in rows
        ),
    ]


def describe(job: LoraJob) -> str:
    parts = [f"rank {job.lora_rank}", f"lr {job.learning_rate:g}", f"batch {job.adapter_batch_size}"]
    if job.gradient_accumulation > 1:
        parts.append(f"accumulation {job.gradient_accumulation}")
    if job.use_rslora:
        parts.append("rsLoRA")
    if job.weight_decay:
        parts.append(f"decay {job.weight_decay:g}")
    if job.lr_schedule != "constant":
        parts.append(job.lr_schedule)
    return ", ".join([*parts, f"{len(job.target_modules)} kind{'s' * (len(job.target_modules) > 1)} of layer"])


if __name__ == "__main__":
    main()
