"""`alto estimate`: for this machine, for a GPU that is not here, and for one on which nothing fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Invoke = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path, tiny_model: Path, tiny_rows: Path) -> Path:
    content = {
        "name": "tiny",
        "model": {"name": str(tiny_model)},
        "data": {"source": str(tiny_rows), "validation": {"rows": 8}},
        "search_space": {"learning_rate": [1e-3, 1e-2], "lora_rank": [2, 4], "adapter_batch_size": 4},
        "budget": {"steps": 20},
    }
    target = tmp_path / "task.yaml"
    target.write_text(yaml.safe_dump(content))
    return target


def test_it_says_what_fits_on_a_gpu_that_is_not_here(invoke: Invoke, file: Path) -> None:
    result = invoke("estimate", str(file), "--gpu", "h100-80")
    assert result.exit_code == 0, result.output
    for part in ("fits on h100-80", "backbone", "4 jobs", "in 1 wave", "arithmetic"):
        assert part in result.stdout


def test_the_terms_of_the_time_are_told(invoke: Invoke, file: Path) -> None:
    content = json.loads(invoke("estimate", str(file), "--gpu", "t4-16", "--json").stdout)
    assert content["terms"]["training"] > 0 and content["terms"]["captures"] == 0, "nothing was measured of captures"
    assert sum(content["terms"].values()) == pytest.approx(content["seconds_without_exit"])
    text = yaml.safe_load(file.read_text()) | {"budget": {"steps": 20_000}}
    file.write_text(yaml.safe_dump(text))
    assert "without exits   training " in invoke("estimate", str(file), "--gpu", "t4-16").stdout


def test_without_a_profile_this_machine_gets_memory_and_no_time(invoke: Invoke, file: Path) -> None:
    result = invoke("estimate", str(file), "--json")
    content = json.loads(result.stdout)
    assert content["event"] == "estimate" and content["device"] == "cpu" and content["basis"] == "arithmetic"
    assert content["peak_bytes"] == sum(content[f"{part}_bytes"] for part in ("backbone", "adapter", "pass"))
    assert content["seconds"] is None


def test_what_does_not_fit_ends_with_the_arithmetic_and_exit_code_5(
    invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alto_core.profiling import gpu_kinds

    monkeypatch.setitem(
        gpu_kinds.GPU_KINDS, "small", gpu_kinds.GpuKind(name="small", num_bytes=750 * 2**20, teraflops=1)
    )
    content = yaml.safe_load(file.read_text())
    content["search_space"]["adapter_batch_size"] = 4096
    file.write_text(yaml.safe_dump(content))
    result = invoke("estimate", str(file), "--gpu", "small")
    assert result.exit_code == 5
    assert "may be used" in result.stderr and "adapter_batch_size: " in result.stderr


def test_an_unknown_gpu_is_told_with_those_there_are(invoke: Invoke, file: Path) -> None:
    result = invoke("estimate", str(file), "--gpu", "h1000")
    assert result.exit_code == 2 and "h200-141" in result.stderr
