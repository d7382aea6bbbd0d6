"""Code blocks of the pages run as they stand; only names of folders and sizes are replaced.

README.md tunes first. The other pages go on in its folder, so they find the task and the model that they speak of. The
tutorial runs in test_tutorial.py, docs/extending.md in test_extending.py, and what waits for Ctrl-C in tests/flows.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants as hub_constants

from alto_core.engine.backbone import release_backbone
from tests.pages import blocks
from tests.shell import run_shell

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.slow,
]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZES = {"rows: 200": "rows: 8", "[8, 16, 32]": "[4, 8, 16]"}


def block(page: str, language: str, part: str) -> str:
    """The one of a page that has this part."""
    (text,) = [one.text for one in blocks() if one.page == page and one.language == language and part in one.text]
    return text


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def folder(
    patch: pytest.MonkeyPatch,
    tiny_model: Path,
    empty_database: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Where a reader of README.md stands: the task file, rows that are learned soon, a hub's cache with the model."""
    folder = tmp_path_factory.mktemp("user")
    cached = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(tiny_model, cached / "snapshots" / ("7" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("7" * 40)
    patch.setattr(hub_constants, "HF_HUB_CACHE", str(folder / "hub"))
    (folder / ".alto").mkdir()
    shutil.copy(empty_database, folder / ".alto" / "mlflow.db")
    rows = ({"prompt": f"{first}{second}:", "completion": "aaa"} for first in "abcdefgh" for second in "abcdefgh")
    (folder / "replies.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = block("README.md", "yaml", "name: ")
    for size, tiny in SIZES.items():
        assert size in text
        text = text.replace(size, tiny)
    (folder / "task.yaml").write_text(text)
    patch.chdir(folder)
    for name in ("ALTO_HOME", "MLFLOW_TRACKING_URI"):
        patch.delenv(name, raising=False)
    patch.setenv("ALTO_DEVICE", "cpu")
    patch.setenv("COLUMNS", "160")
    return folder


@pytest.fixture(scope="module")
def register(folder: Path, register_tiny: Callable[..., int]) -> Callable[..., int]:
    """Registers an adapter that trained so many steps; all that is not given is as in README.md's task."""
    task = yaml.safe_load((folder / "task.yaml").read_text())
    fields = {"name": "earlier", "registry_name": task["name"]}
    fields |= {name: task[name] for name in ("model", "data", "evaluation")}
    return lambda steps, **sections: register_tiny(steps, **(fields | sections))


@pytest.fixture(scope="module")
def readme(folder: Path, register: Callable[..., int], patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What each command of README.md says, with a weak champion from before."""
    register(1)
    yield run_shell(block("README.md", "sh", "alto tune"), patch)
    release_backbone()


def test_the_commands_of_the_readme_tune_promote_and_export(readme: dict[str, str], folder: Path) -> None:
    assert list(readme) == [
        "alto validate task.yaml",
        "alto estimate task.yaml",
        "alto tune task.yaml",
        "alto report support-replies-1",
        "alto export support-replies@champion out/",
        "alto promote support-replies",
    ]
    assert "18, every combination" in readme["alto validate task.yaml"]
    assert "support-replies version 2 (challenger)" in readme["alto tune task.yaml"]
    assert "version 2 serves" in readme["alto promote support-replies"]
    assert (folder / "out" / "adapter_model.safetensors").is_file()


def test_its_adapter_is_loaded_as_shown(readme: dict[str, str]) -> None:
    printed = re.search(r"^adapter +(\S+)$", readme["alto tune task.yaml"], re.MULTILINE)
    assert printed
    shown = block("README.md", "python", "PeftModel")
    assert "<folder that alto printed>" in shown
    names: dict[str, Any] = {}
    exec(shown.replace("<folder that alto printed>", printed[1]), names)
    loaded = [name for name, _ in names["model"].named_modules() if name.endswith("lora_A.default")]
    assert len(loaded) == 7 * names["model"].config.num_hidden_layers


def test_a_version_is_loaded_in_all_the_ways_of_the_registrys_page(
    readme: dict[str, str], register: Callable[..., int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(0)
    told = run_shell(block("registry.md", "sh", "alto promote"))
    assert "version 2 serves, as before" in told["alto promote support-replies"]
    assert "version 1 serves" in told["alto rollback support-replies"]
    assert Path("DIR", "adapter_config.json").is_file()

    # the snippet points MLflow to a database, for good: in this process, and in its environment for others
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    names: dict[str, Any] = {}
    exec(block("registry.md", "python", "download_artifacts"), names)
    assert names["uri"] == "models:/support-replies@champion"

    register(0, registry_name="of-a-folder", model={"name": str(tiny_model)})
    shown = block("registry.md", "python", "base_model_path")
    assert "/models/SmolLM2" in shown
    exec(shown.replace("/models/SmolLM2", str(tiny_model)), names | {"uri": "models:/of-a-folder@champion"})


def test_curves_are_written_and_replayed_as_the_page_of_early_exit_shows(readme: dict[str, str]) -> None:
    told = run_shell(block("early-exit.md", "", "alto curves TASK").replace("TASK", "support-replies-1"))
    assert len(told) == 3
    *_, (_, sweep) = told.items()
    assert len([line for line in sweep.splitlines() if json.loads(line)]) >= 6


def test_a_task_is_submitted_and_planned_as_the_page_of_the_cluster_shows(readme: dict[str, str]) -> None:
    told = run_shell(block("cluster.md", "sh", "alto submit"))
    assert "support-replies-2: 18 jobs" in told["alto submit task.yaml"]
    assert "support-replies-2" in told["alto queue"]
    assert Path("plan.html").is_file()


def test_a_task_is_checked_without_a_network_as_its_page_shows(
    readme: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run_shell(block("offline.md", "sh", "HF_HUB_OFFLINE"), monkeypatch)
    assert "A tune would work here." in told["alto doctor"]
    assert "ready to tune" in told["alto validate task.yaml"]
