"""What is read is never run (Z2, Z3): no pickle, no evaluation, no code of a model. A share of benchmarks/fuzz.py."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import pickle
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from alto_core.config import ModelSection, load_task
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.export import adapter_job
from alto_core.engine.model_files import load_config
from alto_core.errors import EngineError, ModelError, TaskFileError

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "alto_core", "kernels")
RUNS_WHAT_IT_READS = {
    "eval", "exec", "torch.load", "torch.jit.load", "pickle.load", "pickle.loads", "marshal.loads", "shelve.open",
    "joblib.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "pd.read_pickle", "np.load",
}  # fmt: skip
LAUGHS = "[&a [x], " + ", ".join(f"&{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")) + "]"
"""Aliases of aliases: a short text that means nine to the power of eight values."""


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, file: Path):
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def test_no_module_of_ours_calls_what_runs_its_input() -> None:
    found = []
    for package in PACKAGES:
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                keywords = {k.arg for k in node.keywords if getattr(k.value, "value", None) is True} if name else set()
                if name in RUNS_WHAT_IT_READS or keywords & {"shell", "allow_pickle"}:
                    found.append(f"{file.relative_to(REPOSITORY)}:{node.lineno}: {name}")
    assert found == []


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [made]", "!!python/name:os.system", "{{ 7*7 }}"])
def test_a_task_file_makes_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text(f"name: {text}\n")
    with pytest.raises(TaskFileError, match=r"task.yaml:1: "):
        load_task(tmp_path / "task.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["task.yaml"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "values"),
        ("&a [*a]", "values"),
        ("[" * 1500, "nested"),
        ("9" * 5000, "cannot hold"),
        ("0x" + "f" * 40, "63 bits"),
        ("2001-99-99", "cannot hold"),
        ("!!int ''", "cannot hold"),
    ],
    ids=["billion laughs", "cycle", "deep", "long", "large", "date", "tag"],
)  # fmt: skip
def test_a_task_file_that_would_blow_up_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "task.yaml").write_text(f"name: {text}\n")
    with pytest.raises(TaskFileError, match=why) as caught:
        load_task(tmp_path / "task.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'task.yaml'}: file: got ")
    assert "\n" not in str(caught.value)


def test_pickles_in_the_place_of_weights_are_not_run(tmp_path: Path, tiny_model: Path) -> None:
    marker, evil = tmp_path / "ran", tmp_path / "evil"
    evil.write_bytes(pickle.dumps(_Touch(marker)))
    job = LoraJob(learning_rate=1e-3, lora_rank=2, lora_alpha=4, adapter_batch_size=1, target_modules=("q_proj",))
    budget = JobBudget(total_steps=2, warmup_steps=1, eval_steps=(2,))
    backbone = load_backbone(ModelSection(name=str(tiny_model)), "cpu")
    with Engine(backbone, target_modules=job.target_modules, num_slots=1, rank_rows=2) as engine:
        engine.admit(job, budget)
        engine.save(job.job_id, tmp_path / "state")
        engine.export(job.job_id, tmp_path / "adapter", best=False)
        engine.evict(job.job_id)
        (state,) = (tmp_path / "state").iterdir()
        for name in ("params.safetensors", "exp_avg.safetensors"):
            (state / name).write_bytes(evil.read_bytes())
        _mark_as_whole(state)
        with pytest.raises(EngineError, match="expected whole safetensors"):
            engine.restore(job, budget, tmp_path / "state")
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            (tmp_path / "adapter" / name).write_bytes(evil.read_bytes())
        with pytest.raises(ModelError, match="expected whole safetensors"):
            engine.load_adapter(adapter_job(tmp_path / "adapter"), tmp_path / "adapter")
    assert not marker.exists()


def _mark_as_whole(state: Path) -> None:
    files = [path for path in state.iterdir() if path.name != "complete.json"]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (state / "complete.json").write_text(json.dumps({"sha256": sums}))


def test_code_of_a_model_runs_only_where_the_task_file_says_so(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    source = (
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(marker)!r}).touch()\n\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(source)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    with pytest.raises(ModelError, match="trust_remote_code: true` only if you trust it"):
        load_config(ModelSection(name=str(folder)))
    assert not marker.exists()
    load_config(ModelSection(name=str(folder), trust_remote_code=True))
    assert marker.exists()


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """The script, as it imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        return importlib.import_module("fuzz")


@pytest.mark.parametrize(
    ("kind", "cases"), [("task files", 200), ("data rows", 100), ("checkpoints", 100), ("curves", 100)]
)
def test_damaged_and_strange_input_never_ends_in_a_traceback(
    fuzz: ModuleType, tmp_path: Path, tiny_model: Path, kind: str, cases: int
) -> None:
    made = fuzz.kinds(tmp_path, tiny_model)[kind]()
    try:
        tally = fuzz.run_kind(made, cases)
    finally:
        made.close()
    assert tally.cases >= cases
    assert 0 < tally.refused < tally.cases, "some are refused, and some are taken"
