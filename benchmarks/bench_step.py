"""The whole training step of many jobs, through the engine, against what else a user could run.

    python benchmarks/bench_step.py --out FOLDER [--rows 8b_16x1 ...]   # on a GPU: writes FOLDER/step.csv, step.json
    python benchmarks/bench_step.py --record FOLDER                      # anywhere: takes rows and bars into results/

Random bfloat16 weights of the SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B shapes, LoRA of ranks 16/32/64 on all seven
projections, rows of 192 random tokens with labels on the last 132. A step is forward, backward, clipping and AdamW of
every job on float32 adapters, with the packing of its rows and their way to the device. "share" is 4 x parameters x
tokens, the frozen backbone's useful work, over the step's time and the card's matmul rate, both of one process.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS = (16, 32, 64)
LENGTH, LABELS = 192, 132
REPEATS = 5
PEFT_ROWS = ("1b_32x1", "1b_32x2", "1b_32x4")
COMPILED = "PEFT + torch.compile, one at a time"
PLANS = {
    "8b_16x1": ("8b", 16, 1),
    "8b_16x2": ("8b", 16, 2),
    "8b_16x4": ("8b", 16, 4),
    "1b_32x1": ("1b", 32, 1),
    "1b_32x2": ("1b", 32, 2),
    "1b_32x4": ("1b", 32, 4),
    "8b_1": ("8b", 1, 1),
    "8b_2": ("8b", 2, 1),
    "8b_4": ("8b", 4, 1),
    "1b_1": ("1b", 1, 1),
    "1b_4": ("1b", 4, 1),
    "1b_lengths": ("1b", 32, 1),
    "1b_1x32": ("1b", 1, 32),
    "135m_1": ("135m", 1, 1),
    "135m_15x1": ("135m", 15, 1),
    "135m_60x1": ("135m", 60, 1),
    "135m_1x60": ("135m", 1, 60),
}
"""Model, jobs, rows per job."""
COLUMNS = ("row", "model", "jobs", "batch", "tokens", "method", "ms_min", "ms", "ms_max", "share", "peak_gib")


def build_backbone(name: str, attention: str | None = None) -> Any:
    """A backbone with random weights, as `load_backbone` gives it."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    from alto_core.engine.backbone import Backbone
    from alto_core.engine.packed_attention import PACKED_ATTENTION, register_packed_attention
    from alto_core.engine.target_modules import find_linear_layers
    from benchmarks.backbone_steps import model_config

    register_packed_attention()
    config = model_config(name)
    config._attn_implementation = attention or PACKED_ATTENTION
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(std=0.02)
    model.tie_weights()
    model.eval().requires_grad_(False)
    return Backbone(
        model=model,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        name=name,
        layers=find_linear_layers(model),
        head=model.lm_head,
        takes_ragged_rows=True,
        shares_prompts=True,
        max_positions=None,
    )


def make_jobs(count: int, batch: int) -> list[Any]:
    from alto_core.domain import LoraJob

    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [
        LoraJob(
            learning_rate=1e-4,
            lora_rank=rank,
            lora_alpha=2.0 * rank,
            adapter_batch_size=batch,
            target_modules=targets,
            seed=seed,
        )
        for seed, rank in enumerate(itertools.islice(itertools.cycle(RANKS), count))
    ]


