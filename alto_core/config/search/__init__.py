"""The search space of a task file: which jobs a task has. One file holds one strategy; `STRATEGIES` lists them."""

from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from alto_core.config.search.dimensions import LogRange
from alto_core.config.search.grid import GridSpace
from alto_core.config.search.listed import ListedJob, ListSpace
from alto_core.config.search.random_draws import RandomSpace
from alto_core.config.search.space import SearchSpace

STRATEGIES: tuple[type[SearchSpace], ...] = (
    GridSpace,
    RandomSpace,
    ListSpace,
)
STRATEGY_NAMES = tuple(get_args(space.model_fields["strategy"].annotation)[0] for space in STRATEGIES)

if TYPE_CHECKING:
    AnySearchSpace = SearchSpace
else:
    AnySearchSpace = Annotated[Union[STRATEGIES], Field(discriminator="strategy")]  # noqa: UP007 - of a tuple
"""The field of a task file; its `strategy` says which of them it is."""

__all__ = [
    "STRATEGIES",
    "STRATEGY_NAMES",
    "AnySearchSpace",
    "GridSpace",
    "ListSpace",
    "ListedJob",
    "LogRange",
    "RandomSpace",
    "SearchSpace",
]
