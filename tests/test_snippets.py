"""Code that README.md and the tutorial show for an exported adapter runs as it stands, but for the names of folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from alto_core.config import ModelSection
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine

REPOSITORY = Path(__file__).resolve().parents[1]
TARGETS = ("q_proj", "v_proj")


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    """Of the tiny model, exported as it starts."""
    job = LoraJob(learning_rate=1e-3, lora_rank=4, lora_alpha=8.0, adapter_batch_size=1, target_modules=TARGETS, seed=1)
    with Engine(
        load_backbone(ModelSection(name=str(tiny_model)), "cpu"), target_modules=TARGETS, num_slots=1, rank_rows=4
    ) as engine:
        engine.admit(job, JobBudget(total_steps=1, warmup_steps=1, eval_steps=(1,)))
        engine.export(job.job_id, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("page", "model", "folder"),
    [
        ("README.md", "HuggingFaceTB/SmolLM2-135M-Instruct", "<folder that alto printed>"),
        ("docs/tutorial.md", "quickstart/model", "dates-adapter"),
    ],
)
def test_an_exported_adapter_is_loaded_as_shown(
    page: str, model: str, folder: str, tiny_model: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "PeftModel" in block]
    assert f'"{model}"' in shown and f'"{folder}"' in shown
    names: dict[str, Any] = {}
    exec(shown.replace(model, str(tiny_model)).replace(folder, str(adapter)), names)
    loaded = [name for name, _ in names["model"].named_modules() if name.endswith("lora_A.default")]
    assert len(loaded) == 2 * names["model"].config.num_hidden_layers
    assert ("print(" in shown) == bool(capsys.readouterr().out.strip())