def make_rows(count: int, vocabulary: int, lengths: Sequence[int] = (LENGTH,), seed: int = 0) -> list[Any]:
    """Random rows; the last 132 of 192 tokens, or the same share of another length, are labels."""
    import numpy as np

    from alto_core.data.rows import TokenRow

    draw = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = lengths[i % len(lengths)]
        first_label = length - max(1, length * LABELS // LENGTH)
        ids = tuple(draw.integers(0, vocabulary, length).tolist())
        mask = tuple(position >= max(1, first_label) for position in range(length))
        rows.append(TokenRow(row_id=i, origin=f"random:{i}", token_ids=ids, label_mask=mask))
    return rows


@contextmanager
def engine_with(backbone: Any, jobs: Sequence[Any], **options: Any) -> Iterator[Any]:
    from alto_core.domain import JobBudget
    from alto_core.engine.engine import Engine

    budget = JobBudget(total_steps=10**6, warmup_steps=1, eval_steps=(10**6,))
    engine = Engine(
        backbone,
        target_modules=jobs[0].target_modules,
        num_slots=len(jobs),
        rank_rows=sum(job.lora_rank for job in jobs),
        max_lora_rank=max(job.lora_rank for job in jobs),
        **options,
    )
    try:
        for job in jobs:
            engine.admit(job, budget)
        yield engine
    finally:
        engine.close()


def milliseconds(step: Callable[[int], Any], *, repeats: int = REPEATS, seconds: float = 0.4) -> list[float]:
    """Time of one call in each of a few rounds, by device events; the calls are given their number."""
    import torch

    def run(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for i in range(count):
            step(i)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    run(2)
    count = max(3, min(200, int(1000 * seconds / run(2))))
    return [run(count) for _ in range(repeats)]


def matmul_ceiling() -> float:
    """FLOP/s of a bfloat16 product of 8192 cubed, random data."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = milliseconds(lambda _: torch.mm(a, b, out=out), seconds=0.2)
    return 2 * 8192**3 / (statistics.median(times) / 1000)


def time_ours(backbone: Any, jobs: Sequence[Any], batch: int, *, profile: bool = False) -> dict[str, list[float]]:
    """The engine's step, and the replays of its graph alone: what is between them is the device waiting."""
    from benchmarks import lora_methods

    pools = [make_rows(len(jobs) * batch, backbone.model.config.vocab_size, seed=seed) for seed in range(4)]
    steps = [{job.job_id: pool[i * batch : (i + 1) * batch] for i, job in enumerate(jobs)} for pool in pools]
    with engine_with(backbone, jobs, max_pass_tokens=len(jobs) * batch * LENGTH, max_row_tokens=LENGTH) as engine:
        times = milliseconds(lambda i: engine.step(steps[i % len(steps)]))
        records = engine.take_records()
        assert all(record.train_loss == record.train_loss for record in records), "a loss is not a number"
        (captured,) = engine._runner._captured.values()
        replays = milliseconds(lambda _: captured.graph.replay())
        if profile:
            lora_methods.print_profile("ours", captured.graph)
    return {"ours": times, "ours, replay": replays}


def log_normal_lengths(count: int, seed: int) -> list[int]:
    """Lengths of real questions and answers: log-normal, mean about 180, 1024 at most."""
    import numpy as np

    draw = np.random.default_rng(seed)
    return [int(length) for length in np.clip(draw.lognormal(5.05, 0.55, count), 16, 1024)]


def time_lengths(backbone: Any, jobs: Sequence[Any]) -> tuple[dict[str, list[float]], int]:
    """Steps over rows of real lengths, packed and padded to the longest; and the useful tokens of one step."""
    lengths = log_normal_lengths(len(jobs), 0)
    packed = make_rows(len(jobs), backbone.model.config.vocab_size, lengths)
    longest = max(lengths)
    padded = [
        dataclasses.replace(
            row,
            token_ids=row.token_ids + (0,) * (longest - len(row.token_ids)),
            label_mask=row.label_mask + (False,) * (longest - len(row.token_ids)),
        )
        for row in packed
    ]
    times = {}
    for method, rows in (("ours, packed", packed), ("ours, padded", padded)):
        step = {job.job_id: [row] for job, row in zip(jobs, rows, strict=True)}
        with engine_with(backbone, jobs, max_pass_tokens=10**6, max_row_tokens=longest) as engine:
            times[method] = milliseconds(lambda _, engine=engine, step=step: engine.step(step))
    return times, sum(lengths)


def time_frozen(backbone: Any, tokens: int) -> list[float]:
    """Forward and backward of the frozen backbone alone, compiled and captured as the engine does it."""
    import torch

    from alto_core.engine.packed_attention import RaggedRows
    from alto_core.engine.regional_compile import compile_layers, uncompile_layers
    from benchmarks.lora_methods import capture
    from kernels.linear_cross_entropy import linear_cross_entropy

    model, rows = backbone.model, tokens // LENGTH
    offsets = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32, device="cuda")
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    positions = torch.arange(LENGTH, device="cuda").repeat(rows)[None]
    chosen = torch.arange(tokens, device="cuda").view(rows, LENGTH)[:, -LABELS - 1 : -1].reshape(-1)
    labels, weights = ids[0, chosen + 1], torch.full((len(chosen),), 1.0 / len(chosen), device="cuda")
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()

    def step() -> Any:
        hidden = model.model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False, packed_rows=RaggedRows(offsets, LENGTH)
        ).last_hidden_state[0]
        objective, _ = linear_cross_entropy(hidden[chosen], model.lm_head.weight, None, labels, weights)
        return torch.autograd.grad(objective, [embedded])

    compile_layers(model)
    graph = capture(step)
    times = milliseconds(lambda _: graph.replay())
    graph.reset()
    uncompile_layers(model)
    return times


