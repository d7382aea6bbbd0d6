"""The task file's sections and the whole, `TuningTask`."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from alto_core.config.dpo import DpoSection, check_sides, with_dpo_defaults
from alto_core.config.fields import (
    Count,
    Moment,
    Name,
    NonNegative,
    NumGpus,
    OpenFraction,
    Owner,
    Positive,
    Section,
    Source,
    one_of,
    unique,
)
from alto_core.config.search import AnySearchSpace
from alto_core.early_exit import PRESETS
from alto_core.text_metrics import TEXT_METRICS


class ModelSection(Section):
    """The frozen base model."""

    name: Source
    """Hub id, or a local folder (relative to the task file)."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 on a GPU that has it, float32 on the CPU."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: hold the weights of linear layers in 4 bits (NormalFloat, as QLoRA does), for a GPU that has no room for
    them otherwise. Steps take longer. Needs the package bitsandbytes."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""


class SplitSection(Section):
    """Where the rows of a held-out split come from: set aside from the training rows, or a source of their own."""

    rows: Count | None = None
    """That many rows; with `source`, the first so many of it."""
    share: OpenFraction | None = None
    """That share of the training source, in (0, 1)."""
    source: Source | None = None
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


class DataSection(Section):
    """The data set and how it becomes token sequences."""

    source: Source
    """A .jsonl, .json, .csv or .parquet file (relative to the task file), or a hub data set."""
    subset: str | None = None
    """Configuration name of the hub data set."""
    split: str = "train"
    """Split of the hub data set; files have one split."""
    format: Literal["auto", "messages", "prompt_completion", "text", "preference"] = "auto"
    """`auto` looks at the columns of the first rows; with `objective: dpo` it is `preference`, see docs/dpo.md."""
    columns: dict[Literal["messages", "prompt", "completion", "text", "chosen", "rejected"], str] = Field(
        default_factory=dict
    )
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

    @field_validator("columns")
    @classmethod
    def _sides_not_swapped(cls, columns: dict[str, str]) -> dict[str, str]:
        return check_sides(columns)


