"""The passes that a task will make, from its rows alone: cut, packed and captured by the rules of the engine.

No model and no device is needed. Exact for rows that are not preference pairs whose prompts are read twice; adapters
that leave out decoder layers, and rates of their own for A and B, are not told apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alto_core.data.packing import packed_tokens
from alto_core.data.rows import PairRow, TaskData, TokenRow
from alto_core.domain import LoraJob
from alto_core.engine.capture_choice import CaptureChoice, PassKind
from alto_core.engine.pass_inputs import PassShape
from alto_core.engine.step import even_passes, micro_steps
from alto_core.engine.validation import evaluation_passes, evaluation_tokens
from alto_core.job_rows import JobRows


@dataclass(frozen=True, kw_only=True)
class PassAhead:
    """One pass that is to come."""

    kind: PassKind
    tokens: int
    """That the device computes, with those that fill it up."""
    must_capture: bool


class EngineAhead:
    """Plays the passes of one engine.

    Args:
        data: of the task.
        jobs: that may train in it, by id.
        data_seed: of the order of rows.
        num_slots: of the engine.
        max_pass_tokens: of a training pass.
        num_parameters: of the model.
        captures: passes are captured.
    """

    def __init__(
        self,
        data: TaskData,
        jobs: Mapping[str, LoraJob],
        *,
        data_seed: int,
        num_slots: int,
        max_pass_tokens: int,
        num_parameters: int,
        captures: bool,
    ):
        self._jobs, self._max_tokens = jobs, max_pass_tokens
        self._job_rows = JobRows(data.train.rows, data_seed)
        self._train = [_RowSize.of(row) for row in data.train.rows]
        self._validation_rows = data.validation.rows
        self._validation = [_RowSize.of(row) for row in data.validation.rows]
        self._lora_rank = max(job.rank_rows for job in jobs.values())
        self._evaluations = functools.cache(self._shapes_of_evaluation)
        self._choice: CaptureChoice | None = None
        if captures:
            self._choice = CaptureChoice(
                num_parameters=num_parameters,
                num_slots=num_slots,
                max_lora_rank=self._lora_rank,
                max_row_tokens=max(row.longest_side for row in (*data.train.rows, *data.validation.rows)),
            )

    def step(self, steps_made: Mapping[str, int]) -> Iterator[PassAhead]:
        """Passes of a joint step.

        Args:
            steps_made: updates that each job has made before it, by job id.
        """
        jobs = [self._jobs[job_id] for job_id in steps_made]
        rows = [self._rows(job, step) for job, step in zip(jobs, steps_made.values(), strict=True)]
        shapes = []
        for parts in micro_steps([job.adapter_batch_size for job in jobs], rows):
            sizes = [sum(row.tokens for row in part) for _, part in parts]
            for together in even_passes(sizes, self._max_tokens):
                taking_part = [parts[i] for i in together]
                has_dropout = any(jobs[number].dropout for number, _ in taking_part)
                shapes.append(self._shape([part for _, part in taking_part], has_dropout=has_dropout))
        shapes = [shape for shape in shapes if shape.labels]
        kind = PassKind.UPDATE if len(shapes) == 1 else PassKind.GRADIENTS
        yield from (self._ahead(kind, shape) for shape in shapes)

    def evaluation(self, num_jobs: int) -> Iterator[PassAhead]:
        """Passes in which so many jobs are evaluated together."""
        yield from (self._ahead(PassKind.LOSSES, shape) for shape in self._evaluations(num_jobs))

    def _ahead(self, kind: PassKind, shape: PassShape) -> PassAhead:
        if self._choice is None:
            return PassAhead(kind=kind, tokens=shape.tokens, must_capture=False)
        choice = self._choice.choose(kind, shape)
        return PassAhead(kind=kind, tokens=choice.shape.tokens, must_capture=choice.must_capture)

    def _rows(self, job: LoraJob, steps_made: int) -> list[_RowSize]:
        return [self._train[i] for i in self._job_rows.numbers(job, steps_made)]

    def _shapes_of_evaluation(self, num_jobs: int) -> tuple[PassShape, ...]:
        shapes = []
        max_tokens = evaluation_tokens(self._max_tokens)
        for items in evaluation_passes(num_jobs, self._validation_rows, max_tokens, share_prompts=True):
            parts = [[self._validation[row] for number, row in items if number == adapter] for adapter in dict(items)]
            # The losses of pairs are not compared here.
            shapes.append(dataclasses.replace(self._shape(parts, has_dropout=False), pairs=0))
        return tuple(shapes)

    def _shape(self, parts: Sequence[Sequence[_RowSize]], *, has_dropout: bool) -> PassShape:
        rows = [row for part in parts for row in part]
        pairs = sum(row.is_pair for row in rows)
        return PassShape(
            tokens=sum(row.tokens for row in rows),
            labels=sum(row.labels for row in rows),
            rows=len(rows) + pairs,
            segments=len(parts),
            longest_row=max(row.longest for row in rows),
            lora_rank=self._lora_rank,
            has_dropout=has_dropout,
            shared_tokens=sum(row.shared for row in rows),
            pairs=pairs,
        )


class _RowSize(NamedTuple):
    """What a pass's shape depends on."""

    tokens: int
    labels: int
    longest: int
    """Tokens that attention sees at once."""
    shared: int
    """Tokens of a pair's prompt, which stand once."""
    is_pair: bool

    @classmethod
    def of(cls, row: TokenRow) -> _RowSize:
        shared = row.prompt_length if isinstance(row, PairRow) else 0
        tokens = packed_tokens(row, share_prompts=True)
        return cls(tokens, row.num_labels, row.longest_side, shared, isinstance(row, PairRow))
