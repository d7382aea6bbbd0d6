"""The sweep and its evidence in a tiny form: two groups, the second in a run of its own, then tables and pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType

import pytest

from alto_core.curve_files import read_recording

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows that a tiny model can learn, as benchmarks/early_exit_data.py writes them."""
    rows = [{"prompt": f"{chr(97 + i % 26)}{i // 26}:", "completion": chr(97 + i % 26) * 3} for i in range(40)]
    for split, first, count in (("train", 0, 24), ("validation", 24, 8), ("test", 32, 8)):
        (tmp_path / f"letters.{split}.jsonl").write_text("\n".join(map(json.dumps, rows[first : first + count])))
    return tmp_path


def read_csv(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_a_sweep_goes_on_where_it_stopped_and_its_evidence_is_drawn(script, tiny_model: Path, data: Path) -> None:  # type: ignore[no-untyped-def]
    out = data / "out"
    early_exit_sweep: ModuleType = script("early_exit_sweep")

    def sweep(*arguments: str) -> int:
        fixed = ["letters", "--model", str(tiny_model), "--data", str(data), "--out", str(out)]
        fixed += ["--learning-rates", "1e-3", "1e-2", "--lora-ranks", "2", "--max-new-tokens", "4"]
        return int(early_exit_sweep.run(early_exit_sweep.parse([*fixed, "--eval-interval", "0.1", *arguments])))

    assert sweep("--batch-sizes", "8", "--minutes", "0") == 3
    assert not (out / "letters-s0.parquet").exists()
    assert sweep("--batch-sizes", "8") == 0
    first = {job.job_id: job for job in read_recording(out / "letters-s0.parquet").jobs}
    assert sweep("--batch-sizes", "8", "4") == 0
    both = {job.job_id: job for job in read_recording(out / "letters-s0.parquet").jobs}
    assert len(first) == 2
    assert len(both) == 4
    assert all(both[job_id] == job for job_id, job in first.items()), "jobs that are there are not trained again"
    assert all(job.curve.last_step == job.curve.total_steps and job.curve.row_losses for job in both.values())
    assert len(json.loads((out / "letters-s0.json").read_text())["groups"]) == 2

    arguments = [str(out), "--judged", "letters-s0", "--out", str(out), "--pictures", str(out), "--no-bars"]
    script("early_exit_evidence").main(arguments)
    rows = read_csv(out / "early_exit.csv")
    assert {row["policy"] for row in rows} == {"paper", "guarded", "asha", "successive_halving", "median"}
    assert all(float(row["val_ratio"]) >= 1 and row["score_best"] for row in rows)
    assert len(read_csv(out / "early_exit_ranking.csv")) == 5
    subsets = read_csv(out / "early_exit_resampled.csv")
    assert [row["policy"] for row in subsets] == ["paper", "guarded", "asha", "successive_halving", "median"]
    assert all(0 <= float(row["kept_share"]) <= 1 and row["jobs"] == "4" for row in subsets)
    assert {file.name for file in out.glob("*.svg")} == {f"early-exit-{n}.svg" for n in ("ranking", "saved", "ratio")}


def test_asha_at_equal_regret_is_read_between_its_reduction_factors(script) -> None:  # type: ignore[no-untyped-def]
    at = script("early_exit_evidence").asha_at_regret
    points = [(0.0, 0.6), (0.1, 0.8), (0.1, 0.7), (0.3, 0.75)]
    assert at(points, 0.0) == 0.6
    assert at(points, 0.05) == pytest.approx(0.7)
    assert at(points, 0.2) == pytest.approx(0.8), "more regret never saves less"
    assert at(points, 9.0) == pytest.approx(0.8)


def test_a_figure_is_by_the_rules_of_its_bar(script) -> None:  # type: ignore[no-untyped-def]
    values = script("early_exit_evidence").bar_values(
        [
            {"miss_within_standard_error": True, "val_ratio": 1.01, "saved": 0.7, "score_ratio": None},
            {"miss_within_standard_error": False, "val_ratio": 1.003, "saved": 0.8, "score_ratio": 0.97},
        ]
    )
    assert values == pytest.approx(
        {
            "best_val_ratio_worst": 1.003,
            "best_kept_share": 0.5,
            "samples_saved_mean": 0.75,
            "downstream_ratio_worst": 0.97,
        }
    )


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("so 1,200\n#### 1,200.", "12 * 100\n#### 1200", True),
        ("it is 1200", "12 * 100\n#### 1200", False),
        ("#### 12", "#### 1200", False),
        ("acute,  go", "acute, go", True),
        ("acute go", "acute, go", False),
    ],
)
def test_worked_solutions_are_right_by_their_last_number(script, answer: str, reference: str, right: bool) -> None:  # type: ignore[no-untyped-def]
    assert script("early_exit_scores").is_right(answer, reference) is right