class BudgetSection(Section):
    """How long a job trains when nothing ends it, and how often it is looked at."""

    epochs: Annotated[Positive, Field(le=1e6)] | None = None
    """Passes over the training rows."""
    steps: Annotated[Count, Field(le=10**9)] | None = None
    """Optimizer steps of every job, instead of `epochs`."""
    eval_interval_fraction: Annotated[float, Field(ge=1e-4, le=1)] = 0.01
    """Share of a job's own steps between two evaluations."""
    gate_warmup_fraction: OpenFraction = 0.05
    """Share of a job's own steps before the gate."""
    max_eval_share: Positive = 1.0
    """Cost that evaluations may have, as a share of the training's. Where they would cost more they come less often."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("exactly one of `epochs` and `steps`")
        return self


class EarlyExitSection(Section):
    """Which jobs end before their budget is spent."""

    preset: one_of(PRESETS) = "guarded"  # type: ignore[valid-type]
    """Set of rules; see docs/early-exit.md."""
    overrides: dict[str, int | float] = Field(default_factory=dict)
    """Constants of the preset to change, by name; see docs/early-exit.md."""
    parked_gib: NonNegative = 20.0
    """Disk for the states of jobs that ended early, in GiB. The best are kept; of the others the adapter alone."""


PREFERENCE_METRICS = ("preference", "preference_likelihood")
"""Measured on pairs of answers, so only with `objective: dpo`."""
METRIC_PARTS = {"regex": "pattern", "multiple_choice": "choices", "function": "function"}
"""The field that a metric needs, and no other metric may have."""


class EvaluationSection(Section):
    """How finished jobs are compared."""

    metric: one_of([*TEXT_METRICS, "multiple_choice", *PREFERENCE_METRICS]) | None = None  # type: ignore[valid-type]
    """Measured on held-out rows, see docs/evaluation.md; None compares losses alone, and with `objective: dpo` it is
    `preference`."""
    pattern: str | None = None
    """Regular expression of the metric `regex`."""
    choices: Annotated[list[str], Field(min_length=2), AfterValidator(unique)] | None = None
    """Answers that the metric `multiple_choice` chooses from."""
    function: str | None = None
    """Import path of the metric `function`, `package.module:name`."""
    allow_function: bool = False
    """Run the Python code that `function` names."""
    choose_by: Literal["val_loss", "metric"] = "val_loss"
    """What picks the winner, on validation rows."""
    max_new_tokens: Count = 64
    """Longest answer that generation gives, in tokens."""
    temperature: NonNegative = 0.0
    """0 takes the likeliest token each time; above, tokens are drawn, and a lower one draws likelier tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw only from the likeliest tokens that together reach this probability."""
    sampling_seed: int = 0
    """Seeds the draws; equal prompts get equal draws in all jobs."""

    @model_validator(mode="after")
    def _metric_known(self) -> Self:
        if self.choose_by == "metric" and self.metric is None:
            raise ValueError("a `metric` to choose by")
        return self

    @model_validator(mode="after")
    def _parts_of_the_metric(self) -> Self:
        for metric, part in METRIC_PARTS.items():
            given = getattr(self, part) is not None
            if given != (self.metric == metric):
                raise ValueError(f"`{part}` with `metric: {metric}`, and with no other")
        if self.allow_function and self.function is None:
            raise ValueError("`allow_function` only beside `function`")
        return self

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"a regular expression in `pattern` ({error})") from None
        return self

    @model_validator(mode="after")
    def _draws(self) -> Self:
        if self.temperature == 0 and (self.top_p != 1 or self.sampling_seed):
            raise ValueError("`top_p` and `sampling_seed` only with a `temperature` above 0")
        return self


class ClusterSection(Section):
    """What the task asks of a cluster. `alto tune`, which runs a task at once and here, heeds `num_gpus` alone."""

    priority: Literal["urgent", "normal", "background"] = "normal"
    """Tasks of a class are planned before those of the classes after it."""
    deadline: Moment | None = None
    """When it should have ended, with a time zone: `2030-01-31T18:00:00+01:00`."""
    num_gpus: NumGpus = 1
    """GPUs of one host that train the task's jobs side by side, or `auto`: as few as hold it. See
    docs/adapter-parallel.md."""
    min_gpu_gib: NonNegative = 0.0
    """Memory that each of its GPUs must have, in GiB."""
    expected_minutes: Positive | None = None
    """How long it will take at most. None: from what tasks on the same model took, else an hour."""


class TuningTask(Section):
    """A base model, a data set and a search space; wants one good adapter."""

    name: Name
    """Names the task's runs; 1 to 64 letters, digits, `.`, `_` or `-`."""
    owner: Owner = "me"
    """Whose task it is. Where MLflow asks for a login, it is that user's, and may be left out."""
    model: ModelSection
    data: DataSection
    objective: Literal["sft", "dpo"] = "sft"
    """What jobs minimise: `sft` the negative log-likelihood of answers, `dpo` a loss over pairs of answers."""
    dpo: DpoSection | None = None
    """Settings of `objective: dpo`; None: the defaults."""
    search_space: AnySearchSpace
    """With `objective: dpo` a grid or random search may leave out `learning_rate`; see docs/dpo.md for the default."""
    budget: BudgetSection
    early_exit: EarlyExitSection = EarlyExitSection()
    evaluation: EvaluationSection = EvaluationSection()
    init_adapter: Source | None = None
    """Folder of a PEFT LoRA adapter that every job starts from."""
    cluster: ClusterSection = ClusterSection()
    registry_name: Name | None = None
    """Registered-model name; the task's name when None."""
    max_slots: Count | None = None
    """Upper bound of jobs that train side by side. None: as many as fit."""
    activation_checkpointing: Literal["none", "mlp", "layers"] = "none"
    """Parts of the model that run again in the backward pass instead of keeping their activations: less memory, the
    same numbers, more time. `mlp` is the feed-forward part of each layer."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_dpo(cls, content: Any) -> Any:
        return with_dpo_defaults(content)

    @model_validator(mode="after")
    def _fits_the_objective(self) -> Self:
        prefers = self.objective == "dpo"
        if self.dpo is not None and not prefers:
            raise ValueError("a `dpo` section only with `objective: dpo`")
        if (self.data.format == "preference") != prefers:
            raise ValueError(
                f"`objective: dpo` with `data.format: preference`, and with no other; got {self.objective} with "
                f"{self.data.format}"
            )
        if self.evaluation.metric in PREFERENCE_METRICS and not prefers:
            raise ValueError(f"`evaluation.metric: {self.evaluation.metric}` only with `objective: dpo`")
        return self

    @property
    def betas(self) -> tuple[float | None, ...]:
        """The values of beta that jobs are made for; None where the objective has none."""
        if self.objective == "sft":
            return (None,)
        return tuple((self.dpo or DpoSection()).beta)

    @property
    def registered_model(self) -> str:
        return self.registry_name or self.name

    @property
    def digest(self) -> str:
        """Twelve digits over all fields: equal tasks have equal digests."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:12]
