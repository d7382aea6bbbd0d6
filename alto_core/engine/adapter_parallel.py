"""An engine over several devices: one frozen backbone, and each rank trains, evaluates and keeps its own adapters.

It takes the same calls as `Engine`, so the executor, the detectors and the checkpoints know of one engine. A job lives
on one rank from admission to eviction; the rank with the least to do gets the next one. What ranks measure comes back
to the caller, adapters never leave their rank but as files and snapshots.

Where the backbone fits each device, ranks share nothing and never wait for each other within a step. Where it does not,
`sharding` divides it, and the ranks' passes coincide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from alto_core.data.rows import TokenRow
from alto_core.domain import JobBudget, LoraJob, RowLosses, StepRecord
from alto_core.engine.checkpoint import JobSnapshot
from alto_core.engine.engine import PASS_TOKENS, UNTUNED, Engine
from alto_core.engine.messages import Call
from alto_core.engine.ranks import RankGroup
from alto_core.engine.sampling import Sampling
from alto_core.errors import EngineError


class ParallelEngine:
    """Engines of all ranks as one. Closing it leaves the ranks ready for another.

    Args:
        ranks: with the backbone; they serve one engine at a time.
        num_slots: most jobs at a time, over all ranks; rounded up to a multiple of their number.
        rank_rows: sum of LoRA ranks that fit on each.
        max_pass_tokens: of one training pass of a rank; None: by kind of device.
        options: the other arguments of `Engine`.

    Raises:
        ModelError: as `Engine` does.
    """

    def __init__(
        self, ranks: RankGroup, *, num_slots: int, rank_rows: int, max_pass_tokens: int | None = None, **options: Any
    ):
        self._ranks, self._rows_per_rank = ranks, rank_rows
        self._slots_per_rank = -(-num_slots // len(ranks))
        self._max_pass_tokens = max_pass_tokens or PASS_TOKENS[self.device.type]
        self._jobs: list[dict[str, LoraJob]] = [{} for _ in range(len(ranks))]
        self._ahead: frozenset[int] = frozenset()
        """Ranks that have made the step which ran out of memory on another."""
        sizes = {"num_slots": self._slots_per_rank, "rank_rows": rank_rows, "max_pass_tokens": self._max_pass_tokens}
        self._prompt_note: str = self._everywhere("open", **sizes, **options)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that hold a slot, rank by rank."""
        return tuple(itertools.chain.from_iterable(self._jobs))

    @property
    def device(self) -> torch.device:
        """Of the first rank."""
        return torch.device(self._ranks.devices[0])

    @property
    def num_slots(self) -> int:
        """Of all ranks together."""
        return self._slots_per_rank * len(self._ranks)

    @property
    def rank_rows(self) -> int:
        """Of all ranks together; a job fits only where one rank has enough."""
        return self._rows_per_rank * len(self._ranks)

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of one training pass of a rank."""
        return self._max_pass_tokens

    @property
    def ahead(self) -> frozenset[str]:
        """Jobs that have made the step which ran out of memory on another rank."""
        return frozenset(itertools.chain.from_iterable(self._jobs[rank] for rank in self._ahead))

    @property
    def prompt_note(self) -> str:
        return self._prompt_note

    def limit_pass_tokens(self, max_pass_tokens: int) -> None:
        self._everywhere("limit_pass_tokens", max_pass_tokens)
        self._max_pass_tokens = max_pass_tokens

    def fits(self, job: LoraJob, rank_start: int | None = None) -> bool:
        """Whether some rank has a slot and enough neighbouring rank rows; those from `rank_start` on, if given."""
        return self._free_rank(job, rank_start) is not None

    def admit(
        self, job: LoraJob, budget: JobBudget, *, init_adapter: Path | None = None, rank_start: int | None = None
    ) -> None:
        rank, start = self._place(job, rank_start)
        self._on(rank, "admit", job, budget, init_adapter=init_adapter, rank_start=start)
        self._jobs[rank][job.job_id] = job

    def restore(
        self, job: LoraJob, budget: JobBudget, folder: Path, *, step: int | None = None, rank_start: int | None = None
    ) -> int:
        rank, start = self._place(job, rank_start)
        reached: int = self._on(rank, "restore", job, budget, folder, step=step, rank_start=start)
        self._jobs[rank][job.job_id] = job
        return reached

    def load_adapter(self, job: LoraJob, folder: Path) -> None:
        rank, _ = self._place(job, None)
        self._on(rank, "load_adapter", job, folder)
        self._jobs[rank][job.job_id] = job

    def snapshot(self, job_id: str) -> JobSnapshot:
        snapshot: JobSnapshot = self._of("snapshot", job_id)
        return snapshot

    def rank_start(self, job_id: str) -> int:
        """First rank row of a job, counted through all ranks."""
        rank = self._rank_of(job_id)
        return rank * self._rows_per_rank + int(self._on(rank, "rank_start", job_id))

    def has_best(self, job_id: str) -> bool:
        return bool(self._of("has_best", job_id))

    def evict(self, job_id: str) -> None:
        rank = self._rank_of(job_id)
        self._on(rank, "evict", job_id)
        del self._jobs[rank][job_id]

    def step(self, rows_by_job: Mapping[str, Sequence[TokenRow]]) -> None:
        """Make one update of each named job. After a rank ran out of memory the same call repeats what is missing.

        Raises:
            torch.OutOfMemoryError: on a rank whose backbone is its own; a sharded one ends with it.
        """
        by_rank: dict[int, dict[str, Sequence[TokenRow]]] = {}
        for job_id, rows in rows_by_job.items():
            by_rank.setdefault(self._rank_of(job_id), {})[job_id] = rows
        todo = {rank: rows for rank, rows in by_rank.items() if rank not in self._ahead}
        failures = self._ranks.try_call({rank: Call.method("step", rows, passes=True) for rank, rows in todo.items()})
        self._ahead = (self._ahead | todo.keys()) - failures.keys() if failures else frozenset()
        for error in failures.values():
            raise error

    def take_records(self) -> tuple[StepRecord, ...]:
        """What the steps since the last call measured: of each job in the order of its steps."""
        return tuple(itertools.chain.from_iterable(self._everywhere("take_records")))

    def evaluate(self, job_ids: Sequence[str], rows: Sequence[TokenRow], *, max_tokens: int) -> dict[str, RowLosses]:
        by_rank: dict[int, list[str]] = {}
        for job_id in job_ids:
            by_rank.setdefault(self._rank_of(job_id), []).append(job_id)
        calls = {
            rank: Call.method("evaluate", ids, rows, passes=True, max_tokens=max_tokens)
            for rank, ids in by_rank.items()
        }
        found: dict[str, RowLosses] = {}
        for losses in self._ranks.call(calls).values():
            found |= losses
        return {job_id: found[job_id] for job_id in job_ids}

    def side_losses(self, job_id: str, rows: Sequence[TokenRow], *, max_tokens: int) -> NDArray[np.float64]:
        call = Call.method("side_losses", job_id, rows, passes=True, max_tokens=max_tokens)
        rank = self._rank_of(job_id)
        losses: NDArray[np.float64] = self._ranks.call({rank: call})[rank]
        return losses

    def keep_best(self, job_id: str, val_loss: float) -> bool:
        return bool(self._of("keep_best", job_id, val_loss))

    def export(self, job_id: str, folder: Path, *, best: bool = True) -> None:
        self._of("export", job_id, folder, best=best)

    def generate(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        max_rows: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[tuple[int, ...]]:
        """Answers; see `Engine.generate`. Each rank answers for its own jobs."""
        by_rank: dict[int, list[int]] = {}
        for number, (job_id, _) in enumerate(prompts):
            by_rank.setdefault(self._rank_of(job_id or UNTUNED), []).append(number)
        options = {
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": stop_token_ids,
            "max_rows": max_rows,
            "sampling": sampling,
        }
        calls = {
            rank: Call.method("generate", [prompts[i] for i in numbers], passes=True, **options)
            for rank, numbers in by_rank.items()
        }
        answers: list[tuple[int, ...]] = [()] * len(prompts)
        for rank, of_rank in self._ranks.call(calls).items():
            for number, answer in zip(by_rank[rank], of_rank, strict=True):
                answers[number] = answer
        return answers

    def close(self) -> None:
        """Take the adapters off all ranks and forget all jobs."""
        self._jobs = [{} for _ in self._jobs]
        if self._ranks.is_open:
            self._everywhere("close")

    def _place(self, job: LoraJob, rank_start: int | None) -> tuple[int, int | None]:
        """The rank of a new job, and its first rank row there."""
        if job.job_id in self.job_ids:
            raise EngineError(f"job {job.job_id} holds a slot already.")
        rank = self._free_rank(job, rank_start)
        if rank is None:
            raise EngineError(
                f"job {job.job_id} of {job.rank_rows} rank rows does not fit. Evict another, or make the engine larger."
            )
        return rank, None if rank_start is None else rank_start % self._rows_per_rank

    def _free_rank(self, job: LoraJob, rank_start: int | None) -> int | None:
        """Of the ranks where a job fits the one with the fewest rows in a pass; None where there is none."""
        if rank_start is not None:
            rank, start = divmod(rank_start, self._rows_per_rank)
            return rank if rank < len(self._ranks) and self._on(rank, "fits", job, start) else None
        for rank in sorted(range(len(self._ranks)), key=lambda rank: (self._load(rank), rank)):
            if self._on(rank, "fits", job):
                return rank
        return None

    def _load(self, rank: int) -> int:
        return sum(job.adapter_batch_size for job in self._jobs[rank].values())

    def _rank_of(self, job_id: str) -> int:
        if job_id == UNTUNED:
            return 0
        for rank, jobs in enumerate(self._jobs):
            if job_id in jobs:
                return rank
        raise EngineError(f"job {job_id!r} holds no slot; those that do: {', '.join(self.job_ids) or 'none'}.")

    def _of(self, method: str, job_id: str, *arguments: Any, **options: Any) -> Any:
        return self._on(self._rank_of(job_id), method, job_id, *arguments, **options)

    def _on(self, rank: int, method: str, *arguments: Any, **options: Any) -> Any:
        return self._ranks.call({rank: Call.method(method, *arguments, **options)})[rank]

    def _everywhere(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        call = Call.method(method, *arguments, **options)
        return list(self._ranks.call(dict.fromkeys(range(len(self._ranks)), call)).values())


AnyEngine = Engine | ParallelEngine
"""What trains and evaluates jobs, on one device or on several."""
