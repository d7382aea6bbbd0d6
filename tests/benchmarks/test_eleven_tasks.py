"""What surrounds the run of eleven real tasks: its measures, its cases, its random models, its table."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from alto_core.preparation import plan_task
from alto_core.store import KeptPlacement, KeptPlan, QueueEvent
from benchmarks.kernel_bars import TARGETS

ZERO = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return ZERO + timedelta(seconds=seconds)


def events(*told: tuple[float, str, str, str]) -> list[QueueEvent]:
    return [
        QueueEvent(event_id=i, at=at(seconds), kind=kind, text=text, task_id=task_id, host_id="here")
        for i, (seconds, kind, task_id, text) in enumerate(told)
    ]


LOG = events(
    (0, "submitted", "a", "2 GPUs, normal"),
    (0.5, "submitted", "b", "2 GPUs, normal"),
    (1, "claimed", "a", "GPU 0, 1 of here, attempt 1"),
    (3, "begun", "a", "process 7"),
    (11, "released", "a", "ended: the run ended"),
    (11.5, "claimed", "b", "GPU 0, 1 of here, attempt 1"),
    (15, "released", "b", "waiting: its process is gone"),
    (16, "claimed", "b", "GPU 0, 1 of here, attempt 2"),
    (17, "begun", "b", "process 8"),
    (20, "released", "b", "ended: the run ended"),
)


def test_holds_are_counted_from_the_first_submission_to_each_end(script) -> None:  # type: ignore[no-untyped-def]
    measures = script("eleven_measures")
    ended = measures.holds(LOG)
    assert [(hold.task_id, hold.claimed, hold.begun, hold.released) for hold in ended] == [
        ("a", 1.0, 3.0, 11.0),
        ("b", 11.5, None, 15.0),
        ("b", 16.0, 17.0, 20.0),
    ]
    assert {hold.gpus for hold in ended} == {(0, 1)}
    # 10 + 3.5 + 4 seconds of two GPUs were held, of 20 seconds of four
    assert measures.idle_share(ended, 4) == pytest.approx(1 - 35 / 80)
    assert measures.replan_seconds(LOG) == [0.5, 1.0]


def test_the_first_plan_counts_that_has_all_tasks(script) -> None:  # type: ignore[no-untyped-def]
    measures = script("eleven_measures")

    def place(task_id: str, start: float, end: float) -> KeptPlacement:
        return KeptPlacement(task_id=task_id, host_id="here", gpus=(0, 1), start=at(start), end=at(end))

    plan = KeptPlan(
        at=at(2), reason="submitted a", placements=(place("a", 1, 31), place("b", 31, 61)), refusals={}, makespan=59,
        bound=59, gap=0.0, tardiness=0, method="lpt", solver_status="", solve_seconds=0.0,
    )  # fmt: skip
    assert measures.covers(plan, ["a", "b"])
    assert not measures.covers(plan, ["a", "b", "c"])
    assert measures.foreseen_seconds(plan, measures.first_submission(LOG)) == 61.0


def row(
    variant: str, makespan: str, *, share: str = "0.005", devices: str = "8 GPUs", task: str = ""
) -> dict[str, str]:
    foreseen = "300.0" if variant == "all" else ""
    return {
        "shape": "paper", "share": share, "devices": devices, "variant": variant, "task": task, "makespan": makespan,
        "foreseen": foreseen,
    }  # fmt: skip


def test_bars_hold_whole_variants_of_one_budget_on_eight_gpus_against_each_other(script) -> None:  # type: ignore[no-untyped-def]
    bars = script("eleven_measures").bars
    found = bars([row("B", "600.0"), row("B", "1.0", task="llama"), row("all", "120.0")])
    assert found == {"cluster8.all_over_b": 5.0, "cluster8.predicted_over_real": 2.5}
    assert "cluster8.all_over_b" in TARGETS
    assert set(bars([row("B", "600.0", share="0.01"), row("all", "120.0")])) == {"cluster8.predicted_over_real"}
    assert bars([row("B", "600.0"), row("all", "")]) == {}, "a variant with tasks that failed has no makespan"
    assert bars([row("B", "600.0", devices="8 pretended"), row("all", "120.0", devices="8 pretended")]) == {}


def test_the_cases_are_the_simulated_ones_in_a_middling_order(script) -> None:  # type: ignore[no-untyped-def]
    cases, fig12 = script("eleven_cases"), script("plan_fig12")
    ordered = cases.ordered_cases()
    tasks = {task.task_id: task for task in fig12.paper_tasks(batched=True, early_exit=False)}
    assert sorted(f"{case.model} {case.data_set}" for case in ordered) == sorted(tasks)
    assert sorted(case.num_gpus for case in ordered) == [1] * 6 + [2] * 3 + [4] * 2
    assert set(script("eleven_tasks").VARIANTS) == set(fig12.VARIANTS) - {"none", "all, foreseen"}


def test_a_case_is_a_task_that_can_be_planned_with_what_a_variant_adds(script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cases = script("eleven_cases")
    inputs = cases.Inputs(cases.SCALES["tiny"], share=1 / 1000, models=tmp_path / "models", rows=tmp_path)
    case = cases.Case(model="qwen2.5-32b", data_set="tulu-3", num_gpus=2)
    inputs.write([case])
    task = inputs.task(case, batched=False, early_exit=True)
    assert (task.max_slots, task.cluster.num_gpus, task.early_exit.preset) == (2, 2, "guarded")
    assert inputs.task(case, batched=True, early_exit=False).max_slots is None
    plan = plan_task(task)
    assert len(plan.jobs) == 4
    assert len(plan.data.train.rows) == 10, "a thousandth of ten thousand"
    lengths = [len(row.token_ids) for row in (*plan.data.train.rows, *plan.data.validation.rows)]
    assert sum(lengths) / len(lengths) == pytest.approx(400 / 8, rel=0.1)
    measured = plan_task(inputs.profiling_task(case, batched=True))
    assert {budget.total_steps for budget in measured.budgets.values()} == {2}


def test_a_random_model_loads_whole_and_no_two_layers_are_alike(script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    assert script("random_models").model_config("qwen2.5-32b", depth=0.25).num_hidden_layers == 16
    write = script("random_models").write_random_model
    folder = write(tmp_path / "model", "qwen2.5-7b", tiny=True)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    one, two = (layer.mlp.up_proj.weight for layer in model.model.layers)
    assert not torch.equal(one, two)
    assert one.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    kept = (folder / "layer-0.safetensors").stat().st_mtime_ns
    write(folder, "qwen2.5-7b", tiny=True)
    assert (folder / "layer-0.safetensors").stat().st_mtime_ns == kept, "a model that is whole is not written again"


def test_rows_of_an_earlier_call_stay(script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save, columns = script("eleven_bench").save, script("eleven_bench").COLUMNS

    def whole(variant: str, makespan: str) -> dict[str, str]:
        about = {"row": f"paper {variant}", "shape": "paper", "share": "0.005", "devices": "8 GPUs", "variant": variant}
        return {**dict.fromkeys(columns, ""), **about, "makespan": makespan}

    save(tmp_path, [whole("B", "900.0")])
    save(tmp_path, [whole("all", "150.0")])
    save(tmp_path, [whole("B", "600.0")])
    rows = list(csv.DictReader((tmp_path / "eleven_tasks.csv").read_text().splitlines()))
    assert [(row["variant"], row["makespan"]) for row in rows] == [("B", "600.0"), ("all", "150.0")]
    assert json.loads((tmp_path / "eleven_tasks.json").read_text())["bars"] == {"cluster8.all_over_b": 4.0}
