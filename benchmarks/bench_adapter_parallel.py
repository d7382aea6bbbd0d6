"""Adapter parallelism against what else a user could run on several GPUs of one machine.

    python benchmarks/bench_adapter_parallel.py --out FOLDER [--gpus 2] [--seconds 420] [--parts ours fsdp]  # on GPUs
    python benchmarks/bench_adapter_parallel.py --record FOLDER            # anywhere: takes rows and bars into results/
    python benchmarks/bench_adapter_parallel.py --out FOLDER --shape tiny  # on a CPU, to try it

Random bfloat16 weights of the Qwen2.5-32B shape (--shape 70b: of Llama-3.1-70B), made on each device in its own part,
LoRA of rank 16 on all seven projections, 8 jobs of rows of 256 random tokens whose last 176 are labels, adapter batch
size 1, 2, 4 and 8. A step is forward, backward, clipping and AdamW. Tokens are useful ones: below the number of ranks
FSDP fills its batch up with rows that count for nobody. `exposed` is the part of our sharded step that the same step
does not take where every rank holds all layers and nothing is gathered; on half of the layers, of which that leaves
room. `replicated` compares one GPU with all of them on the Llama-3.1-8B shape, through the processes and calls that a
task uses.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LORA_RANK = 16
NUM_JOBS, BATCHES, LENGTH, LABELS = 8, (1, 2, 4, 8), 256, 176
PARTS = ("ours", "fsdp", "tensor", "replicated", "exposed", "pipeline", "compiled")
COLUMNS = ("row", "shape", "ranks", "method", "batch", "ms", "tokens_per_second", "peak_gib")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REPEATS = {"cuda": 5, "cpu": 1}
TINY_4 = (512, 64, 128, 4, 8, 4)
"""Sizes of a model that four ranks can divide, to try it on a CPU."""
SHAPES = {"tiny": ("qwen2.5-32b", TINY_4), "32b": ("qwen2.5-32b", None), "70b": ("llama-3.1-70b", None)}
"""Names in `random_models`, and other sizes."""


@dataclass(frozen=True)
class Plan:
    """What is measured, told to every rank."""

    shape: str
    device_type: str
    num_ranks: int
    pass_tokens: int
    """Of a pass of ours: the activations of all layers lie beside the rank's part of the model."""
    parts: tuple[str, ...]
    out: Path
    meeting: Path
    """Folder where the ranks of each part meet."""
    deadline: float
    """Wall time after which no further measurement is begun."""


def model_config(shape: str, layers: float = 1.0) -> Any:
    """Of the sharded comparison, or of a share of its layers; `tiny` for a CPU."""
    from random_models import model_config

    name, sizes = SHAPES[shape]
    return model_config(name, sizes=sizes, depth=layers)