def time_peft(name: str, count: int, batch: int) -> dict[str, list[float]]:
    """One step of every job, one adapter at a time: PEFT eager and from a CUDA graph.

    With one row a job also eager with compiled layers; that is measured at rank 32 and taken for all ranks.
    """
    totals: dict[str, list[float]] = {}
    for rank in RANKS:
        num_jobs = len(range(RANKS.index(rank), count, len(RANKS)))
        with_compile = batch == 1 and rank == 32
        for method, times in _time_one_adapter(name, rank, batch, with_compile=with_compile).items():
            if method == COMPILED:
                totals[method] = [count * t for t in times]
                continue
            sums = totals.setdefault(method, [0.0] * len(times))
            totals[method] = [total + num_jobs * t for total, t in zip(sums, times, strict=True)]
    return totals


def _time_one_adapter(name: str, rank: int, batch: int, *, with_compile: bool) -> dict[str, list[float]]:
    import peft
    import torch

    from benchmarks.backbone_steps import build_model
    from benchmarks.lora_methods import capture

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    adapted = peft.get_peft_model(build_model(name), config)
    inner = adapted.get_base_model()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
    ids = torch.randint(0, inner.config.vocab_size, (batch, LENGTH), device="cuda")

    def step(_: int = 0) -> None:
        hidden = inner.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = inner.lm_head(hidden[:, -LABELS - 1 : -1].reshape(-1, hidden.shape[-1]))
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[:, -LABELS:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    found = {"PEFT, one at a time": milliseconds(step, repeats=3, seconds=0.5)}
    graph = capture(step)
    found["PEFT in a graph, one at a time"] = milliseconds(lambda _: graph.replay(), repeats=3, seconds=0.3)
    graph.reset()
    if with_compile:
        for layer in inner.model.layers:
            layer.compile()
        found[COMPILED] = milliseconds(step, repeats=3, seconds=0.5)
    torch.cuda.empty_cache()
    return found


def time_bmm(name: str, count: int, batch: int) -> list[float]:
    """All adapters stacked and padded to rank 64 behind every layer, `bmm`, fused AdamW, eager."""
    import torch

    from benchmarks.backbone_steps import Adapters, attach_stacked, build_model, make_step

    model = build_model(name)
    ranks = tuple(itertools.islice(itertools.cycle(RANKS), count))
    leaves = attach_stacked(model, Adapters(model, (batch * LENGTH,) * count, ranks), "bmm")
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    step = make_step(model, count * batch, leaves)

    def whole(_: int) -> None:
        _, _, *gradients = step()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()

    return milliseconds(whole, repeats=3)


def measure(row: str, out: Path, *, profile: bool = False) -> None:
    import gc

    import torch

    from benchmarks.bench_lora_linear import environment

    name, count, batch = PLANS[row]
    tokens = count * batch * LENGTH
    backbone = build_backbone(name)
    num_parameters = sum(p.numel() for p in backbone.model.parameters())
    ceiling = matmul_ceiling()
    torch.cuda.reset_peak_memory_stats()
    if row == "1b_lengths":
        times, tokens = time_lengths(backbone, make_jobs(count, batch))
    else:
        times = time_ours(backbone, make_jobs(count, batch), batch, profile=profile)
    peaks = {"ours": torch.cuda.max_memory_allocated() / 2**30}
    if row != "1b_lengths":
        times["frozen backbone, compiled, graph"] = time_frozen(backbone, tokens)
    del backbone
    gc.collect()
    torch.cuda.empty_cache()
    if row in PEFT_ROWS:
        times.update(time_peft(name, count, batch))
        torch.cuda.reset_peak_memory_stats()
        times["padded bmm, eager"] = time_bmm(name, count, batch)
        peaks["padded bmm, eager"] = torch.cuda.max_memory_allocated() / 2**30
    medians = {method: statistics.median(values) for method, values in times.items()}
    shares = {method: 4 * num_parameters * tokens / (ms / 1000) / ceiling for method, ms in medians.items()}
    table = [
        (row, name, count, batch, tokens, method, f"{min(values):.3f}", f"{medians[method]:.3f}", f"{max(values):.3f}",
         f"{shares[method]:.4f}", f"{peaks[method]:.2f}" if method in peaks else "")
        for method, values in times.items()
    ]  # fmt: skip
    bars = _bars(row, medians, shares)
    known = json.loads((out / "step.json").read_text()) if (out / "step.json").exists() else {"bars": {}, "ceiling": {}}
    known = {**environment(), "bars": {**known["bars"], **bars}, "ceiling": {**known["ceiling"], row: ceiling / 1e12}}
    (out / "step.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
    is_new = not (out / "step.csv").exists()
    with (out / "step.csv").open("a", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([*([COLUMNS] if is_new else []), *table])
    print(row, f"ceiling {ceiling / 1e12:.0f} TFLOP/s, peak {peaks['ours']:.1f} GiB", flush=True)
    for method, ms in medians.items():
        print(f"   {method:36s} {ms:9.2f} ms  share {shares[method]:.3f}", flush=True)


def _bars(row: str, medians: dict[str, float], shares: dict[str, float]) -> dict[str, float]:
    bars = {}
    if row in ("8b_16x1", "8b_16x2", "1b_32x1", "1b_32x4"):
        bars[f"engine.ceiling_{row}"] = shares["ours"]
    if row in ("8b_1", "8b_2", "8b_4", "1b_1", "1b_4"):
        bars[f"engine.ms_{row}"] = medians["ours"]
    if row in PEFT_ROWS:
        batch = row[-1]
        bars[f"engine.over_peft_eager_b{batch}"] = medians["PEFT, one at a time"] / medians["ours"]
        bars[f"engine.over_peft_graph_b{batch}"] = medians["PEFT in a graph, one at a time"] / medians["ours"]
    if row == "1b_lengths":
        bars["engine.packed_gain"] = medians["ours, padded"] / medians["ours, packed"]
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help=f"of {', '.join(PLANS)}; all when none is named")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one replay")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "step")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.rows or list(PLANS)
    if len(rows) == 1:
        measure(rows[0], options.out, profile=options.profile)
        return
    for row in rows:  # a process each: captured graphs hold their memory
        command = [sys.executable, __file__, "--out", str(options.out), "--rows", row]
        subprocess.run(command + ["--profile"] * options.profile, check=False)


if __name__ == "__main__":
    main()
