"""What all tests share: a quiet environment, a workspace of their own, the quickstart's real model."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

from alto_core.config import TuningTask, parse_task
from alto_core.loading import keep_what_is_loaded, loading
from alto_core.settings import Settings, load_settings, prepare_environment

REPOSITORY = Path(__file__).resolve().parents[1]

# A busy machine is slow, not wrong: no example is failed for its time.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

NO_PROCESS = 2**22 + 1
"""Above the highest process id of Linux: a signal to it hits nobody."""

# Before prefect or mlflow are imported by any test module.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
prepare_environment(load_settings({"ALTO_HOME": str(REPOSITORY / ".pytest_cache" / "alto")}))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All test modules are imported here; what that makes stays, and nobody need look through it."""
    with loading():
        result = yield
    keep_what_is_loaded()
    return result


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for the workers, the slow ones first: a module is one, all modules that want the Prefect server are one.

    So what a module makes is made once, one Prefect server is started, and no long test is begun last.
    """
    with_server = {item.path for item in items if "prefect_server" in getattr(item, "fixturenames", ())}
    groups = {item: "prefect" if item.path in with_server else item.path.stem for item in items}
    num_slow = Counter(groups[item] for item in items if item.get_closest_marker("slow"))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: -num_slow[groups[item]])


def _load_prepare_quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "prepare_quickstart", REPOSITORY / "examples" / "prepare_quickstart.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A fresh workspace on the CPU."""
    return load_settings({"ALTO_HOME": str(tmp_path / "alto"), "ALTO_DEVICE": "cpu"})


@pytest.fixture(scope="session")
def quickstart_folder() -> Path:
    """The quickstart's model and rows, made once and kept between runs."""
    folder = REPOSITORY / "quickstart"
    prepare = _load_prepare_quickstart()
    folder.mkdir(exist_ok=True)
    with FileLock(folder / ".lock"):
        prepare.convert_model(folder / "model")
        prepare.write_rows(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(quickstart_folder: Path) -> Path:
    """SmolLM2-135M-Instruct in fp32, a real pretrained model."""
    return quickstart_folder / "model"


def make_tiny_model(folder: Path) -> None:
    """A two-layer Llama with random weights and a tokenizer of single bytes: real parts, made in a second."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # wider than usual, so that the adapters matter
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty-four rows that a tiny model can learn: repeat a letter."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"{chr(97 + i % 26)}{i // 26}:", "completion": chr(97 + i % 26) * 3} for i in range(64)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="session")
def tiny_task(tiny_model: Path, tiny_rows: Path) -> Callable[..., TuningTask]:
    """Makes a small task; sections given replace the default ones."""

    def make(**sections: Any) -> TuningTask:
        content: dict[str, Any] = {
            "name": "tiny",
            "model": {"name": str(tiny_model)},
            "data": {"source": str(tiny_rows), "validation": {"rows": 8}, "test": {"rows": 8}},
            "search_space": {"learning_rate": [1e-3, 1e-2, 1e30], "lora_rank": [2, 4], "adapter_batch_size": 4},
            "budget": {"steps": 20, "eval_interval_fraction": 0.05, "gate_warmup_fraction": 0.2},
            "evaluation": {"metric": "exact_match", "max_new_tokens": 6},
        }
        return parse_task(content | sections)

    return make


@pytest.fixture
def workspace_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh `ALTO_HOME` for code that reads its settings from the environment."""
    home = tmp_path / "alto"
    monkeypatch.setenv("ALTO_HOME", str(home))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    home.mkdir()
    return home


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect's own test server, one for the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def empty_prefect_database(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Prefect's tables, which take ten seconds to make, for servers that tests start themselves."""
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

    url = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value())
    database = tmp_path_factory.mktemp("prefect") / "prefect.db"
    made = url.removeprefix("sqlite+aiosqlite:///")
    with closing(sqlite3.connect(made)) as source, closing(sqlite3.connect(database)) as copy:
        source.backup(copy)
    return database


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow needs seconds to make its tables; tests copy this file."""
    from alto_core.tracking import Tracker

    settings = load_settings({"ALTO_HOME": str(tmp_path_factory.mktemp("mlflow"))})
    Tracker(settings)
    database = settings.home / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:  # into the one file that tests copy
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database


@pytest.fixture
def embedded(settings: Settings, empty_database: Path) -> Settings:
    """A workspace whose MLflow database has its tables."""
    settings.home.mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_database, settings.home / "mlflow.db")
    return settings


def train_and_register(task: TuningTask, steps: int) -> int:
    """Train the one job of a new task for so many steps and register its adapter; returns the version."""
    from alto_core.preparation import create_task, plan_task
    from alto_core.registration import held_out, register_winner
    from alto_core.store import Store
    from alto_core.task_engine import open_engine
    from alto_core.workspace import Workspace

    settings = load_settings()
    task_id = Store(settings).new_task_id(task.name)
    create_task(plan_task(task), task_id, settings)
    workspace = Workspace.open(task_id)
    ((job_id, job),) = workspace.jobs.items()
    rows = workspace.data.train.rows
    with open_engine(workspace, [job_id], num_slots=1) as engine:
        engine.admit(job, workspace.budgets[job_id])
        for step in range(steps):
            start = step * 8 % (len(rows) - 8)
            engine.step({job_id: rows[start : start + 8]})
        engine.export(job_id, workspace.job_folder(job_id) / "adapter", best=False)
        losses = engine.evaluate([job_id], held_out(workspace).rows[:4], max_tokens=1000)[job_id]
    workspace.update_result(winner=job_id, check_losses=losses.loss_sums)
    return register_winner(workspace, job_id).version


@pytest.fixture
def living_tensor_bytes() -> Callable[[], int]:
    """Counts the memory of the living tensors on the CPU. Not beside busy threads: see `allocated_bytes`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor  # torch.compile keeps some, which have no memory

    def count() -> int:
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        tensors = [tensor for tensor in tensors if not issubclass(type(tensor), FakeTensor)]
        plain = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.layout is torch.strided]
        storages = [tensor.untyped_storage() for tensor in plain]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return count


@pytest.fixture(scope="session")
def register_tiny(tiny_task: Callable[..., TuningTask]) -> Callable[..., int]:
    """`register(steps, **sections)`: tunes a little and registers the adapter as `model`; returns its version."""

    def register(steps: int, **sections: Any) -> int:
        space = {"learning_rate": 1e-2, "lora_rank": 4, "adapter_batch_size": 8}
        fields = {"search_space": space, "evaluation": {}, "registry_name": "model", **sections}
        return train_and_register(tiny_task(**fields), steps)

    return register


@pytest.fixture(scope="session")
def home_with(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, register_tiny: Callable[..., int]
) -> Callable[..., Path]:
    """`home_with(1, 40)`: a workspace in which adapters of so many steps are registered one after the other."""

    def make(*steps: int) -> Path:
        home = tmp_path_factory.mktemp("home")
        shutil.copy(empty_database, home / "mlflow.db")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ALTO_HOME", str(home))
            patch.setenv("ALTO_DEVICE", "cpu")
            for count in steps:
                register_tiny(count)
        return home

    return make
