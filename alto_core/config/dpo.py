"""The task file's section for preference tuning, and what a task that prefers gets where its file says nothing."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from alto_core.config.fields import NonNegative, Positive, Section, one_or_more, unique
from alto_core.preference import PreferenceLoss, PreferenceOptions

DPO_LEARNING_RATES = [5e-6, 2e-5, 1e-4, 5e-4]
"""Where a grid or random search names none: lower than for supervised tuning, since the loss is a margin's, not a
text's, and a high rate lets both answers' likelihoods collapse."""


class DpoSection(Section):
    """Settings of `objective: dpo`. Formulas stand in docs/dpo.md."""

    beta: Annotated[list[Positive], BeforeValidator(one_or_more), Field(min_length=1), AfterValidator(unique)] = [0.1]
    """How hard a job is held to its reference; a list is one more dimension of the search space."""
    loss: PreferenceLoss = "sigmoid"
    """Of a pair's margin: `sigmoid` is DPO's own, `ipo` a squared distance, `hinge` a bounded one."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair's sides are swapped; with `loss: sigmoid`."""
    sft_weight: NonNegative = 0.0
    """Adds so many times the negative log-likelihood per token of the chosen answers."""
    length_normalised: bool = False
    """Compare log-probabilities per token of an answer instead of over all of it."""

    @model_validator(mode="after")
    def _smooths_a_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"`label_smoothing` only with `loss: sigmoid`; got it with {self.loss}")
        return self

    @property
    def options(self) -> PreferenceOptions:
        return PreferenceOptions(
            loss=self.loss,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            length_normalised=self.length_normalised,
        )


def with_dpo_defaults(content: Any) -> Any:
    """A task file's content with the data format, metric and learning rates of `objective: dpo`, where it is that.

    What is of another type than expected is left for the checks that follow.
    """
    if not isinstance(content, dict) or content.get("objective") != "dpo":
        return content
    content = dict(content)
    _fill(content, "data", "format", "preference", missing="auto")
    content.setdefault("evaluation", {})
    _fill(content, "evaluation", "metric", "preference", missing=None)
    space = content.get("search_space")
    if isinstance(space, dict) and space.get("strategy") != "list":
        _fill(content, "search_space", "learning_rate", list(DPO_LEARNING_RATES), missing=None)
    return content


def check_sides(columns: dict[str, str]) -> dict[str, str]:
    """Refuse columns of pairs that say they are the other side's, or are one column."""
    chosen, rejected = columns.get("chosen", "chosen"), columns.get("rejected", "rejected")
    if chosen == rejected:
        raise ValueError(f"two columns for `chosen` and `rejected`; both are {chosen!r}")
    if "reject" in chosen.lower() or "chosen" in rejected.lower():
        raise ValueError(f"`chosen` and `rejected` the other way round; got chosen: {chosen}, rejected: {rejected}")
    return columns


def _fill(content: dict[str, Any], section: str, name: str, value: Any, *, missing: Any) -> None:
    fields = content.get(section)
    if isinstance(fields, dict) and fields.get(name, missing) == missing:
        content[section] = {**fields, name: value}
