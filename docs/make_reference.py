"""Write those parts of the pages that the code or a measured table knows: fields of the task file, commands, and so on.

python docs/make_reference.py

A page holds such a part between two comments, `<!-- made by docs/make_reference.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from alto_core import settings
from alto_core.budget import job_budget
from alto_core.config import TuningTask, parse_task
from alto_core.domain import JobState
from alto_core.outcomes import Interval, JobOutcome, Score
from alto_core.search_space import expand_search_space
from alto_core.tracking import description
from flows.cli.app import app

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
MODEL_NAMES = {"135m": "SmolLM2 135M", "1b": "Llama 1B", "8b": "Llama 8B"}
"""As benchmarks/bench_step.py calls their shapes."""
STEPS = DOCS.parent / "benchmarks" / "results" / "step.csv"
BARS = STEPS.with_name("bars.csv")
WRONG_FILES = STEPS.with_name("wrong_files.csv")
PART = re.compile(r"(?<=<!-- made by docs/make_reference\.py: )([a-z-]+)( -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def with_parts(page: str) -> str:
    """A page with all its made parts written anew."""
    return PART.sub(lambda found: f"{found[1]}{found[2]}\n{PARTS[found[1]]().strip()}\n", page)


def task_file_fields() -> str:
    schema = TuningTask.model_json_schema()
    definitions = schema.pop("$defs")
    sections = [("Top level", schema)] + [(name, definitions[name]) for name in definitions]
    return "".join(_section(title, content) for title, content in sections)


def commands() -> str:
    """In the groups of `alto --help`: a heading per command, its help, its arguments and options."""
    group: Any = typer.main.get_command(app)
    by_panel = itertools.groupby(group.commands.items(), key=lambda item: item[1].rich_help_panel)
    sections = [(panel, [_command(name, command) for name, command in items]) for panel, items in by_panel]
    return "\n".join(f"### {panel}\n\n" + "\n".join(entries) for panel, entries in sections)


def environment_variables() -> str:
    """The table that the settings' module opens with."""
    return "\n".join(line for line in (settings.__doc__ or "").splitlines() if line.startswith("|"))


def wrong_files() -> str:
    """What `alto validate` says to files that are wrong, as measured."""
    with WRONG_FILES.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["exit_code"] != "0" or row["says"].startswith("e.g.")]
    said = [row["says"].removeprefix("alto: ").replace("|", "\\|").replace("*", "\\*") for row in rows]
    lines = [f"| {row['case']} | {what} |\n" for row, what in zip(rows, said, strict=True)]
    return f"| wrong | what is said |\n| --- | --- |\n{''.join(lines)}"


def comparison() -> str:
    """How many times as fast a joint step is as what people use today, by rows of a job, from the measured bars."""
    with BARS.open(encoding="utf-8", newline="") as file:
        bars = {row["bar"]: row for row in csv.DictReader(file)}
    one_gpu, two_gpus = "32 jobs, Llama 1B shape, one H200", "8 jobs, Qwen 32B shape, two H200"
    lines = []
    for what, where, bar in (
        ("PEFT, one adapter after the other", one_gpu, "engine.over_peft_eager"),
        ("the same from a CUDA graph", one_gpu, "engine.over_peft_graph"),
        ("FSDP2, one adapter after the other", two_gpus, "ap.over_fsdp"),
        ("the same with compiled layers", two_gpus, "ap.over_fsdp_fast"),
    ):
        measured = [bars.get(f"{bar}_b{rows}") for rows in (1, 2, 4, 8)]
        times = " | ".join(f"{float(row['value']):.1f} x" if row else "" for row in measured)
        script = next(row["command"] for row in measured if row).split(" --")[0]
        lines.append(f"| {what} | {where} | {times} | `{script}` |\n")
    head = "instead of ALTO | a training step of | 1 row a job | 2 rows | 4 rows | 8 rows | measured by"
    return f"| {head} |\n|{' --- |' * 7}\n{''.join(lines)}"


def telemetry() -> str:
    rows = "".join(f"| `{name}` | `{value}` |\n" for name, value in settings.TELEMETRY_OFF.items())
    return f"| variable | value |\n| --- | --- |\n{rows}"


