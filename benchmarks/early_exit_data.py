"""The data sets of the early-exit sweeps as small JSONL files, so that a GPU machine needs no network.

    python benchmarks/early_exit_data.py OUT --gsm8k TRAIN.jsonl TEST.jsonl --instructions task.json

writes OUT/NAME.{train,validation,test}.jsonl with fields `prompt` and `completion`, for the names below. Those of
reasoning-gym come from the installed package; the other two only where their files are given:

- `gsm8k`: GSM8K's own files, lines of `question` and `answer`.
- `overlapping_words`: `task.json` of subtask039_qasc_find_overlapping_words, which the source archive of
  bigbench 1.0.0 holds under bigbench/benchmark_tasks/natural_instructions. Its instruction is the same in every row
  and left out.
- `word_reversal`, `chain_sum`: reasoning-gym's word_sequence_reversal (3 or 4 words) and chain_sum (2 or 3 terms).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 1000, 256, 200
SEED = 1
GENERATORS = {
    "word_reversal": ("word_sequence_reversal", {"min_words": 3, "max_words": 4}),
    "chain_sum": ("chain_sum", {"min_terms": 2, "max_terms": 3}),
}
Row = tuple[str, str]


def generated(name: str) -> Iterator[Row]:
    """Rows of a reasoning-gym task, the last line of each question being the question itself."""
    import reasoning_gym

    generator, options = GENERATORS[name]
    size = 20 * (NUM_TRAIN + NUM_VALIDATION + NUM_TEST)
    for item in reasoning_gym.create_dataset(generator, size=size, seed=SEED, **options):
        yield item["question"].strip().splitlines()[-1] + "\n", item["answer"]


def gsm8k(file: Path) -> Iterator[Row]:
    for line in file.read_text(encoding="utf-8").splitlines():
        content = json.loads(line)
        yield content["question"] + "\n", content["answer"]


def instructions(file: Path) -> list[Row]:
    examples = json.loads(file.read_text(encoding="utf-8"))["examples"]
    rows = [(example["input"] + "\n", example["target"][0]) for example in examples if len(example["target"]) == 1]
    random.Random(0).shuffle(rows)  # neighbours share sentences
    return rows


def write_splits(out: Path, name: str, rows: Iterator[Row], test_rows: Iterator[Row] | None = None) -> None:
    """Cut distinct rows into splits, test rows from a source of their own where there is one."""
    seen: set[str] = set()

    def distinct(source: Iterator[Row]) -> Iterator[Row]:
        for prompt, completion in source:
            if prompt not in seen:
                seen.add(prompt)
                yield prompt, completion

    pool = distinct(rows)
    splits = {"train": list(islice(pool, NUM_TRAIN)), "validation": list(islice(pool, NUM_VALIDATION))}
    splits["test"] = list(islice(pool if test_rows is None else distinct(test_rows), NUM_TEST))
    for split, taken in splits.items():
        lines = [json.dumps({"prompt": p, "completion": c}, ensure_ascii=False) for p, c in taken]
        (out / f"{name}.{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(name, {split: len(taken) for split, taken in splits.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gsm8k", type=Path, nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--instructions", type=Path, metavar="TASK_JSON")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in GENERATORS:
        write_splits(options.out, name, generated(name))
    if options.gsm8k:
        write_splits(options.out, "gsm8k", gsm8k(options.gsm8k[0]), gsm8k(options.gsm8k[1]))
    if options.instructions:
        write_splits(options.out, "overlapping_words", iter(instructions(options.instructions)))


if __name__ == "__main__":
    main()
