"""On how many devices a task trains, and whether each of them holds the backbone whole or a part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from alto_core.data.rows import TaskData
from alto_core.domain import LoraJob
from alto_core.errors import EngineError
from alto_core.profiling.task_profile import TaskRows, plan_task_packing
from alto_core.scheduling.intra_task import PackingPlan
from alto_core.scheduling.memory_model import MemoryModel, ModelShape


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks of a task."""

    num_ranks: int = 1
    sharded: bool = False
    """Each rank holds a part of the decoder layers; else all of the model."""

    def shape(self, shape: ModelShape) -> ModelShape:
        """Of what a rank holds."""
        return dataclasses.replace(shape, num_ranks=self.num_ranks if self.sharded else 1)


@dataclass(frozen=True, kw_only=True)
class PackingQuestion:
    """A task's jobs, and the memory of each device that they are to be packed into."""

    jobs: Sequence[LoraJob]
    rows: TaskRows
    budget_bytes: float
    """That backbone, slots and passes may take together on one device."""
    device_type: str
    max_slots: int | None
    """Over all devices."""

    @classmethod
    def of(
        cls, data: TaskData, jobs: Sequence[LoraJob], *, budget_bytes: float, device_type: str, max_slots: int | None
    ) -> PackingQuestion:
        rows = TaskRows.of(data)
        return cls(jobs=jobs, rows=rows, budget_bytes=budget_bytes, device_type=device_type, max_slots=max_slots)

    def plan(self, model: MemoryModel, layout: Layout) -> PackingPlan:
        """Slots and passes: jobs are dealt out evenly, so each rank gets the room that the largest share needs.

        Args:
            model: of a whole backbone's memory.
            layout: of the ranks.

        Returns:
            Capacity of all ranks together; `max_pass_tokens` and `peak_bytes` are those of one.

        Raises:
            EngineError: not even the smallest job fits.
        """
        at_once = min(len(self.jobs), self.max_slots or len(self.jobs))
        plan = plan_task_packing(
            dataclasses.replace(model, shape=layout.shape(model.shape)),
            self.jobs,
            self.rows,
            budget_bytes=self.budget_bytes,
            device_type=self.device_type,
            max_slots=-(-at_once // layout.num_ranks),
        )
        room, ranks = plan.capacity, layout.num_ranks
        together = dataclasses.replace(
            room,
            num_slots=room.num_slots * ranks,
            rank_rows=room.rank_rows * ranks,
            step_tokens=room.step_tokens * ranks,
        )
        return dataclasses.replace(plan, capacity=together)

    def choose_layout(self, model: MemoryModel, *, asked: int | None, available: int) -> Layout:
        """Whole backbones wherever they leave room for all jobs, for then no device waits for another.

        Args:
            model: of a whole backbone's memory.
            asked: devices; fewer are taken where there are not so many, or not so many jobs. None: the fewest that
                hold the task.
            available: devices.
        """
        whole = Layout(num_ranks=max(1, min(asked or 1, available, len(self.jobs))))
        most = available if asked is None else min(asked, available)
        if most == 1 or not (too_large := self._too_large(model, whole)):
            return whole
        counts = range(2, most + 1) if asked is None else [most]
        layouts = [Layout(num_ranks=count, sharded=True) for count in counts]
        left_out = {layout: self._too_large(model, layout) for layout in layouts}
        best = min(layouts, key=left_out.__getitem__)  # of equals the first
        if left_out[best] == len(self.jobs):
            return layouts[-1]  # nothing fits; the arithmetic of the most devices says how much is missing
        return best if left_out[best] < too_large else whole

    def _too_large(self, model: MemoryModel, layout: Layout) -> int:
        """How many jobs do not fit."""
        try:
            return len(self.plan(model, layout).too_large)
        except EngineError:
            return len(self.jobs)