def mlflow_names() -> str:
    """Tags, parameters and metrics, as the functions that log them name them for an example."""
    task = parse_task(
        {
            "name": "example",
            "model": {"name": "model", "revision": "main"},
            "data": {"source": "rows.jsonl"},
            "objective": "dpo",
            "search_space": {"learning_rate": 1e-4, "lora_rank": 8},
            "budget": {"epochs": 1},
        }
    )
    both = task.model_copy(update={"budget": task.budget.model_copy(update={"steps": 1})})
    data = description.DatasetSummary(
        name="rows", source="rows.jsonl", digest="0", num_train=8, num_validation=1, num_test=1, num_tokens=9
    )
    (job,) = expand_search_space(task.search_space, ["q_proj"], task.betas)
    outcome = JobOutcome(
        job_id=job.job_id,
        state=JobState.FINISHED,
        reason="",
        step=1,
        total_steps=job_budget(job, task.budget, data.num_train).total_steps,
        best_step=1,
        best_val_loss=1.0,
    )
    interval = Interval(value=1.0, low=1.0, high=1.0, num_rows=1)
    score = Score(job_id=None, split="SPLIT", loss=1.0, loss_standard_error=0.0, metric="METRIC", metric_value=interval)
    rows = {
        "tags of a task's run": description.task_tags(task, "", ""),
        "tags of a job's run": description.job_tags(task, "", job, 0, "", ""),
        "parameters of a task's run": [param.key for param in description.task_params(both, 1, data)],
        "parameters of a job's run": [param.key for param in description.job_params(task, job, data)],
        "metrics at a job's end": description.job_metrics(outcome, job.rows_per_update),
        "metrics of a scored split": description.score_metrics(score),
    }
    lines = (f"| {what} | {', '.join(f'`{name}`' for name in sorted(names))} |\n" for what, names in rows.items())
    return f"| what | names |\n| --- | --- |\n{''.join(lines)}"


def step_costs() -> str:
    """Time per token of joint steps, from the measured rows."""
    with STEPS.open(encoding="utf-8", newline="") as file:
        measured = list(csv.DictReader(file))
    backbones = {row["row"]: float(row["ms"]) for row in measured if row["method"].startswith("frozen backbone")}
    ours = [row for row in measured if row["method"] == "ours"]
    per_token = {row["row"]: float(row["ms"]) / int(row["tokens"]) for row in ours}
    one_job = {row["model"]: per_token[row["row"]] for row in ours if row["jobs"] == row["batch"] == "1"}
    lines = (
        f"| {MODEL_NAMES[row['model']]} | {row['jobs']} x {row['batch']} | {int(row['tokens']):,} | "
        f"{float(row['ms']):.1f} | {1000 * per_token[row['row']]:.1f} | "
        f"{one_job[row['model']] / per_token[row['row']]:.2f} | "
        f"{float(row['ms']) / backbones[row['row']]:.2f} | {float(row['peak_gib']):.1f} |\n"
        for row in sorted(ours, key=lambda row: ([*MODEL_NAMES].index(row["model"]), int(row["tokens"])))
    )
    head = (
        "model | jobs x rows | tokens | ms a step | ms per 1,000 tokens | gain over one job | "
        "over the frozen model | peak GiB"
    )
    return f"| {head} |\n|{' --- |' * 8}\n{''.join(lines)}"


PARTS: dict[str, Callable[[], str]] = {
    "task-file-fields": task_file_fields,
    "commands": commands,
    "environment-variables": environment_variables,
    "telemetry": telemetry,
    "mlflow-names": mlflow_names,
    "step-costs": step_costs,
    "comparison": comparison,
    "wrong-files": wrong_files,
}


def _command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(["alto", name, *(argument.metavar for argument in arguments)])
    rows = [(argument.metavar, argument.help) for argument in arguments]
    rows += [(_option(option), _with_default(option)) for option in options]
    table = "".join(f"| `{shown}` | {_text(about)} |\n" for shown, about in rows)
    head = "\n| argument, option | meaning |\n| --- | --- |\n" if table else ""
    return f"#### `{usage}`\n\n{_text(command.help)}\n{head}{table}"


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.rpartition('_')[2].upper()}"
    return ", ".join(option.opts) + value


def _with_default(option: Any) -> str:
    is_shown = not option.is_flag and option.default is not None
    return f"{option.help} Default: {option.default}." if is_shown else str(option.help)


def _section(title: str, content: dict[str, Any]) -> str:
    required = set(content.get("required", ()))
    rows = "".join(
        f"| `{name}` | {_type(field)} | {'**required**' if name in required else _default(field)} | "
        f"{_text(field.get('description', ''))} |\n"
        for name, field in content["properties"].items()
    )
    about = _text(content.get("description", ""))
    return f"\n## {title}\n\n{about}\n\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n{rows}"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(option) for option in field[key]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    bounds = [
        f"{sign} {field[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field
    ]
    return f"{kind} {', '.join(bounds)}".strip()


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else f"`{default}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that has made parts, and what it should hold."""
    for file in (README, *sorted(DOCS.glob("*.md"))):
        page = file.read_text(encoding="utf-8")
        if PART.search(page):
            yield file, with_parts(page)


if __name__ == "__main__":
    for file, page in pages():
        file.write_text(page, encoding="utf-8")
