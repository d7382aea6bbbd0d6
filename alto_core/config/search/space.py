"""What every search space is: a section of the task file that says which jobs a task has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from alto_core.config.fields import Section
from alto_core.domain import LoraJob

ALL_LINEAR = "all-linear"
DEFAULT_ALPHA_OVER_RANK = 2.0


class SearchSpace(Section, ABC):
    """A subclass adds its fields and `strategy: Literal["..."]`, the name that task files give."""

    in_words: ClassVar[str]
    """How the jobs come about, for `alto validate`: "drawn at random"."""

    @abstractmethod
    def expand(self, all_linear: tuple[str, ...], betas: Sequence[float | None]) -> tuple[LoraJob, ...]:
        """The jobs, without repetition, in an order that depends on the arguments alone.

        Args:
            all_linear: name endings of all linear layers of the base model, sorted.
            betas: of the task's objective, one more dimension; None where it has none.

        Raises:
            TaskFileError: the space has fewer distinct jobs than asked for, more than anybody trains, or equal ones.
        """


def refuse_two_alphas(section: Any) -> Any:
    """In one space or job."""
    if section.alpha_over_rank is not None and section.lora_alpha is not None:
        raise ValueError("only one of `lora_alpha` and `alpha_over_rank`")
    return section


def alpha_of(alpha: float | None, over_rank: float | None, lora_rank: int) -> float:
    """lora_alpha as given, or as a multiple of the rank."""
    if alpha is not None:
        return float(alpha)
    return float((over_rank or DEFAULT_ALPHA_OVER_RANK) * lora_rank)


def module_choices(
    target_modules: str | Sequence[str] | Sequence[Sequence[str]], all_linear: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """The choices of layers that a field `target_modules` means, each sorted: `all-linear`, one list, or several."""
    if target_modules == ALL_LINEAR:
        return [all_linear]
    if isinstance(target_modules[0], str):
        return [tuple(sorted(str(name) for name in target_modules))]
    return [tuple(sorted(names)) for names in target_modules]
