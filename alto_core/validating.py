"""Evaluations of jobs on the validation rows, in passes as large as the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alto_core.data.rows import TokenRow
from alto_core.device import is_out_of_memory
from alto_core.domain import Evaluation, JobBudget, MemoryShortage, RowLosses
from alto_core.engine.adapter_parallel import AnyEngine
from alto_core.errors import EngineError
from alto_core.evaluation.preference import preference_measures


class Validator:
    """Evaluates jobs on the same rows; where memory runs out, in smaller passes from then on.

    Args:
        engine: holds the jobs.
        rows: the validation rows.
        max_tokens: of one pass at first. It changes speed and memory, not the numbers.
    """

    def __init__(self, engine: AnyEngine, rows: Sequence[TokenRow], max_tokens: int):
        self._engine, self._rows, self._max_tokens = engine, rows, max_tokens
        self._longest = max((len(row.token_ids) for row in rows), default=0)

    def evaluate(
        self, standing: Mapping[str, tuple[int, JobBudget]]
    ) -> tuple[tuple[Evaluation, ...], tuple[MemoryShortage, ...]]:
        """Evaluate jobs, and let the engine keep the adapters that are the best so far.

        Args:
            standing: step and budget by job id.

        Returns:
            The evaluations, and what became of passes for which there was no memory.

        Raises:
            EngineError: not even one row fits.
        """
        losses, shortages = self._row_losses(tuple(standing))
        evaluations = []
        for job_id, (step, budget) in standing.items():
            evaluation = Evaluation(
                job_id=job_id,
                step=step,
                fraction=budget.fraction(step),
                row_losses=losses[job_id],
                measures=preference_measures(losses[job_id]),
            )
            self._engine.keep_best(job_id, evaluation.val_loss)
            evaluations.append(evaluation)
        return tuple(evaluations), shortages

    def _row_losses(self, job_ids: Sequence[str]) -> tuple[dict[str, RowLosses], tuple[MemoryShortage, ...]]:
        shortages: list[MemoryShortage] = []
        while True:
            try:
                losses = self._engine.evaluate(job_ids, self._rows, max_tokens=self._max_tokens)
                return losses, tuple(shortages)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self._max_tokens <= self._longest:
                    raise EngineError(
                        f"out of memory: a validation row of {self._longest} tokens does not fit. Use a smaller "
                        "data.max_length, or free memory."
                    ) from error
            # Out of the block: what the error's frames hold is free again.
            there_are = self._longest * len(self._rows) * len(job_ids)
            self._max_tokens = max(self._longest, min(self._max_tokens, there_are) // 2)
            self._engine.limit_pass_tokens(self._engine.max_pass_tokens)
            text = f"memory ran out: evaluation in passes of at most {self._max_tokens} tokens from now on"
            shortages.append(MemoryShortage(text=text, max_pass_tokens=self._engine.max_pass_tokens))
