"""What somebody meets who gives `alto validate` a wrong file: time until the answer, its exit code, its lines.

Each kind of wrong task file, rows and model folder is tried in a process of its own, with
a hub that cannot be reached.

    python benchmarks/wrong_files.py quickstart/model
    python benchmarks/wrong_files.py quickstart/model --alto OTHER/.venv/bin/alto    # of another checkout
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from socket import create_server

RESULTS = Path(__file__).parent / "results" / "wrong_files.csv"
TASK = """name: replies
model: {name: model}
data:
  source: rows.jsonl
  chat_template: false
search_space:
  learning_rate: [1e-4, 1e-3]
  lora_rank: [4, 8]
budget: {steps: 20, eval_interval_fraction: 0.5}
"""
ROWS = [json.dumps({"prompt": f"{i} =", "completion": f" {i}"}) for i in range(100)]

Spoil = Callable[[Path], None]


def _task(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        assert old in TASK, old
        (folder / "task.yaml").write_text(TASK.replace(old, new, 1))

    return spoil


def _rows(content: bytes | str, name: str = "rows.jsonl") -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        (folder / "task.yaml").write_text(TASK.replace("rows.jsonl", name))

    return spoil


def _model(change: Callable[[Path], None]) -> Spoil:
    return lambda folder: change(folder / "model")


def _unlink(pattern: str) -> Spoil:
    def spoil(model: Path) -> None:
        for file in model.glob(pattern):
            file.unlink()

    return spoil


def _cut_weights(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    content = weights.read_bytes()[:1_000_000]
    weights.unlink()
    weights.write_bytes(content)


def _an_adapter(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text("{}")


def _folder_of_nothing(folder: Path) -> None:
    (folder / "empty").mkdir()
    _task("rows.jsonl", "empty")(folder)


CASES: dict[str, Spoil] = {
    "nothing wrong": lambda folder: None,
    "YAML: a colon in a text": _task("replies", "to: do"),
    "YAML: a tab": _task("  lora_rank", "\tlora_rank"),
    "YAML: an open bracket": _task("{name: model}", "{name: model"),
    "a misspelled key": _task("learning_rate", "learning_rat"),
    "a value of the wrong type": _task("[4, 8]", "[4, eight]"),
    "a text where a section belongs": _task("{name: model}", "model"),
    "rows: no such file": _task("rows.jsonl", "row.jsonl"),
    "rows: a folder without data": _folder_of_nothing,
    "rows: an empty file": _rows(""),
    "rows: UTF-16": _rows("\n".join(ROWS).encode("utf-16")),
    "rows: one broken line": _rows("\n".join([*ROWS, '{"prompt": "x", ']) + "\n"),
    "rows: one without a field": _rows("\n".join([*ROWS, '{"prompt": "x"}']) + "\n"),
    "rows: other column names": _rows("question,answer\n" + "a,b\n" * 100, "rows.csv"),
    "rows: columns apart by semicolons": _rows("prompt;completion\n" + "a;b\n" * 100, "rows.csv"),
    "rows: another kind of file": _rows("a\n", "rows.txt"),
    "rows: a hub name, no network": _task("rows.jsonl", "some-owner/some-set"),
    "model: no config.json": _model(_unlink("config.json")),
    "model: no weights": _model(_unlink("*.safetensors")),
    "model: cut weights": _model(_cut_weights),
    "model: no tokenizer": _model(_unlink("tokenizer*")),
    "model: an adapter": _model(_an_adapter),
    "model: a hub name, no network": _task("{name: model}", "{name: some-owner/some-model}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--alto", default=str(Path(sys.executable).parent / "alto"), help="the command to try")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file to write")
    arguments = parser.parse_args()
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["case", "exit_code", "seconds", "lines", "says"], lineterminator="\n")
        table.writeheader()
        for row in measure(arguments.alto, arguments.model.resolve()):
            table.writerow(row)
            print(*row.values(), sep="  ", flush=True)


def measure(alto: str, model: Path) -> Iterator[dict[str, object]]:
    """One row per case; `says` is the first line that tells what is wrong, paths without their folders."""
    with closing(create_server(("127.0.0.1", 0))) as taken:
        nobody = taken.getsockname()[1]
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{nobody}", "HF_HUB_OFFLINE": "0"}
    for case, spoil in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary).resolve()
            shutil.copytree(model, folder / "model", copy_function=os.symlink)
            (folder / "rows.jsonl").write_text("\n".join(ROWS) + "\n")
            (folder / "task.yaml").write_text(TASK)
            spoil(folder)
            environment["ALTO_HOME"] = str(folder / "home")
            started = time.monotonic()
            shown = subprocess.run(
                [alto, "validate", "task.yaml"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.monotonic() - started
        lines = shown.stderr.strip().splitlines()
        said = next((line for line in lines if line.startswith("alto: ")), None) or next(
            (line.strip() for line in shown.stdout.splitlines() if line.strip().startswith("e.g.")), "ready to tune"
        )
        yield {
            "case": case,
            "exit_code": shown.returncode,
            "seconds": f"{seconds:.1f}",
            "lines": len(lines),
            "says": said.replace(f"{folder}/", "").replace(str(nobody), "PORT"),
        }


if __name__ == "__main__":
    main()
