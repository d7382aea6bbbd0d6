"""The generation benchmark runs from end to end, tiny, on the CPU."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_generation.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def test_every_method_gives_rows_and_batched_answers_are_those_given_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("train", 12), ("test", 5)):
        rows = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = ["--adapters", "3", "--questions", "4", "--max-new-tokens", "6", "--train-steps", "2"]
    sizes += ["--single-rows", "4", "2", "--batched-rows", "7"]
    spec = importlib.util.spec_from_file_location("bench_generation", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_generation", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), str(tiny_model), str(tmp_path), "--out", str(tmp_path / "out"), *sizes]
    )
    script.main()
    printed = capsys.readouterr().out
    assert "first adapter's answers equal to those it gave alone: 1.000" in printed
    with (tmp_path / "out" / "generation.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    assert [(row["method"].split(",")[0], row["max_rows"], row["answers"]) for row in measured] == [
        ("this engine", "4", "12"),
        ("this engine", "7", "12"),
        ("PEFT generate", "4", "4"),
        ("this engine", "2", "12"),
        ("PEFT generate", "2", "2"),
    ]
    # greedy answers of three adapters, three ways
    ours = [row for row in measured if row["method"].startswith("this engine")]
    assert len({row["tokens"] for row in ours}) == 1
    content = json.loads((tmp_path / "out" / "generation.json").read_text())
    best = [
        max(float(r["tokens_per_second"]) for r in measured if r["method"].endswith("all adapters") is together)
        for together in (False, True)
    ]
    assert content["bars"]["evaluate.batched_over_single"] == pytest.approx(best[1] / best[0], rel=1e-3)
