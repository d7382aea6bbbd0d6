"""What fuzz.py feeds to ALTO as files of a user: task files and data files, each with something wrong in it."""

from __future__ import annotations

import csv
import functools
import io
import json
from pathlib import Path
from typing import Any

import yaml
from fuzz_input import ODD_TEXTS, Kind, damaged, damages, json_values, names_it, odd_numbers, parquet, printable
from hypothesis import strategies as st

from alto_core.budget import job_budget
from alto_core.config import DataSection, ModelSection, TuningTask, load_task, parse_task, with_changes
from alto_core.data import prepare
from alto_core.data.storage import load_task_data, save_task_data
from alto_core.early_exit import PRESETS, make_policy
from alto_core.search_space import expand_search_space


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
    columns = {printable(name): [row.get(name) for row in tables] for name in names}
    return parquet(columns)