def build(
    plan: Plan, device: Any, attention: str, prepare: Callable[[Any], Any], *, layers: float = 1.0
) -> tuple[Any, Any]:
    """A frozen model with random weights: its structure first, then what `prepare` leaves of it on this device.

    Returns:
        The model, and what `prepare` gave.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    config = model_config(plan.shape, layers)
    torch.set_default_dtype(torch.bfloat16 if plan.device_type == "cuda" else torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    prepared = prepare(model)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own.fill_(1.0) if "norm" in name else own.normal_(std=0.02)
    return model, prepared


def timed(step: Callable[[], Any], device: Any, finish: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and the highest memory of any rank in GiB."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        finish()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        step()
    wait()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(REPEATS[device.type]):
        step()
    wait()
    seconds = (time.perf_counter() - started) / REPEATS[device.type]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    most = torch.tensor([seconds, peak], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most[0]), float(most[1])


def make_jobs(batch: int, count: int = NUM_JOBS) -> list[Any]:
    from alto_core.domain import LoraJob

    return [
        LoraJob(
            learning_rate=1e-4,
            lora_rank=LORA_RANK,
            lora_alpha=2.0 * LORA_RANK,
            adapter_batch_size=batch,
            target_modules=TARGETS,
            seed=seed,
        )
        for seed in range(count)
    ]


def make_rows(count: int, vocabulary: int) -> list[Any]:
    import numpy as np

    from alto_core.data.rows import TokenRow

    draw = np.random.default_rng(0)
    mask = tuple(position >= LENGTH - LABELS for position in range(LENGTH))
    return [
        TokenRow(row_id=i, origin="", token_ids=tuple(draw.integers(0, vocabulary, LENGTH).tolist()), label_mask=mask)
        for i in range(count)
    ]


class Bench:
    """The measurements of one rank; all ranks make the same ones in the same order, and the first writes them down."""

    def __init__(self, plan: Plan, rank: int):
        import torch

        self.plan, self.rank = plan, rank
        self.device = torch.device(f"cuda:{rank}" if plan.device_type == "cuda" else "cpu")

    def note(self, method: str, batch: int, seconds: float, peak: float) -> None:
        if self.rank == 0:
            save(self.plan, method, batch, NUM_JOBS * batch * LENGTH, seconds, peak)

    def is_late(self) -> bool:
        """Whether no further measurement is to begin: as the first rank's clock says."""
        import torch
        import torch.distributed as dist

        late = torch.tensor([int(self.rank == 0 and time.time() > self.plan.deadline)])
        dist.broadcast(late, 0)
        return bool(late)

    def fresh(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def exposed(self) -> None:
        """The same passes with gathers and without, on half of the layers."""
        self.ours("ours, half of the layers", layers=0.5)
        self.fresh()
        self.ours("ours, half of the layers, whole", layers=0.5, whole=True)

    def ours(self, method: str = "ours", *, layers: float = 1.0, whole: bool = False) -> None:
        """The engine over a divided backbone; or over a whole one, passes run in the same way and gather nothing."""
        from alto_core.domain import JobBudget
        from alto_core.engine.backbone import Backbone
        from alto_core.engine.engine import Engine
        from alto_core.engine.packed_attention import PACKED_ATTENTION, register_packed_attention
        from alto_core.engine.sharding import ShardedLayers
        from alto_core.engine.target_modules import find_linear_layers

        register_packed_attention()

        def prepare(model: Any) -> Any:
            return None if whole else ShardedLayers(model, self.device)

        model, sharded = build(self.plan, self.device, PACKED_ATTENTION, prepare, layers=layers)
        backbone = Backbone(
            model=model,
            device=self.device,
            dtype=model.lm_head.weight.dtype,
            name=self.plan.shape,
            layers=find_linear_layers(model),
            head=model.lm_head,
            takes_ragged_rows=self.device.type == "cuda",
            shares_prompts=True,
            max_positions=None,
            sharded=sharded,
        )
        budget = JobBudget(total_steps=10**6, warmup_steps=1, eval_steps=(10**6,))
        rows = make_rows(NUM_JOBS * max(BATCHES), model.config.vocab_size)
        for batch in BATCHES:
            if self.is_late():
                break
            self.fresh()
            jobs = make_jobs(batch)[self.rank :: self.plan.num_ranks]
            with Engine(
                backbone,
                target_modules=TARGETS,
                num_slots=max(1, len(jobs)),
                rank_rows=max(1, len(jobs)) * LORA_RANK,
                max_pass_tokens=self.plan.pass_tokens,
                max_row_tokens=LENGTH,
                cuda_graph=False,
            ) as engine:
                for job in jobs:
                    engine.admit(job, budget)
                step = {job.job_id: rows[i * batch : (i + 1) * batch] for i, job in enumerate(jobs)}
                seconds, peak = timed(partial(engine.step, step), self.device, engine.take_records)
            self.note(method, batch, seconds, peak)

    def fsdp(self, *, compiled: bool = False) -> None:
        """One adapter after the other over all ranks."""
        import torch

        from benchmarks import fsdp_baselines

        def prepare(model: Any) -> None:
            fsdp_baselines.add_lora(model)
            fsdp_baselines.shard(model, self.device)

        self.fresh()
        model, _ = build(self.plan, self.device, "sdpa", prepare)
        if compiled:
            torch._dynamo.config.cache_size_limit = 64
            for layer in model.model.layers:
                layer.compile()
        known: dict[int, tuple[float, float]] = {}
        for batch in BATCHES:
            rows = max(1, -(-batch // self.plan.num_ranks))
            if rows not in known:
                if self.is_late():
                    break
                step = fsdp_baselines.fsdp_step(model, rows, LENGTH, LABELS, self.device)
                known[rows] = timed(step, self.device)
            seconds, peak = known[rows]
            self.note("FSDP, compiled" if compiled else "FSDP", batch, NUM_JOBS * seconds, peak)

    def tensor(self) -> None:
        """One adapter after the other, every layer cut over all ranks."""
        from benchmarks import tp_baseline

        self.fresh()
        model, _ = build(self.plan, self.device, "sdpa", tp_baseline.cut)
        for batch in BATCHES:
            if self.is_late():
                break
            step = tp_baseline.tensor_parallel_step(model, batch, LENGTH, LABELS, self.device)
            seconds, peak = timed(step, self.device)
            self.note("tensor parallel", batch, NUM_JOBS * seconds, peak)

    def pipeline(self) -> None:
        """Every rank has some of the layers; the jobs' batches follow each other through them."""
        from torch import nn

        from benchmarks import fsdp_baselines

        def prepare(model: Any) -> None:
            share = -(-len(model.model.layers) // self.plan.num_ranks)
            own = model.model.layers[self.rank * share : (self.rank + 1) * share]
            model.model.layers = nn.ModuleList(own)
            model.config.num_hidden_layers = len(own)
            fsdp_baselines.add_lora(model, NUM_JOBS)

        self.fresh()
        model, _ = build(self.plan, self.device, "sdpa", prepare)
        for batch in BATCHES:
            if self.is_late():
                break
            step = fsdp_baselines.pipeline_step(model, NUM_JOBS, batch, LENGTH, LABELS, self.device)
            seconds, peak = timed(step, self.device)
            self.note("pipeline", batch, seconds, peak)


def run_rank(rank: int, plan: Plan, part: str) -> None:
    """One rank through one part."""
    import torch
    import torch.distributed as dist

    if plan.device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if plan.device_type == "cuda" else "gloo"
    meeting = f"file://{plan.meeting / part}"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=plan.num_ranks)
    bench = Bench(plan, rank)
    parts: dict[str, Callable[[], None]] = {
        "ours": bench.ours,
        "fsdp": bench.fsdp,
        "tensor": bench.tensor,
        "exposed": bench.exposed,
        "pipeline": bench.pipeline,
        "compiled": lambda: bench.fsdp(compiled=True),
    }
    parts[part]()
    dist.destroy_process_group()


def measure_replicated(plan: Plan) -> None:
    """The same jobs on one device, and as many again on each other one, through the processes that a task uses."""
    from random_models import write_random_model

    from alto_core.config import ModelSection
    from alto_core.domain import JobBudget
    from alto_core.engine.adapter_parallel import ParallelEngine
    from alto_core.engine.ranks import RankGroup

    on_gpu = plan.device_type == "cuda"
    in_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=in_memory if on_gpu and in_memory.is_dir() else None))
    try:
        write_random_model(folder, "llama-3.1-8b", tiny=plan.shape == "tiny")
        budget = JobBudget(total_steps=10**6, warmup_steps=1, eval_steps=(10**6,))
        batch, per_rank = 1, NUM_JOBS if plan.shape == "tiny" else 2 * NUM_JOBS
        for num_ranks in (1, plan.num_ranks):
            devices = [f"cuda:{i}" if on_gpu else "cpu" for i in range(num_ranks)]
            jobs = make_jobs(batch, per_rank * num_ranks)
            rows = make_rows(len(jobs) * batch, 512)
            ranks = RankGroup(ModelSection(name=str(folder)), devices, sharded=False)
            try:
                with ParallelEngine(
                    ranks,
                    target_modules=TARGETS,
                    num_slots=len(jobs),
                    rank_rows=per_rank * LORA_RANK,
                    max_row_tokens=LENGTH,
                ) as engine:
                    for job in jobs:
                        engine.admit(job, budget)
                    step = {job.job_id: rows[i * batch : (i + 1) * batch] for i, job in enumerate(jobs)}
                    for _ in range(3):
                        engine.step(step)
                    engine.take_records()
                    started, repeats = time.perf_counter(), 20 if on_gpu else 1
                    for _ in range(repeats):
                        engine.step(step)
                    engine.take_records()
                    seconds = (time.perf_counter() - started) / repeats
            finally:
                ranks.close()
            save(plan, f"replicated, {num_ranks} ranks", batch, len(jobs) * batch * LENGTH, seconds, 0.0)
    finally:
        shutil.rmtree(folder)


def save(plan: Plan, method: str, batch: int, tokens: int, seconds: float, peak: float) -> None:
    """Add a row, and make the bars of all that is known anew."""
    from benchmarks.bench_lora_linear import environment

    row = f"{plan.shape}_{plan.num_ranks}_{method}_b{batch}".replace(", ", "_").replace(" ", "_")
    file = plan.out / "adapter_parallel.csv"
    rows = {}
    if file.exists():
        with file.open(newline="", encoding="utf-8") as source:
            rows = {known["row"]: known for known in csv.DictReader(source)}
    values = (row, plan.shape, plan.num_ranks, method, batch, f"{1000 * seconds:.3f}", f"{tokens / seconds:.1f}")
    rows[row] = dict(zip(COLUMNS, (*values, f"{peak:.2f}"), strict=True))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    content = {**environment(), "bars": bars([dict(known) for known in rows.values()], plan.shape, plan.num_ranks)}
    options = f"--shape {plan.shape} --gpus {plan.num_ranks} --pass-tokens {plan.pass_tokens}"
    content["command"] = f"python benchmarks/bench_adapter_parallel.py {options} --out FOLDER"
    (plan.out / "adapter_parallel.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(
        f"{method:24s} b{batch}  {1000 * seconds:10.1f} ms  {tokens / seconds:10.0f} tokens/s  {peak:6.1f} GiB",
        flush=True,
    )


def bars(rows: Sequence[dict[str, Any]], shape: str, num_ranks: int) -> dict[str, float]:
    """Ratios of what has been measured of a shape on so many ranks."""
    prefix = {("32b", 2): "ap", ("70b", 4): "ap4"}.get((shape, num_ranks), f"ap_{shape}_{num_ranks}")
    speed = {
        (row["method"], int(row["batch"])): float(row["tokens_per_second"])
        for row in rows
        if (row["shape"], int(row["ranks"])) == (shape, num_ranks)
    }
    found: dict[str, float] = {}
    exposed = []
    others = {"fsdp": "FSDP", "fsdp_fast": "FSDP, compiled", "tensor": "tensor parallel", "pipeline": "pipeline"}
    for batch in BATCHES:
        ours = speed.get(("ours", batch))
        for name, method in others.items():
            if ours and (method, batch) in speed:
                found[f"{prefix}.over_{name}_b{batch}"] = ours / speed[method, batch]
        gathered, whole = (speed.get((f"ours, half of the layers{how}", batch)) for how in ("", ", whole"))
        if gathered and whole:
            exposed.append(max(0.0, 1 - gathered / whole))
    if exposed:
        found[f"{prefix}.exposed_gather_share"] = max(exposed)
    one, many = speed.get(("replicated, 1 ranks", 1)), speed.get((f"replicated, {num_ranks} ranks", 1))
    if one and many:
        found[f"{prefix}.replicated_scaling"] = many / one
    return found


def measure(plan: Plan) -> None:
    """All parts, each in processes of its own: one that fails takes no other with it."""
    import torch.multiprocessing

    for part in (part for part in PARTS if part in plan.parts and time.time() < plan.deadline):
        try:
            if part == "replicated":
                measure_replicated(plan)
            else:
                torch.multiprocessing.spawn(run_rank, (plan, part), nprocs=plan.num_ranks)
        except Exception as error:  # told, and the next part begun
            print(f"{part} failed: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=("32b", "70b", "tiny"), default="32b")
    parser.add_argument("--pass-tokens", type=int, default=4096, help="of a pass of ours")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing more after so long")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "adapter_parallel")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        measure(
            Plan(
                shape=options.shape,
                device_type="cpu" if options.shape == "tiny" else "cuda",
                num_ranks=options.gpus,
                pass_tokens=options.pass_tokens,
                parts=tuple(options.parts),
                out=options.out,
                meeting=Path(folder),
                deadline=time.time() + options.seconds,
            )
        )


if __name__ == "__main__":
    main()
