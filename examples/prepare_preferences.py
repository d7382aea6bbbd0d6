"""Real preference pairs for examples/dpo.yaml, from the source package of BIG-bench (Apache-2.0), without a hub.

    pip download --no-deps --no-binary bigbench bigbench==1.0.0
    python examples/prepare_preferences.py OUT_DIR bigbench-1.0.0.tar.gz [--task qasc]

writes OUT_DIR/pairs.jsonl and OUT_DIR/pairs-test.jsonl with fields `prompt`, `chosen`, `rejected`: questions of two
Natural Instructions tasks with the right answer and a wrong one that a person wrote to be mistaken for it. No question
stands in both files. The package's canary goes along with each row, as its authors ask.
"""

from __future__ import annotations

import argparse
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS = {
    "qasc": "subtask042_qasc_incorrect_option_generation",
    "cosmosqa": "subtask025_cosmosqa_incorrect_answer_generation",
}
MARK = "Correct Answer:"
NUM_TEST_ROWS = 200
SEED = 0


def read_tasks(package: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """The tasks' files as they lie in the package.

    Raises:
        SystemExit: it is no such package.
    """
    wanted = {f"natural_instructions/{TASKS[name]}/task.json" for name in names}
    try:
        with tarfile.open(package) as archive:
            for member in archive:
                if any(member.name.endswith(name) for name in wanted):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield json.load(file)
    except (OSError, tarfile.TarError) as error:
        raise SystemExit(f"{package}: {error}. Expected the source package of bigbench 1.0.0.") from None


def pairs(task: dict[str, Any]) -> Iterator[dict[str, str]]:
    """One pair of each question: its right answer, and the first wrong one."""
    for example in task["examples"]:
        prompt, mark, chosen = example["input"].partition(MARK)
        targets = example["target"] if isinstance(example["target"], list) else [example["target"]]
        if mark and chosen.strip() and targets[0].strip() and chosen.strip() != targets[0].strip():
            yield {
                "prompt": prompt.strip(),
                "chosen": chosen.strip(),
                "rejected": targets[0].strip(),
                "canary": task["canary"],
            }


def write(folder: Path, package: Path, names: list[str]) -> None:
    """Write both files, rows in a drawn order that is the same each time."""
    by_prompt = {pair["prompt"]: pair for task in read_tasks(package, names) for pair in pairs(task)}
    if len(by_prompt) <= NUM_TEST_ROWS:
        raise SystemExit(f"{package}: got {len(by_prompt)} pairs, expected thousands. Use bigbench 1.0.0.")
    rows = list(by_prompt.values())
    random.Random(SEED).shuffle(rows)  # noqa: S311 - an order, not a secret
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("pairs-test.jsonl", rows[:NUM_TEST_ROWS]), ("pairs.jsonl", rows[NUM_TEST_ROWS:])):
        lines = (json.dumps(row, ensure_ascii=False) for row in part)
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write preference pairs of BIG-bench as JSON lines.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("package", type=Path)
    parser.add_argument("--task", choices=[*TASKS, "both"], default="qasc")
    arguments = parser.parse_args()
    chosen_tasks = list(TASKS) if arguments.task == "both" else [arguments.task]
    write(arguments.folder, arguments.package, chosen_tasks)
