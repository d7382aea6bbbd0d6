"""The figures of docs/early-exit.md, Evidence: those of the tables, and the tables those of the constants in force."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from alto_core.curve_files import read_recording
from alto_core.early_exit import make_policy
from alto_core.replay import DEFAULT_WARMUP, replay_recording

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]


def table(name: str) -> list[Row]:
    return list(csv.DictReader((RESULTS / f"{name}.csv").read_text().splitlines()))


def shown(first_column: str) -> Iterator[list[str]]:
    """The rows of the table of the page whose header begins so, cell by cell."""
    text = (ROOT / "docs" / "early-exit.md").read_text().partition("## Evidence")[2]
    lines = text.partition(f"| {first_column} |")[2].splitlines()[2:]
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip(" `") for cell in line.strip("|").split("|")]


def mean_of(rows: Sequence[Row], group: str, policy: str) -> Callable[[str], float]:
    found = [row for row in rows if (row["group"], row["policy"]) == (group, policy)]
    return lambda column: sum(float(row[column]) for row in found) / len(found)


def test_the_page_shows_each_sweep_as_its_table_does() -> None:
    rows = {(row["sweep"], row["policy"]): row for row in table("early_exit")}
    sweep, num_shown = "", 0
    for name, policy, saved, asha, ratio, inside, scores, *_ in shown("sweep | policy"):
        sweep = name.split(" ")[0] or sweep
        row = rows[sweep, policy]
        assert saved == f"{100 * float(row['saved']):.1f} %", (sweep, policy)
        assert asha in ("", f"{100 * float(row['asha_saved_at_equal_regret']):.1f} %"), (sweep, policy)
        assert ratio == f"{float(row['val_ratio']):.4f}", (sweep, policy)
        assert (inside == "yes") == (row["miss_within_standard_error"] == "True"), (sweep, policy)
        if scores:
            assert scores == f"{float(row['score_chosen']):.3f} / {float(row['score_best']):.3f}", (sweep, policy)
        num_shown += 1
    assert num_shown == 20


def test_the_page_shows_the_random_subsets_as_their_table_does() -> None:
    rows = table("early_exit_resampled")
    for policy, *cells in shown("policy | fixed: kept"):
        expected = []
        for group in ("fixed", "judged"):
            mean = mean_of(rows, group, policy)
            kept, saved = 100 * mean("kept_share"), 100 * mean("saved")
            expected += [f"{kept:.0f} %", f"{saved:.1f} %", f"{mean('regret_in_standard_errors'):.2f}"]
        assert cells == expected, policy


def test_the_page_shows_early_ranks_as_their_table_does() -> None:
    for sweep, ranks, covered in shown("sweep | rank correlation at 1 / 2 / 5 / 10 / 20 %"):
        rows = [row for row in table("early_exit_ranking") if row["sweep"] == sweep]
        assert ranks == " / ".join(f"{float(row['spearman']):.2f}" for row in rows)
        assert covered == " / ".join(f"{float(row['top_quarter_coverage']):.2f}" for row in rows)


@pytest.mark.parametrize("sweep", ["word_reversal-s0", "overlapping_words-s0"])
def test_the_tables_are_of_the_constants_in_force(sweep: str) -> None:
    recording = read_recording(RESULTS / "early_exit" / f"{sweep}.parquet")
    done = replay_recording(recording, make_policy("guarded", {}), warmup_fraction=DEFAULT_WARMUP)
    row = next(row for row in table("early_exit") if (row["sweep"], row["policy"]) == (sweep, "guarded"))
    assert f"{done.samples_saved_share:.6g}" == row["saved"]
    assert (done.chosen_job, done.best_job) == (row["chosen_job"], row["best_job"])
    unchanged = [
        line
        for line in table("early_exit_sensitivity")
        if (line["sweep"], line["policy"]) == (sweep, "guarded") and _is_default(line["setting"], float(line["value"]))
    ]
    assert unchanged and {line["saved"] for line in unchanged} == {row["saved"]}


def _is_default(setting: str, value: float) -> bool:
    rules = make_policy("guarded", {}).rules  # type: ignore[attr-defined]
    return value == getattr(rules, setting, DEFAULT_WARMUP)
