"""`alto estimate`: the memory and the time that a task will take, here or on a GPU that is not here. No training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from alto_core import wording
from alto_core.first_look import read_task
from alto_core.loading import loading
from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import busy, console_for, dump, stdout_for

if TYPE_CHECKING:
    from alto_core.estimation import Estimate


def run_estimate(file: Path, *, gpu: str | None, as_json: bool) -> None:
    """Print what the task would take; one that does not fit raises an `EngineError` with the arithmetic."""
    settings = load_settings()
    prepare_environment(settings)
    task = read_task(file)
    with stdout_for(as_json) as stream:
        with busy("reading the rows and the model's structure"):
            with loading():  # here, since they import torch and transformers; a wrong field is told before that
                from alto_core.estimation import estimate_task
                from alto_core.preparation import plan_task
                from alto_core.profiling.gpu_kinds import gpu_kind

            kind = gpu_kind(gpu) if gpu else None
            estimate = estimate_task(plan_task(task), settings, kind)
        if as_json:
            print(dump(estimate_object(estimate)), file=stream)
            return
        console = console_for(stream)
        fits = f"fits on {_devices(estimate)}"
        console.print(Text.assemble((f"{file}: ", ""), (fits, "bold green")), soft_wrap=True)
        for name, value in _facts(estimate):
            console.print(Text.assemble((f"  {name:<16}", "dim"), value), soft_wrap=True)


def estimate_object(estimate: Estimate) -> dict[str, Any]:
    """The estimate as one JSON object."""
    expected = estimate.forecast
    return {
        "event": "estimate",
        "device": estimate.device,
        "basis": estimate.basis,
        "num_gpus": estimate.layout.num_ranks,
        "sharded": estimate.layout.sharded,
        "num_slots": estimate.num_slots,
        "peak_bytes": estimate.peak_bytes,
        "backbone_bytes": estimate.backbone_bytes,
        "adapter_bytes": estimate.adapter_bytes,
        "pass_bytes": estimate.pass_bytes,
        "budget_bytes": estimate.budget_bytes,
        "max_pass_tokens": estimate.max_pass_tokens,
        "too_large": list(estimate.too_large),
        "waves": expected and expected.waves,
        "seconds": expected and expected.seconds,
        "seconds_without_exit": expected and expected.seconds_without_exit,
        "terms": expected and asdict(expected.terms),
    }


def _devices(estimate: Estimate) -> str:
    if estimate.layout.num_ranks == 1:
        return estimate.device
    held = "a part of the model" if estimate.layout.sharded else "the whole model"
    return f"{estimate.layout.num_ranks} x {estimate.device}, each with {held} and its own jobs"


def _facts(estimate: Estimate) -> list[tuple[str, str]]:
    parts = (
        f"{wording.size(estimate.backbone_bytes)} backbone, {wording.size(estimate.adapter_bytes)} adapters, "
        f"{wording.size(estimate.pass_bytes)} passes of up to {wording.count(estimate.max_pass_tokens)} tokens"
    )
    facts = [
        ("memory", f"{wording.size(estimate.peak_bytes)} of {wording.size(estimate.budget_bytes)}: {parts}"),
        ("side by side", wording.plural(estimate.num_slots, "job")),
        (
            "time",
            wording.forecast(estimate.forecast)
            if estimate.forecast
            else "not known here before the first task has measured it; `--gpu KIND` tells it for a GPU",
        ),
        (
            "based on",
            "a measured profile of this model on this device"
            if estimate.basis == "measured"
            else "arithmetic: nothing was measured",
        ),
    ]
    terms = wording.forecast_terms(estimate.forecast) if estimate.forecast else ""
    if terms:
        facts.insert(3, ("without exits", terms))
    if estimate.too_large:
        facts.append(
            ("too large", f"{wording.plural(len(estimate.too_large), 'job')}: {', '.join(estimate.too_large)}")
        )
    return facts
