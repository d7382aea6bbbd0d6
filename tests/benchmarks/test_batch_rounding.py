"""The benchmark of what a batch changes runs from end to end, tiny, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import batch_rounding
from benchmarks.batch_rounding import Answered, Distance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def test_in_float32_no_answer_parts_and_nothing_is_rounded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("train", 12), ("test", 5)):
        rows = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(batch_rounding, "RESULTS", tmp_path / "batch_rounding.csv")
    sizes = ["--adapters", "2", "--questions", "4", "--max-new-tokens", "6", "--train-steps", "1"]
    monkeypatch.setattr(sys, "argv", ["batch_rounding.py", str(tiny_model), str(tmp_path), *sizes, "--record"])
    batch_rounding.main()
    exact, rounded = capsys.readouterr().out.splitlines()[-2:]
    assert "dtype=float32 rows_together=12 rows_alone=3 answers=12 equal=12" in exact
    assert "rounding_max=0 " in exact and "dtype=bfloat16" in rounded and "rounding_max=0 " not in rounded
    assert len((tmp_path / "batch_rounding.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("alone", "together", "common"), [((1, 2), (1, 2), 2), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (4,), 0)]
)
def test_answers_part_at_the_first_other_token_or_where_one_ends(
    alone: tuple[int, ...], together: tuple[int, ...], common: int
) -> None:
    assert Answered(job_id=None, prompt=(7,), alone=alone, together=together).common == common


def test_rounding_is_what_the_distance_moves_by() -> None:
    assert Distance(exact=0.25, rounded=-0.5).rounding == 0.75
