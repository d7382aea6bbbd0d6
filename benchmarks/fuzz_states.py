"""What fuzz.py feeds to ALTO as states of earlier runs: checkpoints, adapters and curves, damaged or of others."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from fuzz_input import ODD_TEXTS, Kind, damaged, damages, json_values, names_it, not_finite, odd_numbers, parquet
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from alto_core.config import ModelSection
from alto_core.curve_files import read_recording
from alto_core.domain import JobBudget, LoraJob
from alto_core.early_exit import PRESETS, Curve, make_policy
from alto_core.early_exit.replay import replay
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.export import adapter_job
from alto_core.replay import replay_recording


class Checkpoints(Kind):
    """Training states and adapters on disk: cut, flipped, with tensors of others and whole markers on top."""

    name = "checkpoints"

    def __init__(self, folder: Path, model: Path):
        self._folder = folder
        self._job = LoraJob(
            learning_rate=1e-3, lora_rank=4, lora_alpha=8.0, adapter_batch_size=1, target_modules=("q_proj", "v_proj")
        )
        self._budget = JobBudget(total_steps=4, warmup_steps=1, eval_steps=(4,))
        backbone = load_backbone(ModelSection(name=str(model)), "cpu")
        self._engine = Engine(backbone, target_modules=self._job.target_modules, num_slots=1, rank_rows=8)
        self._engine.admit(self._job, self._budget)
        self._engine.keep_best(self._job.job_id, 1.0)
        self._engine.save(self._job.job_id, folder / "good" / "state")
        self._engine.export(self._job.job_id, folder / "good" / "adapter", best=False)
        self._engine.evict(self._job.job_id)

    def strategy(self) -> st.SearchStrategy[Any]:
        return st.tuples(
            st.sampled_from(["state", "adapter"]),
            st.integers(0, 20),
            st.one_of(
                st.tuples(st.just("bytes"), damages),
                st.tuples(st.just("json"), st.tuples(st.integers(0, 30), json_values)),
                st.tuples(st.just("whole"), json_values),
                st.tuples(st.just("tensor"), st.tuples(st.integers(0, 20), st.sampled_from(
                    ["gone", "extra", "renamed", "transposed", "half", "integer", "nan", "empty"]))),
                st.tuples(st.just("missing"), st.none()),
            ),
            st.booleans(),
        )  # fmt: skip

    def run(self, case: Any) -> None:
        what, index, (kind, change), mark = case
        shutil.rmtree(self._folder / "bad", ignore_errors=True)
        shutil.copytree(self._folder / "good", self._folder / "bad")
        folder = self._folder / "bad" / what
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if kind == "json" or kind == "whole":
            files = [path for path in files if path.suffix == ".json"]
        elif kind == "tensor":
            files = [path for path in files if path.suffix == ".safetensors"]
        file = files[index % len(files)]
        self._change(file, kind, change)
        if what == "state":
            (state,) = folder.iterdir()
            if mark and file.name != "complete.json":
                sums = {
                    p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in state.iterdir() if p.suffix != ".tmp"
                }
                del sums["complete.json"]
                (state / "complete.json").write_text(json.dumps({"sha256": sums}))
            names_it(lambda: self._engine.restore(self._job, self._budget, folder), str(folder))
        else:
            job = names_it(lambda: adapter_job(folder), str(folder))
            names_it(lambda: self._engine.load_adapter(job, folder), str(folder), "slot", job.job_id)
        (job_id,) = self._engine.job_ids
        self._engine.evict(job_id)

    def _change(self, file: Path, kind: str, change: Any) -> None:
        match kind:
            case "bytes":
                file.write_bytes(damaged(file.read_bytes(), change))
            case "missing":
                file.unlink()
            case "whole":
                file.write_text(_json(change), "utf-8")
            case "json":
                content = json.loads(file.read_text())
                names = list(content)
                content[names[change[0] % len(names)]] = change[1]
                file.write_text(_json(content), "utf-8")
            case "tensor":
                tensors = load_file(file)
                name = sorted(tensors)[change[0] % len(tensors)]
                tensor = tensors.pop(name)
                other = {
                    "gone": {},
                    "extra": {name: tensor, "foreign": tensor.clone()},
                    "renamed": {f"x{name}": tensor},
                    "transposed": {name: tensor.T.contiguous()},
                    "half": {name: tensor.half()},
                    "integer": {name: tensor.long()},
                    "nan": {name: tensor * math.nan},
                    "empty": {name: torch.zeros(0)},
                }[change[1]]
                save_file({**tensors, **other}, file)

    def close(self) -> None:
        self._engine.close()


class Curves(Kind):
    """Curves with gaps, losses that are no numbers, and curve files of other programs, damaged or strange."""

    name = "curves"

    def __init__(self, folder: Path):
        self._file = folder / "sweep.parquet"
        self._policies = [make_policy(name, {}) for name in PRESETS]

    def strategy(self) -> st.SearchStrategy[Any]:
        loss = st.floats(0, 10) | not_finite | st.none() | st.sampled_from([1e-300, 1e300, -1.0])
        steps = st.lists(st.integers(1, 40), max_size=6, unique=True).map(sorted)
        curve = st.tuples(st.integers(1, 40), steps, steps, st.lists(loss, min_size=12, max_size=12))
        whole = st.tuples(st.just("curves"), st.lists(curve, max_size=4), st.sampled_from([0.01, 0.1, 0.5, 0.99]))
        cell = st.integers(-1, 40) | st.floats(0, 1) | not_finite | st.none() | odd_numbers | st.sampled_from(ODD_TEXTS)
        table = st.tuples(
            st.just("file"),
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), loss, loss), max_size=8),
            st.tuples(st.none() | st.tuples(st.integers(0, 7), st.integers(0, 7), cell), st.none() | damages),
        )
        return whole | table

    def run(self, case: Any) -> None:
        kind, content, change = case
        if kind == "curves":
            curves = [_curve(f"job{i}", *values) for i, values in enumerate(content)]
            for policy in self._policies:
                replay(curves, policy, change)
            return
        self._file.write_bytes(_curve_file(content, *change))
        recording = names_it(lambda: read_recording(self._file), str(self._file))
        for policy in self._policies:
            replay_recording(recording, policy, warmup_fraction=0.1)


def _json(value: Any) -> str:
    return json.dumps(value).encode("utf-8", "replace").decode()


def _curve(job_id: str, total: int, train: list[int], val: list[int], losses: list[Any]) -> Curve:
    return Curve(
        job_id=job_id,
        learning_rate=1e-3,
        total_steps=max([total, *train, *val]),
        warmup_steps=1,
        train_steps=tuple(train),
        train_losses=tuple(losses[: len(train)]),
        val_steps=tuple(val),
        val_losses=tuple(losses[len(train) : len(train) + len(val)]),
    )


def _curve_file(rows: list[Any], cell: Any, damage: Any) -> bytes:
    columns: dict[str, list[Any]] = {
        "job_id": [row[0] for row in rows],
        "learning_rate": [1e-3 for _ in rows],
        "lora_rank": [8 for _ in rows],
        "adapter_batch_size": [4 for _ in rows],
        "step": [row[1] for row in rows],
        "fraction": [row[1] / 20 for row in rows],
        "train_loss": [row[2] for row in rows],
        "val_loss": [row[3] for row in rows],
    }
    if cell is not None and rows:
        column, row, value = cell
        columns[list(columns)[column]][row % len(rows)] = value
    content = parquet(columns)
    return content if damage is None else damaged(content, damage)
