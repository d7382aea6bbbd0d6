"""The task file: a `TuningTask` in YAML, checked field by field before anything is loaded.

`load_task` reads a file; `parse_task` takes a mapping. Both raise `TaskFileError` for the first wrong field. What needs
the data or the model (layer names, row counts) is checked later, by `data` and `engine`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from alto_core.domain import LrSchedule
from alto_core.errors import TaskFileError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Names become folders, MLflow keys and URLs: letters, digits, dot, dash, underscore; no leading dot."""


def _check_name(value: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        raise ValueError("a name of 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
    return value


def _check_finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def _one_or_more(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _unique(values: list[Any]) -> list[Any]:
    if len({repr(v) for v in values}) != len(values):
        raise ValueError("values without repetition")
    return values


Name = Annotated[str, AfterValidator(_check_name)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_check_finite)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_check_finite)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
LoraRank = Annotated[int, Field(ge=1, le=1024)]
ModuleNames = Annotated[list[str], BeforeValidator(_one_or_more), Field(min_length=1), AfterValidator(_unique)]


class _Section(BaseModel):
    """Unknown keys are refused, and no value is coerced: `true` is not 1, `"8"` is not 8."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ModelSection(_Section):
    """The frozen base model."""

    name: str = Field(min_length=1)
    """Hub id, or a local folder (relative to the task file)."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 on a GPU that has it, float32 on the CPU."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""


class SplitSection(_Section):
    """Where the rows of a held-out split come from: set aside from the training rows, or a source of their own."""

    rows: Count | None = None
    """That many rows; with `source`, the first so many of it."""
    share: OpenFraction | None = None
    """That share of the training source, in (0, 1)."""
    source: str | None = None
    """A file, or a hub data set."""
    split: str | None = None
    """Split of the hub data set, for example `test`."""

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.source is None and self.split is None and (self.rows is None) == (self.share is None):
            raise ValueError("exactly one of `rows` and `share`, or a `source`/`split` of its own")
        if self.share is not None and (self.source is not None or self.split is not None):
            raise ValueError("`share` only without `source` and `split`: it is a share of the training source")
        return self


class DataSection(_Section):
    """The data set and how it becomes token sequences."""

    source: str = Field(min_length=1)
    """A .jsonl, .json, .csv or .parquet file (relative to the task file), or a hub data set."""
    subset: str | None = None
    """Configuration name of the hub data set."""
    split: str = "train"
    """Split of the hub data set; files have one split."""
    format: Literal["auto", "messages", "prompt_completion", "text"] = "auto"
    """`auto` looks at the columns of the first rows."""
    columns: dict[Literal["messages", "prompt", "completion", "text"], str] = Field(default_factory=dict)
    """Name of the column that holds each part, where it differs."""
    chat_template: bool | None = None
    """Render prompt/completion rows as a user and an assistant turn. None: yes when the tokenizer has a template."""
    max_length: Count | None = None
    """Longest row in tokens. None: as many as the model has positions, at most 2048."""
    too_long: Literal["drop", "truncate"] = "drop"
    """`truncate` cuts a row's end; a row that would lose all its trained tokens is dropped either way."""
    bad_rows: Literal["drop", "refuse"] = "drop"
    """`drop` counts unusable rows and goes on; `refuse` stops at the first."""
    limit: Count | None = None
    """Use only the first so many rows of the source."""
    validation: SplitSection = SplitSection(share=0.1)
    """Rows that choose between jobs."""
    test: SplitSection | None = None
    """Rows for the final score, used once. None: no final score."""
    seed: int = 0
    """Seeds the split and the order of rows."""


class LogRange(_Section):
    """A range to draw from."""

    min: Positive
    max: Positive
    log: bool = True
    """Uniform in the logarithm."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max <= self.min:
            raise ValueError("`max` above `min`")
        return self


def _values(item: Any) -> Any:
    """A search dimension: one value or a list of distinct values."""
    return Annotated[list[item], BeforeValidator(_one_or_more), Field(min_length=1), AfterValidator(_unique)]


Rates = Annotated[
    list[Positive] | LogRange, BeforeValidator(lambda v: v if isinstance(v, dict | LogRange) else _one_or_more(v))
]


class _Dimensions(_Section):
    """What grid and random search vary."""

    learning_rate: Rates
    """AdamW's step size; for random search also a range `{min, max, log}`."""
    lora_rank: _values(LoraRank)  # type: ignore[valid-type]
    """Width r of the adapter."""
    adapter_batch_size: _values(Count) = [8]  # type: ignore[valid-type]
    """Rows of a job in one joint step."""
    alpha_over_rank: _values(Positive) | None = None  # type: ignore[valid-type]
    """lora_alpha as a multiple of the rank; 2 when neither is given."""
    lora_alpha: _values(Positive) | None = None  # type: ignore[valid-type]
    """Numerator of the scale alpha / r."""
    dropout: _values(Dropout) = [0.0]  # type: ignore[valid-type]
    """Probability that an element of a LoRA layer's input is dropped, in [0, 1)."""
    weight_decay: _values(NonNegative) = [0.0]  # type: ignore[valid-type]
    """AdamW's decoupled weight decay."""
    gradient_accumulation: _values(Count) = [1]  # type: ignore[valid-type]
    """Joint steps per update; the update sees `adapter_batch_size` times as many rows."""
    use_rslora: _values(bool) = [False]  # type: ignore[valid-type]
    """Scale alpha / sqrt(r) instead of alpha / r."""
    lr_schedule: _values(LrSchedule) = ["constant"]  # type: ignore[valid-type]
    """Course of the learning rate after its warmup: `constant`, `linear` to 0 or `cosine` to 0."""
    target_modules: ModuleNames | Annotated[list[ModuleNames], Field(min_length=1)] | Literal["all-linear"] = (
        "all-linear"
    )
    """Names of linear layers, or a list of such lists to search over."""
    max_grad_norm: NonNegative = 1.0
    """Norm above which a job's gradient is scaled down; 0 turns clipping off."""
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the job's steps over which the learning rate rises from 0."""
    seed: int = 0
    """Seeds the initial adapters and the dropout masks."""

    @model_validator(mode="after")
    def _one_alpha(self) -> Self:
        if self.alpha_over_rank is not None and self.lora_alpha is not None:
            raise ValueError("only one of `lora_alpha` and `alpha_over_rank`")
        return self


class GridSpace(_Dimensions):
    """Every combination."""

    strategy: Literal["grid"] = "grid"

    @model_validator(mode="after")
    def _no_range(self) -> Self:
        if isinstance(self.learning_rate, LogRange):
            raise ValueError("a list of learning rates: a range needs `strategy: random`")
        return self


class RandomSpace(_Dimensions):
    """Distinct random combinations."""

    strategy: Literal["random"]
    num_jobs: Count
    """How many to draw."""
    search_seed: int = 0
    """Seeds the draws."""


class ListedJob(_Section):
    """One job of an explicit list; the fields mean what they mean in a grid."""

    learning_rate: Positive
    lora_rank: LoraRank
    lora_alpha: Positive | None = None
    alpha_over_rank: Positive | None = None
    use_rslora: bool = False
    dropout: Dropout = 0.0
    adapter_batch_size: Count = 8
    gradient_accumulation: Count = 1
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0
    lr_schedule: LrSchedule = "constant"
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: ModuleNames | Literal["all-linear"] = "all-linear"
    seed: int = 0

    @model_validator(mode="after")
    def _one_alpha(self) -> Self:
        if self.alpha_over_rank is not None and self.lora_alpha is not None:
            raise ValueError("only one of `lora_alpha` and `alpha_over_rank`")
        return self


class ListSpace(_Section):
    """Just these jobs."""

    strategy: Literal["list"]
    jobs: Annotated[list[ListedJob], Field(min_length=1)]


class BudgetSection(_Section):
    """How long a job trains when nothing ends it, and how often it is looked at."""

    epochs: Positive | None = None
    """Passes over the training rows."""
    steps: Count | None = None
    """Optimizer steps of every job, instead of `epochs`."""
    eval_interval_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of a job's own steps between two evaluations."""
    gate_warmup_fraction: OpenFraction = 0.05
    """Share of a job's own steps before the gate."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("exactly one of `epochs` and `steps`")
        return self


class EarlyExitSection(_Section):
    """Which jobs end before their budget is spent."""

    preset: Literal["guarded", "paper", "none"] = "guarded"
    """Set of rules; see docs/early-exit.md."""
    overrides: dict[str, int | float] = Field(default_factory=dict)
    """Constants of the preset to change, by name; see docs/early-exit.md."""


class EvaluationSection(_Section):
    """How finished jobs are compared."""

    metric: Literal["exact_match"] | None = None
    """Measured by generation on held-out rows; None compares losses alone."""
    choose_by: Literal["val_loss", "metric"] = "val_loss"
    """What picks the winner, on validation rows."""
    max_new_tokens: Count = 64
    """Longest answer that generation gives, in tokens."""

    @model_validator(mode="after")
    def _metric_known(self) -> Self:
        if self.choose_by == "metric" and self.metric is None:
            raise ValueError("a `metric` to choose by")
        return self


class TuningTask(_Section):
    """A base model, a data set and a search space; wants one good adapter."""

    name: Name
    """Names the task's runs; 1 to 64 letters, digits, `.`, `_` or `-`."""
    owner: Name = "me"
    """Whose task it is."""
    model: ModelSection
    data: DataSection
    search_space: Annotated[GridSpace | RandomSpace | ListSpace, Field(discriminator="strategy")]
    budget: BudgetSection
    early_exit: EarlyExitSection = EarlyExitSection()
    evaluation: EvaluationSection = EvaluationSection()
    init_adapter: str | None = None
    """Folder of a PEFT LoRA adapter that every job starts from."""
    registry_name: Name | None = None
    """Registered-model name; the task's name when None."""
    max_slots: Count | None = None
    """Upper bound of jobs that train side by side. None: as many as fit."""

    @property
    def registered_model(self) -> str:
        return self.registry_name or self.name

    @property
    def digest(self) -> str:
        """Twelve digits over all fields: equal tasks have equal digests."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:12]


def load_task(path: str | Path) -> TuningTask:
    """Read and check a task file. Relative paths in it are taken from the file's folder.

    Raises:
        TaskFileError: the file is missing, is no YAML mapping, or a field is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskFileError("file", got="no such file", expected="a task file in YAML", file=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError("file", got=str(error), expected="a readable UTF-8 text file", file=path) from None
    try:
        content = yaml.load(text, Loader=_TaskLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise TaskFileError("file", got=" ".join(str(error).split()), expected="valid YAML", file=path) from None
    task = parse_task(content, file=path)
    return _with_absolute_paths(task, path.resolve().parent)


def parse_task(content: Any, *, file: Path | str | None = None) -> TuningTask:
    """Check a mapping with the fields of a task file.

    Raises:
        TaskFileError: names the first wrong field, what it held, and what is expected.
    """
    if not isinstance(content, dict):
        raise TaskFileError(
            "file", got=type(content).__name__, expected="a mapping of fields such as `name:` and `model:`", file=file
        )
    content = _with_default_strategy(content)
    try:
        return TuningTask.model_validate(content)
    except ValidationError as error:
        raise _as_task_file_error(error, file) from None


class _TaskLoader(yaml.SafeLoader):
    """YAML 1.2 numbers (`1e-4` is a number) and no repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if repr(key) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(repr(key))
        return super().construct_mapping(node, deep)


_TaskLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _with_default_strategy(content: dict[Any, Any]) -> dict[Any, Any]:
    """`strategy` may be left out: a list of jobs is a list, all else is a grid."""
    space = content.get("search_space")
    if isinstance(space, dict) and "strategy" not in space:
        return {**content, "search_space": {**space, "strategy": "list" if "jobs" in space else "grid"}}
    return content


def _as_task_file_error(error: ValidationError, file: Path | str | None) -> TaskFileError:
    first = error.errors()[0]
    shown = [part for part in first["loc"] if not _is_union_tag(part)]
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in shown).lstrip(".") or "file"
    if first["type"] == "extra_forbidden":
        return TaskFileError(field, got="an unknown key", expected="a known one", hint="Check the spelling.", file=file)
    if first["type"] == "missing":
        return TaskFileError(field, got="nothing", expected="a value", hint="Add this field.", file=file)
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    hint = "Remove the quotes around the number." if _is_quoted_number(first["input"]) else ""
    return TaskFileError(field, got=_shorten(first["input"]), expected=expected, hint=hint, file=file)


def _is_union_tag(part: int | str) -> bool:
    """pydantic puts the names of union branches into the location; they mean nothing to a user."""
    return isinstance(part, str) and (part in ("grid", "random", "list") or "[" in part or part == "LogRange")


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _with_absolute_paths(task: TuningTask, folder: Path) -> TuningTask:
    """Turn each relative name that exists beside the task file into an absolute path; all else stays a hub id."""

    def resolve(name: str | None) -> str | None:
        if name is None:
            return None
        candidate = folder / Path(name).expanduser()
        looks_local = name.startswith((".", "/", "~")) or Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet")
        return str(candidate.resolve()) if looks_local or candidate.exists() else name

    def resolve_split(split: SplitSection | None) -> SplitSection | None:
        return split and split.model_copy(update={"source": resolve(split.source)})

    data = task.data.model_copy(
        update={
            "source": resolve(task.data.source),
            "validation": resolve_split(task.data.validation),
            "test": resolve_split(task.data.test),
        }
    )
    model = task.model.model_copy(update={"name": resolve(task.model.name)})
    return task.model_copy(update={"data": data, "model": model, "init_adapter": resolve(task.init_adapter)})
