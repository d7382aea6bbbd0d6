"""Answers of many adapters in one running batch, against one adapter at a time at its own best batch size.

    python benchmarks/bench_generation.py MODEL GSM8K --out FOLDER    # writes FOLDER/generation.csv and .json
    python benchmarks/bench_generation.py --record FOLDER             # anywhere: takes rows and bar into results/

MODEL is a Hugging Face folder (SmolLM2), GSM8K one with train.jsonl and test.jsonl (question, answer). The adapters,
of ranks 8, 16 and 32, are first trained for a few steps, so that answers end as answers do. Then each of them answers
every question greedily. One at a time is measured twice, with this engine (three adapters, one after another) and with
PEFT and transformers' `generate` (left-padded, as users run it; one adapter), each over several batch sizes; the bar is
held against the best of all. The time of one step with all rows in it, and the share of each part of it, are printed.

Everything is written as it is measured, the parts in the order of their weight, and nothing begins after the minutes
are over. Needs torch, transformers, pydantic, PyYAML and psutil; without PEFT its rows are left out. Tokens are those
of answers, stop tokens not counted.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generation_profile import describe, profile_step, step_milliseconds

BAR = "evaluate.batched_over_single"
COMMAND = "python benchmarks/bench_generation.py MODEL GSM8K --out FOLDER"
COLUMNS = ("method", "max_rows", "adapters", "questions", "answers", "tokens", "seconds", "tokens_per_second", "note")
RANKS = (8, 16, 32)
RATES = (2e-4, 5e-4, 1e-3, 2e-3)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRAIN_ROWS_PER_STEP = 4
ALONE = 3
"""Adapters that answer one at a time, one of each rank."""
OF_ALL, ONE_BY_ONE, PEFT = (
    "this engine, all adapters",
    "this engine, one adapter at a time",
    "PEFT generate, one adapter",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of one method."""

    method: str
    max_rows: int
    adapters: int
    questions: int
    answers: list[tuple[int, ...]]
    seconds: float
    note: str = ""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def row(self) -> tuple[Any, ...]:
        return (
            self.method,
            self.max_rows,
            self.adapters,
            self.questions,
            len(self.answers),
            self.tokens,
            f"{self.seconds:.3f}",
            f"{self.tokens_per_second:.1f}",
            self.note,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be answered, and by whom."""

    engine: Any
    model: Any
    job_ids: list[str]
    prompts: list[tuple[int, ...]]
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    max_new_tokens: int


def read_rows(file: Path, tokenizer: Any, limit: int | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids of prompt and answer, stop token included."""
    lines = file.read_text(encoding="utf-8").splitlines()[:limit]
    rows = []
    for line in lines:
        content = json.loads(line)
        prompt = tokenizer(content["question"].strip() + "\n", add_special_tokens=False)["input_ids"]
        answer = tokenizer(content["answer"].strip(), add_special_tokens=False)["input_ids"]
        rows.append((tuple(prompt), (*answer, tokenizer.eos_token_id)))
    return rows


def make_jobs(count: int) -> list[Any]:
    from alto_core.domain import LoraJob

    return [
        LoraJob(
            learning_rate=RATES[i // len(RANKS) % len(RATES)],
            lora_rank=RANKS[i % len(RANKS)],
            lora_alpha=2.0 * RANKS[i % len(RANKS)],
            adapter_batch_size=TRAIN_ROWS_PER_STEP,
            target_modules=TARGETS,
            seed=i,
        )
        for i in range(count)
    ]


def train(engine: Any, jobs: Sequence[Any], rows: Sequence[Any], steps: int, deadline: float) -> int:
    """Train all jobs on the same rows, step by step; returns the steps made."""
    from alto_core.data.rows import TokenRow

    token_rows = [
        TokenRow(
            row_id=i,
            origin=f"train:{i}",
            token_ids=(*prompt, *answer),
            label_mask=(False,) * len(prompt) + (True,) * len(answer),
        )
        for i, (prompt, answer) in enumerate(rows)
    ]
    for step in range(steps):
        if time.perf_counter() > deadline:
            return step
        start = step * TRAIN_ROWS_PER_STEP % (len(token_rows) - TRAIN_ROWS_PER_STEP + 1)
        engine.step({job.job_id: token_rows[start : start + TRAIN_ROWS_PER_STEP] for job in jobs})
        engine.take_records()  # waits, so that the deadline means something
    return steps


def answer_with_engine(work: Work, method: str, job_ids: Sequence[str], count: int, max_rows: int | None) -> Measured:
    """The first so many prompts, by each of these adapters."""
    asked = [(job_id, prompt) for prompt in work.prompts[:count] for job_id in job_ids]
    answers, seconds = timed(
        lambda: work.engine.generate(
            asked, max_new_tokens=work.max_new_tokens, stop_token_ids=work.stop_token_ids, max_rows=max_rows
        )
    )
    return Measured(
        method=method,
        max_rows=max_rows or 0,
        adapters=len(job_ids),
        questions=count,
        answers=answers,
        seconds=seconds,
        note="max_rows 0: as many as memory allows" if max_rows is None else "",
    )


def answer_one_by_one(work: Work, max_rows: int) -> Measured:
    """All prompts by the first few adapters, one adapter after another."""
    job_ids = work.job_ids[:ALONE]
    each = [answer_with_engine(work, ONE_BY_ONE, [job_id], len(work.prompts), max_rows) for job_id in job_ids]
    return dataclasses.replace(
        each[0],
        adapters=len(each),
        answers=[answer for measured in each for answer in measured.answers],
        seconds=sum(measured.seconds for measured in each),
    )


def steps_of(work: Work, job_ids: Sequence[str], rows: int) -> Callable[[int], object]:
    """Answers of so many tokens to so many rows, none of which ends before."""
    turns = itertools.cycle((job_id, prompt) for prompt in work.prompts for job_id in job_ids)
    asked = list(itertools.islice(turns, rows))
    return lambda tokens: timed(
        lambda: work.engine.generate(asked, max_new_tokens=tokens, stop_token_ids=(), max_rows=rows)
    )


def look_at_steps(work: Work, rows: int) -> None:
    """Print what a step takes and what of it goes where: with layers as transformers wrote them, then compiled."""
    from alto_core.engine.regional_compile import compile_layers, uncompile_layers

    alone = min(rows, len(work.prompts))
    for change, how in ((uncompile_layers, "layers as they are"), (compile_layers, "layers compiled")):
        change(work.model)
        for job_ids, count in ((work.job_ids, rows), (work.job_ids[:1], alone)):
            answer = steps_of(work, job_ids, count)
            answer(2)  # compiles and loads
            _, seconds = timed(lambda answer=answer: answer(1))
            print(f"{how}: prompts of {count} rows read in {seconds:.2f} s", flush=True)
            milliseconds = step_milliseconds(answer)
            print(
                f"{how}: one step of {len(job_ids)} adapters, {count} rows: {milliseconds:.2f} ms, "
                f"{1e3 * count / milliseconds:.0f} tokens/s",
                flush=True,
            )
            for line in describe(profile_step(answer)):
                print("   ", line, flush=True)


def answer_with_peft(work: Work, model: Any, count: int, max_rows: int) -> Measured:
    """The same prompts by one adapter, in left-padded batches of like length, through transformers' `generate`."""
    import torch

    order = sorted(range(count), key=lambda i: len(work.prompts[i]))
    answers: list[tuple[int, ...]] = [()] * count
    device = next(model.parameters()).device

    def run() -> None:
        for start in range(0, count, max_rows):
            numbers = order[start : start + max_rows]
            longest = max(len(work.prompts[i]) for i in numbers)
            padding = [longest - len(work.prompts[i]) for i in numbers]
            ids = [[work.pad_token_id] * pad + list(work.prompts[i]) for pad, i in zip(padding, numbers, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
            out = model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False,
                max_new_tokens=work.max_new_tokens,
                eos_token_id=list(work.stop_token_ids),
                pad_token_id=work.pad_token_id,
            )
            for i, new_ids in zip(numbers, out[:, longest:].tolist(), strict=True):
                stop = next((n for n, token in enumerate(new_ids) if token in work.stop_token_ids), len(new_ids))
                answers[i] = tuple(new_ids[:stop])

    with torch.inference_mode():
        _, seconds = timed(run)
    return Measured(
        method=PEFT,
        max_rows=max_rows,
        adapters=1,
        questions=count,
        answers=answers,
        seconds=seconds,
    )


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall seconds, the device's queue included."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def load_peft(model_folder: Path, adapter_folder: Path, device: str, dtype: Any) -> Any:
    """None where PEFT is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to(device)
    return PeftModel.from_pretrained(base, str(adapter_folder)).eval()


def measure(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer

    from alto_core.config import ModelSection
    from alto_core.domain import JobBudget
    from alto_core.engine.backbone import load_backbone
    from alto_core.engine.engine import Engine

    started = time.perf_counter()
    deadline = started + 60 * options.minutes
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train_rows = read_rows(options.gsm8k / "train.jsonl", tokenizer, 400)
    questions = [prompt for prompt, _ in read_rows(options.gsm8k / "test.jsonl", tokenizer, options.questions)]
    jobs = make_jobs(options.adapters)
    backbone = load_backbone(ModelSection(name=str(options.model)), device)
    table: list[Measured] = []

    def note(measured: Measured) -> Measured:
        table.append(measured)
        print(*measured.row(), flush=True)
        write(options.out, table)
        return measured

    def there_is_time() -> bool:
        return time.perf_counter() < deadline

    sizes = {"num_slots": len(jobs), "rank_rows": sum(job.lora_rank for job in jobs), "max_lora_rank": max(RANKS)}
    longest = max(len(prompt) + len(answer) for prompt, answer in train_rows)
    with Engine(backbone, target_modules=TARGETS, max_row_tokens=longest, **sizes) as engine:
        for job in jobs:
            engine.admit(job, JobBudget(total_steps=10_000, warmup_steps=1, eval_steps=(10_000,)))
        made = train(engine, jobs, train_rows, options.train_steps, started + 15 * options.minutes)
        print(f"{len(jobs)} adapters trained for {made} steps, {time.perf_counter() - started:.0f} s", flush=True)
        engine.forget_captures()
        work = Work(
            engine=engine,
            model=backbone.model,
            job_ids=[job.job_id for job in jobs],
            prompts=questions,
            stop_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.eos_token_id,
            max_new_tokens=options.max_new_tokens,
        )
        single_rows = sorted({min(rows, len(questions)) for rows in options.single_rows}, reverse=True)
        # every kernel for every number of rows is compiled before anything counts
        for job_ids, rows in ((work.job_ids, options.batched_rows), (work.job_ids[:1], single_rows)):
            for count in rows:
                steps_of(work, job_ids, count)(3)
        print(f"warm after {time.perf_counter() - started:.0f} s", flush=True)
        note(answer_one_by_one(work, single_rows[0]))
        first, *others = options.batched_rows
        every = note(answer_with_engine(work, OF_ALL, work.job_ids, len(questions), first))
        alone = table[0].answers[: len(questions)]
        mine = every.answers[:: len(jobs)]
        same = sum(a == b for a, b in zip(mine, alone, strict=True)) / len(alone)
        print(f"first adapter's answers equal to those it gave alone: {same:.3f}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            engine.export(work.job_ids[0], Path(folder) / "adapter", best=False)
            peft = load_peft(options.model, Path(folder) / "adapter", device, backbone.dtype)
        if peft is not None:
            note(answer_with_peft(work, peft, len(questions), single_rows[0]))
        save_ratio(options.out, table)
        if options.profile_rows and torch.cuda.is_available() and there_is_time():
            look_at_steps(work, options.profile_rows)
        for rows in others:
            if there_is_time():
                note(answer_with_engine(work, OF_ALL, work.job_ids, len(questions), rows))
        for rows in single_rows[1:]:
            if there_is_time():
                note(answer_one_by_one(work, rows))
            if peft is not None and there_is_time():
                note(answer_with_peft(work, peft, min(rows, len(questions)), rows))
    save_ratio(options.out, table)
    if torch.cuda.is_available():
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"{time.perf_counter() - started:.0f} s in all")


def save_ratio(out: Path, table: Sequence[Measured]) -> None:
    """Write the bar as it stands with what has been measured so far."""
    batched, single = (
        max(m.tokens_per_second for m in table if (m.method == OF_ALL) is is_batched) for is_batched in (True, False)
    )
    write(out, table, ratio=batched / single)
    print(f"{batched:.0f} tokens/s over {single:.0f}: {batched / single:.2f}", flush=True)


def write(out: Path, table: Sequence[Measured], *, ratio: float | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "generation.csv").open("w", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([COLUMNS, *(measured.row() for measured in table)])
    content = {**environment(), "command": COMMAND, "bars": {} if ratio is None else {BAR: ratio}}
    (out / "generation.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def environment() -> dict[str, str]:
    """What the figures were measured with."""
    import platform

    import torch
    import transformers

    versions = f"python {platform.python_version()}; torch {torch.__version__}; transformers {transformers.__version__}"
    return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("gsm8k", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0, help="no new measurement begins after this")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--questions", type=int, default=1319)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--train-steps", type=int, default=30)
    parser.add_argument("--single-rows", type=int, nargs="*", default=[1319, 660, 256])
    parser.add_argument("--batched-rows", type=int, nargs="*", default=[8192, 16384, 4096])
    parser.add_argument(
        "--profile-rows", type=int, default=8192, help="of the steps that are looked at, on CUDA; 0: none"
    )
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "generation")
    elif options.model and options.gsm8k and options.out:
        measure(options)
    else:
        parser.error("expected MODEL, GSM8K and --out, or --record FOLDER")


if __name__ == "__main__":
    main()
