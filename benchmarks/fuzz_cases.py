"""What fuzz.py feeds to ALTO: task files, data files, checkpoints, adapters, curves, each with something wrong in it.

A case is plain values drawn by hypothesis. `strategy()` draws one; `run()` writes it to a folder and hands it to the
code that a user's file meets. `run` may raise an `AltoError` that names the file; whatever else it raises is a fault.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from alto_core.budget import job_budget
from alto_core.config import DataSection, ModelSection, TuningTask, load_task, parse_task, with_changes
from alto_core.curve_files import read_recording
from alto_core.data import prepare
from alto_core.data.storage import load_task_data, save_task_data
from alto_core.domain import JobBudget, LoraJob
from alto_core.early_exit import PRESETS, Curve, make_policy
from alto_core.early_exit.replay import replay
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.export import adapter_job
from alto_core.errors import AltoError
from alto_core.replay import replay_recording
from alto_core.search_space import expand_search_space

ODD_TEXTS = (
    "", " ", "\x00", "a\ud800", "\u202e", "<|im_end|>", "<script>", "../../x", "{{ 7*7 }}", "=cmd()", "null", "1e-4",
    "\ufeff", "\uff4eame", "a" * 5000,
)  # fmt: skip
odd_numbers = st.sampled_from([0, -1, 1, 2, 8, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300, 1e-4, 1.0])
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
scalars = st.one_of(
    st.none(), st.booleans(), odd_numbers, not_finite, st.integers(-3, 70), st.floats(0, 2), st.sampled_from(ODD_TEXTS)
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
Damage = tuple[str, int, int]
damages: st.SearchStrategy[list[Damage]] = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "zero", "insert", "drop", "double"]), st.integers(0), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damage: list[Damage]) -> bytes:
    """The content with bytes cut off, flipped, zeroed, put in, left out, or a part of it twice."""
    for kind, where, value in damage:
        at = where % (len(content) + 1)
        before, part, after = content[:at], content[at : at + value], content[at + value :]
        match kind:
            case "cut":
                content = before
            case "flip":
                content = before + bytes(byte ^ (value or 1) for byte in content[at : at + 1]) + content[at + 1 :]
            case "zero":
                content = before + bytes(len(part)) + after
            case "insert":
                content = before + bytes([value]) + content[at:]
            case "drop":
                content = before + after
            case "double":
                content = before + part + content[at:]
    return content


class Kind:
    """One kind of input."""

    name: str

    def strategy(self) -> st.SearchStrategy[Any]:
        raise NotImplementedError

    def run(self, case: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


def names_it(call: Callable[[], Any], *words: str) -> Any:
    """The value of a call; an `AltoError` that names none of these words, or is no one-line text, is a fault."""
    try:
        return call()
    except AltoError as error:
        text = str(error)
        assert any(word in text for word in words), f"names none of {words}: {text[:300]}"
        assert len(text) < 20_000, f"{len(text)} characters: {text[:300]}"
        raise


class TaskFiles(Kind):
    """Task files: fields replaced, left out and invented, and the text itself damaged."""

    name = "task files"
    dimensions = (
        "learning_rate",
        "lora_rank",
        "adapter_batch_size",
        "lora_alpha",
        "alpha_over_rank",
        "dropout",
        "seed",
    )
    lengths = ("epochs", "steps", "eval_interval_fraction", "gate_warmup_fraction", "max_eval_share")
    snippets = (
        *(b"&a [*a]", b"*a", b"!!python/object/apply:os.system [id]", b"!!int ''", b"2001-99-99", b"{? a : b", b"\t"),
        *(b"%YAML 9.9\n", b"---\n", b"<<: 1", b"<<: {name: x}", b"!!binary x", b"\0", b"\xff\xfe", b"!!set {a, b}"),
        *(b"0b_", b"1_", b"=", b"!!timestamp x", b"'", b'"\\ud800"', b"9" * 5000, b"0x" + b"f" * 5000, b"[" * 1000),
        # aliases of aliases: a short text that means 8^8 values
        b"[&a [x], " + b", ".join(b"&%c [%s]" % (c, b",".join([b"*%c" % (c - 1)] * 8)) for c in b"bcdefghi") + b"]",
    )

    def __init__(self, folder: Path):
        self._file = folder / "task.yaml"
        self._base: dict[str, Any] = {
            "name": "a",
            "model": {"name": "org/model"},
            "data": {"source": "rows.jsonl", "validation": {"rows": 8}, "test": {"share": 0.1}, "columns": {}},
            "search_space": {"learning_rate": [1e-4, 1e-3], "lora_rank": [2, 4], "target_modules": ["q_proj"]},
            "budget": {"epochs": 2.0},
            "early_exit": {"preset": "guarded", "overrides": {}},
            "evaluation": {"metric": "exact_match"},
            "cluster": {"num_gpus": 1, "deadline": "2030-01-31T18:00:00+01:00"},
        }
        schema = TuningTask.model_json_schema()
        sections = [schema, *schema["$defs"].values()]
        self._fields = sorted({name for section in sections for name in section.get("properties", {})})

    def strategy(self) -> st.SearchStrategy[Any]:
        number = st.one_of(st.integers(1, 64), st.floats(0.01, 0.9), st.integers(1, 64), odd_numbers)
        numbers = number | st.lists(number, min_size=1, max_size=4)
        likely = st.one_of(
            st.tuples(st.just("search_space"), st.sampled_from(self.dimensions), numbers),
            st.tuples(st.just("search_space"), st.just("strategy"), st.sampled_from(["random", "grid", "list"])),
            st.tuples(st.just("search_space"), st.just("num_jobs"), number),
            st.tuples(st.just("search_space"), st.just("learning_rate"), st.just({"min": 1e-4, "max": 1.0})),
            st.tuples(st.just("budget"), st.sampled_from(self.lengths), number),
            st.tuples(st.just("early_exit"), st.just("preset"), st.sampled_from(PRESETS)),
            st.tuples(st.just("early_exit"), st.just("overrides"), st.dictionaries(st.text(max_size=8), number)),
            st.tuples(st.just("evaluation"), st.sampled_from(["metric", "pattern", "choices"]), json_values),
            st.tuples(st.just("data"), st.sampled_from(["limit", "max_length", "seed", "source"]), json_values),
        )
        anything = st.tuples(
            st.sampled_from([*self._base, "", ""]), st.sampled_from(self._fields) | st.text(max_size=4), json_values
        )
        gone = st.tuples(st.sampled_from(list(self._base)), st.integers(0, 9), st.just(None))
        change = st.one_of(likely, likely, likely, anything, gone)
        text = st.one_of(
            st.none(), st.none(), st.none(), damages, st.tuples(st.sampled_from(self.snippets), st.integers(0))
        )
        setting = st.sampled_from(["budget.steps=3", "budget.epochs=null"]) | st.text(max_size=30)
        return st.tuples(st.lists(change, max_size=2), text, st.lists(setting, max_size=1))

    def run(self, case: Any) -> None:
        changes, text, settings = case
        content = json.loads(json.dumps(self._base))
        for section, field, value in changes:
            target = content.get(section)
            target = target if isinstance(target, dict) else content
            if not isinstance(field, int):
                target[field] = value
            elif target:
                del target[list(target)[field % len(target)]]
        written = yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
        if isinstance(text, tuple):
            snippet, where = text
            lines = written.split(b"\n")
            line = lines[where % len(lines)]
            lines[where % len(lines)] = line.partition(b":")[0] + b": " + snippet
            written = b"\n".join(lines)
        elif text is not None:
            written = damaged(written, text)
        self._file.write_bytes(written)
        task = names_it(lambda: load_task(self._file), str(self._file))
        for setting in settings:
            task = names_it(lambda setting=setting, task=task: with_changes(task, [setting]), "--set", "got")
        assert parse_task(json.loads(json.dumps(task.model_dump(mode="json")))).digest == task.digest
        names_it(lambda: make_policy(task.early_exit.preset, task.early_exit.overrides), "early_exit.overrides")
        jobs = names_it(lambda: expand_search_space(task.search_space, ("q_proj", "v_proj")), "search_space")
        for job in jobs[:3]:
            names_it(lambda job=job: job_budget(job, task.budget, 64), "budget")


class DataFiles(Kind):
    """Data files of every ending, their rows odd or their bytes damaged, under many settings."""

    name = "data rows"

    def __init__(self, folder: Path, model: Path):
        self._folder, self._model = folder, ModelSection(name=str(model))
        # the tokenizer is none of what is damaged, and loading it takes most of a case's time
        self._load = prepare.load_model_tokenizer
        prepare.load_model_tokenizer = functools.cache(self._load)

    def close(self) -> None:
        prepare.load_model_tokenizer = self._load

    def strategy(self) -> st.SearchStrategy[Any]:
        text = st.sampled_from(ODD_TEXTS) | st.text(max_size=12)
        role = st.sampled_from(["user", "assistant", "system"])
        turn = st.fixed_dictionaries({}, optional={"role": role | json_values, "content": text | json_values})
        row = st.one_of(
            st.fixed_dictionaries({"prompt": text, "completion": text}),
            st.fixed_dictionaries({"prompt": text, "completion": text | json_values, "meta": json_values}),
            st.fixed_dictionaries({"messages": st.lists(turn, max_size=4)}),
            st.fixed_dictionaries({"text": text}),
            st.dictionaries(st.text(max_size=5), json_values, max_size=3),
            json_values,
        )
        options = st.fixed_dictionaries(
            {},
            optional={
                "format": st.sampled_from(["messages", "prompt_completion", "text"]),
                "max_length": st.sampled_from([1, 2, 8, 10**9]),
                "too_long": st.just("truncate"),
                "bad_rows": st.just("refuse"),
                "limit": st.sampled_from([1, 5]),
                "chat_template": st.booleans(),
                "columns": st.sampled_from([{"text": "prompt"}, {"prompt": "nothing"}]),
            },
        )
        good = st.integers(0, 12)
        ending = st.sampled_from([".jsonl", ".jsonl", ".json", ".csv", ".parquet"])
        return st.tuples(st.lists(row, max_size=6), good, ending, options, st.none() | damages)

    def run(self, case: Any) -> None:
        rows, num_good, ending, options, damage = case
        rows = [*({"prompt": f"{i}:", "completion": "yes"} for i in range(num_good)), *rows]
        file = self._folder / f"rows{ending}"
        content = _written(rows, ending)
        file.write_bytes(content if damage is None else damaged(content, damage))
        data = DataSection.model_validate({"source": str(file), "validation": {"rows": 2}, **options})
        prepared = names_it(lambda: prepare.prepare_data(data, self._model), file.name, "data.", "data:")
        target = self._folder / "prepared"
        save_task_data(prepared, target)
        part = sorted(target.iterdir())[num_good % 3]
        if damage is not None:
            part.write_bytes(damaged(part.read_bytes(), damage))
        names_it(lambda: load_task_data(target), str(target))


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


def _written(rows: list[Any], ending: str) -> bytes:
    """Rows as a file; what an ending cannot hold is left out."""
    if ending in (".jsonl", ".json"):
        lines = [json.dumps(row, ensure_ascii=len(rows) % 2 == 0) for row in rows]
        text = "\n".join(lines) if ending == ".jsonl" else f"[{','.join(lines)}]"
        return text.encode("utf-8", "surrogatepass")
    tables = [row for row in rows if isinstance(row, dict)]
    names = list(dict.fromkeys(str(name) for row in tables for name in row))
    if ending == ".csv":
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows([[str(row.get(name, "")) for name in names] for row in tables])
        return out.getvalue().encode("utf-8", "surrogatepass")
    columns = {_clean(name): [row.get(name) for row in tables] for name in names}
    return _parquet(columns)


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
    content = _parquet(columns)
    return content if damage is None else damaged(content, damage)


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    """A file of these columns; a column that Parquet has no type for is written as text."""
    try:
        return _parquet_of({name: _array(values) for name, values in columns.items()})
    except pa.ArrowNotImplementedError:
        return _parquet_of({name: pa.array([_clean(value) for value in values]) for name, values in columns.items()})


def _parquet_of(columns: dict[str, pa.Array]) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    return bytes(buffer.getvalue())


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        return pa.array([_clean(value) for value in values])


def _clean(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()
