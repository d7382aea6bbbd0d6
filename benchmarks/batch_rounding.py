"""Whether answers that a batch changes part at near ties alone, or whether rows of a batch disturb each other.

    python benchmarks/batch_rounding.py MODEL GSM8K --record    # writes benchmarks/results/batch_rounding.csv

MODEL is a Hugging Face folder (SmolLM2), GSM8K one with train.jsonl and test.jsonl. A few adapters, trained for a few
steps, answer the same questions greedily: each alone, then all of them and the untuned model together. Where answers
part, PEFT and transformers, which know no batch, read what both have in common and say in float32 how far the two
tokens are apart, and in the dtype of the run by how much its rounding moves that distance. The same over all tokens
that were answered tells what a near tie and what plain rounding is. In float32 no answer may part.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_generation import TARGETS, environment, make_jobs, read_rows, train

RESULTS = Path(__file__).resolve().parent / "results" / "batch_rounding.csv"
COLUMNS = (
    "dtype", "rows_together", "rows_alone", "answers", "equal", "tokens",
    "gap_median", "rounding_median", "rounding_p99", "rounding_max",
    "gap_where_parted_median", "gap_where_parted_max", "rounding_where_parted_max", "gpu", "versions",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")
FOREVER = 1e9


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A prompt and what came, from its adapter alone and from it among others."""

    job_id: str | None
    prompt: tuple[int, ...]
    alone: tuple[int, ...]
    together: tuple[int, ...]

    @property
    def common(self) -> int:
        """Tokens before the answers part."""
        pairs = zip(self.alone, self.together, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.alone), len(self.together)))


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Between the logits of two tokens at one place, in nats."""

    exact: float
    """In float32."""
    rounded: float
    """In the dtype of the run."""

    @property
    def rounding(self) -> float:
        return abs(self.rounded - self.exact)


def answer(engine: Any, job_ids: Sequence[str | None], prompts: Sequence[Any], options: Any) -> list[Answered]:
    """By each adapter alone, `rows_alone` at a time, then by all side by side."""
    stops = (options.stop_token_id,)
    limits = {"max_new_tokens": options.max_new_tokens, "stop_token_ids": stops}
    asked = [(job_id, prompt) for prompt in prompts for job_id in job_ids]
    together = dict(zip(asked, engine.generate(asked, **limits), strict=True))
    found = []
    for job_id in job_ids:
        own = [(job_id, prompt) for prompt in prompts]
        alone = engine.generate(own, max_rows=options.rows_alone, **limits)
        found += [
            Answered(job_id=name, prompt=prompt, alone=answer, together=together[name, prompt])
            for (name, prompt), answer in zip(own, alone, strict=True)
        ]
    return found


def logits_of(folder: Path | None, options: Any, dtype: str) -> Callable[[Sequence[int]], Any]:
    """Logits after every token of one row, by transformers and PEFT; `folder` None: of the untuned model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).to(options.device)
    model = (model if folder is None else PeftModel.from_pretrained(model, str(folder))).eval()

    def run(ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids], device=options.device)).logits[0].float()

    return run


def distances(
    answered: Sequence[Answered], folder: Path | None, options: Any, dtype: str
) -> Iterator[tuple[bool, Distance]]:
    """Of the two tokens where answers part (True), and of the two best at every other token of the answers."""
    exact_logits, rounded_logits = logits_of(folder, options, "float32"), logits_of(folder, options, dtype)
    for one in answered:
        ids = (*one.prompt, *one.alone[: one.common])
        exact_LV, rounded_LV = exact_logits(ids), rounded_logits(ids)
        for place in range(one.common + (one.alone != one.together)):
            exact_V, rounded_V = exact_LV[len(one.prompt) - 1 + place], rounded_LV[len(one.prompt) - 1 + place]
            has_parted = place == one.common
            if has_parted:
                pair = [(*tokens, options.stop_token_id)[place] for tokens in (one.alone, one.together)]
            else:
                pair = exact_V.topk(2).indices.tolist()
            better, worse = sorted(pair, key=lambda token: -exact_V[token])
            exact, rounded = (float(logits_V[better] - logits_V[worse]) for logits_V in (exact_V, rounded_V))
            yield has_parted, Distance(exact=exact, rounded=rounded)


def row_of(dtype: str, answered: Sequence[Answered], found: Sequence[tuple[bool, Distance]], options: Any) -> list[Any]:
    import numpy as np

    ties = [distance for has_parted, distance in found if has_parted]
    plain = [distance for has_parted, distance in found if not has_parted]
    rounding = np.array([distance.rounding for distance in plain])
    figures = [
        np.median([distance.exact for distance in plain]),
        *(np.quantile(rounding, share) for share in (0.5, 0.99, 1.0)),
        *((np.median([d.exact for d in ties]), max(d.exact for d in ties)) if ties else ("", "")),
        max(d.rounding for d in ties) if ties else "",
    ]
    equal = sum(one.alone == one.together for one in answered)
    tokens = sum(len(one.alone) for one in answered)
    counts = [len(answered), options.rows_alone, len(answered), equal, tokens]
    where = environment()
    return [dtype, *counts, *(f"{f:.4g}" if f != "" else "" for f in figures), where["gpu"], where["versions"]]


def measure(options: argparse.Namespace, dtype: str, adapters: Path) -> list[Any]:
    """One line of the table. The adapters are trained once, by the first dtype, in float32 masters."""
    from transformers import AutoTokenizer

    from alto_core.config import ModelSection
    from alto_core.domain import JobBudget
    from alto_core.engine.backbone import load_backbone
    from alto_core.engine.engine import Engine

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    options.stop_token_id = tokenizer.eos_token_id
    jobs = make_jobs(options.adapters)
    rows = read_rows(options.gsm8k / "train.jsonl", tokenizer, 40)
    prompts = [prompt for prompt, _ in read_rows(options.gsm8k / "test.jsonl", tokenizer, options.questions)]
    backbone = load_backbone(ModelSection(name=str(options.model), dtype=dtype), options.device)
    sizes = {"num_slots": len(jobs), "rank_rows": sum(job.lora_rank for job in jobs)}
    with Engine(backbone, target_modules=TARGETS, **sizes) as engine:
        for job in jobs:
            if (adapters / job.job_id).exists():
                engine.load_adapter(job, adapters / job.job_id)
            else:
                engine.admit(job, JobBudget(total_steps=10_000, warmup_steps=1, eval_steps=(10_000,)))
        if engine.job_ids and not (adapters / jobs[0].job_id).exists():
            train(engine, jobs, rows, options.train_steps, FOREVER)
            for job in jobs:
                engine.export(job.job_id, adapters / job.job_id, best=False)
        answered = answer(engine, [None, *(job.job_id for job in jobs)], prompts, options)
    found = []
    for job_id in dict.fromkeys(one.job_id for one in answered):
        own = [one for one in answered if one.job_id == job_id]
        found += distances(own, None if job_id is None else adapters / job_id, options, dtype)
    return row_of(dtype, answered, found, options)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rows-alone", type=int, default=3, help="side by side when an adapter answers alone")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--train-steps", type=int, default=2)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--record", action="store_true", help="keep the table under benchmarks/results")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            table.append(measure(options, dtype, Path(folder)))
            print(*(f"{name}={value}" for name, value in zip(COLUMNS, table[-1], strict=True)), flush=True)
    if options.record:
        with RESULTS.open("w", newline="", encoding="utf-8") as target:
            csv.writer(target, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
