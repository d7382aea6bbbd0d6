"""docs/extending.md holds: each extension is one new file and one line, and a task runs with all of them.

The page's own files and lines go into a copy of the code, so the page is what is tested.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from alto_core.domain import JobState, TaskState
from alto_core.settings import Settings, load_settings
from alto_core.store import JobRecord, Store

pytestmark = [pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")

NEW_FILE = re.compile(r"New file `(?P<path>[^`]+)`[^`]*```python\n(?P<text>.*?)```", re.DOTALL)
LINES = re.compile(r"Its line in `(?P<path>[^`]+)`:\n(?P<text>.*?)(?=\n#|\n[A-Z]|\Z)", re.DOTALL)
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)


def new_files() -> dict[str, str]:
    return {found["path"]: found["text"] for found in NEW_FILE.finditer(PAGE)}


def added_lines() -> dict[str, list[tuple[str, str]]]:
    """Of each registry: the line before, and the line that is added behind it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in LINES.finditer(PAGE):
        for block in DIFF.findall(entry["text"]):
            *_, before, added = [line for line in block.splitlines() if line]
            assert before[0] == " " and added[0] == "+"
            found.setdefault(entry["path"], []).append((before[1:], added[1:]))
    return found


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extend_code(code: Path) -> None:
    """Put the project's packages there, with the page's files and lines."""
    for package in ("flows", "tasks", "alto_core", "kernels"):
        shutil.copytree(REPOSITORY / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in new_files().items():
        if "/" in path:
            assert (code / path).parent.is_dir() and not (code / path).exists()
            (code / path).write_text(text, encoding="utf-8")
    for path, lines in added_lines().items():
        text = (code / path).read_text(encoding="utf-8")
        for before, added in lines:
            assert text.count(f"{before}\n") == 1, f"{path} has not one line {before!r}"
            text = text.replace(f"{before}\n", f"{before}\n{added}\n")
        (code / path).write_text(text, encoding="utf-8")


def make_squared_model(folder: Path, tiny_model: Path) -> None:
    """A model of the page's family, with the tiny model's sizes and tokenizer."""
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    module = folder / "modeling_squared.py"
    module.write_text(new_files()[module.name], encoding="utf-8")
    family = load_module(module)
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family.SquaredForCausalLM(family.SquaredConfig(**sizes | {"model_type": "squared"})).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (line,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (folder / "config.json").write_text(json.dumps(config | json.loads(line)), encoding="utf-8")


@dataclass(frozen=True)
class Tuned:
    """A task that `alto tune` of the extended code has ended."""

    settings: Settings
    result: dict[str, Any]

    @property
    def jobs(self) -> list[JobRecord]:
        return list(Store(self.settings).jobs(self.result["task_id"]))


@pytest.fixture(scope="module")
def tuned(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    tiny_rows: Path,
    empty_database: Path,
    prefect_server: None,
) -> Tuned:
    folder = tmp_path_factory.mktemp("extended")
    extend_code(folder / "code")
    make_squared_model(folder / "squared", tiny_model)
    task = {
        "name": "extended",
        "model": {"name": "squared", "trust_remote_code": True},
        "data": {"source": str(tiny_rows), "validation": {"rows": 8}, "test": {"rows": 8}},
        "search_space": {
            "strategy": "balanced",
            "num_jobs": 4,
            "learning_rate": [1e-2, 100.0],
            "lora_rank": [2, 4, 8],
            "target_modules": ["widen", "narrow"],
        },
        "budget": {"steps": 8, "eval_interval_fraction": 0.125, "gate_warmup_fraction": 0.5},
        "early_exit": {"preset": "patience", "overrides": {"patience": 3}},
        "evaluation": {"metric": "shared_start", "max_new_tokens": 4},
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    own = {
        "ALTO_HOME": str(folder / "alto"),
        "ALTO_DEVICE": "cpu",
        "HF_HOME": str(folder / "hub"),
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PYTHONPATH": str(folder / "code"),
    }
    (folder / "alto").mkdir()
    shutil.copy(empty_database, folder / "alto" / "mlflow.db")
    done = subprocess.run(
        [sys.executable, "-c", "from flows.cli.app import main; main()", "tune", "task.yaml", "--json"],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Tuned(load_settings(own), json.loads(done.stdout.splitlines()[-1]))


def test_each_extension_is_one_file_and_one_line_with_its_import() -> None:
    registries = added_lines()
    assert len(new_files()) == 4 and len(registries) == 3
    for lines in registries.values():
        import_line, registration = (added for _, added in lines)
        assert import_line.startswith("from ") and not registration.lstrip().startswith(("from ", "import "))


def test_a_task_runs_with_a_strategy_a_preset_a_metric_and_a_model_family_of_its_own(tuned: Tuned) -> None:
    jobs, result = tuned.jobs, tuned.result
    assert result["state"] == TaskState.FINISHED.value and result["registered"]

    assert sorted(job.job.learning_rate for job in jobs) == [1e-2, 1e-2, 100.0, 100.0]
    assert {job.job.target_modules for job in jobs} == {("narrow", "widen")}

    idle = [job for job in jobs if "no better validation loss in 3 evaluations" in (job.reason or "")]
    assert idle and {job.state for job in idle} == {JobState.OVERFITTING}
    assert {job.job.learning_rate for job in idle} == {100.0}

    scores = [score for score in result["scores"] if score["split"] == "test"]
    assert len(scores) == 2 and {score["metric"] for score in scores} == {"shared_start"}
    assert all(0 <= score["metric_value"]["value"] <= 1 for score in scores)


def test_all_names_that_a_task_leaves_in_mlflow_are_documented(tuned: Tuned) -> None:
    client = MlflowClient(tuned.settings.mlflow_tracking_uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (version,) = client.search_model_versions("name = 'extended'")
    names = set(version.tags).union(*({*run.data.tags, *run.data.params, *run.data.metrics} for run in runs))
    general = {
        re.sub(r"(untuned_)?(validation|test)_", r"\1SPLIT_", name).replace("shared_start", "METRIC") for name in names
    }
    assert len(runs) == 5 and len(general) > 60

    docs = REPOSITORY / "docs"
    pages = (docs / "tracking.md").read_text(encoding="utf-8") + (docs / "registry.md").read_text(encoding="utf-8")
    assert {name for name in general if f"`{name}`" not in pages and not name.startswith("system/")} == set()
