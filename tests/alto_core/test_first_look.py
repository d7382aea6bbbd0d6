"""What a task names is looked at before anything heavy: files of rows, the model's folder; and is the hub there?"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from alto_core.config import TuningTask
from alto_core.errors import DataError, ModelError
from alto_core.first_look import check_named
from alto_core.hub import go_offline_without_hub

REPOSITORY = Path(__file__).resolve().parents[2]


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _one_shard_of_two(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "expected a folder that exists"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json, expected a folder as transformers"),
        (_adapter, "holds an adapter, expected a model"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*.safetensors, .* Copy the weights"),
        (_pickled, r"holds no \*.safetensors but pytorch_model.bin, .* Convert it"),
        (_one_shard_of_two, "lacks model-00002-of-00002.safetensors, which its index lists"),
        (_broken_index, "expected an index of weights"),
    ],
    ids=["no folder", "no config", "adapter", "no weights", "pickle", "shard", "index"],
)
def test_a_model_folder_that_cannot_train_is_refused_by_its_file(
    tiny_task: Callable[..., TuningTask], tiny_model: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    check_named(tiny_task(model={"name": str(folder)}))
    damage(folder)
    with pytest.raises(ModelError, match=f"^model.name: .*{message}"):
        check_named(tiny_task(model={"name": str(folder)}))


def test_each_source_of_rows_is_looked_for(tiny_task: Callable[..., TuningTask], tmp_path: Path) -> None:
    task = tiny_task()
    absent = str(tmp_path / "absent.jsonl")
    for data in ({"source": absent}, {"source": task.data.source, "test": {"source": absent}}):
        with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
            check_named(tiny_task(data=data))


def test_looking_imports_nothing_heavy() -> None:
    code = "import sys, alto_core.first_look; print({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_a_hub_that_is_away_is_told_at_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert go_offline_without_hub() == "" and not constants.is_offline_mode()
    assert "127.0.0.1" in go_offline_without_hub() and constants.is_offline_mode()
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert go_offline_without_hub() == "" and not constants.is_offline_mode(), "it is back"
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert go_offline_without_hub() == "", "a proxy may reach what this machine cannot"


def test_a_model_that_only_the_hub_could_have_is_refused_without_retries(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 20)
    (tmp_path / "task.yaml").write_text(
        "name: a\nmodel: {name: some-owner/some-model}\ndata: {source: rows.jsonl}\nbudget: {steps: 2}\n"
        "search_space: {learning_rate: 1e-4, lora_rank: 4, adapter_batch_size: 2}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{closed}",
        "ALTO_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "validate", str(tmp_path / "task.yaml")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert shown.returncode == 4 and "Retry" not in shown.stderr
    (line,) = shown.stderr.splitlines()
    assert "no such folder (a relative one is looked for beside the task file)" in line
    assert f"127.0.0.1:{closed} cannot be reached (Connection refused)" in line
